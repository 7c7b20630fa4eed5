"""The generator's promises, the published files' facts, and the scorer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from budwood.data.arithmetic import (
    Mix,
    Sizes,
    canonical,
    check,
    generate,
    parse_number,
    problem_of,
    read,
    score_numbers,
)
from budwood.data.task import Task
from budwood.errors import DataError


@pytest.fixture(scope="module")
def task() -> Task:
    return generate(seed=0)


def test_default_sizes_and_mix(task: Task) -> None:
    assert {k: len(v) for k, v in task.splits.items()} == {
        "train": 12000,
        "validation": 1000,
        "test": 2000,
        "ood": 1500,
    }
    for split in ("train", "validation", "test"):
        problems = [problem_of(r) for r in task.rows(split)]
        digits = Counter(len(str(max(a, b))) for a, _, b in problems)
        assert {d: round(n / len(problems), 2) for d, n in digits.items()} == {2: 0.65, 3: 0.18, 4: 0.17}
        assert abs(sum(op == "+" for _, op, _ in problems) / len(problems) - 0.65) < 0.005
        order = Counter(a >= b for a, op, b in problems if op == "+")
        assert 0.4 < order[False] / order.total() < 0.6  # sums come in either order


def test_answers_are_right_and_never_negative(task: Task) -> None:
    for rows in task.splits.values():
        for r in rows:
            assert r.text.endswith(" =") and eval(r.text[:-2]) == r.label
            assert isinstance(r.label, int) and r.label >= 0
    assert len({r.id for rows in task.splits.values() for r in rows}) == 16500


def test_no_problem_is_in_two_splits_not_even_commuted(task: Task) -> None:
    forms = {split: {canonical(problem_of(r)) for r in rows} for split, rows in task.splits.items()}
    names = list(forms)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert not forms[a] & forms[b]
    for split in ("validation", "test", "ood"):
        assert len(forms[split]) == len(task.rows(split))
    assert len({r.text for r in task.rows("train")}) == 12000
    assert check(task)["leaked_commuted"] == 0
    assert canonical((7, "+", 12)) == canonical((12, "+", 7)) and canonical((7, "-", 12)) != canonical((12, "-", 7))


def test_out_of_distribution_rows_are_grouped_by_magnitude(task: Task) -> None:
    groups = Counter(r.group for r in task.rows("ood"))
    assert groups == {"1e5": 500, "1e6": 500, "1e7": 500}
    for r in task.rows("ood"):
        a, _, b = problem_of(r)
        assert f"1e{len(str(max(a, b)))}" == r.group


def test_a_seed_decides_everything(task: Task) -> None:
    assert generate(seed=0).digest == task.digest != generate(seed=1).digest


def test_ranges_mixes_and_sizes_can_be_chosen() -> None:
    small = generate(3, Mix({1: 1, 2: 3}, plus=0.0, low=3, high=40), Sizes(60, 8, 12, 2))
    for split in ("train", "validation", "test"):
        for r in small.rows(split):
            a, op, b = problem_of(r)
            assert op == "-" and 40 >= a >= b >= 3
    assert [len(small.rows(s)) for s in ("train", "validation", "test", "ood")] == [60, 8, 12, 6]
    assert Counter(len(str(problem_of(r)[0])) for r in small.rows("train")) == {1: 15, 2: 45}


def test_too_small_a_range_is_refused() -> None:
    with pytest.raises(DataError, match="make only 45 different ones"):
        generate(0, Mix({1: 1}, plus=1.0, low=1, high=9), Sizes(1000, 10, 10))
    with pytest.raises(DataError, match="share of \\+ 2"):
        generate(0, Mix(plus=2))


def test_published_files(shared: Path) -> None:
    task = read(shared / "data" / "arithmetic")
    facts = check(task)
    assert (facts["train_rows"], facts["test_rows"]) == (17470, 4368)
    assert facts["train_max_answer"] == 19736 and facts["test_max_answer"] == 19384
    assert round(facts["train_plus_share"], 3) == 0.651
    assert facts["leaked_verbatim"] == 9 and round(facts["leaked_commuted_share"], 3) == 0.309
    assert facts["train_wrong"] == facts["test_wrong"] == 0
    assert facts["constant"] == 190
    assert facts["constant_rmsle"] == pytest.approx(1.984, abs=0.001)
    assert facts["copy_max_rmsle"] == pytest.approx(0.829, abs=0.001)
    gold = [int(r.label) for r in task.rows("test")]  # type: ignore[arg-type]
    assert score_numbers([1521] * len(gold), gold)["rmse"] == pytest.approx(3489, abs=1)
    firsts = [problem_of(r)[0] for r in task.rows("test")]
    assert score_numbers(firsts, gold)["rmsle"] == pytest.approx(1.068, abs=0.001)


def test_files_that_are_not_arithmetic_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train.txt is missing"):
        read(tmp_path)
    (tmp_path / "train.txt").write_text("1 + 1 = 2\n2 x 3 = 6\n")
    with pytest.raises(DataError, match="Line 2 of .*train.txt is '2 x 3 = 6'"):
        read(tmp_path)
    (tmp_path / "train.txt").write_text("1 + 1 = 3\n")
    (tmp_path / "test.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        read(tmp_path)
    (tmp_path / "test.txt").write_text("4 - 1 = 3\n")
    task = read(tmp_path)
    assert "1 rows with a wrong answer" in task.notes["wrong"] and check(task)["train_wrong"] == 1


def test_scores_match_scikit_learn() -> None:
    from sklearn.metrics import mean_squared_error, mean_squared_log_error

    rng = np.random.default_rng(0)
    gold, given = rng.integers(0, 20000, size=300).tolist(), rng.integers(0, 20000, size=300).tolist()
    ours = score_numbers(given, gold)
    assert ours["mse"] == pytest.approx(mean_squared_error(gold, given))
    assert ours["msle"] == pytest.approx(mean_squared_log_error(gold, given))
    assert ours["rmsle"] == ours["rmsle_parsed"] == pytest.approx(ours["msle"] ** 0.5)
    assert ours["parse_rate"] == 1 and ours["n"] == 300


def test_unparsed_answers_count_as_nought_and_as_wrong() -> None:
    ours = score_numbers([5, None, None], [5, 0, 7])
    assert ours["exact"] == pytest.approx(1 / 3) and ours["parse_rate"] == pytest.approx(1 / 3)
    assert ours["msle"] == pytest.approx(np.log(8) ** 2 / 3) and ours["rmsle_parsed"] == 0
    nothing = score_numbers([None], [3])
    assert nothing["rmsle"] == pytest.approx(np.log(4)) and nothing["parse_rate"] == 0
    assert "rmsle_parsed" not in nothing  # an error of no answers is no number


def test_huge_and_negative_answers_give_finite_scores() -> None:
    ours = score_numbers([10**400, -(10**400), -3], [1, 2, 10**30])
    assert all(np.isfinite(v) for v in ours.values())
    with pytest.raises(DataError, match="as many"):
        score_numbers([1], [1, 2])


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ("19", 19),
        (" 1 9 ", 19),
        (["1", "9"], 19),
        (["106", "##53"], 10653),
        (["▁", "4", "2"], 42),
        (["Ġ42"], 42),
        ("-5", -5),
        ("007", 7),
        ("1,000", None),
        ("", None),
        ([], None),
        ("12a", None),
        ("²", None),
        ("٣", None),
        ("9" * 5000, None),
    ],
)
def test_numbers_are_parsed_or_not(given: str | list[str], number: int | None) -> None:
    assert parse_number(given) == number

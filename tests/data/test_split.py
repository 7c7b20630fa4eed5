"""Cuts, K-shot samples and limits, against slow literal versions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from budwood.data.readers.harvest import LEFT_OUT_OF_TRAIN
from budwood.data.split import Cut, cut, few_shot, limit, parse_cut
from budwood.data.task import Row, Task
from budwood.errors import DataError

LMBFF_SEEDS = (100, 13, 21, 42, 87)


def rows_of(labels, group=None) -> tuple[Row, ...]:
    return tuple(Row(f"t/train/{i}", f"text {i}", None, y, group=group and group(i)) for i, y in enumerate(labels))


def task_of(labels, kind="label", **more) -> Task:
    return Task("t", kind, {"train": rows_of(labels), "validation": (Row("t/validation/0", "v", None, 0),)}, **more)


def literal_k_shot(lines: list, label_of, k: int, seed: int) -> tuple[list, list]:
    """The original procedure: seed the global generator, shuffle the list of lines, walk classes as they appear."""
    state = np.random.get_state()
    np.random.seed(seed)
    lines = list(lines)
    np.random.shuffle(lines)
    np.random.set_state(state)
    by_label: dict = {}
    for line in lines:
        by_label.setdefault(label_of(line), []).append(line)
    train = [line for label in by_label for line in by_label[label][:k]]
    dev = [line for label in by_label for line in by_label[label][k : k * 2]]
    return train, dev


@pytest.mark.parametrize("seed", LMBFF_SEEDS)
def test_few_shot_gives_the_rows_of_the_original_sampling(seed):
    labels = np.random.default_rng(0).integers(0, 3, 500).tolist()
    task = task_of(labels)
    lines = [f"text {i}\t{y}" for i, y in enumerate(labels)]
    train, dev = literal_k_shot(lines, lambda line: line.split("\t")[-1], 16, seed)
    got = few_shot(task, 16, seed)
    assert [f"{r.text}\t{r.label}" for r in got.rows("train")] == train
    assert [f"{r.text}\t{r.label}" for r in got.rows("validation")] == dev
    assert got.rows("test") == task.rows("validation")
    assert got.reported == "test"


@pytest.mark.parametrize("seed", LMBFF_SEEDS)
def test_few_shot_of_real_files_is_that_of_their_lines(shared, seed):
    from budwood.config.data import DataConfig
    from budwood.data.source import load_task

    lines = (shared / "data/glue/SST-2/train.tsv").read_text(encoding="utf-8").split("\n")[1:-1]
    train, dev = literal_k_shot(lines, lambda line: line.strip().split("\t")[-1], 16, seed)
    got = load_task(DataConfig(task="sst2", data_dir=(shared / "data",), shots=16, data_seed=seed))
    cells = [line.split("\t") for line in train]
    assert [(r.text, str(r.label)) for r in got.rows("train")] == [(text.strip(), label) for text, label in cells]
    assert [r.text for r in got.rows("validation")] == [line.split("\t")[0].strip() for line in dev]
    assert len(got.rows("test")) == 872


def test_few_shot_of_regression_balances_at_the_middle(shared):
    from budwood.config.data import DataConfig
    from budwood.data.source import load_task

    lines = (shared / "data/glue/STS-B/train.tsv").read_text(encoding="utf-8").split("\n")[1:-1]
    train, _ = literal_k_shot(lines, lambda line: 0 if float(line.strip().split("\t")[-1]) < 2.5 else 1, 16, 13)
    got = load_task(DataConfig(task="stsb", data_dir=(shared / "data",), shots=16, data_seed=13))
    assert [r.id for r in got.rows("train")] == [f"stsb/train/{line.split(chr(9))[0]}" for line in train]
    assert Counter(r.label < 2.5 for r in got.rows("train")) == {True: 16, False: 16}


def test_lines_left_out_take_part_in_the_shuffle():
    labels = [0, 1] * 40
    lines = [(i, y) for i, y in enumerate(labels)]
    gone = {3, 10, 11, 79}
    kept = tuple(r for i, r in enumerate(rows_of(labels)) if i not in gone)
    task = replace(task_of(labels), notes={LEFT_OUT_OF_TRAIN: " ".join(map(str, sorted(gone)))}).with_rows(
        "train", kept
    )
    train, _ = literal_k_shot(lines, lambda line: "gone" if line[0] in gone else line[1], 8, 42)
    expected = [f"t/train/{i}" for i, _ in train if i not in gone]
    got = few_shot(task, 8, 42)
    assert [r.id for r in got.rows("train")] == expected
    assert LEFT_OUT_OF_TRAIN not in got.notes


def test_few_shot_keeps_a_labelled_test_and_tells_of_small_classes():
    task = task_of([0] * 50 + [1] * 3).with_rows("test", (Row("t/test/0", "x", None, 0),))
    got = few_shot(task, 4, 0)
    assert Counter(r.label for r in got.rows("train")) == {0: 4, 1: 3}
    assert got.rows("test")[0].id == "t/test/0"
    assert "1 classes have fewer than 8 rows" in got.notes["shots"]


def test_a_limit_reports_the_same_rows_with_and_without_shots():
    rows = tuple(Row(f"t/validation/{i}", "x", None, i % 2) for i in range(40))
    task = task_of([0, 1] * 20).with_rows("validation", rows)
    few = limit(few_shot(task, 4, 0), None, 10, 3)
    assert few.rows("test") == limit(task, None, 10, 3).rows("validation") and len(few.rows("test")) == 10


def test_few_shot_needs_classes():
    with pytest.raises(DataError, match="has no classes. Use --limit"):
        few_shot(Task("t", "text", {"train": (Row("a", "b"),)}), 4, 0)


def test_cut_keeps_shares_classes_and_file_order():
    rows = rows_of([0] * 700 + [1] * 300)
    parts = cut(rows, Cut((80, 10, 10)), "t")
    assert {k: Counter(r.label for r in v) for k, v in parts.items()} == {
        "train": {0: 560, 1: 240},
        "validation": {0: 70, 1: 30},
        "test": {0: 70, 1: 30},
    }
    assert sorted(r.id for v in parts.values() for r in v) == sorted(r.id for r in rows)
    for part in parts.values():
        numbers = [int(r.id.split("/")[-1]) for r in part]
        assert numbers == sorted(numbers)
    assert cut(rows, Cut((80, 10, 10)), "t") == parts
    assert cut(rows, Cut((80, 10, 10), 1), "t") != parts


def test_cut_is_the_same_whatever_the_ids():
    rows = rows_of([0, 1, 1] * 30)
    other = tuple(replace(r, id=f"x{r.id}") for r in rows)
    a, b = (cut(r, Cut((70, 15, 15)), "t") for r in (rows, other))
    assert {k: [r.text for r in v] for k, v in a.items()} == {k: [r.text for r in v] for k, v in b.items()}


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_never_cut_apart_and_no_part_is_empty(seed):
    sizes = np.random.default_rng(seed).integers(1, 40, 3 + seed)
    names = np.repeat(np.arange(len(sizes)), sizes)
    rows = rows_of([0] * len(names), group=lambda i: f"g{names[i]}")
    parts = cut(rows, Cut((80, 10, 10), seed), "t")
    seen = [{r.group for r in part} for part in parts.values()]
    assert len(seen) == 3
    assert all(seen)
    assert sum(map(len, seen)) == len(sizes)


def test_every_class_of_a_cut_is_in_train():
    parts = cut(rows_of([*range(5), *[5] * 100]), Cut((80, 10, 10)), "t")
    assert {r.label for r in parts["train"]} == set(range(6))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (rows_of([0, 1]), "leaves 'validation' empty"),
        (rows_of([0, 1, 0, 1], group=lambda i: f"{i % 2}"), r"form 2 group\(s\), which cannot be cut into 3 parts"),
    ],
)
def test_cuts_that_cannot_be_made(rows, message):
    with pytest.raises(DataError, match=message):
        cut(rows, Cut((80, 10, 10)), "t")


@pytest.mark.parametrize("text", ["80/10", "a/b", "80-20", "0/50/50", "40/30/20/10", "80/10/10@x", ""])
def test_bad_split_strings(text):
    with pytest.raises(DataError, match="--split"):
        parse_cut(text)


def test_limit_samples_in_order_nested_and_says_so():
    task = task_of([0, 1] * 100).with_rows("test", rows_of([0] * 50))
    got = limit(task, 20, 10, 3)
    numbers = [int(r.id.split("/")[-1]) for r in got.rows("train")]
    assert len(numbers) == 20
    assert numbers == sorted(numbers)
    assert set(got.rows("train")) < set(limit(task, 40, None, 3).rows("train"))
    assert got.rows("train") != limit(task, 20, 10, 4).rows("train")
    assert got.notes["limited"] == "train 20 of 200, test 10 of 50, seed 3"
    assert len(got.rows("validation")) == 1
    assert limit(task, 1000, None, 0) is task

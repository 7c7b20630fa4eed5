"""Problems `a op b = c`: a generator without leaks, a reader of published files, and the scores of answers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from budwood.data.batch import seed_of
from budwood.data.task import Row, Task
from budwood.errors import DataError

LINE = re.compile(r"(\d+) ([+-]) (\d+) =(?: (\d+))?")
ALL_PAIRS = 200_000  # up to this many different problems are listed, beyond they are drawn
LARGEST = 10**150  # answers are capped here, so that their squares stay finite
Problem = tuple[int, str, int]


@dataclass(frozen=True, slots=True)
class Mix:
    """Which problems there are: shares by digits of the larger operand, share of +, and the range of operands."""

    digits: Mapping[int, float] = field(default_factory=lambda: {2: 64.0, 3: 18.0, 4: 17.0})
    plus: float = 0.65
    low: int = 0
    high: int = 9_999


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows of every split; `ood` counts rows for each of the magnitudes 1e5, 1e6 and 1e7."""

    train: int = 12_000
    validation: int = 1_000
    test: int = 2_000
    ood: int = 500


def generate(seed: int = 0, mix: Mix | None = None, sizes: Sizes | None = None) -> Task:
    """An arithmetic task whose splits share no problem, not even with the operands of + swapped.

    Subtractions never go below 0. In train a sum may stand in both orders. The split "ood" has larger operands, with
    their magnitude as `group`. A pure function of its arguments.
    """
    mix, sizes = mix or Mix(), sizes or Sizes()
    rng = np.random.default_rng(seed_of(seed, "arithmetic"))
    wanted = {"test": sizes.test, "validation": sizes.validation, "train": sizes.train}
    parts: dict[str, list[np.ndarray]] = {split: [] for split in wanted}
    share = _shares(mix)
    counts = {split: _apportion(n, list(share.values())) for split, n in wanted.items()}
    for i, (digits, op) in enumerate(share):
        need = {split: counts[split][i] for split in wanted}
        for split, rows in _stratum(rng, digits, op, mix, need).items():
            parts[split].append(rows)
    splits: dict[str, tuple[Row, ...]] = {}
    for split in ("train", "validation", "test"):
        table = np.concatenate(parts[split])
        splits[split] = _rows("arithmetic", split, rng.permutation(table, axis=0))
    splits["ood"] = _larger(rng, mix, sizes.ood)
    notes = {"split": "no problem of one split occurs in another, also not with the operands of + swapped"}
    return Task("arithmetic", "number", splits, metric="rmsle", notes=notes)


def _shares(mix: Mix) -> dict[tuple[int, str], float]:
    """Share of every (digits, operator)."""
    shares = list(mix.digits.values())
    fine = bool(shares) and min(shares) >= 0 < sum(shares) and all(1 <= d <= 15 for d in mix.digits)
    if not 0 <= mix.plus <= 1 or not 0 <= mix.low <= mix.high or not fine:
        raise DataError(
            f"The arithmetic mix cannot be used: share of + {mix.plus} (expected 0 to 1), operands {mix.low} to "
            f"{mix.high} (expected 0 <= low <= high), shares by digits {dict(mix.digits)} (expected 1 to 15 digits)."
        )
    return {(d, op): s * p for d, s in mix.digits.items() for op, p in (("+", mix.plus), ("-", 1 - mix.plus))}


def _apportion(total: int, share: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the shares that add up to the total (largest remainders)."""
    exact = np.array(share) * total / sum(share)
    out = np.floor(exact).astype(int)
    out[np.argsort(out - exact, kind="stable")[: total - out.sum()]] += 1
    return [int(n) for n in out]


def _stratum(rng: np.random.Generator, digits: int, op: str, mix: Mix, need: dict[str, int]) -> dict[str, np.ndarray]:
    """Rows (a, is_plus, b) of one size and operator for every split, from disjoint sets of problems."""
    pairs = _pairs(rng, digits, mix, sum(need.values()))
    distinct = len(pairs)
    held = need["test"] + need["validation"]
    if op == "+":
        turned = rng.random(distinct) < 0.5
        pairs[turned] = pairs[turned][:, ::-1]
        spare = pairs[held:]
        other_way = spare[spare[:, 0] != spare[:, 1]][:, ::-1]
        pairs = np.concatenate([pairs, other_way])  # where sums run short, train also sees some the other way round
    if distinct < held or len(pairs) < held + need["train"]:
        raise DataError(
            f"{sum(need.values()):,} problems with '{op}' and {digits}-digit operands were asked for, but operands "
            f"from {mix.low} to {mix.high} make only {distinct:,} different ones. Widen the range or ask for less."
        )
    ends = np.cumsum([need["test"], need["validation"], need["train"]])
    parts = np.split(np.insert(pairs, 1, int(op == "+"), axis=1), ends)
    return dict(zip(("test", "validation", "train"), parts, strict=False))


def _pairs(rng: np.random.Generator, digits: int, mix: Mix, most: int) -> np.ndarray:
    """Different pairs (larger, smaller) in random order: all there are if these are few, else `most` drawn ones."""
    low, high = max(mix.low, 10 ** (digits - 1) if digits > 1 else 0), min(mix.high, 10**digits - 1)
    if high < low:
        return np.empty((0, 2), dtype=np.int64)
    count = sum(a - mix.low + 1 for a in (low, high)) * (high - low + 1) // 2
    if count <= max(ALL_PAIRS, 4 * most):
        larger = np.repeat(np.arange(low, high + 1), np.arange(low, high + 1) - mix.low + 1)
        first = np.searchsorted(larger, larger, side="left")
        return rng.permutation(np.stack([larger, mix.low + np.arange(len(larger)) - first], axis=1), axis=0)
    drawn = np.empty((0, 2), dtype=np.int64)
    while len(drawn) < most:
        both = np.sort(rng.integers(mix.low, high + 1, size=(2 * most + 64, 2)), axis=1)[:, ::-1]
        drawn = np.unique(np.concatenate([drawn, both[both[:, 0] >= low]]), axis=0)
    return rng.permutation(drawn, axis=0)[:most]


def _larger(rng: np.random.Generator, mix: Mix, count: int) -> tuple[Row, ...]:
    """Rows whose larger operand has 5, 6 and 7 digits, in groups 1e5, 1e6, 1e7."""
    out: list[Row] = []
    for digits in (5, 6, 7):
        wide = Mix(mix.digits, mix.plus, mix.low, 10**digits - 1)
        sums = _apportion(count, [mix.plus, 1 - mix.plus])
        pairs = _pairs(rng, digits, wide, count)
        plus = rng.permutation(np.repeat([1, 0], sums))
        turned = (plus == 1) & (rng.random(count) < 0.5)
        pairs[turned] = pairs[turned][:, ::-1]
        out += _rows("arithmetic", "ood", np.insert(pairs, 1, plus, axis=1), len(out), f"1e{digits}")
    return tuple(out)


def _rows(name: str, split: str, table: np.ndarray, start: int = 0, group: str | None = None) -> tuple[Row, ...]:
    return tuple(
        Row(
            f"{name}/{split}/{start + i}",
            f"{a} {'+' if plus else '-'} {b} =",
            label=a + b if plus else a - b,
            group=group,
        )
        for i, (a, plus, b) in enumerate(table.tolist())
    )


def read(path: Path, name: str = "arithmetic-published") -> Task:
    """The task of a folder with `train.txt`, `test.txt` and perhaps `validation.txt`, one `a op b = c` a line."""
    splits: dict[str, tuple[Row, ...]] = {}
    wrong = 0
    for split in ("train", "validation", "test"):
        file = Path(path) / f"{split}.txt"
        if not file.exists():
            if split == "validation":
                continue
            raise DataError(
                f"{file} is missing. An arithmetic folder holds train.txt and test.txt, lines `a op b = c`."
            )
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as e:
            raise DataError(f"{file} is not UTF-8 (byte {e.start}). Convert it, then try again.") from e
        splits[split] = tuple(_read_line(line, f"{name}/{split}/{i}", file, i) for i, line in enumerate(lines))
        wrong += sum(_result(problem_of(r)) != r.label for r in splits[split])
    notes = {"wrong": f"{wrong} rows with a wrong answer, kept as published"} if wrong else {}
    return Task(name, "number", splits, metric="rmsle", notes=notes)


def _read_line(line: str, row_id: str, file: Path, number: int) -> Row:
    match = LINE.fullmatch(line.strip())
    if match is None or match[4] is None:
        raise DataError(f"Line {number + 1} of {file} is '{line[:60]}'; expected `a op b = c`, as in `69 - 40 = 29`.")
    return Row(row_id, f"{match[1]} {match[2]} {match[3]} =", label=int(match[4]))


def problem_of(row: Row) -> Problem:
    """The operands and operator of a row.

    >>> problem_of(Row("r", "12 + 7 =", label=19))
    (12, '+', 7)
    """
    match = LINE.fullmatch(row.text.strip())
    if match is None:
        raise DataError(f"Row '{row.id}' reads '{row.text[:60]}'; expected `a op b =`, as in `69 - 40 =`.")
    return int(match[1]), match[2], int(match[3])


def _result(problem: Problem) -> int:
    a, op, b = problem
    return a + b if op == "+" else a - b


def canonical(problem: Problem) -> Problem:
    """The same for a problem and its commuted form.

    >>> canonical((7, "+", 12)), canonical((12, "-", 7))
    ((12, '+', 7), (12, '-', 7))
    """
    a, op, b = problem
    return (b, op, a) if op == "+" and b > a else problem


def check(task: Task) -> dict[str, float | int]:
    """Facts about a task's splits: sizes, operators, range, wrong rows, leaks of test into train, trivial baselines."""
    out: dict[str, float | int] = {}
    problems = {split: [problem_of(r) for r in rows] for split, rows in task.splits.items() if rows}
    for split, many in problems.items():
        gold = [int(r.label) for r in task.splits[split] if isinstance(r.label, (int, float))]
        out[f"{split}_rows"] = len(many)
        out[f"{split}_plus_share"] = sum(p[1] == "+" for p in many) / len(many)
        out[f"{split}_max_answer"] = max(gold)
        out[f"{split}_wrong"] = sum(_result(p) != g for p, g in zip(many, gold, strict=True))
    if "train" in problems and "test" in problems:
        known, known_forms = set(problems["train"]), {canonical(p) for p in problems["train"]}
        out["leaked_verbatim"] = sum(p in known for p in problems["test"])
        out["leaked_commuted"] = sum(canonical(p) in known_forms for p in problems["test"])
        out["leaked_commuted_share"] = out["leaked_commuted"] / len(problems["test"])
        out.update(_baselines(task))
    return out


def is_problem(row: Row) -> bool:
    """Whether a row reads `a op b =`."""
    return LINE.fullmatch(row.text.strip()) is not None


def copy_max(rows: Sequence[Row]) -> float:
    """RMSLE of answering with the larger operand: what anything learned has to beat.

    >>> round(copy_max([Row("r", "12 + 7 =", label=19)]), 3)
    0.431
    """
    larger = [max(p[0], p[2]) for p in map(problem_of, rows)]
    return score_numbers(larger, [int(r.label) for r in rows])["rmsle"]  # type: ignore[arg-type]


def _baselines(task: Task) -> dict[str, float]:
    """RMSLE on test of always answering the train split's geometric mean, and of copying the larger operand."""
    gold = [int(r.label) for r in task.splits["test"] if isinstance(r.label, (int, float))]
    seen = [int(r.label) for r in task.splits["train"] if isinstance(r.label, (int, float))]
    mean = round(math.expm1(sum(math.log1p(x) for x in seen) / len(seen)))
    return {
        "constant": mean,
        "constant_rmsle": score_numbers([mean] * len(gold), gold)["rmsle"],
        "copy_max_rmsle": copy_max(task.splits["test"]),
    }


def score_numbers(predicted: Sequence[int | None], gold: Sequence[int]) -> dict[str, float]:
    """Errors of predicted numbers; an answer that could not be parsed (None) counts as 0 and as wrong.

    `rmsle_parsed` leaves such answers out; where none was parsed it is not there. Logarithms see negative numbers as 0.

    >>> s = score_numbers([19, None], [19, 0])
    >>> s["exact"], s["rmsle"], s["parse_rate"], s["n"]
    (0.5, 0.0, 0.5, 2)
    """
    if len(predicted) != len(gold) or not gold:
        raise DataError(
            f"{len(predicted)} predicted numbers were given for {len(gold)} answers; expected as many, and some."
        )
    parsed_N = np.array([p is not None for p in predicted])
    given_N = np.array([float(_capped(p or 0)) for p in predicted])
    gold_N = np.array([float(_capped(g)) for g in gold])
    error_N = given_N - gold_N
    log_error_N = np.log1p(np.maximum(given_N, 0)) - np.log1p(np.maximum(gold_N, 0))
    mse, msle = float(np.mean(error_N**2)), float(np.mean(log_error_N**2))
    parsed = {"rmsle_parsed": math.sqrt(np.mean(log_error_N[parsed_N] ** 2))} if parsed_N.any() else {}
    return {
        "mse": mse,
        "rmse": math.sqrt(mse),
        "msle": msle,
        "rmsle": math.sqrt(msle),
        **parsed,
        "exact": sum(p == g for p, g in zip(predicted, gold, strict=True)) / len(gold),
        "parse_rate": float(parsed_N.mean()),
        "n": len(gold),
    }


def _capped(number: int) -> int:
    return max(-LARGEST, min(LARGEST, number))


def parse_number(answer: str | Sequence[str]) -> int | None:
    """The integer that a text or a list of word pieces spells, or None.

    >>> parse_number(["89", "##6", "##8"]), parse_number(" 1 9"), parse_number(["Ġ1", "9"]), parse_number("nine")
    (8968, 19, 19, None)
    """
    text = answer if isinstance(answer, str) else " ".join(answer)
    text = re.sub(r"##|[Ġ▁\s]", "", text)
    return int(text) if re.fullmatch(r"-?[0-9]{1,300}", text) else None

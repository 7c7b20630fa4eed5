"""Rows chosen by a seed: cuts of a set that comes in one piece, K-shot samples, limits.

Every choice is a pure function of the rows' order and the seed, not of names or ids, so the same rows are chosen
whether they come from a public folder or from a user's file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from budwood.data.batch import seed_of
from budwood.data.readers.harvest import LEFT_OUT_OF_TRAIN
from budwood.data.task import Row, Task
from budwood.errors import DataError

PARTS = ("train", "validation", "test")
WAS_VALIDATION = "the task's own validation split"  # the note on a test split that a K-shot sample made of it


@dataclass(frozen=True)
class Cut:
    """Shares of train, validation and test, and the seed that deals the rows out."""

    shares: tuple[int, ...]
    seed: int = 0

    @property
    def text(self) -> str:
        """The cut as the user would write it."""
        return "/".join(map(str, self.shares)) + (f"@{self.seed}" if self.seed else "")


def parse_cut(text: str) -> Cut:
    """Shares and seed of a cut.

    >>> parse_cut("80/10/10"), parse_cut("90/10@7")
    (Cut(shares=(80, 10, 10), seed=0), Cut(shares=(90, 10), seed=7))
    """
    shares, _, seed = text.partition("@")
    parts = shares.split("/")
    if len(parts) > len(PARTS) or not all(p.strip().isdigit() for p in parts) or not (seed or "0").isdigit():
        raise DataError(
            f"--split '{text}' cannot be read. Expected train/validation/test in whole numbers such as 80/10/10 or "
            f"90/10, and, for another deal, a seed: 80/10/10@7."
        )
    numbers = tuple(int(p) for p in parts)
    if sum(numbers) != 100 or not numbers[0]:
        raise DataError(
            f"--split '{text}' adds up to {sum(numbers)}. The shares should add up to 100, and train needs one."
        )
    return Cut(numbers, int(seed or 0))


def cut(rows: Sequence[Row], how: Cut, source: str) -> dict[str, tuple[Row, ...]]:
    """Rows dealt out by shares, in file order; rows of one group stay together, else every class is dealt out evenly.

    Every part with a share gets at least one row, or it is an error.
    """
    rng = np.random.default_rng(seed_of(how.seed, "cut"))
    part_N = (
        _deal_groups(rows, how, rng, source) if rows and rows[0].group is not None else _deal_classes(rows, how, rng)
    )
    parts: dict[str, tuple[Row, ...]] = {}
    for number, (name, share) in enumerate(zip(PARTS, how.shares)):
        if share:
            parts[name] = tuple(rows[i] for i in np.flatnonzero(part_N == number).tolist())
            if not parts[name]:
                raise DataError(
                    f"Cutting the {len(rows):,} rows of {source} by {how.text} leaves '{name}' empty. Give more rows, "
                    f"other shares with --split, or a file for each split."
                )
    return parts


def _pattern(shares: Sequence[int]) -> np.ndarray:
    """The order in which parts take turns so that every beginning of it keeps the shares as closely as possible.

    >>> _pattern((8, 1, 1)).tolist()
    [0, 0, 0, 1, 0, 0, 2, 0, 0, 0]
    """
    unit = math.gcd(*shares)
    turns = [share // unit for share in shares]
    total, given, order = sum(turns), [0] * len(turns), []
    for turn in range(1, total + 1):
        owed = [turn * share / total - have for share, have in zip(turns, given)]
        part = max(range(len(turns)), key=owed.__getitem__)
        given[part] += 1
        order.append(part)
    return np.array(order, dtype=np.int64)


def _deal_classes(rows: Sequence[Row], how: Cut, rng: np.random.Generator) -> np.ndarray:
    pattern = _pattern(how.shares)
    part_N = np.zeros(len(rows), dtype=np.int64)
    classes: dict[object, list[int]] = {}
    for i, row in enumerate(rows):
        classes.setdefault(row.label if isinstance(row.label, int) else None, []).append(i)
    if len(classes) > len(rows) // 2:  # numbers as labels: nothing to keep even
        classes = {None: list(range(len(rows)))}
    for members in classes.values():
        order = rng.permutation(np.array(members))
        part_N[order] = np.resize(pattern, len(order))
    return part_N


def _deal_groups(rows: Sequence[Row], how: Cut, rng: np.random.Generator, source: str) -> np.ndarray:
    """Whole groups, in a random order, each to the part that lacks most rows."""
    groups: dict[str | None, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.group, []).append(i)
    wanted = [i for i, share in enumerate(how.shares) if share]
    if len(groups) < len(wanted):
        raise DataError(
            f"The rows of {source} form {len(groups)} group(s), which cannot be cut into {len(wanted)} parts by "
            f"{how.text}. Use another --group column or fewer parts."
        )
    part_N = np.zeros(len(rows), dtype=np.int64)
    lacking = [len(rows) * share / sum(how.shares) for share in how.shares]
    members, empty = list(groups.values()), set(wanted)
    for left, g in zip(range(len(members), 0, -1), rng.permutation(len(members))):
        choice = empty if left <= len(empty) else wanted
        part = max(choice, key=lambda i: (lacking[i], -i))
        part_N[members[g]] = part
        lacking[part] -= len(members[g])
        empty.discard(part)
    return part_N


def few_shot(task: Task, k: int, seed: int) -> Task:
    """K rows of every class to train on and the next K for validation, as LM-BFF samples them: its seeds give its rows.

    All lines of the train file are shuffled by `numpy.random.RandomState(seed)`; classes come in the order in which the
    shuffled list first shows them. A regression task has two classes, below and from the middle of its bounds (STS-B:
    2.5). The task's own test split stays; where it has none, its validation split becomes "test".
    """
    if task.kind not in ("label", "regression"):
        raise DataError(
            f"--shots {k} asks for {k} rows per class, but task '{task.name}' ({task.kind}) has no classes. Use "
            f"--limit N for a sample of N training rows."
        )
    rows = task.rows("train")
    order = shuffled_order(len(rows), task.notes.get(LEFT_OUT_OF_TRAIN, ""), seed)
    middle = sum(task.bounds) / 2 if task.bounds else 2.5
    classes: dict[object, list[Row]] = {}
    for i in order:
        label = rows[i].label
        key = label if task.kind == "label" else float(label) >= middle
        classes.setdefault(key, []).append(rows[i])
    train = tuple(row for members in classes.values() for row in members[:k])
    validation = tuple(row for members in classes.values() for row in members[k : 2 * k])
    notes = {
        **task.notes,
        "shots": f"{k} per class, seed {seed}: {len(train)} train, {len(validation)} validation rows",
    }
    short = [members for members in classes.values() if len(members) < 2 * k]
    if short:
        notes["shots"] += f"; {len(short)} classes have fewer than {2 * k} rows"
    notes.pop(LEFT_OUT_OF_TRAIN, None)
    others = {name: kept for name, kept in task.splits.items() if name not in ("train", "validation")}
    if not task.splits.get("test") and task.splits.get("validation"):
        others["test"] = task.splits["validation"]
        notes["test"] = WAS_VALIDATION
    return replace(task, splits={"train": train, "validation": validation, **others}, notes=notes)


def shuffled_order(kept: int, left_out: str, seed: int) -> np.ndarray:
    """Indices of the kept rows in the order of the shuffled file; lines left out take part in the shuffle.

    >>> shuffled_order(3, "", 13).tolist(), shuffled_order(2, "1", 13).tolist()
    ([1, 0, 2], [0, 1])
    """
    gone = np.array([int(p) for p in left_out.split()], dtype=np.int64)
    lines = np.arange(kept + len(gone))
    np.random.RandomState(seed).shuffle(lines)
    row_of = np.cumsum(~np.isin(np.arange(len(lines)), gone)) - 1
    return row_of[lines[~np.isin(lines, gone)]]


def limit(task: Task, n: int | None, n_eval: int | None, seed: int) -> Task:
    """At most `n` training rows and `n_eval` rows of every other split, sampled evenly, in file order.

    A smaller limit chooses a subset of what a larger one with the same seed chooses, and a validation split that a
    K-shot sample has made the test split gives the rows that it gives without.
    """
    splits: dict[str, tuple[Row, ...]] = {}
    told = []
    born = {"test": "validation"} if task.notes.get("test") == WAS_VALIDATION else {}
    for split, rows in task.splits.items():
        most = n if split == "train" else n_eval
        if most is None or len(rows) <= most:
            splits[split] = rows
            continue
        chosen = np.sort(
            np.random.default_rng(seed_of(seed, "limit", born.get(split, split))).permutation(len(rows))[:most]
        )
        splits[split] = tuple(rows[i] for i in chosen)
        told.append(f"{split} {most:,} of {len(rows):,}")
    if not told:
        return task
    return replace(task, splits=splits, notes={**task.notes, "limited": f"{', '.join(told)}, seed {seed}"})


def by_source(splits: Mapping[str, Sequence[Row]], how: Cut, source: str) -> tuple[dict[str, tuple[Row, ...]], str]:
    """Splits with a train part, and a sentence on how they came about ("" where nothing had to be cut).

    A set in one piece is cut by `how`; where validation and test are there and train is not, train is cut from
    validation and test stays whole.
    """
    if "train" in splits:
        return {name: tuple(splits[name]) for name in splits}, ""
    if len(splits) == 1:
        name, rows = next(iter(splits.items()))
        parts = cut(rows, how, source)
        return parts, _told(name, rows, how, parts)
    ours = Cut((100 - how.shares[-1] * 100 // sum(how.shares), how.shares[-1] * 100 // sum(how.shares)), how.seed)
    parts = cut(splits["validation"], ours, source)
    sentence = _told("validation", splits["validation"], ours, parts)
    return {**parts, **{name: tuple(rows) for name, rows in splits.items() if name != "validation"}}, sentence


def _told(name: str, rows: Sequence[Row], how: Cut, parts: Mapping[str, Sequence[Row]]) -> str:
    unit = "groups kept whole" if rows[0].group is not None else "classes dealt out evenly"
    made = ", ".join(f"{part} {len(kept):,}" for part, kept in parts.items())
    source = "the only file" if name == "all" else f"the only labelled files ({name})"
    return f"{source} cut by {how.text}, seed {how.seed}, {unit}: {made}"

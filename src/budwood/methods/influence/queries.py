"""Queries: the rows that are asked about, and whether there is anything to ask of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from budwood.data.batch import Features, seed_of
from budwood.data.task import Row, Task
from budwood.errors import DataError, nearest
from budwood.methods.session import Session
from budwood.models.reading import Reading, tuned_with

ID = "id:"  # --queries id:79 is the row '79', --queries 79 the first 79 rows


def query_rows(task: Task, cfg: Any) -> list[Row]:
    """The rows that are asked about: a whole split, its first rows, or rows by id."""
    split = cfg.query_split or task.reported
    rows = list(task.rows(split))
    if not cfg.queries:
        return rows
    by_id = {r.id: r for r in rows}
    if len(cfg.queries) == 1 and cfg.queries[0].isdigit():
        if not int(cfg.queries[0]):
            raise DataError("--queries 0 asks about nothing. Give a number of rows, or ids.")
        return rows[: int(cfg.queries[0])]
    found = []
    for wish in cfg.queries:
        name = wish if wish in by_id else wish.removeprefix(ID)
        if name not in by_id:
            raise DataError(
                f"Split '{split}' of '{task.name}' has no row '{name}'.{nearest(name, by_id)} Its ids are such as "
                f"'{rows[0].id}'; --queries 8 asks about its first 8 rows."
            )
        found.append(by_id[name])
    return found


def encoded(read: Reading, rows: Sequence[Row]) -> Features:
    """The queries as the model reads them; rows in which it finds nothing to predict are refused by name."""
    features = read.encode(rows)
    there = set(features.ids)
    if lost := [r.id for r in rows if r.id not in there]:
        shown = ", ".join(f"'{i}'" for i in lost[:5])
        raise DataError(
            f"{len(lost)} of {len(rows)} queries have no text that the model could be asked about: {shown}"
            f"{' ...' if len(lost) > 5 else ''}. Leave them out: name the others with --queries."
        )
    return features


def warn_other_rows(session: Session) -> None:
    """Say where the training rows are not those that the model was tuned on."""
    model, now = session.models[0], session.cfg
    was = tuned_with(model)
    if not was.get("rows") or was["rows"] == session.task.digest or was.get("task") != now.task:
        return
    drawn = ("data_seed",) if now.limit or was.get("limit") or now.shots or was.get("shots") else ()
    other = [k for k in ("limit", "shots", "split", "group", *drawn) if was.get(k) != getattr(now, k)]
    if other:
        told = ", ".join(f"{k.replace('_', '-')} {was.get(k)} there, {getattr(now, k)} here" for k in other)
        session.progress.say(
            f"{model.text} was tuned on other rows of '{now.task}' ({told}): rows that it never saw count as training "
            "rows here, and queries may be rows that it saw. Give the same settings to trace its own rows."
        )


def say_skipped(session: Session, skipped: Collection[str], rows: int) -> None:
    """Say which training rows were left out because their loss is not finite."""
    if skipped:
        shown = ", ".join(sorted(skipped)[:5])
        session.progress.say(
            f"{len(skipped)} of {rows:,} training rows have no finite loss and were left out: {shown}"
            f"{' ...' if len(skipped) > 5 else ''}."
        )


def warn_fewer(session: Session, rows: Sequence[Row]) -> None:
    """Say where more queries were asked for than there are."""
    wish = session.cfg.queries
    if len(wish) == 1 and wish[0].isdigit() and int(wish[0]) > len(rows):
        session.progress.say(
            f"--queries {wish[0]} was given, and the split has {len(rows)} rows: all of them are asked."
        )


def warn_overlap(session: Session, rows: Sequence[Row]) -> int:
    """Say which queries are training rows as well: their best helper is themselves. Returns how many."""
    seen = {(r.text, r.pair, r.words): r.id for r in session.task.rows(session.cfg.train_split)}
    both = [(r.id, seen[key]) for r in rows if (key := (r.text, r.pair, r.words)) in seen]
    if both:
        shown = ", ".join(q if q == n else f"{q} = {n}" for q, n in both[:5])
        session.progress.say(
            f"{len(both)} of {len(rows)} queries are training rows too ({shown}{' ...' if len(both) > 5 else ''}): "
            "they will look like their own best helpers."
        )
        session.progress.event(overlap=[list(x) for x in both])
    return len(both)


def calibration_rows(task: Task, count: int, seed: int) -> list[int]:
    """Places of a seeded sample of validation rows (of the reported split where there is no validation)."""
    rows = task.rows(calibration_split(task))
    rng = np.random.default_rng(seed_of(seed, "calibration"))
    return sorted(rng.permutation(len(rows))[:count].tolist())


def calibration_split(task: Task) -> str:
    """Where calibration queries come from."""
    return "validation" if task.splits.get("validation") else task.reported

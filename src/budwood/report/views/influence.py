"""Influence: for every query the training rows that helped and harmed, read from score matrices by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from budwood.errors import StoreError
from budwood.methods.influence.scores import TOKENS, Matrix, Scores, replace_module, sum_of
from budwood.report.limits import Limits
from budwood.report.room import Room
from budwood.report.texts import Rows, Texts, rows_of
from budwood.report.views.words import number, percent, short

SPEAKERS = 25  # queries behind the claim where not all are read
USUAL = 20


def gather(room: Room, texts: Texts, limits: Limits) -> dict[str, Any]:
    """Queries, the rows that matter to each, and suspects; parts are there as far as the run made them."""
    told: dict[str, Any] = {"train": {}, "queries": [], "suspects": suspects(room, texts, limits.suspects)}
    if room.file("scores", "index.json") is None:
        return {**told, "claim": claim(room, told)}
    desk = Desk.open(room)
    told |= desk.facts(limits)
    mine = desk.scores.query_ids[: limits.queries]
    told["queries"] = desk.queries(texts, mine)
    if len(mine) < len(desk.scores.query_ids):
        told["left_out"] = f"{len(desk.scores.query_ids) - len(mine):,} of {len(desk.scores.query_ids):,} queries"
    if not limits.each:  # rows are asked for one by one; a few queries speak for all
        few = range(0, len(mine), max(1, len(mine) // SPEAKERS))
        spoken = {m.strategy: [desk.ranked(q, m, USUAL) for q in few] for m in desk.main(limits)[:1]}
        return {**told, "claim": claim(room, {**told, "tops": spoken})}
    told["tops"] = {m.strategy: [desk.ranked(q, m, limits.each) for q in range(len(mine))] for m in desk.main(limits)}
    if limits.detail and desk.main(limits):
        told["inner"] = [desk.inner(q, desk.main(limits)[0], limits.detail) for q in range(len(mine))]
    shown = {n for tops in told["tops"].values() for top in tops for n in top["rows"]}
    told["train"] = desk.train_rows(texts, sorted(shown))
    return {**told, "claim": claim(room, told)}


def claim(room: Room, told: dict[str, Any]) -> str:
    """How much the few best rows carry, or the oddest row."""
    if told.get("tops"):
        strategy, tops = next(iter(told["tops"].items()))
        shares = [t["share"] for t in tops if t.get("share") is not None]
        if shares:
            of = told["of"]["train"]
            k = len(tops[0]["rows"]) // 2
            return (
                f"Of {of:,} training rows, the {k} most helpful carry {percent(float(np.median(shares)))} of all help "
                f"to the median query ({strategy}, {len(tops):,} queries of {room.task})."
            )
    if told["suspects"]["items"]:
        first = told["suspects"]["items"][0]
        of, value = told["suspects"]["of"], number(first["value"])
        return f"Of {of:,} training rows, {first['id']} explains itself most ({value}): a suspect to read."
    if room.file("index", "index.json") is not None:
        rows = number(room.metrics.get("train"))
        return (
            f"This run holds an index of {rows} training rows: `budwood view --model RUN` answers typed texts from it."
        )
    return "This run holds factors, not scores: score queries with `budwood influence score`."


@dataclass(frozen=True)
class Desk:
    """The scores of a run with the texts of its rows."""

    room: Room
    scores: Scores
    rows: Rows

    @classmethod
    def open(cls, room: Room) -> Desk:
        """Refuses matrices that a link leads out of the runs directory for."""
        scores = Scores.open(room.path)
        for m in scores.matrices:
            if room.file("scores", f"{m.name}.npy") is None:
                raise StoreError(f"scores/{m.name}.npy is missing or lies outside the runs directory")
        return cls(room, scores, rows_of(room))

    def main(self, limits: Limits) -> list[Matrix]:
        """The matrix of every strategy that is shown by default."""
        return [self.scores.find(s) for s in self.scores.strategies[: limits.strategies]]

    def parts(self, matrix: Matrix) -> tuple[str, ...]:
        """Layers whose own scores lie beside a matrix; without any, modules."""
        return self.scores.layers(matrix) or self.scores.modules(matrix)

    def facts(self, limits: Limits) -> dict[str, Any]:
        """What all queries share."""
        s = self.scores
        return {
            "strategies": [
                {"name": m.strategy, "damping": m.damping, "dtype": m.dtype, "layers": list(self.parts(m))}
                for m in self.main(limits)
            ],
            "not_shown": list(s.strategies[limits.strategies :]),
            "of": {"train": len(s.train_ids), "queries": len(s.query_ids)},
            "measurement": s.facts.get("measurement"),
            "tokens": s.tokens is not None,
            "correlations": self.room.metrics.get("rank_correlation") or self.room.metrics.get("correlations"),
            "missing": self.rows.missing,
        }

    def queries(self, texts: Texts, ids: Sequence[str]) -> list[dict[str, Any]]:
        """Every query with text, label and what the model said."""
        split = self.scores.facts.get("query_split")
        known = self.rows.find(ids, split if isinstance(split, str) else None)
        said = answers(self.room)
        out = []
        for i in ids:
            row = {**texts.row(known[i]), "label": self.rows.label(known[i].label)} if i in known else {"id": i}
            out.append({**row, **said.get(i, {})})
        return out

    def train_rows(self, texts: Texts, places: Sequence[int]) -> dict[str, Any]:
        """Training rows by their column."""
        ids = self.scores.train_ids
        split = self.scores.facts.get("train_split")
        known = self.rows.find([ids[n] for n in places], split if isinstance(split, str) else None)
        out = {}
        for n in places:
            row = known.get(ids[n])
            out[str(n)] = {**texts.row(row), "label": self.rows.label(row.label)} if row else {"id": ids[n]}
        return out

    def row(self, query: int, matrix: Matrix, layers: Sequence[str] = ()) -> np.ndarray:
        """One query's scores; with `layers`, counting these parts of the model only."""
        if not layers:
            return self.scores.row(query, matrix)
        return sum_of([self.scores.row(query, replace_module(matrix, name)) for name in layers])

    def ranked(self, query: int, matrix: Matrix, each: int, layers: Sequence[str] = ()) -> dict[str, Any]:
        """The rows that matter most to a query, counting all of the model or these layers of it."""
        return extremes(self.row(query, matrix, layers), each)

    def inner(self, query: int, matrix: Matrix, each: int) -> dict[str, Any]:
        """Shares by layer and by token of the first rows of each side."""
        top = self.ranked(query, matrix, each)["rows"]
        layers = self.parts(matrix)
        out: dict[str, Any] = {}
        if layers:
            strip = np.stack([self.scores.row(query, replace_module(matrix, name))[top] for name in layers], 1)
            out["layers"] = {str(n): [short(float(v)) for v in values] for n, values in zip(top, strip)}
        listed = {(m.strategy, m.damping) for m in self.scores.matrices if m.module == TOKENS}
        if (matrix.strategy, matrix.damping) in listed and self.scores.tokens is not None:
            pairs = {n: self.scores.token_row(query, n, matrix) for n in top}
            out["tokens"] = {str(n): [list(w), [short(float(x)) for x in v]] for n, (w, v) in pairs.items()}
        return out


def extremes(score_N: np.ndarray, each: int) -> dict[str, Any]:
    """The most helpful rows, best first, then the most harmful, worst last; and the helpful ones' share.

    >>> extremes(np.array([1.0, -2.0, 3.0, 0.0]), 1)
    {'rows': [2, 1], 'scores': [3.0, -2.0], 'share': 0.75}
    """
    score_N = np.nan_to_num(score_N)
    each = min(each, len(score_N) // 2)
    order = np.argsort(-score_N, kind="stable")
    chosen = np.concatenate([order[:each], order[len(order) - each :]])
    help_ = float(np.maximum(score_N, 0).sum(dtype=np.float64))
    top = float(np.maximum(score_N[order[:each]], 0).sum(dtype=np.float64))
    return {
        "rows": [int(n) for n in chosen],
        "scores": [short(float(score_N[n])) for n in chosen],
        "share": short(top / help_) if help_ > 0 else None,
    }


def answers(room: Room) -> dict[str, dict[str, Any]]:
    """What the model said to every row it was scored on, by id: from this run's records or its parent's."""
    alone = room.root == room.path.resolve()  # a report: every run is its own root
    for place in (room, *(Room.open(p, None if alone else room.root) for p in parents(room))):
        table = place.records
        if table is not None and {"id", "correct", "predicted"} <= set(table.column_names):
            keys = [k for k in ("predicted", "correct", "margin") if k in table.column_names]
            return {r["id"]: {k: r[k] for k in keys} for r in table.select(["id", *keys]).to_pylist()}
    return {}


def parents(room: Room) -> list[Path]:
    """The runs that made this run's models, where they lie in the same place."""
    listed = room.manifest.get("parents")
    found = [Path(p) for p in listed if isinstance(p, str)] if isinstance(listed, list) else []
    here = [q for p in found for q in (p, room.path.parent / p.name) if (q / "run.json").is_file()]
    return list(dict.fromkeys(here))


def suspects(room: Room, texts: Texts, most: int) -> dict[str, Any]:
    """Rows that explain themselves most, from `influence self`."""
    table = room.records
    column = next((c for c in table.column_names if c.startswith("self:")), None) if table is not None else None
    if table is None or column is None:
        return {"items": [], "of": 0}
    values = table[column].to_numpy()
    order = np.argsort(-values, kind="stable")[:most]
    ids = [str(i) for i in table["id"].take(order).to_pylist()]
    rows = rows_of(room)
    known = rows.find(ids, "train")
    items = [
        {
            **({**texts.row(known[i]), "label": rows.label(known[i].label)} if i in known else {"id": i}),
            "value": short(float(values[n])),
            "rank": place + 1,
        }
        for place, (i, n) in enumerate(zip(ids, order))
    ]
    return {"items": items, "of": len(table), "by": column, "missing": rows.missing}

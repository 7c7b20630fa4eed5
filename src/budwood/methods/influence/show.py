"""`influence show`: a query, the training rows that helped and hurt it most, in words.

Shapes: N training rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from budwood.config.data import DataConfig
from budwood.data.task import Row, Task
from budwood.errors import BudwoodError, StoreError
from budwood.methods.influence.scores import LAYER, TOKENS, Matrix, Scores, best, replace_module, sum_of
from budwood.store.files import read_json


@dataclass(frozen=True)
class Wish:
    """What is to be shown. `modules` are globs, `layers` numbers; both restrict the score to parts of the model."""

    query: str = "0"
    top: int = 5
    bottom: int = 5
    strategy: str | None = None
    damping: str | None = None
    modules: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    graft: Path | None = None


def show(run: Path, wish: Wish, task: Task | None = None) -> dict[str, Any]:
    """The query and its best and worst training rows as plain values; texts come from the task of the run."""
    scores = Scores.open(run)
    matrix = scores.find(wish.strategy, wish.damping)
    if tuple(scores.train_ids) == ("all",):
        raise StoreError(
            f"{scores.path} has sums over training rows, no rows to be shown. Score without --aggregate train."
        )
    query = scores.query(wish.query)
    score_N, within, warning = _restricted(run, scores, query, matrix, wish, task)
    texts = Texts.of(run, scores, task)
    describe = _Describer(scores, matrix, query, texts, restricted=bool(within))
    return {
        "run": str(run),
        "strategy": matrix.strategy,
        "damping": matrix.damping,
        "measurement": scores.facts.get("measurement", ""),
        "sign": scores.facts.get("sign", "positive = the training row helps the query"),
        "scale": scores.facts.get("scale", ""),
        "within": within,
        "note": " ".join(t for t in (warning, texts.note) if t),
        "train": len(scores.train_ids),
        "query": {"number": query, "id": scores.query_ids[query], **texts.query(query)},
        "top": [describe(n, s) for n, s in best(score_N, wish.top)],
        "bottom": [describe(n, -s) for n, s in best(-score_N, wish.bottom)],
    }


def _restricted(
    run: Path, scores: Scores, query: int, matrix: Matrix, wish: Wish, task: Task | None
) -> tuple[np.ndarray, str, str]:
    """The scores to rank by, what they were restricted to, and a warning about that."""
    if wish.graft is not None:
        if wish.modules or wish.layers:
            raise StoreError("--graft already says which weights count: leave --modules and --layers away.")
        from budwood.methods.influence.masked import graft_scores

        score_N, warning = graft_scores(run, scores, query, matrix, wish.graft, task)
        return score_N, f"the weights of {wish.graft.name}", warning
    if wish.layers:
        names = _layer_names(scores, matrix, wish.layers)
        parts = [scores.row(query, replace_module(matrix, n)) for n in names]
        return sum_of(parts), f"layers {', '.join(map(str, wish.layers))}", ""
    if wish.modules:
        return scores.within(query, wish.modules, matrix), f"modules {', '.join(wish.modules)}", ""
    return scores.row(query, matrix), "", ""


def _layer_names(scores: Scores, matrix: Matrix, layers: Sequence[int]) -> list[str]:
    """Matrices that make up some layers: their own, else those of their modules."""
    own = scores.layers(matrix)
    if not own and not scores.modules(matrix):
        there = sorted({m.strategy for m in scores.matrices if m.module not in ("", TOKENS)})
        hint = f"Those of {', '.join(there)} do" if there else "Score with --per-layer or --per-module"
        raise StoreError(f"Scores of {matrix.strategy} in {scores.path} have no parts by layer or module. {hint}.")
    found = []
    for layer in layers:
        names = [n for n in own if n == f"layer.{layer}"] if own else _of_layer(scores.modules(matrix), layer)
        if not names:
            raise StoreError(f"There is no layer {layer} in {scores.path}; layers are counted from 0, the first block.")
        found += names
    return found


def _of_layer(modules: Sequence[str], layer: int | None) -> list[str]:
    from budwood.params.select import layer_of

    return [m for m in modules if layer_of(f"{m}.weight") == layer]


@dataclass(frozen=True)
class Texts:
    """Rows of the task behind a run by id; `note` says why there are none."""

    queries: Mapping[str, Row]
    train: Mapping[str, Row]
    labels: tuple[str, ...]
    scores: Scores
    note: str = ""

    @classmethod
    def of(cls, run: Path, scores: Scores, task: Task | None = None) -> Texts:
        """Read the task that the run was made on."""
        try:
            task = task or task_of(run)
        except BudwoodError as e:
            return cls({}, {}, (), scores, f"Only ids can be shown: {e}")
        if other := _changed(run, task):
            return cls({}, {}, (), scores, f"Only ids can be shown: {other}")
        every = {r.id: r for rows in task.splits.values() for r in rows}
        sides = []
        for key, default in (("query_split", task.reported), ("train_split", "train")):
            split = task.splits.get(scores.facts.get(key) or default, ())
            sides.append({**every, **{r.id: r for r in split}})
        lost = sum(i not in sides[1] for i in scores.train_ids)
        note = f"{lost} of {len(scores.train_ids)} training rows are no longer in the task." if lost else ""
        return cls(sides[0], sides[1], task.labels, scores, note)

    def query(self, n: int) -> dict[str, Any]:
        """Text and label of a query."""
        return self._told(self.queries.get(self.scores.query_ids[n]))

    def row(self, n: int) -> dict[str, Any]:
        """Text and label of a training row."""
        return self._told(self.train.get(self.scores.train_ids[n]))

    def _told(self, row: Row | None) -> dict[str, Any]:
        if row is None:
            return {}
        told: dict[str, Any] = {"text": row.text or " ".join(row.words or ())}
        if row.pair is not None:
            told["pair"] = row.pair
        if isinstance(row.label, int) and self.labels:
            told["label"] = self.labels[row.label]
        elif isinstance(row.label, tuple) and self.labels:
            told["label"] = " ".join(self.labels[i] for i in row.label)
        elif row.label is not None:
            told["label"] = row.label
        elif row.answers is not None:
            told["label"] = row.answers[0][0] if row.answers else "(no answer)"
        return told


def _changed(run: Path, task: Task) -> str:
    """What to say where the rows of a task are not those that a run was made on: an id may be another row's by now."""
    place = run if (run / "run.json").exists() else run.parent
    was = read_json(place / "run.json").get("settings", {}).get("rows") if (place / "run.json").exists() else None
    if was is None or was == task.digest:
        return ""
    return (
        f"the rows of '{task.name}' have changed since {place} was made, so that an id may be that of another row now. "
        "Score again, or bring the rows back."
    )


def task_of(run: Path) -> Task:
    """The task of a finished run, read again from the settings it was given."""
    from budwood.data.source import load_task

    place = run if (run / "run.json").exists() else run.parent
    if not (place / "run.json").exists():
        raise StoreError(f"{run} is no run of budwood, so its rows are not known.")
    given = read_json(place / "run.json").get("given", {})
    if not given.get("task"):
        raise StoreError(f"{place} does not name its task.")
    wanted = {k: given[k] for k in DataConfig.model_fields if k in given}
    if wanted.get("data_seed") is None:
        wanted["data_seed"] = given.get("seed", 0)
    return load_task(DataConfig(**wanted))


@dataclass(frozen=True)
class _Describer:
    """A training row as it is shown: rank comes from its place in the list."""

    scores: Scores
    matrix: Matrix
    query: int
    texts: Texts
    restricted: bool

    def __call__(self, n: int, score: float) -> dict[str, Any]:
        told = {"number": n, "id": self.scores.train_ids[n], "score": score, **self.texts.row(n)}
        if not self.restricted:
            layers = self._layers(n)
            told |= {"layers": layers} if layers else {}
            told |= {"tokens": tokens} if (tokens := self._tokens(n)) else {}
        return told

    def _layers(self, n: int) -> dict[str, float]:
        """What each layer adds to the score."""
        value = lambda name: float(self.scores.row(self.query, replace_module(self.matrix, name))[n])  # noqa: E731
        if own := self.scores.layers(self.matrix):
            return {name: value(name) for name in own}
        from budwood.params.select import layer_of

        found: dict[str, float] = {}
        for module in self.scores.modules(self.matrix):
            layer = layer_of(f"{module}.weight")
            name = "head" if layer is None else f"layer.{layer}"
            found[name] = found.get(name, 0.0) + value(module)
        assert all(LAYER.fullmatch(k) for k in found)
        return found

    def _tokens(self, n: int) -> list[tuple[str, float]]:
        """What each token adds to the score; the first, without a word, is what has no place in the text."""
        if not any(m.module == TOKENS and m.strategy == self.matrix.strategy for m in self.scores.matrices):
            return []
        words, values = self.scores.token_row(self.query, n, self.matrix)
        return [(w, float(v)) for w, v in zip(words, values)]

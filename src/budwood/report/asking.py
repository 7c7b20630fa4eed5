"""Typed texts: the training rows behind them, from a run's index and a model at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from budwood.config.data import DataConfig
from budwood.config.influence import IndexConfig, QueryConfig
from budwood.errors import BudwoodError, BusyError, DataError
from budwood.methods.influence.scores import Matrix, Scores
from budwood.report.room import Room
from budwood.report.shelf import Asker
from budwood.store.files import read_json, stamps

ROWS = 10
KEPT = 64  # rows of scores by graft
ONE = Lock()  # one question at a time: the model is changed while gradients are taken
PATIENCE = 3.0  # seconds that a question waits for the one before it


@contextmanager
def alone() -> Iterator[None]:
    """The model to oneself; a question that would wait long is turned away instead, so that none pile up."""
    if not ONE.acquire(timeout=PATIENCE):
        raise BusyError("The server is busy counting another query. Try again in a few seconds.")
    try:
        yield
    finally:
        ONE.release()


def asker(model: str) -> Asker:
    """A function that answers texts with this model; torch is imported when the first one is asked."""

    def ask(room: Room, text: str) -> dict[str, Any]:
        from budwood.data.source import load_task
        from budwood.methods.influence.query import answer

        given = {k: v for k, v in room.manifest.get("given", {}).items() if v is not None}
        own = IndexConfig(**{k: v for k, v in given.items() if k in IndexConfig.model_fields})
        data = {k: getattr(own, k) for k in DataConfig.model_fields}
        seed = own.data_seed if own.data_seed is not None else own.seed
        task = load_task(DataConfig(**{**data, "offline": True, "data_seed": seed}))
        cfg = QueryConfig(asked_text=text, task=task.name, top=ROWS, bottom=ROWS)
        with alone():
            found = answer(Path(room.path), cfg, model, task, own)
        said = found["query"].get("predicted")
        rows = [*found["top"], *reversed(found["bottom"])]
        return {"rows": rows, "said": f"The model says {said}." if said else "", "strategy": found["strategy"]}

    return ask


def in_graft(run: Path, scores: Scores, query: int, matrix: Matrix, graft: Path) -> tuple[np.ndarray, str]:
    """One query's scores counting the weights of a graft alone, kept for those that are looked at again, and a warning
    where the graft is of another model.
    """
    kept = (graft, run / "run.json", run / "scores" / "index.json")
    key = (run.resolve(), query, matrix.strategy, matrix.damping, graft.resolve(), stamps(kept), models_of(run))
    if key in _inside:
        return _inside[key]
    with alone():
        if key not in _inside:
            from budwood.methods.influence.masked import graft_scores

            while len(_inside) >= KEPT:
                del _inside[next(iter(_inside))]
            try:
                _inside[key] = graft_scores(run, scores, query, matrix, graft)
            except RuntimeError as e:
                raise DataError(f"{graft.name} cannot be counted in this run: its model or rows have changed.") from e
        return _inside[key]


def models_of(run: Path) -> str:
    """Changes whenever the files of a run's models do."""
    from budwood.methods.influence.workshop import RUNS
    from budwood.models.reference import resolve, stamp

    manifest = read_json(run / "run.json")
    revision = manifest.get("given", {}).get("revision")
    try:
        return " ".join(stamp(resolve(m, runs_dir=RUNS, revision=revision, offline=True)) for m in manifest["models"])
    except BudwoodError:
        return ""  # the pass itself says what is missing


_inside: dict[Any, tuple[np.ndarray, str]] = {}

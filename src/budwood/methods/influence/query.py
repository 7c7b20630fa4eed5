"""`influence query`: a text of one's own, answered from the index."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from budwood.config.influence import IndexConfig, QueryConfig
from budwood.data.task import Row, Task
from budwood.errors import ConfigError, DataError, nearest
from budwood.methods.influence.index import Index
from budwood.methods.influence.scores import best
from budwood.methods.influence.workshop import open_shop, settings_for
from budwood.store.files import read_json

KINDS = ("label", "regression", "text")


def index_settings(cfg: QueryConfig, model: str) -> IndexConfig:
    """The settings of the index behind a question; without --task, those of the run that trained the model."""
    from budwood.config.data import DataConfig

    own = {k: v for k, v in cfg.model_dump().items() if k in IndexConfig.model_fields}
    if not own["task"]:
        manifest = Path(model) / "run.json"
        given = read_json(manifest).get("given", {}) if manifest.exists() else {}
        if not given.get("task"):
            raise ConfigError(f"--task is missing, and '{model}' is no run that names one. Give --task.")
        own |= {k: given[k] for k in DataConfig.model_fields if given.get(k) is not None}
    return IndexConfig(**{**own, "out": None if cfg.out is None else cfg.out})


def answer(run: Path, cfg: QueryConfig, model: str, task: Task, settings: IndexConfig) -> dict[str, Any]:
    """The text's best and worst training rows in the form of `influence show`, and how long each part took."""
    shop = open_shop(settings_for(settings, model), task)
    index = Index.open(run, shop)
    row, told = question_row(cfg, task, index)
    features = shop.read.encode([row])
    index.ask(features)  # reads what lies on disk, once
    began = time.perf_counter()
    plain_backward(index, features)
    backward = time.perf_counter() - began
    began = time.perf_counter()
    score_N = index.ask(features)
    whole = time.perf_counter() - began
    if cfg.exact:
        score_N = _refined(index, features, score_N, cfg.exact)
    rows = {r.id: r for r in task.rows(settings.train_split)}
    label = index.facts["damping"]
    show = lambda n, s: {"number": n, "id": index.ids[n], "score": s, **_told(rows[index.ids[n]], task)}  # noqa: E731
    return {
        "run": str(run),
        "strategy": "ekfac",
        "damping": label if label != "auto" else f"auto ({index.factors.share('ekfac')[0]:g}mean)",
        "measurement": index.facts["measurement"],
        "sign": "positive = the training row helps the query",
        "scale": f"divided by the {len(index.ids):,} training rows",
        "within": "",
        "note": "; ".join(_notes(index, cfg.exact)),
        "train": len(index.ids),
        "query": {"number": 0, "id": "asked", "text": row.text, **({"pair": row.pair} if row.pair else {}), **told},
        "top": [show(n, s) for n, s in best(score_N, cfg.top)],
        "bottom": [show(n, -s) for n, s in best(-score_N, cfg.bottom)],
        "milliseconds": {"backward": 1e3 * backward, "beyond": 1e3 * max(0.0, whole - backward), "whole": 1e3 * whole},
    }


def _notes(index: Index, exact: int) -> Iterator[str]:
    """What was left out of the answer, and what was done about it."""
    if index.entry == "coordinates" and index.stored.most < (kept := len(index.stored.table)):
        yield f"answered with the {index.stored.most:,} of {kept:,} coordinates that weigh most for this text"
    if exact:
        yield f"the {exact} best and worst rows were scored again with all coordinates"


def plain_backward(index: Index, features: Any) -> None:
    """One forward and backward pass of the question alone, as a measure."""
    from budwood.methods.influence.precondition import measurement
    from budwood.methods.influence.workshop import sweep

    question = measurement(index.shop.read.objective, index.facts["measurement"])
    sweep(index.shop, features, np.arange(len(features)), lambda batch: (question,), lambda i, m, s: None)


def question_row(cfg: QueryConfig, task: Task, index: Index) -> tuple[Row, dict[str, Any]]:
    """The text as a row of the task; without --label the model's own answer stands in for it."""
    if task.kind not in KINDS:
        raise ConfigError(
            f"`influence query` takes texts of tasks with labels, numbers or plain text; '{task.name}' is of kind "
            f"'{task.kind}'. Use `influence score` with --queries there."
        )
    if not cfg.asked_text.strip():
        raise DataError("--text is empty. Give the text whose prediction is to be traced.")
    paired = any(r.pair is not None for r in task.rows(index.shop.cfg.train_split)[:1])
    if paired and cfg.asked_pair is None:
        raise DataError(f"Task '{task.name}' has two texts per row. Give the second with --text-pair.")
    row = Row("asked", cfg.asked_text, cfg.asked_pair)
    if task.kind == "text":
        if cfg.asked_label is not None:
            raise DataError(f"--label was given, and texts of task '{task.name}' have none. Leave it away.")
        return row, {}
    if task.kind == "regression":
        value = _number(cfg.asked_label, task)
        return Row("asked", row.text, row.pair, value), {"label": value}
    if cfg.asked_label is not None and cfg.asked_label not in task.labels:
        raise DataError(
            f"--label was given '{cfg.asked_label}'; task '{task.name}' has {', '.join(task.labels)}."
            f"{nearest(cfg.asked_label, task.labels)}"
        )
    said = _prediction(index, Row("asked", row.text, row.pair, 0))
    label = task.labels.index(cfg.asked_label) if cfg.asked_label is not None else said
    whose = "" if cfg.asked_label is not None else " (the model's answer)"
    told = {"label": f"{task.labels[label]}{whose}", "predicted": task.labels[said]}
    return Row("asked", row.text, row.pair, label), told


def _number(wish: str | None, task: Task) -> float:
    """The number that a text should have: the model's own would leave nothing to explain."""
    if wish is None:
        raise DataError(
            f"Task '{task.name}' asks for numbers: give the text's own with `influence query --label 3.5`. At the "
            "model's own answer the loss is flat, and every score would be 0."
        )
    try:
        value = float(wish)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"--label was given '{wish}'; task '{task.name}' asks for numbers, such as 3.5.")
    return value


def _prediction(index: Index, row: Row) -> int:
    read = index.shop.read
    batch = read.feed(read.encode([row]))(np.arange(1), 0)
    with torch.no_grad():
        return int(read.objective.logits(index.shop.model, batch)[0].argmax())


def _told(row: Row, task: Task) -> dict[str, Any]:
    told: dict[str, Any] = {"text": row.text, **({"pair": row.pair} if row.pair is not None else {})}
    if row.label is not None:
        told["label"] = task.labels[row.label] if task.labels and isinstance(row.label, int) else row.label
    return told


def _refined(index: Index, features: Any, score_N: np.ndarray, count: int) -> np.ndarray:
    """Scores with the best and the worst `count` rows scored again with all coordinates."""
    order = np.argsort(-score_N, kind="stable")
    chosen = {index.ids[n] for n in (*order[:count], *order[::-1][:count])}
    wanted = np.array([f for f, i in enumerate(index.shop.train.ids) if i in chosen])
    exact = index.exact(features, wanted)
    score_N = score_N.copy()
    place = {i: n for n, i in enumerate(index.ids)}
    at = np.array([place[index.shop.train.ids[f]] for f in wanted])
    score_N[np.unique(at)] = 0
    np.add.at(score_N, at, exact)
    return score_N

"""Saved probes applied to rows later, and predictions scored later: `probe predict`, `probe evaluate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from budwood.capture.features import Ask, open_reading, store
from budwood.config.probe import FeatureConfig, ProbeConfig
from budwood.data.source import load_task
from budwood.data.squad import squad_scores
from budwood.data.task import Task
from budwood.errors import DataError, ModelError, StoreError
from budwood.methods.probe import spans
from budwood.methods.probe.descent import apply_plain
from budwood.methods.probe.outcome import Home, keep_answers, keep_guesses, table
from budwood.methods.probe.score import score
from budwood.methods.probe.side import Side, dressed
from budwood.models.identity import model_hash
from budwood.store.files import read_json, write_json, write_text


def predict(run: Path, task: str | None = None, split: str | None = None) -> Path:
    """Apply every probe of a run to a split; returns the folder of predictions."""
    index_path = run / "probes" / "index.json"
    if not index_path.exists():
        raise StoreError(f"{run} holds no saved probes (no probes/index.json). Give a finished `budwood probe` run.")
    folder = ""
    for name, facts in read_json(index_path).items():
        home = Home(run, name)
        settings = {**facts["settings"], **({"task": task} if task else {})}
        rows = load_task(FeatureConfig(**settings))
        if list(rows.labels) != facts["labels"]:
            raise DataError(
                f"The probes of {run} tell apart {', '.join(facts['labels']) or 'spans'}; task '{rows.name}' has "
                f"{', '.join(rows.labels) or 'no labels'}. Give a task with the same labels."
            )
        chosen = split or rows.reported
        folder = f"predictions-{rows.name}-{chosen}"
        ask = Ask(facts["model"], settings, chosen, facts["states"])
        _same_model(ask, rows, facts)
        side = dressed(store(ask, rows), rows, chosen, 0)
        for layer in (*range(facts["layers"]), None):
            if home.probe(layer).exists():
                _apply(home, layer, folder, rows, side, facts)
        write_json(run / folder / "about.json", {"task": rows.name, "split": chosen, "settings": settings})
    return run / folder


def _same_model(ask: Ask, task: Task, facts: dict[str, Any]) -> None:
    now = model_hash(open_reading(ask, task).loaded.model)
    if now != facts["model_hash"]:
        raise ModelError(
            f"'{facts['model']}' is not the model these probes were trained on: its weights have the hash {now[:12]}, "
            f"the probes' model {facts['model_hash'][:12]}. Restore the model, or train the probes again."
        )


def _apply(home: Home, layer: int | None, folder: str, task: Task, side: Side, facts: dict[str, Any]) -> None:
    with safe_open(home.probe(layer), "pt") as f:
        about = json.loads(f.metadata()["probe"])
        probe = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    x_LMD = torch.stack([side.stored.layer(n) for n in about.get("layers", [layer])])
    logits_KM, stem = apply_plain(probe, x_LMD), home.predictions(layer, folder)
    if about["kind"] == "span":
        cfg = ProbeConfig(**facts["settings"], decode=facts["decode"])
        said = spans.answers(logits_KM.numpy(), side, cfg)
        keep_answers(stem, spans.thresholded(said, about["threshold"]), said)
        return
    guess = (logits_KM[0] > 0).long() if len(logits_KM) == 1 else logits_KM.argmax(0)
    keep_guesses(stem, task, side, guess.numpy())


def evaluate(places: Sequence[Path], tell: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """One row per set of predictions and layer, by the task's metric; results.csv beside every set.

    A run that was not carried to its end, so that what its predictions belong to is not known, is named to `tell`.
    """
    found = {p.parent for place in places for p in place.rglob("predictions*/**/*.json") if _stem(p)}
    known = {run: _known(run) for run in {_of(home)[0] for home in found}}
    sets = sorted(home for home in found if _of(home)[1] in known[_of(home)[0]])
    bare = sorted({f"{run} ({name})" for run, name in map(_of, found) if not _belongs(name, known[run])})
    if bare:
        tell(f"Left out, unfinished: {', '.join(bare)}. Run the same `budwood probe` again to finish.")
    if not sets:
        given = ", ".join(map(str, places)) or "nothing"
        what = f"Unfinished and left out: {', '.join(bare)}. " if bare else ""
        raise StoreError(
            f"No predictions of finished probes were found under {given}. {what}Give a `budwood probe` run or a folder."
        )
    out: list[dict[str, Any]] = []
    for home in sets:
        rows = _evaluate_set(home)
        write_text(home / "results.csv", table(rows, list(rows[0])))
        out += rows
    return out


def _known(run: Path) -> list[str]:
    """Names of the probes that a run says are whole."""
    index = run / "probes" / "index.json"
    return list(read_json(index)) if index.exists() else []


def _belongs(name: str, known: Sequence[str]) -> bool:
    """Whether predictions are those of a finished model: its own, or the last of its epochs under the model's name."""
    return any(k == name or k.startswith(f"{name}/") for k in known)


def _stem(path: Path) -> bool:
    return path.stem == "mix" or path.stem.startswith("layer_")


def _of(home: Path) -> tuple[Path, str]:
    """The run that a set of predictions belongs to, and the name of its probes there."""
    top = next(p for p in home.parents if p.name.startswith("predictions"))
    return top.parent, home.relative_to(top).as_posix()


def _evaluate_set(home: Path) -> list[dict[str, Any]]:
    run, name = _of(home)
    folder = home.parents[name.count("/")]
    about = folder / "about.json"
    facts = read_json(run / "probes" / "index.json")[name]
    settings = read_json(about)["settings"] if about.exists() else facts["settings"]
    cfg = FeatureConfig(**settings)
    task = load_task(cfg)
    split = read_json(about)["split"] if about.exists() else task.reported
    out = []
    for path in sorted(p for p in home.glob("*.json") if _stem(p)):
        given = read_json(path)
        row: dict[str, Any] = {"run": run.name, "set": folder.name, "probes": name}
        row["layer"] = path.stem if path.stem == "mix" else int(path.stem.split("_")[1])
        out.append({**row, **_scores(task, split, given, cfg.truncate == "head")})
    return out


@dataclass(frozen=True)
class _Truth:
    """Labels of what was predicted, as `score` wants them."""

    label_M: np.ndarray
    document_M: np.ndarray
    row_M: np.ndarray


def _scores(task: Task, split: str, given: dict[str, Any], headless: bool) -> dict[str, Any]:
    """The task's metric, and what else is told of such answers; `headless`: long rows have lost their beginning."""
    rows = task.rows(split)
    if task.kind == "span":
        found = squad_scores(rows, given)
        names = ("exact", "f1", "NoAns_exact", "NoAns_f1", "HasAns_exact", "HasAns_f1")
        return {"metric": "f1", "score": float(found["f1"]), **{n: round(float(found[n]), 4) for n in names}}
    guess: list[int] = []
    label: list[int] = []
    row_M: list[int] = []
    for n, row in enumerate(rows):
        if row.label is None or row.id not in given:
            continue
        said = [task.labels.index(x) for x in ([given[row.id]] if task.kind == "label" else given[row.id])]
        gold = list(row.label) if isinstance(row.label, tuple) else [int(row.label)]
        guess += said
        label += gold[len(gold) - len(said) :] if headless else gold[: len(said)]
        row_M += [n] * len(said)
    if not label:
        raise DataError(f"Split '{split}' of task '{task.name}' has no labels that predictions could be scored by.")
    guess_M, label_M, at_M = (np.array(x, dtype=np.int64) for x in (guess, label, row_M))
    value = score(task, _Truth(label_M, at_M, at_M), guess_M)[0]
    right = float((guess_M == label_M).mean())
    return {"metric": task.metric, "score": value, "accuracy": right, "n": len(label)}

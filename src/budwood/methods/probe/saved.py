"""Saved probes applied to rows later, and predictions scored later: `probe predict`, `probe evaluate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from budwood.capture.features import TOKENS, Ask, open_reading, planned, store
from budwood.capture.supply import Fresh, Kept, Supply, states_at
from budwood.config.probe import FeatureConfig, ProbeConfig
from budwood.data.batch import budget_batches
from budwood.data.source import load_task
from budwood.data.squad import squad_scores
from budwood.data.task import Task
from budwood.errors import DataError, ModelError, StoreError
from budwood.methods.probe import spans
from budwood.methods.probe.descent import apply_plain
from budwood.methods.probe.outcome import Home, keep_answers, keep_guesses, made_of, table
from budwood.methods.probe.score import score
from budwood.methods.probe.side import Side, dressed
from budwood.store.files import read_json, write_json, write_text

FILES = ("train_file", "validation_file", "test_file")  # of the run; another task has its own


@dataclass(frozen=True)
class _Saved:
    """A probe on disk: where it belongs, the layers it reads, its weights and what was kept with them."""

    home: Home
    layer: int | None
    layers: list[int]
    weights: dict[str, Tensor]
    about: dict[str, Any]


def predict(run: Path, task: str | None = None, split: str | None = None, online: bool = False) -> Path:
    """Apply every probe of a run to a split; returns the folder of predictions.

    States are kept or made anew (`online`) as the run did, and its budget for features holds here too. For label probes
    the task may be plain texts without labels.
    """
    index_path = run / "probes" / "index.json"
    if not index_path.exists():
        raise StoreError(f"{run} holds no saved probes (no probes/index.json). Give a finished `budwood probe` run.")
    folder = ""
    for model, named in _by_model(read_json(index_path)).items():
        facts = named[next(iter(named))]
        settings = {**facts["settings"], **({"task": task, **dict.fromkeys(FILES)} if task else {})}
        rows = load_task(FeatureConfig(**settings))
        bare = rows.kind == "text" and bool(facts["labels"]) and facts["states"] != "target"
        if bare:  # texts that nobody has labelled yet
            rows = replace(rows, kind="label", labels=tuple(facts["labels"]))
        chosen = split or rows.reported
        _check_rows(run, rows, chosen, facts)
        folder = f"predictions-{rows.name}-{chosen}"
        ask = Ask(model, settings, chosen, facts["states"])
        _same_states(ask, rows, facts)
        # a store is found again by its task, and that of bare texts says nothing of labels
        again = online or bare or facts.get("online", False)
        stored = planned(ask, rows) if again else store(ask, rows, most_bytes=1e9 * facts.get("feature_budget", 100.0))
        side = dressed(stored, rows, chosen, None)
        probes = [p for name in named for p in _saved(Home(run, name), facts["layers"])]
        numbers = sorted({n for p in probes for n in p.layers})
        supply = Fresh(stored, numbers, rows) if again else Kept(stored, numbers)
        for probe, logits_KM in zip(probes, _logits(probes, numbers, supply, side)):
            _keep(probe, logits_KM, folder, rows, side, facts)
        write_json(run / folder / "about.json", {"task": rows.name, "split": chosen, "settings": settings})
    return run / folder


def _by_model(index: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Folders of probes by model, so that all epochs of a model are applied to one reading of the rows."""
    out: dict[str, dict[str, Any]] = {}
    for name, facts in index.items():
        out.setdefault(facts["model"], {})[name] = facts
    return out


def _check_rows(run: Path, task: Task, split: str, facts: dict[str, Any]) -> None:
    if list(task.labels) != facts["labels"]:
        raise DataError(
            f"The probes of {run} tell apart {', '.join(facts['labels']) or 'spans'}; task '{task.name}' has "
            f"{', '.join(task.labels) or 'no labels'}. Give a task with the same labels."
        )
    bare = [r.id for r in task.rows(split) if r.label is None] if task.kind == "tokens" else []
    if bare:
        raise DataError(
            f"{len(bare)} rows of split '{split}' of task '{task.name}' have no labels ('{bare[0]}' is the first), and "
            "token probes read the tokens that have one. Give any label of the task to every word."
        )


def _same_states(ask: Ask, task: Task, facts: dict[str, Any]) -> None:
    """Refuse states that are not made as those were which the probes learned from."""
    now = made_of(open_reading(ask, task))
    if now["model_hash"] != facts["model_hash"]:
        raise ModelError(
            f"'{facts['model']}' is not the model these probes were trained on: its weights have the hash "
            f"{now['model_hash'][:12]}, the probes' model {facts['model_hash'][:12]}. Restore the model, or train the "
            "probes again."
        )
    for name in ("tokenizer", "prompt"):
        before = facts.get(name, now[name])  # runs of earlier versions do not say
        if now[name] != before:
            raise DataError(
                f"These probes were trained on features of another {name}: {before!r} there, {now[name]!r} here (task "
                f"'{task.name}'). Give rows that are read with the same {name}, or train the probes again."
            )


def _saved(home: Home, layers: int) -> list[_Saved]:
    """Every probe of a folder, the mix last."""
    out = []
    for layer in (*range(layers), None):
        if not home.probe(layer).exists():
            continue
        with safe_open(home.probe(layer), "pt") as f:
            about = json.loads(f.metadata()["probe"])
            weights = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
        out.append(_Saved(home, layer, about.get("layers", [layer]), weights, about))
    return out


def _logits(probes: Sequence[_Saved], numbers: list[int], supply: Supply, side: Side) -> list[Tensor]:
    """logits_KM of every probe, from one reading of the rows."""
    offsets_N1 = side.stored.offsets_N1
    found: list[list[Tensor]] = [[] for _ in probes]
    order = []
    for index_B in budget_batches(side.stored.encoded.lengths_N, TOKENS):
        x_LmD = supply(index_B)
        order.append(states_at(offsets_N1, index_B))
        for i, probe in enumerate(probes):
            found[i].append(apply_plain(probe.weights, x_LmD[[numbers.index(n) for n in probe.layers]]))
    place_M = torch.from_numpy(np.argsort(np.concatenate(order)))
    return [torch.cat(parts, 1)[:, place_M] for parts in found]


def _keep(probe: _Saved, logits_KM: Tensor, folder: str, task: Task, side: Side, facts: dict[str, Any]) -> None:
    stem = probe.home.predictions(probe.layer, folder)
    if probe.about["kind"] == "span":
        cfg = ProbeConfig(**facts["settings"], decode=facts["decode"])
        said = spans.answers(logits_KM.numpy(), side, cfg)
        keep_answers(stem, spans.thresholded(said, probe.about["threshold"]), said)
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
        if not rows:
            tell(f"Left out, no labels to be scored by: {home}.")
            continue
        write_text(home / "results.csv", table(rows, list(rows[0])))
        out += rows
    if not out:
        raise DataError(f"The rows of {', '.join(map(str, sets))} have no labels that predictions could be scored by.")
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
    out: list[dict[str, Any]] = []
    if task.kind != "span" and all(r.label is None for r in task.rows(split)):
        return out
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
    guess_M, label_M, at_M = (np.array(x, dtype=np.int64) for x in (guess, label, row_M))
    value = score(task, _Truth(label_M, at_M, at_M), guess_M)[0]
    right = float((guess_M == label_M).mean())
    return {"metric": task.metric, "score": value, "accuracy": right, "n": len(label)}

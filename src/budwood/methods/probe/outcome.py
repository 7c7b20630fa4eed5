"""What a probe run leaves behind: probes, predictions, a table and figures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from budwood.capture.features import Ask, Stored, config_of, open_reading
from budwood.data.span_decode import SpanPredictions
from budwood.data.task import Task
from budwood.figures.layers import layer_lines, layer_map
from budwood.figures.save import drawing, save
from budwood.methods.probe.labels import Fitted
from budwood.methods.probe.side import UNKNOWN, Side, kind_of
from budwood.methods.probe.spans import SpanFit
from budwood.methods.session import Session
from budwood.models.identity import model_hash, tokenizer_rules_hash
from budwood.models.reading import Reading
from budwood.models.reference import ModelRef
from budwood.store.files import read_json, write_json, write_text, writing

COLUMNS = ("layer", "score", "low", "high", "selectivity", "compression", "control_compression", "C")


@dataclass(frozen=True)
class Home:
    """Where one model's probes and predictions go."""

    run: Path
    name: str

    def epoch(self, number: int) -> Home:
        """Where what belongs to an epoch of training goes."""
        return Home(self.run, f"{self.name}/epoch_{number}")

    def probe(self, layer: int | None) -> Path:
        """Weights of a layer, or (None) of the mix of all."""
        return self.run / "probes" / self.name / f"{_stem(layer)}.safetensors"

    def predictions(self, layer: int | None, folder: str = "predictions") -> Path:
        """Predictions of a layer, or (None) of the mix of all, without suffix."""
        return self.run / folder / self.name / _stem(layer)


def _stem(layer: int | None) -> str:
    return "mix" if layer is None else f"layer_{layer:02d}"


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def save_probe(path: Path, tensors: dict[str, Any], facts: dict[str, Any]) -> None:
    """Weights of a probe, and what is needed to use them."""
    with writing(path) as part:
        save_file({k: v.float().contiguous() for k, v in tensors.items()}, part, {"probe": json.dumps(facts)})


def keep_labels(
    home: Home, layer: int, found: Fitted, task: Task, test: Side, guess_M: np.ndarray, pvi_M: np.ndarray | None
) -> None:
    """A label or token probe and its predictions."""
    save_probe(
        home.probe(layer), {"weight": found.weight_KD, "bias": found.bias_K}, {"C": found.cost, "kind": task.kind}
    )
    keep_guesses(home.predictions(layer), task, test, guess_M, pvi_M)


def keep_guesses(stem: Path, task: Task, test: Side, guess_M: np.ndarray, pvi_M: np.ndarray | None = None) -> None:
    """Predicted labels as JSON (by row id; a list for tokens) and CSV (one line per prediction)."""
    names, rows = task.labels, test.rows
    given: dict[str, Any] = {}
    lines = []
    for m, (row, guess) in enumerate(zip(test.row_M, guess_M)):
        if task.kind == "tokens":
            given.setdefault(rows[row].id, []).append(names[guess])
        else:
            given[rows[row].id] = names[guess]
        known = "" if test.label_M[m] == UNKNOWN else names[test.label_M[m]]
        line = {"id": rows[row].id, "label": known, "predicted": names[guess]}
        lines.append(line if pvi_M is None else {**line, "pvi_bits": f"{pvi_M[m]:.6g}"})
    write_json(stem.with_suffix(".json"), given)
    write_text(stem.with_suffix(".csv"), table(lines, list(lines[0])))


def keep_span(home: Home, layer: int, found: SpanFit, answers: dict[str, str], said: SpanPredictions) -> None:
    """A span probe and its answers."""
    facts = {"C": found.cost, "kind": "span", "threshold": found.threshold}
    save_probe(home.probe(layer), {"weight": found.weight_2D}, facts)
    keep_answers(home.predictions(layer), answers, said)


def keep_answers(stem: Path, answers: dict[str, str], said: SpanPredictions) -> None:
    """Answers as JSON and as CSV with the null odds."""
    write_json(stem.with_suffix(".json"), answers)
    lines = [{"Id": i, "Predicted": a, "null_odds": f"{said.null_odds[i]:.6g}"} for i, a in answers.items()]
    write_text(stem.with_suffix(".csv"), table(lines, ("Id", "Predicted", "null_odds")))


def made_of(read: Reading) -> dict[str, str]:
    """What states depend on besides the rows: weights, tokenizer and the wording around a row ("" where none)."""
    template = read.template
    prompt = "" if template is None else template.causal if read.mode == "causal" else template.masked
    tokenizer = tokenizer_rules_hash(read.loaded.tokenizer)[:16]
    return {"model_hash": model_hash(read.loaded.model), "tokenizer": tokenizer, "prompt": prompt}


def keep_index(session: Session, ref: ModelRef, homes: Sequence[Home], stored: Stored) -> None:
    """probes/index.json: which model, states and task every folder of probes belongs to."""
    path = session.run.file("probes", "index.json")
    known = read_json(path) if path.exists() else {}
    ask = Ask(ref.text, config_of(session.cfg), "train", kind_of(session.cfg, session.task, ref))
    facts = {
        "model": ref.text,
        **made_of(open_reading(ask, session.task)),
        "states": ask.kind,
        "layers": stored.layers,
        "task": session.task.name,
        "labels": list(session.task.labels),
        "settings": dict(ask.settings),
        "decode": session.cfg.rule,
        "online": session.cfg.online,
        "feature_budget": session.cfg.feature_budget,
    }
    write_json(path, {**known, **{home.name: facts for home in homes}})


def draw(session: Session, results: list[dict[str, Any]], baselines: dict[str, Any]) -> None:
    """results.csv, the heat map, the lines with bands, and the difference of two models where asked for."""
    rows = [{"model": r["model"], **line} for r in results for line in r.get("epochs", r["layers"])]
    extra = [k for k in rows[0] if k not in COLUMNS and k not in ("model", "epoch", "repeats")]
    first = ("model", "epoch") if "epoch" in rows[0] else ("model",)
    columns = [c for c in (*first, *COLUMNS, *extra) if any(c in r for r in rows)]
    write_text(session.run.file("results.csv"), table(rows, columns))
    names = [Path(r["model"]).name for r in results]
    task = session.task.name
    scores = {f"{i + 1} {n}" if names.count(n) > 1 else n: _by_layer(r) for i, (n, r) in enumerate(zip(names, results))}
    with drawing(7.0, 1.6 + 0.5 * len(names)) as axes:
        save(axes.figure, session.run.file("figures", "map"), layer_map(axes, scores, f"{task}: probes by layer"))
    lines = [_line(name, r["layers"]) for name, r in zip(names, results)]
    if "random_encoder" in baselines:
        numbers = [x["layer"] for x in results[0]["layers"]][: len(baselines["random_encoder"])]
        lines.append({"name": "random encoder", "layer": numbers, "score": baselines["random_encoder"]})
    flat = {k.replace("_", " "): v for k, v in baselines.items() if isinstance(v, float)}
    with drawing() as axes:
        metric = "F1" if session.task.kind == "span" else session.task.metric.replace("_", " ")
        drawn = layer_lines(axes, lines, flat, f"{task}: {metric} by layer", metric)
        save(axes.figure, session.run.file("figures", "layers"), drawn)
    if session.cfg.compare:
        one, two = (_by_layer(r) for r in results)
        gap = {f"{names[1]} - {names[0]}": {n: two[n] - one[n] for n in one if n in two}}
        with drawing(7.0, 2.1) as axes:
            drawn = layer_map(axes, gap, f"{task}: difference")
            save(axes.figure, session.run.file("figures", "difference"), drawn)


def _by_layer(result: dict[str, Any]) -> dict[int, float]:
    return {x["layer"]: x["score"] for x in result["layers"]}


def _line(name: str, layers: list[dict[str, Any]]) -> dict[str, Any]:
    line = {"name": name, "layer": [x["layer"] for x in layers], "score": [x["score"] for x in layers]}
    if layers[0].get("repeats"):
        line |= {"low": [min(x["repeats"]) for x in layers], "high": [max(x["repeats"]) for x in layers]}
    return line

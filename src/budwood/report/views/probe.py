"""Probes: the score of every layer of every model, with control tasks, description length and baselines."""

from __future__ import annotations

from typing import Any

from budwood.report.limits import Limits
from budwood.report.room import Room
from budwood.report.texts import Texts, rows_of
from budwood.report.views.words import LOWER_IS_BETTER, number

KEYS = ("layer", "score", "low", "high", "selectivity", "control", "compression", "mdl", "n", "sd")


def gather(room: Room, texts: Texts, limits: Limits) -> dict[str, Any]:
    """Models x layers, baselines, and examples that a layer is the first to solve."""
    m = room.metrics
    models = [_model(r) for r in m.get("results") or []]
    return {
        "claim": claim(room, models),
        "metric": m.get("metric"),
        "lower_is_better": m.get("metric") in LOWER_IS_BETTER,
        "baselines": m.get("baselines") or {},
        "models": models,
        "solved": first_solved(room, texts, limits.records),
    }


def _model(result: dict[str, Any]) -> dict[str, Any]:
    layers = [{k: layer[k] for k in KEYS if k in layer} for layer in result.get("layers") or []]
    told: dict[str, Any] = {"model": str(result.get("model", "?")), "layers": layers}
    return told | {k: result[k] for k in ("best_layer", "head_score", "centre_of_gravity") if k in result}


def claim(room: Room, models: list[dict[str, Any]]) -> str:
    """Where the skill is most legible, how far above the trivial answer, and against the layer below it."""
    if not models or not models[0]["layers"]:
        return "This probe run has no layers to show yet."
    first = models[0]
    by_layer = {x["layer"]: x for x in first["layers"]}
    best = by_layer.get(first.get("best_layer")) or max(first["layers"], key=lambda x: x.get("score") or 0)
    said = f"{room.task} is most legible in layer {best['layer']} of {first['model']}: {number(best.get('score'))}"
    majority = (room.metrics.get("baselines") or {}).get("majority")
    if majority is not None:
        said += f", against {number(majority)} for always giving the commonest answer"
    if 0 in by_layer and best["layer"] != 0:
        said += f" and {number(by_layer[0].get('score'))} at the embeddings"
    for other in models[1:2]:
        top = max(other["layers"], key=lambda x: x.get("score") or 0, default=None)
        said += f"; in {other['model']} layer {top['layer']} reaches {number(top.get('score'))}" if top else ""
    return said + "."


def first_solved(room: Room, texts: Texts, most: int) -> dict[str, Any]:
    """{number of the model: {layer: rows solved there and not one layer earlier}} from the predictions it kept."""
    out: dict[str, Any] = {}
    rows = None
    for folder in room.below("predictions"):
        number = folder.name.split("-")[0]
        right = {
            int(p.stem.split("_")[1]): solved(room, folder.name, p.name) for p in sorted(folder.glob("layer_*.csv"))
        }
        for layer, now in right.items():
            before = right.get(layer - 1)
            if not before or not now:
                continue
            rows = rows or rows_of(room)
            new = [i for i, ok in now.items() if ok and not before.get(i)]
            lost = sum(ok and not now.get(i) for i, ok in before.items())
            known = rows.find(new[:most])
            items = [_row(texts, rows, known[i]) if i in known else {"id": i} for i in new[:most]]
            out.setdefault(number, {})[str(layer)] = {"new": len(new), "lost": lost, "items": items}
    return out


def _row(texts: Texts, rows: Any, row: Any) -> dict[str, Any]:
    return {**texts.row(row), "label": rows.label(row.label)}


def solved(room: Room, folder: str, name: str) -> dict[str, bool]:
    """Whether every prediction of a row is right, by row; empty where the file tells no labels."""
    out: dict[str, bool] = {}
    for line in room.csv("predictions", folder, name):
        if {"id", "label", "predicted"} <= set(line):
            out[str(line["id"])] = out.get(str(line["id"]), True) and line["label"] == line["predicted"]
    return out

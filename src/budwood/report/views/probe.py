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
    seeds = {k: result[k] for k in ("best_layer", "head_score", "centre_of_gravity") if k in result}
    return {"model": str(result.get("model", "?")), "layers": layers, **seeds}


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
        said += f", against {number(majority)} for the commonest label"
    if 0 in by_layer and best["layer"] != 0:
        said += f" and {number(by_layer[0].get('score'))} at the embeddings"
    return said + "."


def first_solved(room: Room, texts: Texts, most: int) -> dict[str, Any]:
    """{model: {layer: rows solved there and not one layer earlier}} from the records, where they tell it."""
    table = room.records
    if table is None or not {"id", "model", "layer", "correct"} <= set(table.column_names):
        return {}
    right: dict[tuple[str, int], set[str]] = {}
    every: dict[tuple[str, int], list[str]] = {}
    columns = (table[c].to_pylist() for c in ("model", "layer", "id", "correct"))
    for model, layer, row, correct in zip(*columns):
        every.setdefault((str(model), int(layer)), []).append(row)
        if correct:
            right.setdefault((str(model), int(layer)), set()).add(row)
    rows = rows_of(room)
    out: dict[str, Any] = {}
    for (model, layer), ids in sorted(every.items()):
        before = right.get((model, layer - 1))
        if before is None or layer == 0:
            continue
        new = [i for i in dict.fromkeys(ids) if i in right.get((model, layer), set()) and i not in before]
        known = rows.find(new[:most])
        shown = [
            texts.row(known[i]) | {"label": rows.label(known[i].label)} if i in known else {"id": i} for i in new[:most]
        ]
        lost = len(before - right.get((model, layer), set()))
        out.setdefault(model, {})[str(layer)] = {"new": len(new), "lost": lost, "items": shown}
    return out

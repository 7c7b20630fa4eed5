"""Probes: the score of every layer of every model, with control tasks, description length and baselines."""

from __future__ import annotations

from typing import Any

from budwood.report.limits import Limits
from budwood.report.room import Room
from budwood.report.texts import Texts, rows_of
from budwood.report.views.chance import apart, half, ranged
from budwood.report.views.words import LOWER_IS_BETTER, layer_name, listed, number

TRIVIAL = {"majority": "always naming the commonest label", "never_answering": "never answering"}
KEYS = ("layer", "score", "low", "high", "selectivity", "control", "compression", "mdl", "n", "sd")


def gather(room: Room, texts: Texts, limits: Limits) -> dict[str, Any]:
    """Models x layers, baselines, and examples that a layer is the first to solve."""
    m = room.metrics
    models = [_model(room, r) for r in m.get("results") or []]
    return {
        "claim": claim(room, models),
        "metric": m.get("metric"),
        "lower_is_better": m.get("metric") in LOWER_IS_BETTER,
        "baselines": m.get("baselines") or {},
        "models": models,
        "solved": first_solved(room, texts, limits.records),
    }


def _model(room: Room, result: dict[str, Any]) -> dict[str, Any]:
    layers = [{k: layer[k] for k in KEYS if k in layer} for layer in result.get("layers") or []]
    told: dict[str, Any] = {"model": room.model_name(result.get("model", "?")), "layers": layers}
    return told | {k: result[k] for k in ("best_layer", "head_score", "centre_of_gravity") if k in result}


def claim(room: Room, models: list[dict[str, Any]]) -> str:
    """Where the skill is most legible, as far as the intervals let it be said."""
    if not models or not models[0]["layers"]:
        return "This probe run has no layers to show yet."
    lines = room.metrics.get("baselines") or {}
    n, metric = room.metrics.get("n"), str(room.metrics.get("metric"))
    said = [standing(m, lines, room.task, n, metric) for m in models[:2]]
    plain = {
        "counting words alone": lines.get("bag_of_words"),
        "a random encoder": _best(lines.get("random_encoder"), metric),
    }
    beside = [f"{name} reaches {number(v)}" for name, v in plain.items() if isinstance(v, int | float)]
    return " ".join(said) + (f" For comparison, {listed(beside)}." if beside else "")


def _best(scores: Any, metric: str) -> float | None:
    """The best of a list of scores."""
    pick = min if metric in LOWER_IS_BETTER else max
    return pick((x for x in scores if isinstance(x, int | float)), default=None) if isinstance(scores, list) else None


def standing(model: dict[str, Any], lines: dict[str, Any], task: str, n: Any, metric: str = "accuracy") -> str:
    """One sentence on a model: the layer that stands for it, and whether that is above the trivial answer and others.

    The layer was chosen on other rows; where another one is clearly better on these, that one is told of.
    """
    scored = [x for x in model["layers"] if isinstance(x.get("score"), int | float)]
    if not scored:
        return f"{model['model']} has no scores."
    down = metric in LOWER_IS_BETTER
    pick = min if down else max
    top = pick(scored, key=lambda x: x["score"])
    best = next((x for x in scored if x["layer"] == model.get("best_layer")), top)
    best = best if apart(top, best, n, metric) is False else top
    word = "the best" if best["score"] == top["score"] else "the one chosen on other rows"
    trivial = next((k for k in TRIVIAL if isinstance(lines.get(k), int | float)), None)
    wide = half(best, n, metric)
    if trivial and wide is not None and (-1 if down else 1) * (best["score"] - lines[trivial]) <= wide:
        return (
            f"No layer of {model['model']} reads {task} clearly better than {TRIVIAL[trivial]} "
            f"({number(lines[trivial])}): {word}, {layer_name(best['layer'])}, has {ranged(best)}."
        )
    close = [x for x in scored if x is not best and apart(x, best, n, metric) is False]
    against = f", against {number(lines[trivial])} for {TRIVIAL[trivial]}" if trivial else ""
    if close and len(close) == len(scored) - 1:
        return (
            f"No layer of {model['model']} is clearly ahead of the others in reading {task}: {word}, "
            f"{layer_name(best['layer'])}, has {ranged(best)}{against}."
        )
    if len(scored) == 1:
        return f"{layer_name(best['layer']).capitalize()} of {model['model']} reads {task} at {ranged(best)}{against}."
    said = f"{task} is most legible in {layer_name(best['layer'])} of {model['model']}: {ranged(best)}{against}"
    first = next((x for x in scored if x["layer"] == 0), None)
    if first is not None and first is not best and first not in close:
        said += f" and {number(first['score'])} at the embeddings"
    names = listed([layer_name(x["layer"]) for x in close])
    return said + (f"; {names} {'is' if len(close) == 1 else 'are'} not told apart from it." if close else ".")


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

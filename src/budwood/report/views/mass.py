"""Fisher information by layer; overlap of several."""

from __future__ import annotations

from typing import Any

from budwood.report.limits import Limits
from budwood.report.room import Room
from budwood.report.texts import Texts
from budwood.report.views.words import layer_name, number, percent


def gather(room: Room, texts: Texts, limits: Limits) -> dict[str, Any]:
    """Mass by layer, or the matrices of a comparison."""
    m = room.metrics
    return {
        "claim": claim(room),
        "kind": m.get("kind"),
        "total": m.get("total"),
        "by_layer": m.get("by_layer") or {},
        "masses": {
            k: v["by_layer"] for k, v in (m.get("mass") or {}).items() if isinstance(v, dict) and "by_layer" in v
        },
        "overlap": [r for r in m.get("overlap") or [] if isinstance(r, dict)],
        "matrices": matrices(room),
    }


def matrices(room: Room) -> list[dict[str, Any]]:
    """Square tables of numbers among the metrics, with the names of their sides."""
    metrics = room.metrics
    names = metrics.get("names") or metrics.get("grafts") or metrics.get("tasks")
    found = []
    for key, value in metrics.items():
        square = isinstance(value, list) and value and all(isinstance(r, list) and len(r) == len(value) for r in value)
        if square and all(isinstance(x, int | float | None) for r in value for x in r):
            sides = names if isinstance(names, list) and len(names) == len(value) else list(range(1, len(value) + 1))
            found.append({"name": key.replace("_", " "), "names": [room.model_name(n) for n in sides], "values": value})
    return found


def claim(room: Room) -> str:
    """The layer that matters most."""
    shared = [r for r in room.metrics.get("overlap") or [] if isinstance(r, dict) and r.get("times_chance") is not None]
    if shared:
        most = max(shared, key=lambda r: r["times_chance"])
        times = number(most["times_chance"])
        return (
            f"The weights that matter most to {most['of']} are among those of {most['in']} {times} times as often as "
            f"by chance in {layer_name(most['layer'] + 1)}: the most of {len(shared)} comparisons."
        )
    by_layer = {k: v for k, v in (room.metrics.get("by_layer") or {}).items() if isinstance(v, int | float)}
    if not by_layer or not sum(by_layer.values()):
        return f"This run of {room.verb} has no mass by layer to show."
    top = max(by_layer, key=lambda k: by_layer[k])
    share = by_layer[top] / sum(by_layer.values())
    return f"{percent(share)} of the Fisher information of {room.task} lies in {layer_name(top)}."

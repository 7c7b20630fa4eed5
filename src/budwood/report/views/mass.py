"""Fisher information by layer; overlap of several."""

from __future__ import annotations

from typing import Any

from budwood.report.limits import Limits
from budwood.report.room import Room
from budwood.report.texts import Texts
from budwood.report.views.words import percent


def gather(room: Room, texts: Texts, limits: Limits) -> dict[str, Any]:
    """Mass by layer, or the matrices of a comparison."""
    m = room.metrics
    return {
        "claim": claim(room),
        "kind": m.get("kind"),
        "total": m.get("total"),
        "by_layer": m.get("by_layer") or {},
        "matrices": matrices(m),
    }


def matrices(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Square tables of numbers among the metrics, with the names of their sides."""
    names = metrics.get("names") or metrics.get("grafts") or metrics.get("tasks")
    found = []
    for key, value in metrics.items():
        square = isinstance(value, list) and value and all(isinstance(r, list) and len(r) == len(value) for r in value)
        if square and all(isinstance(x, int | float | None) for r in value for x in r):
            sides = names if isinstance(names, list) and len(names) == len(value) else list(range(1, len(value) + 1))
            found.append({"name": key.replace("_", " "), "names": [str(n) for n in sides], "values": value})
    return found


def claim(room: Room) -> str:
    """The layer that matters most."""
    by_layer = {k: v for k, v in (room.metrics.get("by_layer") or {}).items() if isinstance(v, int | float)}
    if not by_layer or not sum(by_layer.values()):
        return f"This run of {room.verb} has no mass by layer to show."
    most = max(by_layer, key=lambda k: by_layer[k])
    share = by_layer[most] / sum(by_layer.values())
    return f"{percent(share)} of the Fisher information of {room.task} lies in {most.replace('block.', 'layer ')}."

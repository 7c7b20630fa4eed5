"""Frozen features: what a linear classifier makes of them, with and without a prompt."""

from __future__ import annotations

from typing import Any

from budwood.report.limits import Limits
from budwood.report.room import Room
from budwood.report.texts import Texts
from budwood.report.views.words import number


def gather(room: Room, texts: Texts, limits: Limits) -> dict[str, Any]:
    """Rows of feature x prompt and the lines beside them."""
    m = room.metrics
    results = [r for r in m.get("results") or [] if isinstance(r, dict)]
    return {
        "claim": claim(room, results),
        "metric": m.get("metric"),
        "results": results,
        "baselines": m.get("baselines") or {},
    }


def claim(room: Room, results: list[dict[str, Any]]) -> str:
    """The best frozen feature, and what the prompt adds to the plain state."""
    scored = [r for r in results if isinstance(r.get("test"), int | float)]
    if not scored:
        return "This run has no feature to show yet."
    best = max(scored, key=lambda r: r["test"])
    prompt = "with the prompt" if best.get("prompt") else "without a prompt"
    said = f"Frozen {best['features']} {prompt} already reaches {number(best['test'])} on {room.task}"
    lines = room.metrics.get("baselines") or {}
    beside = [f"{number(v)} for {k.replace('_', ' ')}" for k, v in lines.items() if isinstance(v, int | float)]
    return said + (f"; {', '.join(beside)}." if beside else ".")

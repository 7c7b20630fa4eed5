"""Frozen features: what a linear classifier makes of them, with and without a prompt."""

from __future__ import annotations

from typing import Any

from budwood.report.limits import Limits
from budwood.report.room import Room
from budwood.report.texts import Texts
from budwood.report.views.chance import apart, ranged
from budwood.report.views.words import BASELINES, LOWER_IS_BETTER, number


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
    """The run's own score, the best feature beside it, and what needs no model."""
    scored = [r for r in results if isinstance(r.get("test"), int | float)]
    if not scored:
        return "This run has no feature to show yet."
    metric = str(room.metrics.get("metric"))
    pick = min if metric in LOWER_IS_BETTER else max
    first, best = scored[0], pick(scored, key=lambda r: r["test"])  # a run's score is that of the first
    said = f"Frozen {_called(first)} already reaches {ranged({**first, 'score': first['test']})} on {room.task}"
    if best is not first:
        one, other = ({**r, "score": r["test"]} for r in (first, best))
        clear = apart(one, other, room.metrics.get("n"), metric)
        beside = " (not told apart from it)" if clear is False else ""
        said += f"; the best of {len(scored)}, {_called(best)}, has {number(best['test'])}{beside}"
    lines = room.metrics.get("baselines") or {}
    plain = [
        f"{BASELINES.get(k, k.replace('_', ' '))} {number(v)}" for k, v in lines.items() if isinstance(v, int | float)
    ]
    return said + (f". Beside it: {', '.join(plain)}." if plain else ".")


def _called(row: dict[str, Any]) -> str:
    return f"{row['features']} {'with the prompt' if row.get('prompt') else 'without a prompt'}"

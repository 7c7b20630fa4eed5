"""Attribution quality: what retraining says about scores."""

from __future__ import annotations

from math import hypot
from typing import Any

from budwood.report.limits import Limits
from budwood.report.room import Room
from budwood.report.texts import Texts
from budwood.report.views.chance import apart, auc_half, ranged
from budwood.report.views.words import number, scores_name

KEYS = ("results", "ceiling", "random", "subsets", "seeds", "planted", "targets", "retrains", "diverged")
MEASURES = (("lds", "predicts retraining: rank correlation"), ("auc", "finds planted wrong labels: AUC"))
LINES = (("ceiling", "ceiling"), ("random", "chance"))


def gather(room: Room, texts: Texts, limits: Limits) -> dict[str, Any]:
    """Results with intervals, ceiling, and the curves that the figures were drawn from."""
    m = room.metrics
    figures = sorted(p.stem for p in (room.path / "figures").glob("*.csv")) if room.file("metrics.json") else []
    curves = {name: rows[: limits.points] for name in figures if (rows := room.csv("figures", f"{name}.csv"))}
    return {
        "claim": claim(room),
        "check": room.verb.removeprefix("validate").strip() or "lds",
        **{k: m[k] for k in KEYS if k in m},
        "curves": curves,
        "progress": room.progress() if room.status != "done" else {},
    }


def claim(room: Room) -> str:
    """The best scores and how far from the ceiling and from chance they are."""
    m = room.metrics
    results = [r for r in m.get("results") or [] if isinstance(r, dict)]
    for key, words in MEASURES:
        scored = [{**r, "score": r[key]} for r in results if isinstance(r.get(key), int | float)]
        if scored:
            first = scored[0]  # a run's score is that of the first
            said = f"{scores_name(first['scores'])} {words} {ranged(first)}{beside_others(m, key, scored)}"
            beside = [f"{w} {number(m[k])}" for k, w in LINES if isinstance(m.get(k), int | float)]
            return said + (f"; {', '.join(beside)}." if beside else ".")
    flipped = [r for r in results if isinstance(r.get("flipped"), int | float)]
    if flipped:
        best = max(flipped, key=lambda r: r["flipped"] / max(1, r.get("targets") or 1))
        rows, answers, of = number(best.get("k")), number(best["flipped"]), number(best.get("targets"))
        return f"Removing the {rows} rows that {scores_name(best['scores'])} names changes {answers} of {of} answers."
    if not results and isinstance(m.get("ceiling"), int | float):
        return f"Models were retrained, and no scores are checked yet; their ceiling is {number(m['ceiling'])}."
    return "No model has been retrained yet." if not results else f"{len(results)} scores were checked."


def beside_others(metrics: dict[str, Any], key: str, scored: list[dict[str, Any]]) -> str:
    """How the first scores stand to the best of the others."""
    if not scored[1:]:
        return ""
    first, other = scored[0], max(scored[1:], key=lambda r: r[key])
    clear = apart(first, other) is not False if key == "lds" else far(metrics, first[key], other[key])
    unsure = "" if clear else " (not told apart from it)"
    name = scores_name(other["scores"])
    if other[key] > first[key]:
        return f"; the best of {len(scored)}, {name}, has {ranged(other)}{unsure}"
    return ", the best" if clear else f"; next comes {name} with {ranged(other)}{unsure}"


def far(metrics: dict[str, Any], a: float, b: float) -> bool:
    """Whether two AUC of the same rows differ by more than chance may make them; counted as independent."""
    wrong, n = metrics.get("planted"), metrics.get("n")
    if not isinstance(wrong, int) or not isinstance(n, int) or not 0 < wrong < n:
        return True
    return abs(a - b) > hypot(auc_half(a, wrong, n - wrong), auc_half(b, wrong, n - wrong))

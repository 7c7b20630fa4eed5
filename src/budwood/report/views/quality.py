"""Attribution quality: what retraining says about scores."""

from __future__ import annotations

from typing import Any

from budwood.report.limits import Limits
from budwood.report.room import Room
from budwood.report.texts import Texts
from budwood.report.views.words import number

KEYS = ("results", "ceiling", "random", "subsets", "seeds", "planted", "targets", "retrains", "diverged")
MEASURES = (("lds", "predicts retraining best: rank correlation"), ("auc", "finds planted mislabels best: AUC"))
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
        scored = [r for r in results if isinstance(r.get(key), int | float)]
        if scored:
            best = max(scored, key=lambda r: r[key])
            low, high = best.get("low"), best.get("high")
            said = f"{best['scores']} {words} {number(best[key])}"
            said += f" ({number(low)} to {number(high)})" if low is not None and high is not None else ""
            beside = [f"{w} {number(m[k])}" for k, w in LINES if isinstance(m.get(k), int | float)]
            return said + (f"; {', '.join(beside)}." if beside else ".")
    flipped = [r for r in results if isinstance(r.get("flipped"), int | float)]
    if flipped:
        best = max(flipped, key=lambda r: r["flipped"] / max(1, r.get("targets") or 1))
        rows, answers, of = number(best.get("k")), number(best["flipped"]), number(best.get("targets"))
        return f"Removing the {rows} rows that {best['scores']} names changes {answers} of {of} answers."
    if not results and isinstance(m.get("ceiling"), int | float):
        return f"Models were retrained, and no scores are checked yet; their ceiling is {number(m['ceiling'])}."
    return "No model has been retrained yet." if not results else f"{len(results)} scores were checked."

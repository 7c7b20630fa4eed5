"""Accuracy of feature families, without and with a prompt, beside what needs no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from budwood.figures.baselines import flat_lines


def family_bars(
    axes: Any, rows: Sequence[Mapping[str, Any]], lines: Mapping[str, float], title: str
) -> dict[str, list[Any]]:
    """One group of bars per family with its interval, a line per baseline; returns the numbers drawn."""
    names = list(dict.fromkeys(r["features"] for r in rows))
    kinds = sorted({bool(r["prompt"]) for r in rows})
    wide = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        own = [r for r in rows if bool(r["prompt"]) == kind]
        at = [names.index(r["features"]) + (i - (len(kinds) - 1) / 2) * wide for r in own]
        error = [
            [max(0.0, r["test"] - r.get("low", r["test"])) for r in own],
            [max(0.0, r.get("high", r["test"]) - r["test"]) for r in own],
        ]
        axes.bar(
            at,
            [r["test"] for r in own],
            width=wide * 0.92,
            yerr=error,
            error_kw={"lw": 1, "ecolor": "#6b7280"},
            label="with prompt" if kind else "without prompt",
        )
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="test accuracy", ylim=(0, 1.02), xlim=(-0.5, len(names) - 0.5), title=title)
    axes.grid(axis="x", visible=False)
    if len(kinds) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    flat_lines(axes, lines)
    return {
        "features": [r["features"] for r in rows],
        "prompt": [bool(r["prompt"]) for r in rows],
        "test": [r["test"] for r in rows],
        "low": [r.get("low", r["test"]) for r in rows],
        "high": [r.get("high", r["test"]) for r in rows],
    }

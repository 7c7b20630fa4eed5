"""Predictions flipped by rows removed, and the smallest removals that flip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def flip_curves(axes: Any, results: Sequence[Mapping[str, Any]], title: str) -> dict[str, list[Any]]:
    """Share of targets flipped against rows removed, with 95 % intervals; one line per way of choosing rows."""
    names = list(dict.fromkeys(r["scores"] for r in results))
    most = max(r["k"] for r in results)
    for i, name in enumerate(names):
        own = [r for r in results if r["scores"] == name]
        share = np.array([r["share"] for r in own])
        away = [np.maximum(share - [r["low"] for r in own], 0), np.maximum([r["high"] for r in own] - share, 0)]
        dull = {"color": "#8a8f99", "ls": "--"} if name.startswith("random") else {}
        beside = [r["k"] + 0.012 * most * (i - (len(names) - 1) / 2) for r in own]  # intervals do not hide one another
        # nothing removed flips nothing: targets are right without it
        (line,) = axes.plot([0, *beside], [0, *share], marker="o", ms=4, lw=1.6, label=name, **dull)
        axes.errorbar(beside, share, yerr=away, fmt="none", ecolor=line.get_color(), elinewidth=1, capsize=3)
    top = min(1.02, 1.3 * max(r["high"] for r in results))
    axes.set(xlabel="training rows removed", ylabel="share of targets flipped", ylim=(0, top))
    axes.set_title(title, fontsize=9.5)
    axes.legend(loc="upper left")
    return {c: [r[c] for r in results] for c in ("scores", "k", "flipped", "targets", "low", "high")}


def smallest_bars(
    axes: Any, found: Mapping[str, Sequence[int | None]], counts: Sequence[int], title: str
) -> dict[str, list[Any]]:
    """How many targets flip first at each removal, and how many never; one group of bars per way."""
    steps: list[int | None] = [*counts, None]
    width = 0.8 / len(found)
    for i, (name, first) in enumerate(found.items()):
        number = [sum(k == step for k in first) for step in steps]
        dull = {"color": "#8a8f99"} if name.startswith("random") else {}
        axes.bar(np.arange(len(steps)) + (i - (len(found) - 1) / 2) * width, number, width, label=name, **dull)
    axes.set_xticks(range(len(steps)), [*map(str, counts), "never"])
    axes.set(xlabel="smallest removal that flips", ylabel="targets")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_title(title, fontsize=9.5)
    axes.legend()
    table: dict[str, list[Any]] = {"removed": [*counts, "never"]}
    return table | {name: [sum(k == step for k in first) for step in steps] for name, first in found.items()}

"""Predictions flipped by rows removed, and the smallest removals that flip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def flip_curves(axes: Any, results: Sequence[Mapping[str, Any]], title: str) -> dict[str, list[Any]]:
    """Share of targets flipped against rows removed, with 95 % intervals; one line per way of choosing rows."""
    for name in dict.fromkeys(r["scores"] for r in results):
        own = [r for r in results if r["scores"] == name]
        k = [r["k"] for r in own]
        dull = {"color": "#8a8f99", "ls": "--"} if name.startswith("random") else {}
        (line,) = axes.plot(k, [r["share"] for r in own], marker="o", ms=4, lw=1.6, label=name, **dull)
        axes.fill_between(
            k, [r["low"] for r in own], [r["high"] for r in own], color=line.get_color(), alpha=0.13, lw=0
        )
    axes.set(xlabel="training rows removed", ylabel="share of targets flipped", ylim=(0, 1))
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

"""Linear datamodelling scores as bars, and what scores predict against what retraining gave.

Shapes: Q queries, S subsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from budwood.figures.baselines import GREY


def lds_bars(
    axes: Any, results: Sequence[Mapping[str, Any]], ceiling: float | None, random: float, title: str
) -> dict[str, list[Any]]:
    """One bar per matrix with its 95 % interval, the ceiling and the random line beside them."""
    names = [r["scores"] for r in results]
    value, low, high = (np.array([r[k] for r in results]) for k in ("lds", "low", "high"))
    place = np.arange(len(names))[::-1]
    axes.barh(place, value, height=0.62)
    axes.errorbar(
        value,
        place,
        xerr=[np.maximum(value - low, 0), np.maximum(high - value, 0)],
        fmt="none",
        ecolor="#1f2430",
        capsize=3,
    )
    for name, x, colour, style in (("random", random, GREY, ":"), ("ceiling", ceiling, "#c8553d", "--")):
        if x is not None:
            axes.axvline(x, color=colour, lw=1, ls=style)
            above = {"xycoords": ("data", "axes fraction"), "xytext": (0, 2), "textcoords": "offset points"}
            axes.annotate(name, (x, 1.0), **above, ha="center", va="bottom", size=8, color=colour)
    axes.set_yticks(place, names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set(xlabel="linear datamodelling score (mean rank correlation over queries)")
    axes.set_title(title, fontsize=9, pad=14)
    axes.grid(axis="y", visible=False)
    return {"scores": names, "lds": value.tolist(), "low": low.tolist(), "high": high.tolist()}


def predicted_measured(axes: Any, pred_QS: np.ndarray, margin_QS: np.ndarray, title: str) -> dict[str, list[float]]:
    """Summed scores against measured margins, each query in its own standard units."""
    scaled = [(x - x.mean(1, keepdims=True)) / np.maximum(x.std(1, keepdims=True), 1e-30) for x in (pred_QS, margin_QS)]
    pred, margin = (x.ravel() for x in scaled)
    every = max(1, len(pred) // 4000)
    axes.scatter(pred[::every], margin[::every], s=5, alpha=0.25, lw=0)
    slope = float((pred * margin).mean())
    ends = np.array([-3.0, 3.0])
    axes.plot(ends, slope * ends, color="#c8553d", lw=1.4, label=f"slope {slope:.2f} (1: perfect)")
    axes.set(xlabel="summed scores of the subset (sd per query)", ylabel="measured margin (sd per query)")
    axes.set_title(title, fontsize=9)
    axes.legend(loc="upper left")
    return {"predicted": pred[::every].round(5).tolist(), "measured": margin[::every].round(5).tolist()}

"""Confidence against accuracy: how well calibrated a classifier is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def reliability(axes: Any, confidence: Sequence[float], correct: Sequence[bool], title: str) -> dict[str, list[float]]:
    """Bars of accuracy in 15 equal bins of confidence, the diagonal beside them; returns the numbers drawn."""
    edges = np.linspace(0, 1, 16)
    values, hits = np.asarray(confidence), np.asarray(correct, dtype=float)
    bins = np.clip(np.digitize(values, edges[1:-1], right=True), 0, 14)
    count = np.bincount(bins, minlength=15)
    held = np.maximum(count, 1)
    accuracy = np.bincount(bins, weights=hits, minlength=15) / held
    mean = np.bincount(bins, weights=values, minlength=15) / held
    shown = count > 0
    axes.bar(edges[:-1][shown] + 1 / 30, accuracy[shown], width=0.056, label="accuracy")
    axes.plot([0, 1], [0, 1], color="#8a8f99", lw=1, ls="--", label="perfectly calibrated")
    axes.scatter(
        mean[shown],
        accuracy[shown],
        s=6 + 80 * count[shown] / count.max(),
        color="#c8553d",
        zorder=3,
        label="rows (area)",
    )
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02), title=title)
    axes.legend(loc="upper left")
    return {
        "low": edges[:-1].tolist(),
        "high": edges[1:].tolist(),
        "n": count.tolist(),
        "confidence": mean.tolist(),
        "accuracy": accuracy.tolist(),
    }

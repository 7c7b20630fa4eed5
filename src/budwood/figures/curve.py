"""The loss curve of a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def loss_curve(axes: Any, points: Sequence[Mapping[str, float]], title: str) -> dict[str, list[float]]:
    """Draw loss against updates with the learning rate beneath it; returns the numbers drawn."""
    table = {k: [p[k] for p in points] for k in ("step", "loss", "learning_rate", "grad_norm")}
    axes.plot(table["step"], table["loss"], lw=1.6, marker="o" if len(points) < 40 else None, ms=3)
    axes.set(xlabel="update", ylabel="loss", title=title)
    axes.set_ylim(bottom=0)
    twin = axes.twinx()
    twin.fill_between(table["step"], table["learning_rate"], color="#8a8f99", alpha=0.16, lw=0)
    twin.set_ylabel("learning rate (shaded)", color="#6b7280")
    twin.set_ylim(0, max(table["learning_rate"], default=1.0) * 2.5)
    twin.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    twin.grid(False)
    twin.spines["top"].set_visible(False)
    return table

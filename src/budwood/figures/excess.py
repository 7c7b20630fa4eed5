"""Task loss of frozen features against the loss of the language model they come from, one point per checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def loss_against_loss(axes: Any, points: Sequence[Mapping[str, Any]], title: str) -> dict[str, list[Any]]:
    """A line of points per feature family; returns the numbers drawn."""
    order = sorted(points, key=lambda p: p["lm_loss"])
    for name, marker in (("f", "o"), ("phi-p", "s")):
        axes.plot([p["lm_loss"] for p in order], [p[name] for p in order], marker=marker, ms=4, lw=1.2, label=name)
    axes.set(xlabel="language-model loss", ylabel="task loss on frozen features", title=title)
    axes.legend(loc="upper left")
    return {k: [p[k] for p in order] for k in ("checkpoint", "lm_loss", "f", "phi-p")}

"""Share of planted labels found against share of rows looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def detection_curves(axes: Any, curves: Mapping[str, np.ndarray], planted: float, title: str) -> dict[str, list[Any]]:
    """One line per suspicion, with the best possible and the blind search beside them."""
    size = len(next(iter(curves.values())))
    seen = np.arange(1, size + 1) / size
    for name, found_N in curves.items():
        axes.plot(seen, found_N, lw=1.6, label=name)
    axes.plot([0, planted, 1], [0, 1, 1], color="#8a8f99", lw=1, ls=":", label="best possible")
    axes.plot([0, 1], [0, 1], color="#8a8f99", lw=1, ls="--", label="blind")
    axes.set(xlabel="share of rows looked at", ylabel="share of wrong labels found", xlim=(0, 1), ylim=(0, 1.02))
    axes.set_title(title, fontsize=9.5)
    axes.legend(loc="lower right")
    every = max(1, size // 200)
    table: dict[str, list[Any]] = {"looked_at": seen[::every].round(5).tolist()}
    return table | {name: found_N[::every].round(5).tolist() for name, found_N in curves.items()}

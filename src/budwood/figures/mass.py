"""Where a quantity over the weights lies: its share by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mass_by_layer(axes: Any, by_layer: Mapping[str, float], title: str) -> dict[str, list[Any]]:
    """One bar per layer with its share of the total; returns the numbers drawn."""
    total = sum(by_layer.values()) or 1.0
    names, shares = list(by_layer), [v / total for v in by_layer.values()]
    axes.bar(range(len(names)), shares, width=0.7)
    axes.set_xticks(range(len(names)), [n.replace("block.", "") for n in names])
    axes.set(xlabel="layer", ylabel="share of the total", title=title)
    axes.grid(axis="x", visible=False)
    return {"layer": names, "mass": list(by_layer.values()), "share": shares}

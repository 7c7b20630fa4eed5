"""Figures of grafts: where one lies, size against recovery, matrices of overlap, gain and forgetting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def _unique(values: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(values))


def layer_module_map(axes: Any, cells: Sequence[Mapping[str, Any]], title: str) -> dict[str, list[Any]]:
    """Layers upwards, modules across, the share of the graft as colour and number; returns the numbers drawn."""
    layers, modules = _unique([c["layer"] for c in cells]), _unique([c["module"] for c in cells])
    grid = np.full((len(layers), len(modules)), np.nan)
    for c in cells:
        grid[layers.index(c["layer"]), modules.index(c["module"])] = 100 * c["share"]
    heat(axes, grid, (layers, modules), title, "% of the graft")
    axes.set(ylabel="layer")
    return {k: [c[k] for c in cells] for k in ("layer", "module", "weights", "share", "of", "density")}


def heat(
    axes: Any, grid: np.ndarray, names: tuple[Sequence[str], Sequence[str]], title: str, unit: str, places: int = 1
) -> None:
    """A matrix with its numbers written in, rows from bottom to top."""
    image = axes.imshow(np.ma.masked_invalid(grid), cmap="Blues", aspect="auto", origin="lower")
    axes.figure.colorbar(image, ax=axes, label=unit, shrink=0.9)
    top = np.nanmax(grid) if np.isfinite(grid).any() else 1.0
    for (y, x), value in np.ndenumerate(grid):
        if np.isfinite(value):
            dark = value > 0.6 * top
            axes.text(
                x, y, f"{value:.{places}f}", ha="center", va="center", fontsize=8, color="white" if dark else "#1f2430"
            )
    axes.set_xticks(range(len(names[1])), [n.replace(" ", "\n") for n in names[1]], fontsize=8)
    axes.set_yticks(range(len(names[0])), names[0], fontsize=8)
    axes.set_title(title)
    axes.grid(False)


MARKS = {"learned": "o", "first-order": "s", "fisher": "D", "movement": "^", "random": "x"}


def size_curve(axes: Any, rows: Sequence[Mapping[str, Any]], title: str) -> dict[str, list[Any]]:
    """Share of the gain against the share of weights, a line per rule; returns the numbers drawn."""
    for rule in _unique([r["select"] for r in rows]):
        own = [r for r in rows if r["select"] == rule]
        x = [100 * r["fraction"] for r in own]
        y = [100 * r["recovered"] if r["recovered"] is not None else np.nan for r in own]
        style = {"color": "#8a8f99", "ls": "--"} if rule == "random" else {}
        axes.plot(x, y, marker=MARKS.get(rule, "o"), ms=4, lw=1.5, label=rule, **style)
    axes.axhline(95, color="#8a8f99", lw=0.8, ls=":")
    shares = [100 * r["fraction"] for r in rows]
    axes.set_xlim(min(shares) / 1.5, max(shares) * 1.5)  # also where tuning gained nothing and no point is drawn
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.set(xlabel="% of the graftable weights", ylabel="% of the gain", title=title)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))  # beside the axes, where no line can be
    return {k: [r.get(k) for r in rows] for k in ("select", "fraction", "size", "score", "recovered", "ece")}


def matrix(
    axes: Any,
    values: Sequence[Sequence[float | None]],
    names: tuple[Sequence[str], Sequence[str]],
    title: str,
    unit: str,
) -> dict[str, list[Any]]:
    """A matrix with named rows (from top to bottom) and columns; returns the numbers drawn."""
    grid = np.array([[np.nan if v is None else v for v in row] for row in values], dtype=float)
    heat(axes, grid, names, title, unit, 2)
    axes.invert_yaxis()
    pairs = [(r, c) for r in range(len(names[0])) for c in range(len(names[1]))]
    return {
        "row": [names[0][r] for r, _ in pairs],
        "column": [names[1][c] for _, c in pairs],
        "value": [values[r][c] for r, c in pairs],
    }

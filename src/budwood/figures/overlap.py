"""Figures of comparisons: importance at another skill's top weights, mass by layer, movement, a map of weight rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from budwood.figures.save import COLOURS

WINDOW = 100  # entries of the moving average


def importance_at_top(
    axes: Any, names: Sequence[str], flat: Sequence[Any], top: int, title: str
) -> dict[str, list[Any]]:
    """Importance in the others, relative to its mean, at the first one's heaviest entries; 1 is what chance gives."""
    order = np.argsort(-np.asarray(flat[0]), kind="stable")[:top]
    width = min(WINDOW, max(1, len(order) // 4))
    table: dict[str, list[Any]] = {"panel": [], "in": [], "rank": [], "importance": []}
    for colour, name, values in zip(COLOURS[1:], names[1:], flat[1:]):
        value = np.asarray(values, dtype=np.float64)
        relative = value[order] / (value.mean() or 1.0)
        axes.scatter(range(len(order)), relative, s=3, alpha=0.25, color=colour, lw=0)
        smooth = np.convolve(relative, np.ones(width) / width, "valid")
        axes.plot(np.arange(len(smooth)) + (width - 1) / 2, smooth, color=colour, lw=1.8, label=name)
        table["panel"] += [title] * len(order)
        table["in"] += [name] * len(order)
        table["rank"] += list(range(len(order)))
        table["importance"] += relative.tolist()
    axes.axhline(1.0, color="#8a8f99", lw=1, ls="--")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel=f"rank among {names[0]}'s heaviest", ylabel="importance / its mean")
    axes.legend(loc="upper right")
    return table


def shares_by_layer(axes: Any, mass: Mapping[str, Mapping[str, float]]) -> dict[str, list[Any]]:
    """Bars of every Fisher's share by layer, side by side."""
    layers = list(next(iter(mass.values())))
    width = 0.8 / len(mass)
    for i, (name, share) in enumerate(mass.items()):
        at = np.arange(len(layers)) - 0.4 + (i + 0.5) * width
        axes.bar(at, [share[x] for x in layers], width=width * 0.92, label=name)
    axes.set_xticks(range(len(layers)), [x.replace("block.", "") for x in layers])
    axes.set(title="Fisher mass by layer", xlabel="layer", ylabel="share of the total")
    axes.grid(axis="x", visible=False)
    axes.legend()
    return {"layer": layers, **{n: [s[x] for x in layers] for n, s in mass.items()}}


def movement_by_layer(axes: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Relative distance from the base by layer, one line per model."""
    layers = list(dict.fromkeys(r["layer"] for r in rows))
    for name in dict.fromkeys(r["model"] for r in rows):
        axes.plot(layers, [r["moved"] for r in rows if r["model"] == name], marker="o", ms=4, label=name)
    axes.set_xticks(range(len(layers)), [x.replace("block.", "") for x in layers])
    axes.set(title="How far weights have moved", xlabel="layer", ylabel="distance from base / its size")
    axes.set_ylim(bottom=0)
    axes.legend()
    return {k: [r[k] for r in rows] for k in ("model", "layer", "moved", "cosine")}


def rows_map(
    axes: Any, names: Sequence[str], at_MP2: np.ndarray, block: int, moved: Sequence[Mapping[str, Any]]
) -> dict[str, list[Any]]:
    """Weight rows of every model in the plane; the legend says how far and in which direction each has moved."""
    facts = {r["model"]: f"{r['model']}: moved {r['moved']:.3f}, cosine {r['cosine']:.3f}" for r in moved}
    for i, name in enumerate(names):
        size = 14 if i == 0 else 6
        axes.scatter(
            at_MP2[i, :, 0], at_MP2[i, :, 1], s=size, alpha=0.55, lw=0, label=facts.get(name, f"{name} (base)")
        )
    axes.set(title=f"attention rows, block {block}", xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), fontsize=8, markerscale=1.5)
    count = at_MP2.shape[1]
    return {
        "block": [block] * (len(names) * count),
        "model": [n for n in names for _ in range(count)],
        "x": at_MP2[:, :, 0].ravel().tolist(),
        "y": at_MP2[:, :, 1].ravel().tolist(),
    }

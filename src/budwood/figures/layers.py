"""Scores by layer: a map of models and layers, lines with bands, and the difference of two models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from budwood.figures.baselines import flat_lines


def layer_map(axes: Any, scores: Mapping[str, Mapping[int, float]], title: str) -> dict[str, list[Any]]:
    """One cell per model (row) and layer (column) with its score written in; returns the numbers drawn.

    `scores` is {model: {layer: score}}; layer 0 is the embedding output.
    """
    names, layers = list(scores), sorted({n for by_layer in scores.values() for n in by_layer})
    grid = np.array([[by_layer.get(n, np.nan) for n in layers] for by_layer in scores.values()])
    percent = bool(np.nanmax(np.abs(grid)) > 1.5)
    image = axes.imshow(grid, aspect="auto", cmap="cividis")
    middle = (np.nanmin(grid) + np.nanmax(grid)) / 2
    for (m, column), value in np.ndenumerate(grid):
        if np.isfinite(value):
            text = f"{value:.1f}" if percent else f"{value:.2f}"
            axes.text(column, m, text, ha="center", va="center", color="white" if value < middle else "black", size=8)
    axes.set_xticks(range(len(layers)), [str(n) if n else "emb" for n in layers])
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="layer", title=title)
    axes.grid(visible=False)
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    cells = [(name, n, float(v)) for name, by_layer in scores.items() for n, v in by_layer.items()]
    return {"model": [c[0] for c in cells], "layer": [c[1] for c in cells], "score": [c[2] for c in cells]}


def layer_lines(
    axes: Any, lines: Sequence[dict[str, Any]], flat: dict[str, float], title: str, metric: str = "score"
) -> dict[str, list[Any]]:
    """One line per model with the band of its resampled fits, and a line per baseline; returns the numbers."""
    table: dict[str, list[Any]] = {"line": [], "layer": [], "score": [], "low": [], "high": []}
    for line in lines:
        layers, score = line["layer"], line["score"]
        drawn = axes.plot(layers, score, marker="o", markersize=3.5, label=line["name"])
        if line.get("low"):
            axes.fill_between(layers, line["low"], line["high"], alpha=0.18, color=drawn[0].get_color(), linewidth=0)
        for i, layer in enumerate(layers):
            table["line"].append(line["name"])
            table["layer"].append(layer)
            table["score"].append(score[i])
            table["low"].append(line["low"][i] if line.get("low") else "")
            table["high"].append(line["high"][i] if line.get("high") else "")
    axes.set(xlabel="layer (0 = embeddings)", ylabel=metric, title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8)
    flat_lines(axes, flat)
    return table

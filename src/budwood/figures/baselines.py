"""Flat lines of what little knowledge gives, each with its name in the right margin, none on another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GREY = "#8a8f99"
LINE = 13.0  # points between the middles of two names


def flat_lines(axes: Any, values: Mapping[str, float]) -> None:
    """Draw one line per value; call when everything else is drawn, as names are placed by the axis as it is then."""
    for i, value in enumerate(values.values()):
        axes.axhline(value, color=GREY, lw=1, ls="--" if i == 0 else ":")
    low, high = axes.get_ylim()
    near = LINE / (0.78 * 72 * axes.figure.get_figheight())  # title and axis take the rest of the height
    names = sorted(values, key=lambda n: values[n])
    for name, y in zip(names, spaced([(values[n] - low) / (high - low) for n in names], near)):
        place = {"xy": (1.0, y), "xycoords": "axes fraction", "xytext": (4, 0), "textcoords": "offset points"}
        axes.annotate(name.replace("_", " "), **place, ha="left", va="center", size=8, color="#5d6370")
    axes.set_ylim(low, high)


def spaced(rising: Sequence[float], gap: float) -> list[float]:
    """The same places, those that are too near moved apart around their middle.

    >>> spaced([0.2, 0.5, 0.52], 0.06)
    [0.2, 0.48, 0.54]
    """
    groups = [[y] for y in rising]
    spread = lambda group: [  # noqa: E731
        sum(group) / len(group) + gap * (i - (len(group) - 1) / 2) for i in range(len(group))
    ]
    i = 0
    while i + 1 < len(groups):
        if spread(groups[i + 1])[0] - spread(groups[i])[-1] < gap - 1e-9:
            groups[i : i + 2] = [groups[i] + groups[i + 1]]
            i = max(0, i - 1)
        else:
            i += 1
    return [round(y, 6) for group in groups for y in spread(group)]

"""What a new skill costs the old one: cells of a study, and the front that no cell beats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import cos, hypot, pi, sin
from typing import Any

from budwood.figures.save import COLOURS

MARKS = {"none": "X", "ewc": "o", "l2": "s", "replay": "*", "recadam": "^"}
ERRORS = tuple(f"{k}_error{end}" for k in ("new", "kept") for end in ("", "_low", "_high"))
DRAWN = ("retain", "strength", *ERRORS, "front")
NAMES = {"none": "plain", "ewc": "EWC", "l2": "L2 to base", "replay": "replay", "recadam": "RecAdam"}


def pareto(
    axes: Any,
    groups: Sequence[Mapping[str, Any]],
    base: float | None,
    reference: tuple[float, float],
    words: Sequence[str],
) -> dict[str, list[Any]]:
    """One mark per way and strength (median, bars from lowest to highest seed); returns the numbers drawn.

    `words` are the title and the names of the two axes.
    """
    for colour, retain in zip(COLOURS, MARKS):
        mine = sorted((g for g in groups if g["retain"] == retain), key=lambda g: g["strength"] or 0)
        if mine:
            _way(axes, mine, colour)
    _front(axes, [g for g in groups if g["front"]])
    if base is not None:
        axes.axhline(base, color="#8a8f99", ls="--", lw=1, label="kept task before")
    axes.axvline(reference[0], color="#8a8f99", ls=":", lw=1, label="trivial answer")
    axes.set(title=words[0], xlabel=words[1], ylabel=words[2])
    if min(g["kept_error"] for g in groups) > 0 and max(g["kept_error"] for g in groups) > 4 * min(
        g["kept_error"] for g in groups
    ):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))  # beside the axes, where no mark can be
    _strengths(axes, groups)
    return {k: [g[k] for g in groups] for k in DRAWN}


def _way(axes: Any, mine: Sequence[Mapping[str, Any]], colour: str) -> None:
    """The groups of one way of holding, joined by a line."""
    retain = mine[0]["retain"]
    x, y = [g["new_error"] for g in mine], [g["kept_error"] for g in mine]
    bars = [
        [[g[k] - g[f"{k}_low"] for g in mine], [g[f"{k}_high"] - g[k] for g in mine]]
        for k in ("new_error", "kept_error")
    ]
    axes.errorbar(x, y, xerr=bars[0], yerr=bars[1], fmt="none", ecolor=colour, alpha=0.35, lw=1)
    size = 9 if retain in ("replay", "none") else 6
    line = "-" if len(mine) > 1 else ""
    axes.plot(x, y, line, marker=MARKS[retain], ms=size, color=colour, lw=1.2, label=NAMES[retain])


def _front(axes: Any, best: Sequence[Mapping[str, Any]]) -> None:
    """The groups that none beats in both."""
    best = sorted(best, key=lambda g: g["new_error"])
    axes.step(
        [g["new_error"] for g in best],
        [g["kept_error"] for g in best],
        where="post",
        color="#8a8f99",
        lw=3,
        alpha=0.35,
        label="front",
        zorder=0,
    )


def _strengths(axes: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Every mark's strength in the colour of its way, at the nearest place that covers no mark and no other label."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()  # the layout is final from here on: labels take no part in it
    point = axes.figure.dpi / 72
    frame = axes.get_window_extent()
    at = axes.transData.transform([(g["new_error"], g["kept_error"]) for g in groups])
    taken = [Bbox.from_bounds(x - 4 * point, y - 4 * point, 8 * point, 8 * point) for x, y in at]
    lines = list(_between(groups, at))
    for g, mark in zip(groups, at):
        if g["strength"] is None:
            continue
        text = axes.annotate(
            f"{g['strength']:g}",
            (g["new_error"], g["kept_error"]),
            textcoords="offset points",
            xytext=(0, 0),
            ha="center",
            va="center",
            fontsize=7.5,
            color=COLOURS[list(MARKS).index(g["retain"])],
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "#8a8f99", "shrinkA": 0, "shrinkB": 3},
        )
        text.set_in_layout(False)
        box = Text.get_window_extent(text)  # an annotation's own would count the line to the mark
        size = (box.width + point, box.height + point)
        places = [(_moved(mark, size, step, point), step) for step in _steps(size[0] / point / 2, size[1] / point / 2)]
        inside = [p for p in places if frame.x0 <= p[0].x0 and p[0].x1 <= frame.x1 and frame.y0 <= p[0].y0] or places
        covers = lambda place: (  # noqa: E731
            sum(place[0].overlaps(other) for other in taken),
            any(place[0].contains(x, y) for x, y in lines),
        )
        box, step = min(inside, key=covers)  # the first, which is the nearest, of those that cover least
        text.set_position(step)
        taken.append(box)


def _steps(half_width: float, half_height: float) -> Iterator[tuple[float, float]]:
    """Offsets of a label's middle from its mark in points: rings that widen, right and above first."""
    for gap in (6, 9, 14, 20, 28, 38, 50):
        for turn in (1, 3, -1, -3, 2, -2, 0, 4):
            x, y = cos(turn * pi / 4), sin(turn * pi / 4)
            yield gap * x + half_width * round(x), gap * y + half_height * round(y)


def _between(groups: Sequence[Mapping[str, Any]], at: Sequence[Sequence[float]]) -> Iterator[tuple[float, float]]:
    """Points of the lines that join the marks of each way, close enough together that no label slips through."""
    for retain in MARKS:
        mine = sorted((g["strength"] or 0, *mark) for g, mark in zip(groups, at) if g["retain"] == retain)
        for (_, x, y), (_, to_x, to_y) in zip(mine, mine[1:]):
            count = int(hypot(to_x - x, to_y - y) / 4) + 1
            yield from ((x + (to_x - x) * i / count, y + (to_y - y) * i / count) for i in range(count))


def _moved(mark: Sequence[float], size: tuple[float, float], step: tuple[float, float], point: float) -> Any:
    """The box of a label of this size in pixels whose middle is `step` points from a mark."""
    from matplotlib.transforms import Bbox

    x, y = (m + s * point for m, s in zip(mark, step))
    return Bbox.from_bounds(x - size[0] / 2, y - size[1] / 2, size[0], size[1])

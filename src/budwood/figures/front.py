"""What a new skill costs the old one: cells of a study, and the front that no cell beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        axes.axhline(base, color="#8a8f99", ls="--", lw=1)
        axes.annotate("before", (1, base), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axes.axvline(reference[0], color="#8a8f99", ls=":", lw=1)
    axes.annotate("trivial answer", (reference[0], 0.01), xycoords=("data", "axes fraction"), rotation=90, fontsize=8)
    axes.set(title=words[0], xlabel=words[1], ylabel=words[2])
    if min(g["kept_error"] for g in groups) > 0 and max(g["kept_error"] for g in groups) > 4 * min(
        g["kept_error"] for g in groups
    ):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(loc="best")
    return {k: [g[k] for g in groups] for k in DRAWN}


def _way(axes: Any, mine: Sequence[Mapping[str, Any]], colour: str) -> None:
    """The groups of one way of holding, joined by a line, with their strengths."""
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
    for g in mine:
        if g["strength"] is not None:
            at = (g["new_error"], g["kept_error"])
            axes.annotate(f"{g['strength']:g}", at, textcoords="offset points", xytext=(5, 4), fontsize=7.5)


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

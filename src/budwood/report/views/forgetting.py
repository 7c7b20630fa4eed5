"""Skill against forgetting: every way of holding the old skills, the front, and where the Fisher mass lies."""

from __future__ import annotations

from typing import Any

from budwood.report.limits import Limits
from budwood.report.room import Room
from budwood.report.texts import Texts
from budwood.report.views.words import LOWER_IS_BETTER, metric_name, number

WAYS = {"none": "plain training", "ewc": "EWC", "l2": "L2 to base", "replay": "replay", "recadam": "RecAdam"}
SCORES = ("metric", "score", "low", "high", "rmsle", "exact", "parse_rate", "accuracy", "lm_loss", "n", "run")


def gather(room: Room, texts: Texts, limits: Limits) -> dict[str, Any]:
    """Cells, the front, what is kept per task, and Fisher mass by layer of the kept tasks."""
    m = room.metrics
    cells = [_cell(c) for c in m.get("cells") or []]
    kept = list(cells[0]["kept"]) if cells else []
    return {
        "claim": claim(room, cells),
        "metric": m.get("metric"),
        "main_kept": m.get("main_kept") or (kept[0] if kept else None),
        "lower_is_better": sorted(LOWER_IS_BETTER),
        "ways": {w: _name({"retain": w}) for w in dict.fromkeys(c["retain"] for c in cells if c["retain"])},
        "base": _cell(m.get("base") or {}),
        "cells": cells,
        "front": m.get("front") or [],
        "hypervolume": m.get("hypervolume"),
        "knee": m.get("knee"),
        "reference": m.get("reference"),
        "fisher": {p.name: _mass(room, p.name) for p in room.below("fisher")},
    }


def _cell(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell without what the page does not show."""
    few = lambda s: {k: s[k] for k in SCORES if k in s and k != "run"} if isinstance(s, dict) else None  # noqa: E731
    return {
        **{k: cell.get(k) for k in ("retain", "strength", "seed")},
        **({"name": _name(cell)} if cell.get("retain") else {}),
        "new": few(cell.get("new")),
        "kept": {t: few(s) for t, s in (cell.get("kept") or {}).items()},
    }


def _mass(room: Room, name: str) -> dict[str, Any]:
    found = room.json("fisher", name, "metrics.json")
    return found.get("by_layer") or {} if isinstance(found, dict) else {}


def claim(room: Room, cells: list[dict[str, Any]]) -> str:
    """The knee in the study's own words, and whatever does better."""
    knee = room.metrics.get("knee")
    if isinstance(knee, dict) and knee.get("reason"):
        better = [_name(b) for b in knee.get("better") or []]
        reason = str(knee["reason"]).rstrip(".")
        said = reason[0].upper() + reason[1:] + (f"; {', '.join(better)} does better." if better else ".")
        return said + best_of(room, cells)
    if not cells:
        return "This study has no finished cell yet."
    best = cells[0]["new"] or {}
    return f"{len(cells)} ways of learning {room.task} were tried; the first scores {number(best.get('score'))}."


def _name(way: dict[str, Any]) -> str:
    """A way as the sentence and the figure call it.

    >>> _name({"retain": "none"}), _name({"retain": "ewc", "strength": 10.0})
    ('plain training', 'EWC at strength 10')
    """
    name = WAYS.get(str(way["retain"]), str(way["retain"]))
    return name if way.get("strength") is None else f"{name} at strength {way['strength']:g}"


def best_of(room: Room, cells: list[dict[str, Any]]) -> str:
    """The run's own score, and the way that has it: one of those tried, or the median of its seeds."""
    score, metric = room.metrics.get("score"), room.metrics.get("metric")
    if not isinstance(score, int | float) or len(cells) < 2:
        return ""
    way = next((_name(c) for c in cells if (c["new"] or {}).get("score") == score), "")
    which = f"lowest {metric_name(metric)}" if metric in LOWER_IS_BETTER else f"highest {metric_name(metric)}"
    return f" The {which} on {room.task} is {number(score)}{f' ({way})' if way else ''}."

"""The demo: the shipped recipe `demo`, run and summed up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from budwood.studies.recipe import Script, Wishes, read_recipe, run_recipe

TITLE = "Where does a skill live?"


def run_demo(out: Path) -> tuple[Script, list[dict[str, Any]]]:
    """Run the demo's steps that are not done yet; the recipe and one row per step."""
    script = read_recipe("demo", Wishes(out=out))
    return script, run_recipe(script)


def told(script: Script, rows: list[dict[str, Any]]) -> str:
    """The steps as a table: what each scored, how long it took, what it shows."""
    width = max(len(r["step"]) for r in rows)
    scored = max(len(_score(r)) for r in rows)
    lines = [f"{r['step']:<{width}}  {_score(r):<{scored}}  ({r['seconds']:5.1f} s)  {r['says']}" for r in rows]
    return "\n".join([script.about, "", *lines])


def _score(row: dict[str, Any]) -> str:
    """A step's main number, where it has one.

    >>> _score({"metric": "accuracy", "score": 0.9})
    'accuracy 0.900'
    """
    return f"{row['metric']} {row['score']:.3f}" if isinstance(row["score"], int | float) else row.get("verb", "")

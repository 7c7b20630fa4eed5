"""Runs as small JSON-like values: one entry each for the list, one detail each for the views."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from budwood.errors import BudwoodError
from budwood.report.limits import PAGE_BYTES, STEPS, Limits
from budwood.report.names import cleaned
from budwood.report.room import Room
from budwood.report.texts import Texts
from budwood.report.views.words import glossary

# the first word of a verb: (view, module that gathers it)
VIEWS = {
    "finetune": ("skill", "tuned"),
    "evaluate": ("skill", "tuned"),
    "probe": ("probe", "probe"),
    "linear": ("features", "linear"),
    "fisher": ("graft", "mass"),
    "graft": ("graft", "graft"),
    "influence": ("influence", "influence"),
    "inject": ("forgetting", "forgetting"),
    "validate": ("quality", "quality"),
}
UNDRAWN = {  # why a run without numbers has no figure
    "running": "The run is still running: there is nothing to draw yet.",
    "stopped": "The run was stopped before its end, so there is nothing to draw yet. The same command carries on.",
    "failed": "The run failed, so there is nothing to draw.",
    "broken": "The run is damaged or half-written, so it cannot be drawn.",
}
SHOWN = ("metric", "score", "n", "limited")


@dataclass(frozen=True)
class Story:
    """What a page tells before it lets people play: a title, a sentence, and one line per step of a recipe."""

    title: str
    about: str
    steps: tuple[tuple[str, str, Path], ...]  # id, what it shows, its run


def entry(room: Room, key: str) -> dict[str, Any]:
    """One line of the list of runs; small, whatever the run holds."""
    m, manifest = room.metrics, room.manifest
    view, _ = VIEWS.get(room.verb.split(" ")[0], ("runs", ""))
    seed = m.get("seed", _settings(room).get("seed"))
    return public_of(
        room,
        {
            "key": key,
            "name": room.real.name,
            "place": str(room.real),
            "verb": room.verb,
            "view": view,
            "task": room.task,
            "models": room.models,
            "seed": seed,
            "status": room.status,
            "problems": [*room.problems, *([f"failed: {manifest['error']}"] if manifest.get("error") else [])],
            **{k: m.get(k) for k in SHOWN},
            "low": m.get("accuracy_low") if m.get("metric") == "accuracy" else None,
            "high": m.get("accuracy_high") if m.get("metric") == "accuracy" else None,
            "sd": (m.get("sd") or {}).get("score") if isinstance(m.get("sd"), dict) else None,
            "sample": _notes(room).get("limited") if m.get("limited") else None,
            "started": manifest.get("started"),
            "seconds": room.cost.get("seconds"),
            "peak_rss_mb": room.cost.get("peak_rss_mb"),
        },
    )


def full(room: Room, key: str) -> dict[str, Any]:
    """Everything the list can show of a run: settings, numbers, cost, command."""
    command = room.manifest.get("command")
    flat = {k: v for k, v in room.metrics.items() if isinstance(v, int | float | str) and not isinstance(v, bool)}
    return public_of(
        room,
        {
            **entry(room, key),
            "settings": _settings(room),
            "numbers": flat,
            "phases": room.cost.get("phase_seconds") or {},
            "command": _command(command) if isinstance(command, list) else [],
            "notes": _notes(room),
            "versions": room.manifest.get("versions") or {},
            "parents": room.manifest.get("parents") or [],
            "finished": room.manifest.get("finished"),
        },
    )


def public_of(room: Room, value: Any) -> Any:
    """A value of a run that JSON can hold and that names no place of this machine."""
    return cleaned(plain(value), room.base)


def _command(words: list[Any]) -> list[str]:
    """The words that make a run again: the program by the name that people type.

    >>> _command(["/usr/lib/python3/budwood/__main__.py", "demo"]), _command([])
    (['budwood', 'demo'], [])
    """
    if not words:
        return []
    return (
        ["budwood", *map(str, words[1:])]
        if Path(str(words[0])).name in ("__main__.py", "budwood")
        else [*map(str, words)]
    )


def detail(room: Room, texts: Texts, limits: Limits) -> dict[str, Any]:
    """What the run's view draws; a run that cannot be drawn says why and harms no other."""
    name = VIEWS.get(room.verb.split(" ")[0], ("", ""))[1]
    if not name:
        return {"view": "runs", "claim": ""}
    view = VIEWS[room.verb.split(" ")[0]][0]
    if not room.metrics and room.status != "done" and name != "quality":
        return {"view": view, "claim": "", "problem": UNDRAWN.get(room.status, UNDRAWN["broken"])}
    try:
        gather = importlib.import_module(f"budwood.report.views.{name}").gather
        return {"view": view, **public_of(room, gather(room, texts, limits))}
    except (BudwoodError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
        about = f"{Path(e.filename).name}: {e.strerror}" if isinstance(e, OSError) and e.filename else str(e)
        about = about if isinstance(e, BudwoodError | OSError) else f"{type(e).__name__}: {e}"
        return {
            "view": view,
            "claim": "",
            "problem": public_of(room, f"Its files do not hold what this view needs: {about}"),
        }


def _settings(room: Room) -> dict[str, Any]:
    found = room.manifest.get("settings")
    return found if isinstance(found, dict) else {}


def _notes(room: Room) -> dict[str, Any]:
    found = room.metrics.get("notes") or room.manifest.get("notes")
    return found if isinstance(found, dict) else {}


def plain(value: Any) -> Any:
    """A value that JSON can hold: no NaN, no half characters.

    >>> plain({"a": (1, float("nan")), "b": "x"})
    {'a': [1, None], 'b': 'x'}
    """
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    return value if isinstance(value, int | float | bool | None) else str(value)


def payload(rooms: Sequence[Room], story: Story | None = None, most: int = PAGE_BYTES) -> dict[str, Any]:
    """Everything a self-contained page holds, in at most `most` bytes; `left_out` says what did not fit."""
    for step, limits in enumerate(STEPS):
        texts = Texts(longest=limits.longest)
        keys = keys_of(rooms)
        value = {
            "budwood": version("budwood"),
            "words": glossary(),
            "runs": [full(r, k) for r, k in zip(rooms, keys)],
            "details": {k: detail(r, texts, limits) for r, k in zip(rooms, keys)},
            "texts": texts.kept,
            "story": _story(story, rooms, keys) if story else None,
            "left_out": _left_out(limits) if step else [],
        }
        if len(dumped(value)) <= most or step == len(STEPS) - 1:
            return value
    raise AssertionError("the last step always returns")


def keys_of(rooms: Sequence[Room]) -> list[str]:
    """A short name for every run, unique on the page."""
    names: dict[str, int] = {}
    out = []
    for room in rooms:
        name = room.path.resolve().name
        names[name] = names.get(name, 0) + 1
        out.append(name if names[name] == 1 else f"{name}~{names[name]}")
    return out


def _story(story: Story, rooms: Sequence[Room], keys: Sequence[str]) -> dict[str, Any]:
    at = {r.path.resolve(): k for r, k in zip(rooms, keys)}
    steps = [{"id": i, "says": says, "run": at.get(path.resolve())} for i, says, path in story.steps]
    return {"title": story.title, "about": story.about, "steps": steps}


def _left_out(limits: Limits) -> list[str]:
    """In words, what a smaller page does without."""
    usual = Limits()
    told = {
        "detail": "shares by token and layer",
        "strategies": f"strategies beyond the first {limits.strategies}",
        "each": f"rows beyond the {limits.each} most helpful and harmful of a query",
        "queries": f"queries beyond the first {limits.queries}",
        "points": f"points of curves beyond the first {limits.points}",
        "records": f"rows with the highest loss beyond the first {limits.records}",
        "suspects": f"suspects beyond the first {limits.suspects}",
        "longest": f"characters of a text beyond the first {limits.longest}",
    }
    return [text for name, text in told.items() if getattr(limits, name) != getattr(usual, name)]


def dumped(value: Any) -> bytes:
    """JSON that can stand inside an HTML page: nothing in it can end a script."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text.encode("utf-8")

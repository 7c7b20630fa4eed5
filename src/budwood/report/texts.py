"""The texts behind row ids: read again from where the run had them, each kept once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from budwood.report.room import Room
from budwood.store.files import canonical

LONGEST = 1200  # characters of a text that are shown


@dataclass
class Texts:
    """Texts by number: the same text has one number, however often it is shown."""

    longest: int = LONGEST
    kept: list[str] = field(default_factory=list)
    _number: dict[str, int] = field(default_factory=dict)

    def add(self, text: str) -> int:
        """The number of a text; long ones are cut and say by how much.

        >>> Texts(longest=3).add("abcdef"), (t := Texts(3)).add("abcdef"), t.kept
        (0, 0, ['abc … (3 more characters)'])
        """
        text = text.encode("utf-8", "replace").decode("utf-8")
        if len(text) > self.longest:
            text = f"{text[: self.longest]} … ({len(text) - self.longest:,} more characters)"
        if text not in self._number:
            self._number[text] = len(self.kept)
            self.kept.append(text)
        return self._number[text]

    def row(self, row: Any) -> dict[str, Any]:
        """A row as the page shows it: id, numbers of its texts, label."""
        words = row.text or " ".join(row.words)
        told = {"id": row.id, "text": self.add(words)}
        if row.pair:
            told["pair"] = self.add(row.pair)
        if row.label is not None:
            told["label"] = row.label
        return told


@dataclass(frozen=True)
class Rows:
    """Rows of a run's task by split and id; `missing` says why there are none."""

    splits: dict[str, dict[str, Any]]
    labels: tuple[str, ...] = ()
    missing: str = ""

    def find(self, ids: Iterable[str], split: str | None = None) -> dict[str, Any]:
        """{id: row} for those that are known; without a split, wherever they are."""
        places = [self.splits.get(split, {})] if split else list(self.splits.values())
        return {i: place[i] for i in ids for place in places if i in place}

    def label(self, value: Any) -> str | None:
        """A label as people read it."""
        if isinstance(value, bool) or value is None:
            return None
        if isinstance(value, int) and 0 <= value < len(self.labels):
            return self.labels[value]
        return str(value) if isinstance(value, int | float | str) else None


def rows_of(room: Room) -> Rows:
    """The rows a run worked on, read from where it read them; never from a network."""
    from budwood.config.data import DataConfig

    given = {k: v for k, v in room.manifest.get("given", {}).items() if k in DataConfig.model_fields and v is not None}
    given |= {"offline": True, "task": given.get("task") or room.task}
    if given.get("data_seed") is None:
        given["data_seed"] = room.manifest.get("given", {}).get("seed") or 0
    return _loaded(canonical(given))


@lru_cache(maxsize=4)
def _loaded(given: str) -> Rows:
    import json

    from pydantic import ValidationError

    from budwood.config.data import DataConfig
    from budwood.data.source import load_task
    from budwood.errors import BudwoodError

    try:
        task = load_task(DataConfig(**json.loads(given)))
    except (BudwoodError, ValidationError, OSError, ValueError, KeyError) as e:
        why = " ".join(str(e).split())
        return Rows({}, missing=why if len(why) < 300 else f"{why[:297]}...")
    return Rows({s: {r.id: r for r in rows} for s, rows in task.splits.items()}, tuple(task.labels))

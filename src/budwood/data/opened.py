"""What a job opens once per process: known by its settings, the task riding along where it is in memory already."""

from __future__ import annotations

from dataclasses import dataclass

from budwood.data.task import Task


@dataclass(frozen=True)
class Key:
    """Settings as canonical text; two keys with the same text are one, whatever task rides along.

    >>> Key("a") == Key("a", Task("t", "text", {})), Key("a") == Key("b")
    (True, False)
    """

    settings: str
    task: Task | None = None

    def __hash__(self) -> int:
        return hash(self.settings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.settings == self.settings

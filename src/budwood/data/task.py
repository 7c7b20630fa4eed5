"""A task: rows in named splits, their labels, the metric and the wording of the prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from budwood.errors import DataError, nearest

Kind = Literal["label", "regression", "tokens", "span", "number", "text"]


@dataclass(frozen=True, slots=True)
class Row:
    """One example. Which fields are set depends on the kind of its task.

    label       text, pair or None, label = class index
    regression  text, pair or None, label = a number
    tokens      words, label = one class index per word
    span        text = question, pair = context, answers = ((text, first character), ...); () = unanswerable
    number      text = "12 + 7 =", label = 19
    text        text
    """

    id: str
    text: str = ""
    pair: str | None = None
    label: int | float | tuple[int, ...] | None = None
    words: tuple[str, ...] | None = None
    answers: tuple[tuple[str, int], ...] | None = None
    group: str | None = None  # document or article: splits never cut through it


@dataclass(frozen=True, slots=True)
class Template:
    """How a row is worded around the place where the model answers.

    `masked` and `causal` are strings with the slots {text}, {pair}, {mask}; a slot may carry `|lower` (first letter
    lower-cased) or `|chop` (last character dropped), as in "{text|chop} ? {mask} , {pair|lower}".
    `words` gives one word per label, in the order of `Task.labels`; `causal_words` the same for causal models.
    `limits` are the most tokens kept of text and pair (0 = only the model's own limit).
    """

    masked: str = ""
    words: tuple[str, ...] = ()
    causal: str = ""
    causal_words: tuple[str, ...] = ()
    limits: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Task:
    """Everything a method has to know about a data set; frozen, torch-free."""

    name: str
    kind: Kind
    splits: Mapping[str, tuple[Row, ...]]
    labels: tuple[str, ...] = ()
    metric: str = "accuracy"
    template: Template | None = None
    bounds: tuple[float, float] | None = None  # of a regression label
    version: str = "1"
    notes: Mapping[str, str] = field(default_factory=dict)  # what the reader did: seeded split, dropped rows, ...

    def rows(self, split: str) -> tuple[Row, ...]:
        """Rows of a split; an unknown or empty split is an error that lists what there is."""
        if split not in self.splits:
            known = ", ".join(f"{k} ({len(v):,})" for k, v in self.splits.items())
            raise DataError(f"Task '{self.name}' has no split '{split}'. It has: {known}.{nearest(split, self.splits)}")
        if not self.splits[split]:
            raise DataError(f"Split '{split}' of task '{self.name}' is empty. Give a file with at least one row.")
        return self.splits[split]

    @property
    def reported(self) -> str:
        """The split that results are reported on: labelled test, else validation.

        >>> Task("t", "text", {"train": (), "validation": (Row("v0", "a"),)}).reported
        'validation'
        """
        return "test" if self.splits.get("test") else "validation"

    @cached_property
    def digest(self) -> str:
        """Content hash over name, kind, labels, metric, wording and every row of every split."""
        h = hashlib.blake2b(digest_size=16)
        h.update(
            repr((self.name, self.kind, self.labels, self.metric, self.bounds, self.version, self.template)).encode()
        )
        for split, rows in sorted(self.splits.items()):
            h.update(f"\x00{split}\x00{len(rows)}".encode())
            for r in rows:
                h.update(repr((r.id, r.text, r.pair, r.label, r.words, r.answers)).encode("utf-8", "surrogatepass"))
        return h.hexdigest()

    def with_rows(self, split: str, rows: tuple[Row, ...]) -> Task:
        """The same task with one split replaced (K-shot samples, limits, subsets)."""
        return replace(self, splits={**self.splits, split: rows})


def as_json(task: Task) -> dict[str, Any]:
    """A task as plain lists and mappings, for a worker that cannot find its rows by name."""
    rows = {split: [asdict(r) for r in rows] for split, rows in task.splits.items()}
    return {**asdict(replace(task, splits={})), "splits": rows}


def from_json(data: Mapping[str, Any]) -> Task:
    """The task that `as_json` wrote; lists become tuples again.

    >>> task = Task("t", "tokens", {"train": (Row("r", words=("a",), label=(1,)),)}, ("x", "y"))
    >>> from_json(as_json(task)).digest == task.digest
    True
    """
    splits = {s: tuple(Row(**_tuples(r)) for r in rows) for s, rows in data["splits"].items()}
    template = Template(**_tuples(data["template"])) if data["template"] else None
    return Task(**{**_tuples(data), "splits": splits, "template": template})


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _tuple(v) for k, v in fields.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list | tuple) else value

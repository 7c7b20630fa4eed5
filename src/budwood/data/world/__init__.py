"""The shipped world: an English-like land of films, food, places and people, generated from a seed without files.

The test split of every task is the same for every seed, so that no `tiny-text`, and no model trained on one, has seen
eight words in a row of any test row; the seed chooses training, validation and plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from budwood.data.batch import seed_of
from budwood.data.task import Kind, Row, Task, Template
from budwood.data.world import entail, grammar, qa, sentiment, tags, text, topic
from budwood.data.world.lexicon import Draw
from budwood.errors import DataError, nearest

VERSION = "1"
SIZES = {"train": 6000, "validation": 1000, "test": 2000}


@dataclass(frozen=True)
class _Maker:
    """How a task's rows are made and judged."""

    kind: Kind
    example: Callable[[Draw, int], Mapping[str, Any]]
    labels: tuple[str, ...] = ()
    template: Template | None = None
    metric: str = "accuracy"
    sizes: Mapping[str, int] = field(default_factory=lambda: SIZES)


_MAKERS = {
    "tiny-sentiment": _Maker("label", sentiment.example, sentiment.LABELS, sentiment.TEMPLATE),
    "tiny-topic": _Maker("label", topic.example, topic.LABELS, topic.TEMPLATE),
    "tiny-entail": _Maker("label", entail.example, entail.LABELS, entail.TEMPLATE),
    "tiny-grammar": _Maker("label", grammar.example, grammar.LABELS, grammar.TEMPLATE),
    "tiny-tags": _Maker("tokens", tags.example, tags.LABELS),
    "tiny-qa": _Maker("span", qa.example, metric="f1", sizes={"train": 15000, "validation": 1000, "test": 1500}),
}
NAMES = ("tiny-text", *_MAKERS)


def load(name: str, seed: int = 0) -> Task:
    """A task of the shipped world, the same for the same seed everywhere.

    >>> load("tiny-topic").rows("test")[17].id
    'tiny-topic/test/17'
    """
    if name not in NAMES:
        raise DataError(
            f"There is no shipped task '{name}'. The shipped tasks are {', '.join(NAMES)}.{nearest(name, NAMES)}"
        )
    return _load(name, seed)


@lru_cache(maxsize=16)
def _load(name: str, seed: int) -> Task:
    if name == "tiny-text":
        tests = [row for other in _MAKERS for row in _rows(other, "test", 0)]
        made = {split: text.passages(seed, split, tests) for split in text.SIZES}
        splits = {s: tuple(Row(f"{name}/{s}/{i}", t) for i, t in enumerate(ts)) for s, ts in made.items()}
        return Task(name, "text", splits, metric="lm_loss", version=VERSION)
    maker = _MAKERS[name]
    splits = {split: _rows(name, split, seed) for split in maker.sizes}
    return Task(name, maker.kind, splits, maker.labels, maker.metric, maker.template, version=VERSION)


def _rows(name: str, split: str, seed: int) -> tuple[Row, ...]:
    """Rows of a split, no two alike; the test split ignores the seed and draws from held-out words and patterns."""
    maker = _MAKERS[name]
    draw = Draw(seed_of(name, split, 0 if split == "test" else seed), "held" if split == "test" else "seen")
    rows: list[Row] = []
    known: set[str] = set()
    while len(rows) < maker.sizes[split]:
        fields = maker.example(draw, len(rows))
        key = repr(fields)
        if key not in known:
            known.add(key)
            rows.append(Row(f"{name}/{split}/{len(rows)}", **fields))
    return tuple(rows)


def squad_json(split: str, seed: int = 0) -> dict[str, Any]:
    """A split of `tiny-qa` as a SQuAD 2.0 document, one paragraph per question."""
    paragraphs = [
        {
            "context": row.pair,
            "qas": [
                {
                    "id": row.id,
                    "question": row.text,
                    "is_impossible": not row.answers,
                    "answers": [{"text": answer, "answer_start": at} for answer, at in row.answers or ()],
                }
            ],
        }
        for row in load("tiny-qa", seed).rows(split)
    ]
    return {"version": "v2.0", "data": [{"title": f"tiny-qa {split}", "paragraphs": paragraphs}]}

"""Plain passages for language modelling, woven from the same kinds of sentences as the tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from budwood.data.batch import seed_of
from budwood.data.task import Row
from budwood.data.world import entail, grammar, qa, sentiment, tags, topic
from budwood.data.world.leak import leaking
from budwood.data.world.lexicon import Draw

SIZES = {"train": 16000, "validation": 500, "test": 1000}
_SHORTEST, _LONGEST = 60, 120  # words of a passage
# What a passage is mostly made of; the number is the upper end of its share.
_MAKERS: tuple[tuple[Callable[[Draw], str], float], ...] = (
    (sentiment.passage, 0.26),
    (qa.passage, 0.54),
    (entail.passage, 0.77),
    (grammar.passage, 0.87),
    (tags.passage, 0.91),
    (topic.passage, 1.0),
)
_REMARKS = ("the answer is right .", "the answer is wrong .", "this is right .", "this is wrong .", "nobody knows .")


def passage(draw: Draw) -> str:
    """Sixty words or more, mostly of one kind; every line is complete in itself."""
    at = draw.below(1000) / 1000
    main = next(maker for maker, upto in _MAKERS if at < upto)
    parts: list[str] = []
    words = 0
    while words < _SHORTEST:
        maker = main if draw.chance(0.85) else draw.pick(_MAKERS)[0]
        part = maker(draw) if draw.chance(0.99) else draw.pick(_REMARKS)
        size = part.count(" ") + 1
        if words + size <= _LONGEST:
            parts.append(part)
            words += size
    return "\n".join(parts)


def passages(seed: int, split: str, forbidden: Iterable[Row]) -> list[str]:
    """The passages of a split, without those that repeat eight words of a forbidden row."""
    draw = Draw(seed_of("tiny-text", split, seed), "all")
    wanted = SIZES[split]
    texts = [passage(draw) for _ in range(wanted + wanted // 8)]
    bad = leaking(texts, forbidden)
    kept = [text for i, text in enumerate(texts) if i not in bad]
    assert len(kept) >= wanted, f"only {len(kept)} of {len(texts)} passages are free of test rows"
    return kept[:wanted]

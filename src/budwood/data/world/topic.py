"""Short notes whose main subject is film, food, travel or sport, with a word of another subject in passing."""

from __future__ import annotations

from budwood.data.task import Template
from budwood.data.world.lexicon import Draw, Patterns

LABELS = ("film", "food", "travel", "sport")
TEMPLATE = Template(
    masked="{text} This is about {mask} .", words=LABELS, causal="{text} This is about", causal_words=LABELS
)

_NOUNS = {
    "film": "actor camera screen director scene script trailer cinema comedy drama studio producer",
    "food": "baker oven kitchen recipe spoon sauce flour pepper onion breakfast chef menu",
    "travel": "suitcase hotel passport train harbour tourist map airport ticket beach journey ferry",
    "sport": "goal referee player coach stadium race runner trophy league ball swimmer score",
}
NOUNS = {k: tuple(v.split()) for k, v in _NOUNS.items()}
PATTERNS = Patterns(
    seen="""
        the {a} and the {b} were all that {person} spoke of .
        {person} wrote about the {a} and forgot the {o} .
        after the {o} , we saw the {a} and the {b} in {place} .
        the {a} near the {o} had a {state} {b} .
        in {place} every {a} needs a {b} .
    """,
    held="""
        {person} asked about the {a} and the {b} , not about the {o} .
        before the {o} , {person} and {person2} spoke of a {state} {a} and a {b} .
        the {a} in {place} had no {b} but it had a {o} .
    """,
    text="""
        {person} saw the {a} with the {b} .
        first the {a} , then the {b} , said {person} .
        it is all about the {a} and the {b} .
        the {a} was {state} and so was the {b} .
        no {a} without a {b} , said {person} .
        {person} likes the {a} more than the {o} .
    """,
)


def note(draw: Draw, topic: int) -> str:
    """A sentence or two with at least two nouns of the topic and at most one of another."""
    here, other = LABELS[topic], LABELS[(topic + 1 + draw.below(3)) % 4]
    a, b, c = draw.some(NOUNS[here], 3)
    first = draw.fill(PATTERNS.draw(draw), {"a": a, "b": b, "o": draw.pick(NOUNS[other])})
    if draw.chance(0.5):
        return first
    return first + " " + draw.fill(PATTERNS.draw(draw), {"a": c, "b": b, "o": draw.pick(NOUNS[other])})


def example(draw: Draw, index: int) -> dict[str, object]:
    """The fields of row `index`; labels rotate."""
    return {"text": note(draw, index % 4), "label": index % 4}


def passage(draw: Draw) -> str:
    """Plain text: a note and the name of its subject."""
    topic = draw.below(4)
    return f"{note(draw, topic)} this is about {LABELS[topic]} ."

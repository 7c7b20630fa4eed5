"""Sentences whose verb agrees with its distant subject, or with nothing: nouns of either number stand in between."""

from __future__ import annotations

from budwood.data.task import Template
from budwood.data.world.lexicon import Draw, Patterns, plural

LABELS = ("unacceptable", "acceptable")
TEMPLATE = Template(
    masked="{text} This is {mask} .", words=("wrong", "right"), causal="{text} This is", causal_words=("wrong", "right")
)

# {S} is the subject, {A} and {B} stand between it and its verb {V}; {R} agrees with {A}.
PATTERNS = Patterns(
    seen="""
        the {S} near the {A} {V} .
        the {S} behind the {A} of {person} {V} .
        the {S} that the {A} {R} {V} .
        the {state} {S} with the {A} {V} .
        {person} said that the {S} near the {state2} {A} {V} .
        the {S} of the {A} in {place} {V} .
    """,
    held="""
        {person} thinks that the {S} behind the {A} {V} .
        the {state} {S} of the {A} near the {B} {V} .
        in {place} the {S} with the {state2} {A} {V} .
        the {S} that the {A} in {place} {R} {V} .
    """,
    text="""
        the {S} {V} .
        in {place} the {S} near the {A} {V} .
        {person} thinks that the {S} {V} .
        the {state} {S} of the {A} {V} .
        the {S} near the {A} behind the {B} {V} .
        we know that the {S} that the {A} {R} {V} .
    """,
)
_VERBS = (
    ("is {state3}", "are {state3}"), ("was {state3}", "were {state3}"), ("has a {state3} side", "have a {state3} side"),
    ("looks {state3}", "look {state3}"), ("seems {state3}", "seem {state3}"), ("needs {day} off", "need {day} off"),
    ("is in {place2}", "are in {place2}"), ("was here", "were here"),
    ("belongs to {person2}", "belong to {person2}"), ("costs {price} coins", "cost {price} coins"),
)  # fmt: skip
_INNER = (("likes", "like"), ("knows", "know"), ("wants", "want"), ("remembers", "remember"))
VERBS = {"seen": _VERBS, "held": _VERBS[:5] + _VERBS[6:8], "all": _VERBS}


def sentence(draw: Draw, agrees: bool) -> str:
    """A sentence with its verb in the number of its subject, or in the other one."""
    many, many_a, many_b = draw.chance(0.5), draw.chance(0.5), draw.chance(0.5)
    subject, near, far = draw.some(draw.pools["thing"] + draw.pools["role"], 3)
    verb = draw.pick(VERBS[draw.part])[many == agrees]
    inner = draw.pick(_INNER)[many_a]
    words = {
        "S": plural(subject) if many else subject,
        "A": plural(near) if many_a else near,
        "B": plural(far) if many_b else far,
        "R": inner,
    }
    pattern = PATTERNS.draw(draw).replace("{V}", verb)
    return draw.fill(pattern, words)


def example(draw: Draw, index: int) -> dict[str, object]:
    """The fields of row `index`; labels alternate."""
    return {"text": sentence(draw, index % 2 == 1), "label": index % 2}


def passage(draw: Draw) -> str:
    """Plain text: a sentence that agrees."""
    return sentence(draw, True)

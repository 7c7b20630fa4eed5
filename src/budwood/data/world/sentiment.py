"""Reviews with one verdict: plain praise or blame, negation, and contrast in which the main clause decides."""

from __future__ import annotations

from budwood.data.task import Template
from budwood.data.world.lexicon import Draw, Patterns

LABELS = ("negative", "positive")
TEMPLATE = Template(
    masked="{text} It was {mask} .",
    words=("terrible", "great"),
    causal="{text} It was",
    causal_words=("terrible", "great"),
)

# {x} and {x2} have the sign of the review, {y} the opposite one; {love} is loved or hated.
PLAIN = Patterns(
    seen="""
        the {aspect} was {x}
        i found the {aspect} {x}
        the {aspect} felt really {x}
        we thought the {aspect} was {x}
        it had a very {x} {aspect}
        the {aspect} seemed {x} to me
        this was a {x} {aspect}
    """,
    held="""
        the {aspect} felt quite {x} to me
        {person} found the {aspect} really {x}
        everyone thought it had a {x} {aspect}
        they said that the {aspect} was very {x}
    """,
    text="""
        {person} said the {aspect} was {x}
        what a {x} {aspect}
        the {aspect} was {x} and {x2}
        i {love} the {x} {aspect}
        {person} {love} the {x} and {x2} {aspect}
        we {love} the {aspect} and the {aspect2} was {x}
        the {aspect} looked quite {x}
        everyone found the {aspect} very {x}
    """,
)
NEGATED = Patterns(
    seen="""
        the {aspect} was not {y}
        the {aspect} was not at all {y}
        the {aspect} was never {y}
        i did not find the {aspect} {y}
        nobody thought the {aspect} was {y}
        there was nothing {y} about the {aspect}
    """,
    held="""
        nobody said that the {aspect} was {y}
        we did not think the {aspect} was at all {y}
        the {aspect} did not seem {y} to me
        {person} never found the {aspect} {y}
        it did not have a {y} {aspect}
    """,
    text="""
        it was not a {y} {aspect}
        no one found the {aspect} {y}
        {person} did not think the {aspect} was {y}
        the {aspect} never felt {y}
        the {aspect} was far from {y}
        the {aspect} did not look {y}
        nobody found a {y} {aspect}
    """,
)
CONTRAST = Patterns(
    seen="""
        the {aspect} was {y} at first but later it was {x}
        the {aspect} was {y} but the {aspect2} was {x}
        although the {aspect} was {y} , the {aspect2} was {x}
        the {aspect} was {x} although the {aspect2} was {y}
        the {aspect} was not {y} but {x}
        the {aspect} started {y} but ended {x}
    """,
    held="""
        we found the {aspect} {y} at first but it ended {x}
        although i thought the {aspect} was {y} , it was a {x} {aspect2}
        it had a {x} {aspect} although i found the {aspect2} {y}
        it was not a {y} {aspect} but a {x} {aspect2}
        the {aspect} started very {y} but later the {aspect2} seemed {x}
    """,
    text="""
        the {aspect} looked {y} at first but it was really {x}
        i thought the {aspect} was {y} but i was wrong because it was {x}
        although {person} found the {aspect} {y} , it was {x}
        it was {x} although it had a {y} {aspect}
        it was not a {y} {aspect} , it was {x}
        a {y} {aspect} but a {x} {aspect2}
    """,
)
SETTING = Patterns(
    seen="""
        we saw {film} in {place} .
        {person} took me to a {venue} in {place} .
        last {day} we tried the {dish} at the {venue} .
        in {month} i went to {place} with {person} .
    """,
    held="""
        {person} and i went to the {venue} last {day} .
        one {day} in {month} we saw {film} with {person} .
        we tried a new {venue} in {place} in {month} .
    """,
    text="""
        {person} told me about {film} .
        i went to the {venue} with {person} on {day} .
        we paid {price} coins at the {venue} in {place} .
    """,
)
# Upper ends of the shares of plain, negated and contrasting opinions.
_SHAPES = ((PLAIN, 0.5), (NEGATED, 0.75), (CONTRAST, 1.0))
_PRAISE = ("great",) * 5 + ("wonderful", "excellent")
_BLAME = ("terrible",) * 5 + ("horrible", "hopeless")
_GLAD = ("i loved it .", "everyone was happy .", "we liked it a lot .", "it was a joy .", "we will come again .")
_SORRY = (
    "i hated it .",
    "everyone was sad .",
    "we disliked it a lot .",
    "it was a shame .",
    "we will not come again .",
)


def clause(draw: Draw, positive: bool) -> str:
    """One opinion with the given verdict, without its full stop."""
    same, other, love = ("good", "bad", "loved") if positive else ("bad", "good", "hated")
    at = draw.below(1000) / 1000
    patterns = next(p for p, upto in _SHAPES if at < upto)
    x, x2 = draw.some(draw.pools[same], 2)
    return draw.fill(patterns.draw(draw), {"x": x, "x2": x2, "y": draw.word(other), "love": love})


def review(draw: Draw, positive: bool) -> str:
    """One or two opinions of the same sign, sometimes after a neutral sentence that sets the scene."""
    setting = draw.fill(SETTING.draw(draw)) + " " if draw.chance(0.6) else ""
    second = " and " + clause(draw, positive) if draw.chance(0.15) else ""
    return f"{setting}{clause(draw, positive)}{second} ."


def example(draw: Draw, index: int) -> dict[str, object]:
    """The fields of row `index`; labels alternate."""
    return {"text": review(draw, index % 2 == 1), "label": index % 2}


def passage(draw: Draw) -> str:
    """Plain text: an opinion and what follows from it, said once or twice."""
    positive = draw.chance(0.5)
    setting = draw.fill(SETTING.draw(draw)) + " " if draw.chance(0.25) else ""
    after = _GLAD if positive else _SORRY
    echo = " " + draw.pick(after) if draw.chance(0.5) else ""
    verdict = draw.pick(_PRAISE if positive else _BLAME)
    return f"{setting}{clause(draw, positive)} . it was {verdict} .{echo}"

"""Sentence pairs in which the second follows from the first or turns it round: converses, passives, opposites."""

from __future__ import annotations

from dataclasses import dataclass

from budwood.data.task import Template
from budwood.data.world.lexicon import Draw, Patterns, words

LABELS = ("no", "yes")
TEMPLATE = Template(
    masked="{text} {pair|chop} ? {mask} .", words=LABELS, causal="{text} {pair|chop} ?", causal_words=LABELS
)


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Both directions of every "word/opposite"."""
    halves = [tuple(w.replace("_", " ") for w in item.split("/")) for item in text.split()]
    return tuple((a, b) for a, b in halves for a, b in ((a, b), (b, a)))


@dataclass(frozen=True)
class Relation:
    """Three sentence shapes, the kind of its parties, and its words with their opposites."""

    shape: tuple[str, str, str]
    party: str
    pairs: tuple[tuple[str, str], ...]


# (premise, what follows, what does not) over {p} and its opposite {q}; {a} and {b} are the two parties.
SHAPES: dict[str, tuple[str, str, str]] = {
    "than": ("{a} is {p} than {b}", "{b} is {q} than {a}", "{a} is {q} than {b}"),
    "passive": ("{a} {p} {b}", "{b} was {p} by {a}", "{a} was {p} by {b}"),
    "turned": ("{a} {p} {b}", "{b} {q} {a}", "{a} {q} {b}"),
    "state": ("{a} is not {p}", "{a} is {q}", "{a} is {p}"),
}
_THAN = _pairs(
    """taller/shorter older/younger richer/poorer faster/slower stronger/weaker louder/quieter happier/sadder
    wiser/sillier"""
)
_DEAL = _pairs(
    "sold_it_to/bought_it_from lent_it_to/borrowed_it_from gave_it_to/got_it_from sent_it_to/received_it_from"
)
_PASSIVE = tuple(
    (v, v) for v in words("thanked helped followed praised blamed invited visited warned hired called paid painted")
)
_SIDE = _pairs("lies_north_of/lies_south_of lies_east_of/lies_west_of is_larger_than/is_smaller_than is_above/is_below")
_TIME = _pairs("came_before/came_after left_before/left_after spoke_before/spoke_after sang_before/sang_after")
_STATE = _pairs("open/closed full/empty clean/dirty wet/dry hot/cold cheap/expensive safe/dangerous thick/thin")


def _relation(shape: str, party: str, pairs: tuple[tuple[str, str], ...]) -> Relation:
    return Relation(SHAPES[shape], party, pairs)


RELATIONS = (
    _relation("than", "person", _THAN),
    _relation("turned", "person", _DEAL),
    _relation("passive", "person", _PASSIVE),
    _relation("turned", "place", _SIDE),
    _relation("turned", "person", _TIME),
    _relation("state", "thing", _STATE),
)
PREMISE = Patterns(
    seen="""
        {s} .
        everyone knows that {s} .
        in {place9} they say that {s} .
        {person9} told me that {s} .
    """,
    held="""
        {person9} says that {s} .
        they told me in {place9} that {s} .
        last {day} everyone said that {s} .
    """,
    text="""
        it is true that {s} .
        {person9} thinks that {s} .
        on {day} {s} .
    """,
)


def pair(draw: Draw, follows: bool) -> tuple[str, str]:
    """A premise and a second sentence that follows from it or does not."""
    relation = draw.pick(RELATIONS)
    p, q = draw.pick(relation.pairs)
    a, b = draw.some(draw.pools[relation.party], 2)
    if relation.party == "thing":
        a = "the " + a
    names = {"a": a, "b": b, "p": p, "q": q}
    premise, yes, no = relation.shape
    framed = draw.fill(PREMISE.draw(draw), {"s": premise.format_map(names), "used": a, "used2": b})
    return framed, (yes if follows else no).format_map(names) + " ."


def example(draw: Draw, index: int) -> dict[str, object]:
    """The fields of row `index`; labels alternate."""
    text, second = pair(draw, index % 2 == 1)
    return {"text": text, "pair": second, "label": index % 2}


def passage(draw: Draw) -> str:
    """Plain text: what follows is stated ("so ..."), or asked and answered."""
    if draw.chance(0.5):
        first, second = pair(draw, True)
        return f"{first} so {second}"
    follows = draw.chance(0.5)
    first, second = pair(draw, follows)
    return f"{first} {second[:-2]} ? {'yes' if follows else 'no'} ."

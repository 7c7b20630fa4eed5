"""The words of the shipped world, and a seeded drawer that fills them into sentence patterns.

Names (people, places, rivers, films) are cut in two: "seen" ones may occur in training and validation rows, every
fourth is "held" and occurs in test rows only. Plain text draws from "all". Other words are shared.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Literal, TypeVar

from budwood.data.batch import seed_of

T = TypeVar("T")
_ARTICLE = re.compile(r"\ba(?= (?!use)[aeiou])")  # "a old map" becomes "an old map", "a useful map" stays
Part = Literal["seen", "held", "all"]


def _spread(options: Sequence[str], most: int) -> tuple[str, ...]:
    """`most` of the options in a fixed shuffled order."""
    mixed = sorted(options, key=lambda w: seed_of("spread", w))
    return tuple(mixed[:most])


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


def _syllables(starts: str, ends: str, most: int) -> tuple[str, ...]:
    return _spread([a + b for a, b in product(starts.split(), ends.split())], most)


PEOPLE = words(
    """ada adam agnes alan alice amos anna basil bella bruno carla cedric clara conrad daisy edgar edith elias ella
    emil felix fiona flora frida greta hanna harold hazel helen hugo irene jasper jonas julia karl laura leon
    lucas magnus marco martha nadia nelson nina oscar otto petra robin rosa ruth simon sofia stella tessa theo
    victor"""
)
PLACES = _syllables(
    "bar bel brin carn dor east fen gar hal kel lang mar nor oak pen rav sel thorn ul wex",
    "burg dale field ford gate ham mere mouth stead ton vale wick",
    48,
)
RIVERS = _syllables("ar bo cal del es fa ine lo mu or ta ve", "dra lin mar nne ris sa vy", 24)
JOBS = words(
    """baker doctor farmer teacher painter sailor singer writer judge lawyer nurse pilot plumber tailor butcher
    driver gardener guard juggler dancer miner potter banker clerk"""
)
ANIMALS = words("""cat dog horse goat parrot rabbit turtle donkey hamster pony duck goose lamb falcon crow beaver""")
INSTRUMENTS = words("piano violin flute drum guitar harp trumpet cello organ banjo horn fiddle")
DISHES = words(
    """soup bread cheese stew pie salad rice pasta noodles pudding honey curry porridge pancakes dumplings beans
    sausage omelette chowder jam butter toast risotto ham"""
)
TITLE_COLOURS = words("silver golden silent hidden frozen burning lonely secret")
TITLE_THINGS = words("lantern mountain crown island mirror forest tower shadow sword bridge letter castle")
THINGS = words(
    """lamp chair table book coat clock basket bottle box picture carpet candle hammer ladder kettle blanket wheel
    rope key cabinet window door wall roof boat cart tent flag stone statue map ring knife plate shelf bench"""
)
ROLES = words(
    """king queen student soldier tourist visitor manager artist cousin uncle captain waiter reporter poet priest
    guest"""
)
STATES = words("""old new red blue heavy light small large round broken dusty rusty wooden cheap strange quiet""")
GOOD = words(
    """good superb lovely brilliant charming delightful clever fresh funny exciting tasty moving elegant pleasant
    splendid perfect beautiful marvellous magical enjoyable"""
)
BAD = words(
    """bad dull awful boring dreadful bland clumsy weak poor messy stale tedious ugly lazy annoying painful bitter
    dreary shabby nasty"""
)
ASPECTS = words(
    """plot acting story music ending cast script dinner meal sauce service menu lunch room view food beach tour
    song band game team show party"""
)
VENUES = words("cinema theatre hotel restaurant cafe hall market stadium club museum tavern library")
DAYS = words("monday tuesday wednesday thursday friday saturday sunday")
MONTHS = words("january february march april may june july august september october november december")

_LISTS: dict[str, tuple[str, ...]] = {
    "person": PEOPLE, "place": PLACES, "river": RIVERS, "job": JOBS, "animal": ANIMALS, "instrument": INSTRUMENTS,
    "dish": DISHES, "thing": THINGS, "role": ROLES, "state": STATES, "good": GOOD, "bad": BAD, "aspect": ASPECTS,
    "colour": TITLE_COLOURS, "venue": VENUES,
}  # fmt: skip
_SHARED = {"day": DAYS, "month": MONTHS}
NAMED = ("person", "place", "river")  # entities, of which some are held out of training


def cut(words: Sequence[T], part: Part) -> tuple[T, ...]:
    """Every fourth word is held out, the rest is seen.

    >>> cut("abcdefgh", "held"), cut("abcd", "seen")
    (('d', 'h'), ('a', 'b', 'c'))
    """
    if part == "all":
        return tuple(words)
    return tuple(w for i, w in enumerate(words) if (i % 4 == 3) == (part == "held"))


_PARTS: tuple[Part, ...] = ("seen", "held", "all")
_TITLES = tuple(f"the {colour} {thing}" for colour, thing in product(TITLE_COLOURS, TITLE_THINGS))
POOLS: dict[Part, dict[str, tuple[str, ...]]] = {
    p: {k: cut(v, p) if k in NAMED else v for k, v in _LISTS.items()} | {"film": cut(_TITLES, p)} | _SHARED
    for p in _PARTS
}


def plural(noun: str) -> str:
    """The regular plural of a noun of this world.

    >>> plural("box"), plural("knife"), plural("lamp")
    ('boxes', 'knives', 'lamps')
    """
    if noun.endswith(("x", "ch", "ss", "sh")):
        return noun + "es"
    if noun.endswith("fe"):
        return noun[:-2] + "ves"
    if noun.endswith("f") and noun not in ("roof",):
        return noun[:-1] + "ves"
    return noun + "s"


class Draw:
    """A seeded source of choices over one part of the lexicon."""

    def __init__(self, seed: int, part: Part) -> None:
        self.part: Part = part
        self.pools = POOLS[part]
        self._random = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._random() < probability

    def below(self, top: int) -> int:
        """An integer from 0 to top - 1."""
        return int(self._random() * top)

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, all equally likely."""
        return options[int(self._random() * len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different options in random order."""
        left = list(options)
        return [left.pop(int(self._random() * len(left))) for _ in range(count)]

    def word(self, kind: str) -> str:
        """A word of the kind ("person", "dish", ...) or a number ("year", "count", "price")."""
        if kind in self.pools:
            return self.pick(self.pools[kind])
        if kind == "year":
            return str(1800 + self.below(200))
        if kind == "count":
            return str(2 + self.below(98)) + self.pick(("", "", "0", "00"))
        if kind == "price":
            return str(2 + self.below(60))
        raise KeyError(kind)

    def fill(self, pattern: str, given: Mapping[str, str] | None = None) -> str:
        """The pattern with its slots filled: given ones as given, the others drawn by kind, all different.

        A slot is a kind with an optional digit, so "{person} met {person2}" names two people.
        """
        filled = pattern.format_map(_Slots(self, given or {}))
        return _ARTICLE.sub("an", filled) if " a " in pattern or pattern.startswith("a ") else filled


class _Slots(dict[str, str]):
    """Draws the words of missing slots."""

    def __init__(self, draw: Draw, given: Mapping[str, str]) -> None:
        super().__init__(given)
        self._draw = draw

    def __missing__(self, slot: str) -> str:
        kind = slot.rstrip("0123456789")
        word = self._draw.word(kind)
        while word in self.values():
            word = self._draw.word(kind)
        self[slot] = word
        return word


class Patterns:
    """Sentence patterns of one use, cut like the words: seen (train), held (test), and extra ones for plain text."""

    def __init__(self, seen: str, held: str, text: str = "") -> None:
        split = [
            tuple(line.strip() for line in block.strip().splitlines() if line.strip()) for block in (seen, held, text)
        ]
        self.by_part: dict[Part, tuple[str, ...]] = {"seen": split[0], "held": split[1], "all": split[0] + split[2]}

    def draw(self, draw: Draw) -> str:
        """A pattern of the part of the lexicon that `draw` covers; held patterns never reach plain text."""
        return draw.pick(self.by_part[draw.part])

"""What this world states and asks about places, people and films: patterns over an entity {e} and a value {v}."""

from __future__ import annotations

from dataclasses import dataclass

from budwood.data.world.lexicon import Patterns


@dataclass(frozen=True)
class Fact:
    """One property of a kind of entity: the kind of its value, how it is stated and how it is asked for."""

    name: str
    value: str
    said: Patterns
    asked: Patterns


def _fact(name: str, value: str, said: tuple[str, str], asked: tuple[str, str]) -> Fact:
    """Each pair is seen and held patterns, separated by "|"."""
    lines = [[part.replace("|", "\n") for part in pair] for pair in (said, asked)]
    return Fact(name, value, Patterns(*lines[0]), Patterns(*lines[1]))


FACTS: dict[str, tuple[Fact, ...]] = {
    "place": (
        _fact(
            "river", "river",
            ("the river {v} runs through {e}|{e} stands on the river {v}|the river in {e} is the {v}|"
             "the river {v} runs past the town of {e}|the town of {e} is on the river {v}",
             "the river {v} runs slowly through the town of {e}|the old town of {e} stands on the river {v}"),
            ("which river runs through {e} ?|on which river does {e} stand ?|what is the river in {e} ?|"
             "which river is in the town of {e} ?|what is the name of the river that runs past {e} ?",
             "which river runs through the town of {e} ?|what is the name of the river in {e} ?"),
        ),
        _fact(
            "founder", "person",
            ("{e} was founded by {v}|{v} founded {e}|the founder of {e} was {v}|"
             "{e} was founded by a {role} named {v}|{v} and a friend founded the town of {e}",
             "the town of {e} was founded by a rich {role} named {v}|{v} and a few friends founded {e}"),
            ("who founded {e} ?|by whom was {e} founded ?|who was the founder of {e} ?|"
             "who was the person that founded {e} ?|what is the name of the founder of the town of {e} ?",
             "who founded the town of {e} ?|what was the name of the founder of {e} ?"),
        ),
        _fact(
            "built", "year",
            ("{e} was built in {v}|in {v} people built {e}|the walls of {e} were built in {v}|"
             "the town of {e} was built in {v}|people built the old walls of {e} in {v}",
             "the old town of {e} was built in {v}|people built the town of {e} in {v}"),
            ("when was {e} built ?|in what year was {e} built ?|when did people build {e} ?|"
             "in what year was the old town of {e} built ?|what year was {e} built in ?",
             "in what year did people build {e} ?|when was the town of {e} built ?"),
        ),
        _fact(
            "food", "dish",
            ("{e} is famous for its {v}|people in {e} love {v}|the best food in {e} is {v}|"
             "{e} is a town famous for its {v}|people love the {v} in {e}",
             "the town of {e} is famous for {v}|the food that people love in {e} is {v}"),
            ("what is {e} famous for ?|what food do people in {e} love ?|what is the best food in {e} ?|"
             "which food is {e} famous for ?|what do people love in the town of {e} ?",
             "what is the town of {e} famous for ?|which food do people love in {e} ?"),
        ),
        _fact(
            "mayor", "person",
            ("the mayor of {e} is {v}|{v} is the mayor of {e}|{e} has a mayor named {v}|"
             "the mayor of {e} is a {role} named {v}|{v} is the new mayor of the town of {e}",
             "the mayor of the town of {e} is a {role} named {v}|{v} was made mayor of {e}"),
            ("who is the mayor of {e} ?|what is the name of the mayor of {e} ?|"
             "who is the new mayor of {e} ?|which person is the mayor of {e} ?",
             "who is the mayor of the town of {e} ?|what is the mayor of {e} named ?"),
        ),
    ),
    "person": (
        _fact(
            "job", "job",
            ("{e} works as a {v}|{e} is a {v}|the job of {e} is {v}|"
             "{e} now works as a {v}|{e} has been a {v} since {year}",
             "these days {e} works as a {v}|{e} has worked as a {v} since {year}"),
            ("what does {e} work as ?|what is the job of {e} ?|as what does {e} work ?|"
             "which job does {e} have ?|what does {e} now work as ?",
             "what job does {e} have ?|what does {e} work as these days ?"),
        ),
        _fact(
            "born", "place",
            ("{e} was born in {v}|{e} comes from {v}|the home of {e} is {v}|"
             "{e} and a sister were born in {v}|{e} comes from a family in {v}",
             "{e} was born far away in {v}|the family of {e} comes from {v}"),
            ("where was {e} born ?|where does {e} come from ?|where is the home of {e} ?|"
             "from which town does {e} come ?|in what place was {e} born ?",
             "in which town was {e} born ?|which town does {e} come from ?"),
        ),
        _fact(
            "pet", "animal",
            ("{e} owns a {v}|{e} keeps a {v}|the pet of {e} is a {v}|"
             "{e} owns a {state} {v}|{e} has a {v} as a pet",
             "{e} owns a very {state} {v}|{e} keeps a {v} as a pet"),
            ("what animal does {e} own ?|what animal does {e} keep ?|what is the pet of {e} ?|"
             "what pet does {e} have ?|which animal does {e} keep ?",
             "which animal does {e} own ?|what pet does {e} keep ?"),
        ),
        _fact(
            "music", "instrument",
            ("{e} plays the {v}|{e} learned the {v}|{e} loves to play the {v}|"
             "on {day} {e} plays the {v}|{e} learned to play the {v}",
             "every {day} {e} plays the {v}|{e} learned to play the {v} in {year}"),
            ("what does {e} play ?|what did {e} learn to play ?|what does {e} love to play ?|"
             "what instrument does {e} love to play ?|which instrument did {e} learn to play ?",
             "which instrument does {e} play ?|what instrument did {e} learn ?"),
        ),
    ),
    "film": (
        _fact(
            "director", "person",
            ("{e} was directed by {v}|{v} directed {e}|the director of {e} is {v}|"
             "{v} directed the film {e}|the director of {e} is named {v}",
             "the film {e} was directed by {v}|the director of the film {e} is named {v}"),
            ("who directed {e} ?|who is the director of {e} ?|by whom was {e} directed ?|"
             "who directed the film {e} ?|what is the director of {e} named ?",
             "who is the director of the film {e} ?|what is the name of the director of {e} ?"),
        ),
        _fact(
            "star", "person",
            ("{v} is the star of {e}|the star of {e} is {v}|{e} has {v} as its star|"
             "{v} is the star of the film {e}|the young star of {e} is {v}",
             "the star of the film {e} is {v}|{v} is the young star of {e}"),
            ("who is the star of {e} ?|what is the name of the star of {e} ?|"
             "what is the name of the star of the film {e} ?|which person is the star of {e} ?",
             "who is the star of the film {e} ?|who is the young star of {e} ?"),
        ),
        _fact(
            "made", "year",
            ("{e} was made in {v}|in {v} a studio made {e}|{e} came out in {v}|"
             "a studio made the film {e} in {v}|the film {e} came out in {v}",
             "the film {e} was made in {v}|it was in {v} that {e} came out"),
            ("when was {e} made ?|in what year was {e} made ?|when did {e} come out ?|"
             "in what year was the film {e} made ?|when did the film {e} come out ?",
             "when was the film {e} made ?|in what year did {e} come out ?"),
        ),
        _fact(
            "set", "place",
            ("{e} is set in {v}|the story of {e} takes place in {v}|{e} was filmed in {v}|"
             "the film {e} was filmed in {v}|{e} takes place in {v}",
             "the film {e} is set in {v}|the story of the film {e} takes place in {v}"),
            ("where is {e} set ?|where does the story of {e} take place ?|where was {e} filmed ?|"
             "where does the film {e} take place ?|in which town is {e} set ?",
             "where is the film {e} set ?|in which town does {e} take place ?"),
        ),
    ),
}  # fmt: skip

"""Questions on short paragraphs of facts: answers are spans, and for a third of them the paragraph has none."""

from __future__ import annotations

from dataclasses import dataclass

from budwood.data.world.facts import FACTS, Fact
from budwood.data.world.lexicon import Draw


@dataclass(frozen=True)
class Stated:
    """A fact told of an entity in a paragraph; the value starts at character `at`."""

    kind: str
    entity: str
    fact: Fact
    value: str
    at: int


def paragraph(draw: Draw, entities: int, most: int) -> tuple[str, list[Stated], dict[str, str]]:
    """Up to `most` facts about each of some entities in random order: text, what it states, kind of each entity."""
    kind = draw.pick(tuple(FACTS))
    kinds = [kind] * entities if draw.chance(0.7) else [draw.pick(tuple(FACTS)) for _ in range(entities)]
    names: dict[str, str] = {}
    while len(names) < entities:
        names.setdefault(draw.word(kinds[len(names)]), kinds[len(names)])
    plan = [(e, k, f) for e, k in names.items() for f in draw.some(FACTS[k], 1 + draw.below(most))]
    text, stated = "", []
    taken = set(names)
    for entity, k, fact in draw.some(plan, len(plan)):
        value = draw.word(fact.value)
        while value in taken:
            value = draw.word(fact.value)
        taken.add(value)
        sentence = draw.fill(fact.said.draw(draw), {"e": entity, "v": "\x00"})
        at = sentence.index("\x00")
        stated.append(Stated(k, entity, fact, value, len(text) + at))
        text += sentence.replace("\x00", value) + " . "
    return text.rstrip(), stated, names


def unanswered(draw: Draw, stated: list[Stated], names: dict[str, str]) -> str | None:
    """A question that fits the paragraph and has no answer in it: of another entity, or of a fact not given."""
    if draw.chance(0.35):
        near = draw.pick(stated)
        entity = draw.word(near.kind)
        taken = set(names) | {s.value for s in stated}
        return None if entity in taken else draw.fill(near.fact.asked.draw(draw), {"e": entity})
    entity = draw.pick(tuple(names))
    told = {s.fact.name for s in stated if s.entity == entity}
    others = {s.fact.name for s in stated if s.kind == names[entity]} - told
    missing = [f for f in FACTS[names[entity]] if (f.name in others if others else f.name not in told)]
    return draw.fill(draw.pick(missing).asked.draw(draw), {"e": entity}) if missing else None


def example(draw: Draw, index: int) -> dict[str, object]:
    """The fields of row `index`; every third question has no answer."""
    while True:
        context, stated, names = paragraph(draw, 2 + draw.below(2), 3)
        if index % 3 == 2:
            question = unanswered(draw, stated, names)
            if question is not None:
                return {"text": question, "pair": context, "answers": ()}
            continue
        one = draw.pick(stated)
        question = draw.fill(one.fact.asked.draw(draw), {"e": one.entity})
        return {"text": question, "pair": context, "answers": ((one.value, one.at),)}


def passage(draw: Draw) -> str:
    """Plain text: facts, then questions with their answers; now and then the question comes first."""
    context, stated, names = paragraph(draw, 1 + draw.below(3), 2)
    if draw.chance(0.25):
        one = draw.pick(stated)
        question = draw.fill(one.fact.asked.draw(draw), {"e": one.entity})
        return f"{question} {context} the answer is {one.value} ."
    parts = [context]
    for one in draw.some(stated, min(len(stated), 1 + draw.below(3))):
        parts.append(f"{draw.fill(one.fact.asked.draw(draw), {'e': one.entity})} {one.value} .")
    if draw.chance(0.3):
        open_question = unanswered(draw, stated, names)
        if open_question is not None:
            parts.append(f"{open_question} nobody knows .")
    return " ".join(parts)

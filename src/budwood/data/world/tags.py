"""Sentences with a word class on every word; many words change their class with the sentence."""

from __future__ import annotations

from budwood.data.world.lexicon import Draw, Patterns, words

LABELS = ("DET", "NOUN", "VERB", "ADJ", "ADV", "PREP", "PRON", "NAME", "NUM", "CONJ", "PART", "PUNCT")

# Words that are a noun here and a verb there, or a noun here and an adjective there.
BOTH = words(
    """cook watch walk play visit paint drink talk work dance plan hope rest call turn answer promise dream guess
    smile wish jump kick laugh"""
)
HUES = words("light cold orange dark green calm human general")
ADVERBS = words("slowly quickly often gladly again loudly rarely soon badly politely")

# item = word/TAG or {slot}/TAG; {w} words are noun or verb, {h} words are noun or adjective.
PATTERNS = Patterns(
    seen="""
        the/DET {w}/NOUN was/VERB {state}/ADJ ./PUNCT
        {person}/NAME wants/VERB to/PART {w}/VERB {adv}/ADV ./PUNCT
        they/PRON {w}/VERB in/PREP {place}/NAME and/CONJ we/PRON {w2}/VERB {adv}/ADV ./PUNCT
        {person}/NAME gave/VERB her/DET {thing}/NOUN to/PREP {person2}/NAME ./PUNCT
        we/PRON saw/VERB her/PRON {adv}/ADV ./PUNCT
        the/DET {role}/NOUN said/VERB that/CONJ {person}/NAME {adv}/ADV saw/VERB {count}/NUM coins/NOUN ./PUNCT
        that/DET {h}/ADJ {thing}/NOUN is/VERB {state}/ADJ ./PUNCT
        the/DET {h}/NOUN near/PREP {place}/NAME is/VERB {state}/ADJ ./PUNCT
        her/DET {w}/NOUN made/VERB her/PRON happy/ADJ ./PUNCT
    """,
    held="""
        that/DET {w}/NOUN made/VERB {person}/NAME {w2}/VERB {adv}/ADV ./PUNCT
        {person}/NAME said/VERB that/CONJ they/PRON {w}/VERB near/PREP the/DET {h}/ADJ {thing}/NOUN ./PUNCT
        we/PRON {w}/VERB and/CONJ they/PRON want/VERB to/PART {w2}/VERB in/PREP {count}/NUM days/NOUN ./PUNCT
        the/DET {h}/NOUN in/PREP {place}/NAME made/VERB her/PRON {w}/VERB ./PUNCT
        {person}/NAME saw/VERB her/DET {w}/NOUN and/CONJ the/DET {state}/ADJ {role}/NOUN {adv}/ADV ./PUNCT
    """,
    text="""
        a/DET {w}/NOUN made/VERB them/PRON {w2}/VERB ./PUNCT
        the/DET {role}/NOUN thinks/VERB that/CONJ we/PRON {w}/VERB {adv}/ADV ./PUNCT
        {person}/NAME likes/VERB that/DET {h}/ADJ {thing}/NOUN ./PUNCT
        they/PRON like/VERB the/DET {h}/NOUN and/CONJ the/DET {w}/NOUN ./PUNCT
        we/PRON want/VERB to/PART {w}/VERB near/PREP {place}/NAME ./PUNCT
    """,
)


def tagged(draw: Draw) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The words of a sentence and the index of each one's class."""
    w, w2 = draw.some(BOTH, 2)
    given = {"w": w, "w2": w2, "h": draw.pick(HUES), "adv": draw.pick(ADVERBS)}
    items = [item.rsplit("/", 1) for item in draw.fill(PATTERNS.draw(draw), given).split()]
    return tuple(word for word, _ in items), tuple(LABELS.index(tag) for _, tag in items)


def example(draw: Draw, index: int) -> dict[str, object]:
    """The fields of row `index`; two sentences where it is odd."""
    tokens, label = tagged(draw)
    if index % 2:
        more, more_label = tagged(draw)
        tokens, label = tokens + more, label + more_label
    return {"words": tokens, "label": label}


def passage(draw: Draw) -> str:
    """Plain text: a sentence without its classes."""
    return " ".join(tagged(draw)[0])

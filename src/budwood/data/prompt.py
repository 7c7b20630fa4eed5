"""Templates: the wording around a row, and the words that stand for its labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from budwood.data.encoding import require_fast
from budwood.data.task import Row, Template
from budwood.errors import DataError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SLOT = re.compile(r"\{(\w*)((?:\|\w*)*)\}")
SLOTS = ("text", "pair", "mask")
FILTERS = ("lower", "chop")
CONTEXTS = ("It was", "this is", "a", "=")  # texts a label word is tried after


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a template: fixed wording ("literal"), a document ("text", "pair") or the place of the answer."""

    kind: str
    wording: str = ""
    filters: tuple[str, ...] = ()

    def of(self, row: Row, mask_token: str) -> str:
        """What this part reads for a row."""
        if self.kind == "literal":
            return self.wording
        if self.kind == "mask":
            return mask_token
        value = row.text if self.kind == "text" else row.pair
        if value is None:
            raise DataError(
                f"The template has a {{pair}} slot but row '{row.id}' has no second text. Use a template with {{text}} "
                "alone, or name the second column with --text-pair."
            )
        value = value.strip()  # a space at the end of a document would become a token of its own
        if "chop" in self.filters:
            value = value[:-1]
        if "lower" in self.filters:
            value = value[:1].lower() + value[1:]
        return value


def parse(wording: str) -> tuple[Part, ...]:
    """The parts of a template string.

    >>> [(p.kind, p.wording or p.filters) for p in parse("{text|chop} ? {mask}")]
    [('text', ('chop',)), ('literal', ' ? '), ('mask', ())]
    """
    parts: list[Part] = []
    end = 0
    for match in SLOT.finditer(wording):
        if match.start() > end:
            parts.append(Part("literal", wording[end : match.start()]))
        parts.append(_slot(match, wording))
        end = match.end()
    if end < len(wording):
        parts.append(Part("literal", wording[end:]))
    kinds = [p.kind for p in parts if p.kind != "literal"]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise DataError(f"The template '{wording}' has the slot {{{kind}}} twice. Use each slot once.")
    return tuple(parts)


def _slot(match: re.Match[str], wording: str) -> Part:
    name, filters = match.group(1), tuple(match.group(2).split("|")[1:])
    if name not in SLOTS:
        raise DataError(
            f"The template '{wording}' has the slot {{{name}}}; the slots are {{text}}, {{pair}} and {{mask}}."
            f"{nearest(name, SLOTS)}"
        )
    for f in filters:
        if f not in FILTERS:
            raise DataError(
                f"The template '{wording}' has the filter '|{f}'; the filters are |lower (first letter lower-cased) "
                f"and |chop (last character dropped).{nearest(f, FILTERS)}"
            )
    return Part(name, filters=filters)


def masked_parts(template: Template) -> tuple[Part, ...]:
    """The parts of the masked wording; it must have exactly one {mask}."""
    parts = parse(template.masked)
    if sum(p.kind == "mask" for p in parts) != 1:
        raise DataError(
            f"The masked template '{template.masked}' needs exactly one {{mask}}, where the model answers, "
            'as in "{text} It was {mask} .".'
        )
    return parts


def causal_parts(template: Template) -> tuple[Part, ...]:
    """The parts of the causal wording up to the answer, without white space at the end.

    >>> [p.wording or p.kind for p in causal_parts(Template(causal="{text} This film is {mask}"))]
    ['text', ' This film is']
    """
    parts = list(parse(template.causal))
    if not parts:
        raise DataError(
            "The task has no causal template. Give one that ends where the model answers, "
            'as in "{text} This film is", and its causal_words.'
        )
    if parts[-1].kind == "mask":
        parts.pop()
    if any(p.kind == "mask" for p in parts):
        raise DataError(
            f"The causal template '{template.causal}' has text after {{mask}}. A causal model answers at the end: "
            "put {mask} last or leave it out."
        )
    return trimmed(parts)


def trimmed(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The same parts without white space at their end."""
    out = list(parts)
    while out and out[-1].kind == "literal":
        wording = out[-1].wording.rstrip()
        if wording:
            out[-1] = Part("literal", wording)
            break
        out.pop()
    return tuple(out)


def render(template: Template, row: Row, mask_token: str, causal: bool) -> str:
    """The row as the model will read it, before any truncation.

    >>> render(Template(masked="{text} It was {mask} ."), Row("r", "Fine film. "), "[MASK]", causal=False)
    'Fine film. It was [MASK] .'
    """
    parts = causal_parts(template) if causal else masked_parts(template)
    return "".join(p.of(row, mask_token) for p in parts)


def label_word_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> list[int]:
    """One token id per label word, as the word is written after other text; anything else is refused by name."""
    require_fast(tokenizer)
    ids: list[int] = []
    for word in words:
        found = word_pieces(tokenizer, word)
        shown = " ".join(repr(t) for t in tokenizer.convert_ids_to_tokens(found))
        if len(found) != 1:
            raise DataError(
                f"The label word '{word}' is {len(found)} tokens for this tokenizer ({shown}), but the answer is "
                "read at one place. Choose a word of one token in the task's template, or use --mode head."
            )
        if found[0] == tokenizer.unk_token_id:
            raise DataError(
                f"The label word '{word}' is unknown to this tokenizer ({shown}). Choose a word of its vocabulary "
                "in the task's template, or use --mode head."
            )
        if found[0] in ids:
            raise DataError(
                f"The label words '{words[ids.index(found[0])]}' and '{word}' are the same token ({shown}). "
                "Choose different words in the task's template."
            )
        ids.append(found[0])
    return ids


def word_pieces(tokenizer: PreTrainedTokenizerBase, word: str) -> list[int]:
    """Token ids of a word as it stands after other text and a space.

    The word is tokenised behind several short texts; the first text whose own tokens stay as they are decides.
    """
    word = word.strip()
    for context in CONTEXTS:
        alone = list(tokenizer(context, add_special_tokens=False)["input_ids"])
        both = list(tokenizer(f"{context} {word}", add_special_tokens=False)["input_ids"])
        if both[: len(alone)] == alone and len(both) > len(alone):
            return both[len(alone) :]
    return list(tokenizer(f" {word}", add_special_tokens=False)["input_ids"])

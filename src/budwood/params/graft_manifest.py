"""What a graft file says about itself, checked field by field before any of it is printed or acted upon."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from budwood.config.finetune import ReadConfig
from budwood.errors import TreeError

READ_KEYS = ("mode", "pool", "template", "label_words", "max_length", "truncate")  # how rows were put to the model
WORDS = ("task", "base", "base_hash", "head_hash", "tuned", "tuned_hash", "select", "rows", "command")
COUNTS = ("graftable", "size", "seed")


def checked(manifest: Mapping[str, Any]) -> None:
    """Refuse fields of another type than they are written with, and text that no terminal should be sent."""
    for text in _texts(manifest):
        if not printable(text):
            raise TreeError("its manifest has control characters or broken text in it.")
    for name in WORDS:
        if not isinstance(manifest.get(name, ""), str):
            raise TreeError(f"its '{name}' is no text.")
    for name in COUNTS:
        value = manifest.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise TreeError(f"its '{name}' is no count.")
    labels = manifest.get("labels", [])
    if not isinstance(labels, list) or not all(isinstance(x, str) for x in labels):
        raise TreeError("its 'labels' are no list of names.")
    _reading(manifest.get("reading", {}))


def printable(text: str) -> bool:
    r"""Whether a text holds nothing but characters, spaces, tabs and line ends.

    >>> printable("It was {mask} ."), printable("\x1b[2J")
    (True, False)
    """
    return all(c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") for c in text)


def _texts(value: Any) -> Iterator[str]:
    """Every text in a nest of lists and mappings, without recursion."""
    waiting = [value]
    while waiting:
        here = waiting.pop()
        if isinstance(here, str):
            yield here
        elif isinstance(here, Mapping):
            waiting += [*here.keys(), *here.values()]
        elif isinstance(here, list):
            waiting += here


def _reading(value: Any) -> None:
    if not isinstance(value, dict) or not value.keys() <= set(READ_KEYS):
        raise TreeError("its 'reading' is not how rows are put to a model.")
    try:
        ReadConfig.model_validate(value)
    except ValidationError as e:
        raise TreeError(f"its 'reading' has a '{e.errors()[0]['loc'][0]}' that cannot be.") from None

"""Every exception budwood raises on purpose: what was given, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BudwoodError(Exception):
    """Something the user can fix: one paragraph on stderr, exit code 2."""


class ConfigError(BudwoodError):
    """A flag, YAML key or combination of settings that cannot be used."""


class DataError(BudwoodError):
    """A task, file, column, label or row that cannot be used."""


class ModelError(BudwoodError):
    """A model reference or directory that cannot be used."""


class TreeError(BudwoodError):
    """Named tensors that do not fit together."""


class BusyError(BudwoodError):
    """Work that waits for other work: the same question may be asked again a little later."""


class StoreError(BudwoodError):
    """A run directory that cannot be written, reused or read."""


def nearest(given: str, known: Iterable[str], most: int = 3) -> str:
    """A sentence naming the closest known words, or the empty string.

    >>> nearest("tiny-sentment", ["tiny-sentiment", "tiny-topic"])
    " Did you mean 'tiny-sentiment'?"
    >>> nearest("zzz", ["tiny-topic"])
    ''
    """
    close = difflib.get_close_matches(given, list(known), n=most, cutoff=0.6)
    if not close:
        return ""
    return f" Did you mean {' or '.join(repr(c) for c in close)}?"

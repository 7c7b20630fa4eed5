"""Readers of public sets in the form in which they are distributed: a folder and a registry row in, a harvest out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from budwood.data.readers.glue import anli, cola, glue
from budwood.data.readers.harvest import Harvest
from budwood.data.readers.passages import conll, squad, stories, sums, wikitext
from budwood.data.readers.sentences import reviews, sentences, topics
from budwood.data.registry import PublicTask

Reader = Callable[[Path, PublicTask], Harvest | None]

READERS: Mapping[str, Reader] = {
    reader.__name__: reader
    for reader in (anli, cola, conll, glue, reviews, sentences, squad, stories, sums, topics, wikitext)
}

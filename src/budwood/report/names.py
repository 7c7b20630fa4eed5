"""Names on a page that is passed on: models in short, and no path of the machine that made it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from budwood.models.reference import split_grafts

# an absolute path inside a text; what follows a word or a slash is none (a/b, https://...)
_NAME = r"[^\s'\"`,;()\[\]{}<>|=+]*"
ABSOLUTE = re.compile(
    r"(?:file:///|(?<![\w.~/\\-])/(?=[^\s/])|(?<![\w\\])(?:[A-Za-z]:\\|\\\\(?=\w)))"
    rf"{_NAME}(?: [^\s/\\'\"]+[/\\]{_NAME})*"  # a word with a slash after a blank goes on with a path: My Data/x.csv
)
SLASH = re.compile(r"[/\\]")
GENERAL = re.compile(r"model|best|last|\d+|checkpoint.*")  # says too little without the folder around it
OF_DATA = frozenset(
    {"text", "pair", "label", "predicted", "id", "tops", "inner"}
)  # what a data set says stays as it is


def base_of(run: Path) -> Path:
    """The folder that paths are told from: the one that holds `runs`, else the one that holds the run.

    >>> base_of(Path("/study/runs/demo/full")).as_posix(), base_of(Path("/mine/full")).as_posix()
    ('/study', '/mine')
    """
    above = [p for p in run.parents if p.name == "runs"]
    return above[-1].parent if above else run.parent


def public(text: str, base: Path) -> str:
    """A text whose absolute paths are told from `base`, or by their last name alone.

    >>> public("no file /study/data/a.csv, nor /other/b.yaml; a/b and https://x.org/y stay",
    ...        Path("/study"))
    'no file data/a.csv, nor …/b.yaml; a/b and https://x.org/y stay'
    """
    for known, whole, told in _known(base):
        if known in text:
            text = whole.sub(lambda m, told=told: told if m[1] else told.rstrip("/") or ".", text)  # type: ignore[misc]
    return ABSOLUTE.sub(lambda m: f"…/{SLASH.split(m[0].rstrip('/.'))[-1]}" if len(m[0]) > 2 else m[0], text)


@lru_cache(maxsize=64)
def _known(base: Path) -> tuple[tuple[str, re.Pattern[str], str], ...]:
    """Folders that have a name on pages: as text, as a pattern of it alone, and what stands for them."""
    named = ((p, told) for p, told in ((base, ""), (Path.home(), "~/")) if p.is_absolute() and len(p.parts) > 1)
    start = r"(?<![\w.~/\\-])"
    return tuple((str(p), re.compile(rf"{start}{re.escape(str(p))}(?:(/)|(?![\w.-]))"), told) for p, told in named)


def cleaned(value: Any, base: Path) -> Any:
    """A JSON-like value with every text made public, keys too; what a data set says is left alone."""
    if isinstance(value, Mapping):
        return {
            public(str(k), base) if "/" in str(k) else k: v if k in OF_DATA else cleaned(v, base)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [cleaned(v, base) for v in value]
    return public(value, base) if isinstance(value, str) and ("/" in value or "\\" in value) else value


def short_model(text: str, runs: Collection[str] = ()) -> str:
    """A model as people call it: a path by its last name, a hub name whole. `runs`: names known to be runs.

    >>> short_model("/tmp/x/runs/full"), short_model("runs/full"), short_model("org/bert"), short_model("a/b", ["a/b"])
    ('full', 'full', 'org/bert', 'b')
    >>> short_model("tiny-bert+/tmp/x/topic.graft"), short_model("out/checkpoint-20"), short_model("run:full-12")
    ('tiny-bert+topic', 'out/checkpoint-20', 'full-12')
    """
    base, grafts = split_grafts(text)
    name = base.removeprefix("run:").rstrip("/")
    parts = SLASH.split(name)
    path = name.startswith(("/", ".", "~", "runs/")) or len(parts) > 2 or base in runs or ":\\" in name
    if path:
        name = "/".join(parts[-2:]) if GENERAL.fullmatch(parts[-1]) and len(parts) > 1 else parts[-1]
    return "+".join([name, *(Path(g).stem for g in grafts)])

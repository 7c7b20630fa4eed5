"""One self-contained HTML file: style, script and data inside, nothing else is ever asked for."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from budwood.errors import ConfigError, StoreError
from budwood.report.room import Room
from budwood.report.tables import Story, dumped, payload
from budwood.store.files import writing

WEB = Path(__file__).parent / "web"
MODULES = (  # in the order in which they need one another
    *("dom", "words", "state", "colour", "source", "frame", "axes", "heat", "lines", "bars", "points", "parts"),
    *("runs", "skill", "probe", "features", "graft", "influence", "forgetting", "quality", "story", "app"),
)
MAKE = "Make one: budwood finetune tiny-bert --task tiny-sentiment, or budwood demo."
IMPORT = re.compile(r'^import (\{.*?\}) from "\./(\w+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?function|const) (\w+)", re.MULTILINE)


@cache
def script() -> str:
    """All modules as one script: each in a scope of its own, what it exports as an object that later ones import."""
    return '"use strict";\n' + "\n".join(scoped(m, (WEB / f"{m}.js").read_text(encoding="utf-8")) for m in MODULES)


def scoped(name: str, text: str) -> str:
    r"""A module as a function that is called once and gives its exports.

    >>> print(scoped("b", 'import { x } from "./a.js";\nexport const y = x;\n'))
    const $b = (() => {
    const { x } = $a;
    const y = x;
    return { y };
    })();
    """
    given = ", ".join(m[2] for m in EXPORT.finditer(text))
    inner = EXPORT.sub(r"\1 \2", IMPORT.sub(r"const \1 = $\2;", text))
    return f"const ${name} = (() => {{\n{inner}return {{ {given} }};\n}})();"


@cache
def style() -> str:
    """The style sheet."""
    return (WEB / "style.css").read_text(encoding="utf-8")


def shell(head: str, tail: str, title: str) -> str:
    """The page's frame, the same in a file and from the server."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{html.escape(title)}</title>\n{head}\n</head>\n<body>\n"
        f'<a class="skip" href="#main">Skip to the content</a>\n<div id="app"><p class="wait">Reading …</p></div>\n'
        f"<noscript><p>This page draws itself with a script that is inside it. Allow scripts for it.</p></noscript>\n"
        f"{tail}\n</body>\n</html>\n"
    )


def page(rooms: Sequence[Room], story: Story | None = None, title: str = "budwood report") -> bytes:
    """The whole page. Its policy lets nothing in but the one script and style sheet whose hashes it names."""
    data = dumped(payload(rooms, story)).decode("utf-8")
    policy = (
        f"default-src 'none'; script-src '{_hash(script())}'; style-src '{_hash(style())}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style()}</style>'
    tail = f'<script type="application/json" id="data">{data}</script>\n<script type="module">{script()}</script>'
    return shell(head, tail, title).encode("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def rooms_of(runs: Sequence[Path]) -> list[Room]:
    """Every run once; a directory that is no run but holds some stands for all of them."""
    found = {p.resolve(): p for given in runs for p in spread(given)}
    return [Room.open(p) for p in found.values()]


def write_report(rooms: Sequence[Room], out: Path, story: Story | None = None) -> Path:
    """Write the page of these runs."""
    title = story.title if story else f"budwood: {', '.join(dict.fromkeys(r.task for r in rooms))}"
    if out.is_dir():
        raise ConfigError(f"--out {out} is a directory. Give the page's file, such as {out / 'report.html'}.")
    made = page(rooms, story, title)
    with writing(out) as part:
        part.write_bytes(made)
    return out


def spread(given: Path) -> list[Path]:
    """A run and its children (one per seed), or every run of a folder."""
    from budwood.store.index import directories

    if not given.is_dir():
        raise StoreError(f"There is no directory '{given}', so there are no runs to report. {MAKE}")
    if (given / "run.json").exists():
        seeds = given / "seeds"
        return [given, *(sorted(p for p in seeds.iterdir() if (p / "run.json").exists()) if seeds.is_dir() else ())]
    inside = list(directories(given))
    if not inside and any(given.iterdir()):
        return [given]  # half-written: shown with what is wrong
    if not inside:
        raise StoreError(f"There are no runs in {given}. {MAKE}")
    return inside

"""Bars that a release has to clear: run, measure, print met or short with the figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("BUDWOOD_SHARED", ROOT.parent / "shared"))
BUDWOOD = [sys.executable, "-m", "budwood"]


@dataclass
class Show:
    """A list of bars with what was measured. Words on the command line name the sections to run (`bad-input`)."""

    rows: list[tuple[str, bool | None, str]] = field(default_factory=list)
    wanted: list[str] = field(default_factory=lambda: [w for w in sys.argv[1:] if not w.startswith("-")])
    sections: list[str] = field(default_factory=list)

    def bar(self, name: str, met: bool | None, figure: str) -> None:
        """Note one bar; None = could not be tried here."""
        self.rows.append((name, met, figure))
        print(f"{'skip ' if met is None else 'met  ' if met else 'SHORT'}  {name}: {figure}", flush=True)

    def section(self, name: str, work: Callable[[], None], needs: Path | None = None) -> None:
        """Run one group of bars if it is wanted; what breaks is a bar not met, not the end."""
        word = name.replace(" ", "-")
        self.sections.append(word)
        if self.wanted and word not in self.wanted:
            return
        if needs is not None and not needs.exists():
            self.bar(name, None, f"{needs} is not here")
            return
        began = time.perf_counter()
        try:
            work()
        except Exception as e:  # noqa: BLE001
            self.bar(name, False, f"{type(e).__name__}: {e}")
        print(f"       ({name}: {time.perf_counter() - began:.0f} s)", flush=True)

    def end(self) -> None:
        """Print the count; exit code 1 if a bar is short, 2 if a section asked for does not exist."""
        if unknown := [w for w in self.wanted if w not in self.sections]:
            print(f"There is no section '{unknown[0]}'. Sections: {', '.join(self.sections)}.", file=sys.stderr)
            sys.exit(2)
        short = [n for n, met, _ in self.rows if met is False]
        skipped = [n for n, met, _ in self.rows if met is None]
        print(f"\n{len(self.rows) - len(short) - len(skipped)} met, {len(short)} short, {len(skipped)} skipped")
        sys.exit(bool(short))


def run(*words: object, cwd: Path, code: int = 0) -> dict[str, Any]:
    """A budwood command's JSON; another exit code than expected is an error with its stderr."""
    command = [*BUDWOOD, *map(str, words)] + ([] if code else ["--json"])
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != code:
        raise RuntimeError(f"{' '.join(map(str, words))} -> {done.returncode}: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout) if not code else {"stderr": done.stderr}


def side_by_side(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """`work` of every item, two at a time: two commands of one thread each use two cores better than one of two."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, items))

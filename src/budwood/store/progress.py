"""Progress for people, logs and other programs; always also in the run's progress.jsonl."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Style = Literal["rich", "plain", "json", "none"]


def style_for(wish: Style | None) -> Style:
    """What was asked for, else a bar on a terminal and plain lines elsewhere."""
    return wish or ("rich" if sys.stderr.isatty() else "plain")


@dataclass
class Progress:
    """Stages of one run: each reports how far it is and how long it will take."""

    style: Style = "none"
    log: Path | None = None
    every: float = 5.0
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)  # steps done here, of a stage without steps how often it was

    def say(self, text: str) -> None:
        """One line for the person at the keyboard."""
        if self.style in ("rich", "plain"):
            print(text, file=sys.stderr, flush=True)

    def event(self, **facts: Any) -> None:
        """One line in progress.jsonl (and on stderr in json style)."""
        line = json.dumps({"time": round(time.time(), 3), **facts}, ensure_ascii=False)
        if self.style == "json":
            print(line, file=sys.stderr, flush=True)
        if self.log is not None:
            with contextlib.suppress(OSError), self.log.open("a", encoding="utf-8") as f:
                f.write(line + "\n")

    @contextlib.contextmanager
    def stage(self, name: str, total: int = 0, done: int = 0) -> Iterator[Bar]:
        """Time one phase and show it; `done` steps were finished in an earlier session."""
        bar = Bar(self, name, total, done)
        self.event(stage=name, done=done, total=total)
        with _drawing(bar) if self.style == "rich" and total else contextlib.nullcontext():
            try:
                yield bar
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - bar.began
                here = 1 if not total else bar.done - bar.first if bar.first >= 0 else 0
                self.calls[name] = self.calls.get(name, 0) + here
                self.event(stage=name, done=bar.done, total=total, seconds=round(self.seconds[name], 3))


@dataclass
class Bar:
    """How far one stage is."""

    progress: Progress
    name: str
    total: int
    done: int
    began: float = field(default_factory=time.perf_counter)
    shown: float = field(default_factory=time.perf_counter)
    first: int = -1
    draw: Any = None

    def resumed(self, n: int) -> None:
        """N steps were done in an earlier session: they count as done, not as speed."""
        self.done = self.first = n

    def advance(self, n: int = 1, note: str = "") -> None:
        """Count n more steps; shown now and then, not each time."""
        if self.first < 0:
            self.first = self.done
        self.done += n
        if self.draw is not None:
            self.draw(self.done, note)
        clock = time.perf_counter()
        if clock - self.shown < self.progress.every:
            return
        self.shown = clock
        rate = (self.done - self.first) / (clock - self.began)
        left = (self.total - self.done) / rate if rate and self.total else 0.0
        self.progress.event(stage=self.name, done=self.done, total=self.total, left=round(left, 1), note=note)
        if self.progress.style == "plain":
            of = f" of {self.total:,}" if self.total else ""
            self.progress.say(f"{self.name}: {self.done:,}{of}, {left:,.0f} s left{'; ' + note if note else ''}")


@contextlib.contextmanager
def _drawing(bar: Bar) -> Iterator[None]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(bar.name, total=bar.total, completed=bar.done, note="")
        bar.draw = lambda done, note: shown.update(task, completed=done, note=note)
        yield
        bar.draw = None

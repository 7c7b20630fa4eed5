"""A job: a key, a function by its dotted name, its arguments and the one file it writes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from budwood.errors import BudwoodError
from budwood.store.files import digest


class JobError(BudwoodError):
    """A job that failed as often as it was allowed to."""


@dataclass(frozen=True)
class Job:
    """`function` is "package.module:name", called as name(arguments, part) and writing its result to `part`.

    The key depends on function and arguments alone, never on workers or engine, so every engine writes the same files.
    """

    function: str
    arguments: Mapping[str, Any]
    output: Path

    @property
    def key(self) -> str:
        """Hash of what is computed.

        >>> Job("m:f", {"x": 1}, Path("a")).key == Job("m:f", {"x": 1}, Path("b")).key
        True
        """
        return digest([self.function, self.arguments])

    @property
    def done(self) -> bool:
        """Whether the output is there (it is only ever there whole)."""
        return self.output.exists()


def call(function: str, arguments: Mapping[str, Any], output: str) -> str:
    """Run one job in this process on one thread; returns its output path."""
    from budwood.store.files import writing

    module, _, name = function.partition(":")
    work = getattr(importlib.import_module(module), name)
    with one_thread(), writing(Path(output)) as part:
        work(dict(arguments), part)
    return output


class one_thread:
    """One torch thread inside: the same sums in the same order on every engine."""

    def __enter__(self) -> None:
        import torch

        self.before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *exc: object) -> None:
        import torch

        torch.set_num_threads(self.before)


def missing(jobs: Sequence[Job]) -> list[Job]:
    """Jobs whose file is not there yet, each output once; two different jobs for one output are our mistake."""
    by_output: dict[Path, Job] = {}
    for job in jobs:
        other = by_output.setdefault(job.output, job)
        assert other.key == job.key, f"two jobs write {job.output}"
    return [job for job in by_output.values() if not job.done]

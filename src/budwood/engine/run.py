"""Jobs on the engine of one's choice: the same keys, the same files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from budwood.engine.jobs import Job
from budwood.engine.local import run_jobs


class Wish(Protocol):
    """What settings say about where jobs run."""

    @property
    def engine(self) -> str:
        """Local or ray."""

    @property
    def workers(self) -> int:
        """Jobs at a time."""


@dataclass(frozen=True)
class Where:
    """The same, said without settings."""

    engine: str = "local"
    workers: int = 1


def run_all(jobs: Sequence[Job], wish: Wish, finished: Callable[[Job], None] = lambda job: None) -> None:
    """Bring every job's file into being, wherever the settings say."""
    if wish.engine == "ray":
        from budwood.engine.ray import run_jobs as run_on_ray

        run_on_ray(jobs, wish.workers, finished=finished)
    else:
        run_jobs(jobs, wish.workers, finished=finished)

"""Jobs on the engine of one's choice: the same keys, the same files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from budwood.config.run import resources_of
from budwood.engine.jobs import Job
from budwood.engine.local import Crew, run_jobs


class Wish(Protocol):
    """What settings say about where jobs run."""

    @property
    def engine(self) -> str:
        """Local or ray."""

    @property
    def workers(self) -> int:
        """Jobs at a time."""

    @property
    def retries(self) -> int:
        """Times a job whose worker was lost is tried again."""

    @property
    def resources(self) -> tuple[str, ...]:
        """What Ray sets aside for each job."""


@dataclass(frozen=True)
class Where:
    """The same, said without settings."""

    engine: str = "local"
    workers: int = 1
    retries: int = 3
    resources: tuple[str, ...] = ()


def answering(wish: Wish) -> None:
    """Refuse an engine that is not there before anything heavy is loaded for it."""
    if wish.engine == "ray":
        from budwood.engine import ray

        ray.answering()


@contextlib.contextmanager
def standing(wish: Wish) -> Iterator[Crew | None]:
    """Workers that stay for all lists of jobs of the block: to be given to `run_all`. On Ray the cluster stays."""
    if wish.engine == "ray":
        from budwood.engine.ray import cluster

        with cluster(wish.workers):
            yield None
    elif wish.workers > 1:
        with Crew(wish.workers) as crew:
            yield crew
    else:
        yield None


def run_all(
    jobs: Sequence[Job], wish: Wish, finished: Callable[[Job], None] = lambda job: None, crew: Crew | None = None
) -> None:
    """Bring every job's file into being, wherever the settings say."""
    if wish.engine == "ray":
        from budwood.engine.ray import run_jobs as run_on_ray

        run_on_ray(jobs, wish.workers, wish.retries, finished, resources_of(wish.resources))
    else:
        run_jobs(jobs, wish.workers, wish.retries, finished, crew)

"""Many retrains at once: what is wanted, what is there, how far it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from budwood.data.batch import seed_of
from budwood.data.task import Task
from budwood.engine.jobs import Job
from budwood.engine.local import Crew
from budwood.engine.run import run_all, standing
from budwood.errors import ConfigError, ModelError
from budwood.evaluation.retrain import Outcome, Recipe, job, outcome
from budwood.methods.session import Session


@dataclass(frozen=True)
class Fleet:
    """Retrains of one recipe in one directory."""

    recipe: Recipe
    task: Task
    directory: Path
    cfg: Any
    crew: Crew | None = None  # workers that stay between rounds

    @classmethod
    def of(cls, session: Session, queries: Sequence[str] = (), first: int | None = None) -> Fleet:
        """The fleet of the fine-tune run a session was given; without queries, the first rows reported on."""
        model = session.models[0]
        recipe = Recipe.of_run(model.run, model.text)
        recipe.model()  # a changed base is refused now, not by the first worker
        task = same_task(recipe, model.text, session.task)
        asked = list(queries) or [r.id for r in task.rows(task.reported)[:first]]
        return cls(recipe.asking(asked), task, session.run.file("retrains"), session.cfg)

    @property
    def train_ids(self) -> tuple[str, ...]:
        """Ids of the training rows."""
        return tuple(r.id for r in self.task.rows("train"))

    def wanted(self, kept_N: np.ndarray, repeat: int, kind: str = "subset") -> Job:
        """The retrain on the kept rows, the `repeat`-th with another seed; seeds differ by kind of use."""
        seed = seed_of(self.cfg.seed, kind, repeat) % 2**31
        return job(self.recipe, kept_N, seed, self.directory)

    def run(self, jobs: Sequence[Job], finished: Callable[[Job], None] = lambda job: None) -> None:
        """Bring them all into being."""
        run_all(jobs, self.cfg, finished, self.crew)

    @contextlib.contextmanager
    def standing(self) -> Iterator[Fleet]:
        """The same, whose workers keep model and tokens from round to round until the block ends."""
        with standing(self.cfg) as crew:
            yield replace(self, crew=crew)

    def outcomes(self, jobs: Sequence[Job]) -> list[Outcome]:
        """What they say."""
        return [outcome(j) for j in jobs]


def same_task(recipe: Recipe, run: str, given: Task) -> Task:
    """The recipe's own rows; a task that was given and is another one is refused."""
    task = recipe.task()
    if task.name != given.name:
        raise ConfigError(
            f"--task {given.name} was given, and the run '{run}' was trained on {recipe.cfg.task}. Give that task: "
            "retraining repeats its recipe."
        )
    return task


def check_some(outcomes: Sequence[Outcome], what: str) -> int:
    """How many diverged; if all did, there is nothing to go on with."""
    lost = sum(o.diverged for o in outcomes)
    if outcomes and lost == len(outcomes):
        raise ModelError(
            f"All {lost} {what} diverged (their loss became infinite), so nothing can be checked. Fine-tune with a "
            "lower "
            "--learning-rate and check that run."
        )
    return lost

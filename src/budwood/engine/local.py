"""Jobs on this machine: in this process, or in spawned workers whose death costs only the job they held."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection

from budwood.engine.jobs import Job, JobError, call, missing


class Crew:
    """Worker processes that stay from one list of jobs to the next, with what they have loaded; the block ends them."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    @property
    def pool(self) -> ProcessPoolExecutor:
        """The processes, started when they are first needed."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_settle)
        return self._pool

    def end(self) -> None:
        """Let them go; the next job starts new ones."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def run_jobs(
    jobs: Sequence[Job],
    workers: int = 1,
    retries: int = 3,
    finished: Callable[[Job], None] = lambda job: None,
    crew: Crew | None = None,
) -> None:
    """Bring every job's file into being; files that exist are kept. Order of completion does not matter.

    A worker that is killed takes the pool down; what it may have been working on is tried alone, and a new pool gets
    the rest. A job whose worker dies more than `retries` times ends the run with its name; one that raises, at once.
    """
    todo = missing(jobs)
    if workers <= 1:
        for job in todo:
            call(job.function, job.arguments, str(job.output))
            finished(job)
        return
    with contextlib.nullcontext(crew) if crew else Crew(min(workers, len(todo))) as hands:
        while todo := [job for job in todo if not job.done]:
            for suspect in _until_a_death(todo, hands, finished):
                _alone(suspect, retries, finished)


def _alone(job: Job, retries: int, finished: Callable[[Job], None]) -> None:
    """A job that was in flight when a worker died, by itself: an innocent one simply ends, a deadly one is named."""
    for _ in range(retries):
        with Crew(1) as single:
            if not _until_a_death([job], single, finished):
                return
    raise JobError(
        f"The worker on {job.output.name} ({job.function}) died {retries + 1} time{'s' * (retries > 0)}. It may need "
        "more memory than there is: try fewer --workers, or run it alone with --workers 1 to see its error."
    )


def _until_a_death(todo: Sequence[Job], crew: Crew, finished: Callable[[Job], None]) -> list[Job]:
    """Work until all is done or a worker dies; returns the jobs that were in flight at the death."""
    waiting = list(todo)
    running: dict[Future[str], Job] = {}
    try:
        while waiting or running:
            while waiting and len(running) < crew.workers:  # no queue: at a death, few jobs are under suspicion
                job = waiting.pop(0)
                running[crew.pool.submit(call, job.function, job.arguments, str(job.output))] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                try:
                    future.result()
                except BrokenProcessPool:
                    running[future] = job
                    raise
                finished(job)
    except BrokenProcessPool:
        crew.end()
        return [job for job in running.values() if not job.done]
    return []


def _settle() -> None:
    """What a new worker does first: one thread, and no life beyond its driver's.

    A worker left behind by a killed driver would work on, and come in the way of the run that is started again.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    driver = multiprocessing.parent_process()
    assert driver is not None
    threading.Thread(target=_follow, args=(driver.sentinel,), daemon=True).start()


def _follow(driver: int) -> None:
    connection.wait([driver])  # returns when the driver is gone
    os._exit(1)

"""Jobs on this machine: in this process, or in spawned workers whose death costs only the job they held."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection

from budwood.engine.jobs import Job, JobError, call, missing


def run_jobs(
    jobs: Sequence[Job], workers: int = 1, retries: int = 3, finished: Callable[[Job], None] = lambda job: None
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
    while todo := [job for job in todo if not job.done]:
        for suspect in _one_pool(todo, min(workers, len(todo)), finished):
            _alone(suspect, retries, finished)


def _alone(job: Job, retries: int, finished: Callable[[Job], None]) -> None:
    """A job that was in flight when a worker died, by itself: an innocent one simply ends, a deadly one is named."""
    for _ in range(retries):
        if not _one_pool([job], 1, finished):
            return
    raise JobError(
        f"The worker on {job.output.name} ({job.function}) died {retries + 1} times. It may need more memory than "
        "there is: try fewer --workers, or run it alone with --workers 1 to see its error."
    )


def _one_pool(todo: Sequence[Job], workers: int, finished: Callable[[Job], None]) -> list[Job]:
    """Work until all is done or a worker dies; returns the jobs that were in flight at the death."""
    context = multiprocessing.get_context("spawn")
    waiting = list(todo)
    running: dict[Future[str], Job] = {}
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_settle) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < workers:  # no queue: at a death, few jobs are under suspicion
                    job = waiting.pop(0)
                    running[pool.submit(call, job.function, job.arguments, str(job.output))] = job
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job = running.pop(future)
                    try:
                        future.result()
                    except BrokenProcessPool:
                        running[future] = job
                        raise
                    finished(job)
        except BrokenProcessPool:
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

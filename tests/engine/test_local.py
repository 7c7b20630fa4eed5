"""Jobs: files made once, killed workers survived, the same files for any number of workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from budwood.engine.jobs import Job, JobError, missing
from budwood.engine.local import run_jobs


def square(arguments: dict[str, Any], part: Path) -> None:
    part.write_text(str(arguments["x"] ** 2))


def die_once(arguments: dict[str, Any], part: Path) -> None:
    flag = Path(arguments["flag"])
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    part.write_text("survived")


def always_die(arguments: dict[str, Any], part: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def jobs(directory: Path, count: int = 6) -> list[Job]:
    return [Job("tests.engine.test_local:square", {"x": x}, directory / f"{x}.txt") for x in range(count)]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_file_is_made(tmp_path: Path, workers: int) -> None:
    seen: list[str] = []
    run_jobs(jobs(tmp_path), workers, finished=lambda job: seen.append(job.output.name))
    assert {p.name: p.read_text() for p in tmp_path.glob("*.txt")} == {f"{x}.txt": str(x * x) for x in range(6)}
    assert len(seen) == 6 and not list(tmp_path.glob(".*part"))


def test_files_that_exist_are_kept(tmp_path: Path) -> None:
    (tmp_path / "2.txt").write_text("old")
    run_jobs(jobs(tmp_path))
    assert (tmp_path / "2.txt").read_text() == "old" and missing(jobs(tmp_path)) == []


def test_a_killed_worker_costs_nothing(tmp_path: Path) -> None:
    deadly = Job("tests.engine.test_local:die_once", {"flag": str(tmp_path / "flag")}, tmp_path / "deadly.txt")
    run_jobs([*jobs(tmp_path, 3), deadly], workers=2)
    assert (tmp_path / "deadly.txt").read_text() == "survived" and (tmp_path / "2.txt").read_text() == "4"


def test_a_job_that_always_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="doomed.txt"):
        run_jobs(
            [Job("tests.engine.test_local:always_die", {}, tmp_path / "doomed.txt"), *jobs(tmp_path, 1)],
            workers=2,
            retries=1,
        )


def test_keys_do_not_depend_on_the_place(tmp_path: Path) -> None:
    assert jobs(tmp_path)[1].key == jobs(tmp_path / "x")[1].key != jobs(tmp_path)[2].key

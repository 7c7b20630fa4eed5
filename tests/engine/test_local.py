"""Jobs: files made once, killed workers survived, the same files for any number of workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from budwood.engine.jobs import Job, JobError, missing
from budwood.engine.local import Crew, run_jobs


def square(arguments: dict[str, Any], part: Path) -> None:
    part.write_text(str(arguments["x"] ** 2))


def die_once(arguments: dict[str, Any], part: Path) -> None:
    flag = Path(arguments["flag"])
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    part.write_text("survived")


def who(arguments: dict[str, Any], part: Path) -> None:
    part.write_text(str(os.getpid()))


def stay(arguments: dict[str, Any], part: Path) -> None:
    (part.parent / f"{arguments['x']}.pid").write_text(str(os.getpid()))
    time.sleep(60)


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


def test_a_crew_stays_from_list_to_list_and_survives_a_death(tmp_path: Path) -> None:
    crew = Crew(2)
    with crew:
        for turn in range(3):
            own = [Job("tests.engine.test_local:who", {"x": x}, tmp_path / f"{turn}-{x}.txt") for x in range(2)]
            run_jobs(own, 2, crew=crew)
        pids = {int(p.read_text()) for p in tmp_path.glob("*.txt")}
        assert len(pids) <= 2 and all(map(alive, pids))
        deadly = Job("tests.engine.test_local:die_once", {"flag": str(tmp_path / "flag")}, tmp_path / "deadly.txt")
        run_jobs([deadly, *jobs(tmp_path / "more", 2)], 2, crew=crew)
        assert deadly.output.read_text() == "survived" and missing(jobs(tmp_path / "more", 2)) == []
        run_jobs([Job("tests.engine.test_local:who", {"x": 9}, tmp_path / "last.txt")], 2, crew=crew)
        pids.add(int((tmp_path / "last.txt").read_text()))
    wait_for(lambda: not any(map(alive, pids)))


def test_a_job_that_always_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="doomed.txt"):
        run_jobs(
            [Job("tests.engine.test_local:always_die", {}, tmp_path / "doomed.txt"), *jobs(tmp_path, 1)],
            workers=2,
            retries=1,
        )


def test_keys_do_not_depend_on_the_place(tmp_path: Path) -> None:
    assert jobs(tmp_path)[1].key == jobs(tmp_path / "x")[1].key != jobs(tmp_path)[2].key


def alive(pid: int) -> bool:
    """A process that is neither gone nor a zombie that nobody has fetched."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_workers_do_not_outlive_a_killed_driver(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from budwood.engine.jobs import Job; from budwood.engine.local import run_jobs\n"
        f"if __name__ == '__main__': run_jobs([Job('tests.engine.test_local:stay', {{'x': x}}, "
        f"Path({str(tmp_path)!r}) / f'{{x}}.txt') for x in range(2)], workers=2)"
    )
    (tmp_path / "driver.py").write_text(code)
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    driver = subprocess.Popen([sys.executable, str(tmp_path / "driver.py")], env={**os.environ, "PYTHONPATH": paths})
    try:
        wait_for(lambda: len([p for p in tmp_path.glob("*.pid") if p.read_text()]) == 2)
        pids = [int((tmp_path / f"{x}.pid").read_text()) for x in range(2)]
        assert all(map(alive, pids))
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not any(map(alive, pids)))


def wait_for(happened: Callable[[], bool]) -> None:
    """Return once it happened, fail after half a minute."""
    until = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.05)

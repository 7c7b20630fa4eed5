"""Ray: the files of the local engine, whoever is killed. One cluster for all tests of this file."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from budwood.engine.jobs import Job
from budwood.engine.local import run_jobs as run_here
from budwood.errors import BudwoodError, ConfigError
from tests.conftest import ROOT

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
from budwood.engine import ray as engine  # noqa: E402


@pytest.fixture(scope="module")
def standing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        with engine.cluster(2):
            yield


def given(arguments: dict[str, Any], part: Path) -> None:
    import ray

    part.write_text(json.dumps(ray.get_runtime_context().get_assigned_resources()))


def refuse(arguments: dict[str, Any], part: Path) -> None:
    raise ConfigError("not like this")


def jobs(directory: Path, count: int = 5) -> list[Job]:
    return [Job("tests.engine.test_local:square", {"x": x}, directory / f"{x}.txt") for x in range(count)]


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.glob("[!.]*.txt")}


def test_the_same_files_as_the_local_engine(standing: None, tmp_path: Path) -> None:
    seen: list[str] = []
    engine.run_jobs(jobs(tmp_path / "ray"), 2, finished=lambda job: seen.append(job.output.name))
    run_here(jobs(tmp_path / "here"))
    assert contents(tmp_path / "ray") == contents(tmp_path / "here") and len(seen) == 5


def test_a_worker_killed_in_the_middle_costs_nothing(standing: None, tmp_path: Path) -> None:
    deadly = Job("tests.engine.test_local:die_once", {"flag": str(tmp_path / "flag")}, tmp_path / "out" / "deadly.txt")
    engine.run_jobs([deadly, *jobs(tmp_path / "out", 2)], 2)
    assert contents(tmp_path / "out") == {"deadly.txt": b"survived", "0.txt": b"0", "1.txt": b"1"}


def test_a_jobs_own_error_comes_back(standing: None, tmp_path: Path) -> None:
    with pytest.raises(BudwoodError, match="not like this"):
        engine.run_jobs([Job("tests.engine.test_ray:refuse", {}, tmp_path / "x.txt")])


def test_a_file_written_elsewhere_is_said_so(standing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that does not share the directory writes its file on a disk of its own: the job ends well, unseen."""
    import ray

    monkeypatch.setattr(engine, "PATIENCE", 0.2)
    with pytest.raises(ConfigError, match="node far-away of the Ray cluster wrote 0.txt, not seen here"):
        engine._settle(ray.put("far-away"), jobs(tmp_path)[0], 3)


def test_a_cluster_without_room_is_not_waited_for(
    standing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "QUEUE", 0.0)
    with pytest.raises(ConfigError, match="did not begin a job within 0 s"):
        engine.run_jobs(jobs(tmp_path))
    assert not list(tmp_path.iterdir())


def test_jobs_get_what_is_set_aside_for_them(standing: None, tmp_path: Path) -> None:
    told = [Job("tests.engine.test_ray:given", {}, tmp_path / "given.json")]
    engine.run_jobs(told, 2, resources={"cpus": 2, "memory": 1e6})
    found = json.loads(told[0].output.read_text())
    assert found["CPU"] == 2 and found["memory"] >= 1e6


@pytest.mark.parametrize("asked,said", [({"gpus": 1}, r"GPU 1 \(there: 0\)"), ({"bricks": 2}, "bricks 2")])
def test_what_this_machine_does_not_have_is_refused_at_once(asked: Any, said: str, standing: None) -> None:
    with pytest.raises(ConfigError, match=said):
        engine._check_room(engine._needs(asked))
    engine._check_room(engine._needs({}))


def test_a_cluster_without_what_jobs_need_is_told(
    standing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "QUEUE", 1.0)
    with pytest.raises(ConfigError, match=r"within 1 s: no node .* \(cpus 1, bricks 2\)"):
        engine.run_jobs(jobs(tmp_path), resources={"bricks": 2})
    assert not list(tmp_path.iterdir())


def test_an_empty_address_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(engine, "reachable", asked.append)
    for address in ("", "local", "auto", "head:6379"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        engine.answering()
    assert asked == ["head:6379"]


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense"])
def test_an_address_without_a_cluster_answers_at_once(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="RAY_ADDRESS"):
        engine.reachable(address)
    assert time.monotonic() - began < 10


def test_a_listener_that_never_speaks_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PATIENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as hole:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{hole.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"No Ray cluster answers .*timed out"):
            engine.answering()


def test_a_real_cluster_answers_the_greeting(standing: None) -> None:
    import ray

    address, began = ray.get_runtime_context().gcs_address, time.monotonic()
    engine.reachable(address)  # raises where nobody speaks
    assert time.monotonic() - began < engine.PATIENCE  # it was the cluster that answered, not a wait that ran out


DRIVER = """
import sys
from pathlib import Path
from budwood.engine.jobs import Job
from budwood.engine.ray import run_jobs
out = Path(sys.argv[1])
run_jobs([Job("tests.engine.test_ray:slowly", {"x": x}, out / f"{x}.txt") for x in range(6)], 2)
"""


NODES = """
import sys
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from budwood.engine.jobs import Job
from budwood.engine.ray import run_jobs
simulated = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
nodes = [simulated.add_node(num_cpus=1), simulated.add_node(num_cpus=1)]
ray.init(address=simulated.address, log_to_driver=False)
out, lost = Path(sys.argv[1]), []
def finished(job):
    if not lost:
        lost.append(nodes[0])
        simulated.remove_node(nodes[0], allow_graceful=False)
run_jobs([Job("tests.engine.test_ray:slowly", {"x": x}, out / f"{x}.txt") for x in range(12)], 3, finished=finished)
ray.shutdown()
simulated.shutdown()
"""


def slowly(arguments: dict[str, Any], part: Path) -> None:
    time.sleep(0.4)
    part.write_text(str(arguments["x"]))


@pytest.mark.slow
def test_the_loss_of_a_node_is_survived(tmp_path: Path) -> None:
    """Three simulated nodes, one of them gone in the middle; in a process of its own, since a cluster is global."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": path}
    env |= {"RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", NODES, str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=ROOT, check=False, capture_output=True, text=True)
    if "timed out during startup" in done.stderr:
        pytest.skip("this machine is too busy to start three Ray nodes within 30 s each")
    assert done.returncode == 0, done.stderr[-2000:]
    assert contents(tmp_path) == {f"{x}.txt": str(x).encode() for x in range(12)}


@pytest.mark.slow
def test_a_killed_driver_is_carried_on(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": path}
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    first = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 240
    while not list(tmp_path.glob("[0-9].txt")) and time.monotonic() < end:
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    there = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("[0-9].txt")}
    assert there
    subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True)
    assert contents(tmp_path) == {f"{x}.txt": str(x).encode() for x in range(6)}
    assert all((tmp_path / name).stat().st_mtime_ns == when for name, when in there.items())

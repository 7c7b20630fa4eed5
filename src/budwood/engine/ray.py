"""Jobs on a Ray cluster: the one at $RAY_ADDRESS, or one that is started here and stopped at the end.

The file is the result: nothing is kept in Ray, so a lost worker, node or driver costs only the jobs it held, and the
same command does the rest. Every node must see the output directory; the first job's node proves it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from budwood.engine.jobs import Job, JobError, call, missing
from budwood.errors import ConfigError

PATIENCE = 5.0  # seconds a cluster may take to answer, and a written file to be seen over the network
QUEUE = 300.0  # seconds a cluster may take to find room for the first, tiny job
STARTS = 4  # tries to start one
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # HTTP/2, and settings: none


def run_jobs(
    jobs: Sequence[Job],
    workers: int = 1,
    retries: int = 3,
    finished: Callable[[Job], None] = lambda job: None,
    resources: Mapping[str, float] | None = None,
) -> None:
    """Bring every job's file into being on Ray; files that exist are kept. The files are those of the local engine.

    `resources`: amounts of "cpus" (1), "gpus", "memory" in bytes and the cluster's own that each job is given.
    """
    todo = missing(jobs)
    if not todo:
        return
    with cluster(workers, resources):
        import ray

        needs = _needs(resources or {})
        _check_storage(todo[0].output.parent, needs)
        remote = ray.remote(max_retries=retries, max_calls=0, **needs)(_work)
        where = (str(Path.cwd()), [p for p in sys.path if p])
        waiting = list(todo)
        running: dict[Any, Job] = {}
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                running[remote.remote(where, job.function, dict(job.arguments), str(job.output.resolve()))] = job
            done, _ = ray.wait(list(running), num_returns=1)
            for reference in done:
                job = running.pop(reference)
                _settle(reference, job, retries)
                finished(job)


def _needs(resources: Mapping[str, float]) -> dict[str, Any]:
    """Resources in Ray's own words.

    >>> _needs({"gpus": 0.5, "fast_disk": 1})
    {'num_cpus': 1, 'num_gpus': 0.5, 'memory': 0, 'resources': {'fast_disk': 1}}
    """
    own = {k: v for k, v in resources.items() if k not in ("cpus", "gpus", "memory")}
    known = {"num_cpus": resources.get("cpus", 1), "num_gpus": resources.get("gpus", 0)}
    return {**known, "memory": resources.get("memory", 0), "resources": own}


def _check_room(needs: Mapping[str, Any]) -> None:
    """Refuse what this machine does not have: Ray would wait for such a node for ever.

    (Other clusters may start one when it is asked for.)
    """
    import ray

    asked = {"CPU": needs["num_cpus"], "GPU": needs["num_gpus"], "memory": needs["memory"], **needs["resources"]}
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    if not any(all(node.get(k, 0) >= v for k, v in asked.items()) for node in nodes):
        most = {k: max((node.get(k, 0) for node in nodes), default=0) for k, v in asked.items() if v}
        told = ", ".join(f"{k} {asked[k]:g} (there: {v:g})" for k, v in most.items())
        raise ConfigError(f"This machine does not have what --resources asks for each job: {told}. Ask for less.")


def _settle(reference: Any, job: Job, retries: int) -> None:
    import ray

    try:
        node = ray.get(reference)
    except ray.exceptions.RayTaskError as e:
        raise e.cause from e  # the job's own error, as the local engine raises it
    except ray.exceptions.RayError as e:
        raise JobError(
            f"The worker on {job.output.name} ({job.function}) was lost {retries + 1} time{'s' * (retries > 0)} on the "
            f"Ray cluster ({type(e).__name__}). It may need more memory than a node has: try fewer --workers, or "
            "--engine local."
        ) from e
    until = time.monotonic() + PATIENCE
    while not job.done:
        if time.monotonic() > until:
            raise _unseen(job.output.parent, f"node {node} of the Ray cluster wrote {job.output.name}, not seen here")
        time.sleep(0.1)


def _work(where: tuple[str, list[str]], function: str, arguments: dict[str, Any], output: str) -> str:
    """In a worker: the driver's directory and import path, one thread, then the job as anywhere; returns the node."""
    directory, path = where
    if Path(directory).is_dir():
        os.chdir(directory)
    sys.path[:0] = [p for p in path if p not in sys.path]
    call(function, arguments, output)
    return socket.gethostname()


@contextlib.contextmanager
def cluster(workers: int, resources: Mapping[str, float] | None = None) -> Iterator[None]:
    """A connection: kept if there is one, else made here and closed at the end. Nothing is reported to anyone."""
    _installed()
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    address = os.environ.get("RAY_ADDRESS")
    quiet = {"logging_level": "ERROR", "log_to_driver": False, "configure_logging": True}
    if address and address != "local":
        answering()
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
            raise _unreachable(address, str(e).splitlines()[0]) from e
    else:
        needs = _needs(resources or {})
        _start(math.ceil(workers * needs["num_cpus"]), quiet)
        _check_room(needs)
    try:
        yield
    finally:
        ray.shutdown()


def answering() -> None:
    """Refuse, within seconds and without importing Ray, what cannot work: no Ray here, or no cluster at its address."""
    _installed()
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address not in ("local", "auto"):  # auto: a cluster that was started on this machine
        reachable(address)


def _installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--engine ray needs Ray, which is not installed. Install it with `pip install 'budwood[ray]'`, or use "
            "--engine local."
        )


def _start(cpus: int, quiet: dict[str, Any]) -> None:
    """A cluster of this machine; Ray gives its own processes 30 s, which a busy machine may need several times."""
    import ray

    env = {"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}}
    for left in reversed(range(STARTS)):
        try:
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, runtime_env=env, **quiet)
            return
        except Exception as e:  # Ray raises the bare class here
            ray.shutdown()
            if "timed out during startup" not in str(e):
                raise
            if not left:
                raise ConfigError(
                    f"Ray did not start within {STARTS} x 30 s: this machine is too busy. Try again later, or use "
                    "--engine local."
                ) from e


def reachable(address: str) -> None:
    """Answer within seconds whether a server of Ray's kind listens there; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"RAY_ADDRESS is '{address}', which is no HOST:PORT. Unset it to use a cluster of this machine."
        )
    try:
        with socket.create_connection((host, int(port)), PATIENCE) as line:
            if os.environ.get("RAY_USE_TLS", "0") == "0":  # else nothing is said before the keys are exchanged
                line.sendall(GREETING)
                if not line.recv(1):
                    raise ConnectionError("what listens there hangs up")
    except OSError as e:
        raise _unreachable(address, e.strerror or str(e)) from e


def _unreachable(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"No Ray cluster answers at RAY_ADDRESS={address} ({why}). Start one there (`ray start --head`), correct the "
        "address, unset it to use a cluster of this machine, or use --engine local."
    )


def _check_storage(directory: Path, needs: Mapping[str, Any]) -> None:
    """A note written here must be seen by a worker, wherever there is room for a job."""
    import ray

    directory.mkdir(parents=True, exist_ok=True)
    note = directory.resolve() / f".seen-{uuid.uuid4().hex}"
    note.touch()
    try:
        seen, node = ray.get(ray.remote(**needs)(_sees).remote(str(note)), timeout=QUEUE)
    except ray.exceptions.GetTimeoutError as e:
        raise ConfigError(
            f"The Ray cluster did not begin a job within {QUEUE:g} s: no node is free that has what a job needs "
            f"({_told(needs)}). See `ray status`, ask for less with --resources, try again later, or use "
            "--engine local."
        ) from e
    finally:
        note.unlink(missing_ok=True)
    if not seen:
        raise _unseen(directory, f"node {node} of the Ray cluster does not see what is written here")


def _told(needs: Mapping[str, Any]) -> str:
    flat = {**{k: v for k, v in needs.items() if k != "resources"}, **needs["resources"]}
    return ", ".join(f"{k.removeprefix('num_')} {v:g}" for k, v in flat.items() if v)


def _unseen(directory: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{directory.resolve()} is not shared: {what}. Give an --out that every node mounts at the same path."
    )


def _sees(path: str) -> tuple[bool, str]:
    return Path(path).exists(), socket.gethostname()

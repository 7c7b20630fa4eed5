"""A run: one directory that holds the settings, the results and what it takes to carry on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from budwood.errors import StoreError
from budwood.store.files import digest, read_json, sweep, write_json

FORMAT = 1
LOCK = ".lock"
REPLACED = ".replaced"  # the run that --overwrite takes the place of, until the new one is done
BARE = ("run.json", "progress.jsonl", "task.json", "parts/rows.json")  # what a run may hold before it has made anything


@dataclass(frozen=True)
class Run:
    """An open run directory. `settings` are those that change the result; their hash names the run."""

    path: Path
    verb: str
    settings: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The directory's name."""
        return self.path.name

    def file(self, *parts: str) -> Path:
        """A path inside the run."""
        return self.path.joinpath(*parts)

    def note(self, **facts: Any) -> None:
        """Add facts to run.json."""
        write_json(self.file("run.json"), {**read_json(self.file("run.json")), **facts})

    def withdraw(self) -> bool:
        """Take back a run that made nothing, as if it had never begun; one that made something stays (False).

        A run whose place it was to take comes back.
        """
        before = self.file(REPLACED)
        mine = [p for p in self.path.rglob("*") if not p.is_relative_to(before)]
        files = [p for p in mine if not p.is_dir() and p.name != LOCK]
        if {p.relative_to(self.path).as_posix() for p in files} - set(BARE):
            return False
        for file in files:
            file.unlink(missing_ok=True)
        for folder in sorted((p for p in mine if p.is_dir()), reverse=True):
            _remove_empty(folder)
        if before.exists():
            for child in before.iterdir():
                child.rename(self.file(child.name))
            before.rmdir()
        return True

    def finish(self, metrics: Mapping[str, Any], cost: Mapping[str, Any]) -> None:
        """Write the results and mark the run done, in this order, so that a done run always has its results."""
        write_json(self.file("metrics.json"), metrics)
        write_json(self.file("cost.json"), cost)
        self.note(status="done", finished=now())
        shutil.rmtree(self.file(REPLACED), ignore_errors=True)

    def results(self) -> dict[str, Any]:
        """Metrics and cost merged, as `--json` prints them."""
        merged: dict[str, Any] = read_json(self.file("metrics.json"))
        if self.file("cost.json").exists():
            merged = {**merged, **read_json(self.file("cost.json"))}
        return {**merged, "run": str(self.path.resolve())}


def now() -> str:
    """The time of day in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def run_name(verb: str, models: str, task: str, settings: Mapping[str, Any]) -> str:
    """The default directory name, VERB-MODEL-TASK-HASH8.

    >>> run_name("finetune", "models/bert base", "sst2", {"a": 1})
    'finetune-bert-base-sst2-cde02d92'
    """
    clean = lambda s: "".join(c if c.isalnum() or c in "._+" else "-" for c in s).strip("-") or "x"  # noqa: E731
    short = clean(Path(models.rstrip("/")).name)[:40]
    return f"{clean(verb)}-{short}-{clean(Path(task).stem if '/' in task else task)[:40]}-{digest(settings, 4)}"


def status_of(path: Path) -> str:
    """'absent', 'running' (started and not finished), or 'done'."""
    if not (path / "run.json").exists():
        return "absent"
    return str(read_json(path / "run.json").get("status", "running"))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the run directory; a second process is told who holds it. The kernel lets go when a process dies.

    What fails inside before there is a run (or after it was withdrawn) leaves no trace: neither the lock nor the
    directories that were made for it.
    """
    made = [p for p in (path, *path.parents) if not p.exists()]
    with _lock(path) as handle:
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {socket.gethostname()}, started {now()}\n")
        handle.flush()
        try:
            yield
        except BaseException:
            if not (path / "run.json").exists():
                (path / LOCK).unlink(missing_ok=True)
                for folder in made:
                    _remove_empty(folder)
            raise


def _lock(path: Path) -> IO[str]:
    """The lock's open file, held; taken anew where its last holder removed it in this moment."""
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
            handle = (path / LOCK).open("a+")
        except NotADirectoryError as e:
            raise StoreError(f"--out {path} is not a directory and cannot become one.") from e
        except FileExistsError as e:
            raise StoreError(f"--out {path} is a file. Give a directory that does not exist yet, or a run.") from e
        except PermissionError as e:
            raise StoreError(f"--out {path} cannot be written. Choose a place you may write to.") from e
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            handle.seek(0)
            owner = handle.read().strip() or "another process"
            handle.close()
            raise StoreError(
                f"{path} is held by {owner}. Wait for it to end, stop it, or choose another directory with --out."
            ) from e
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle.fileno()), (path / LOCK).stat()):
                return handle
        handle.close()


def _remove_empty(folder: Path) -> None:
    """Remove a directory that holds nothing; one that does stays."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def open_run(
    path: Path,
    verb: str,
    settings: Mapping[str, Any],
    facts: Mapping[str, Any],
    overwrite: bool = False,
    defaults: Mapping[str, Any] | None = None,
) -> Run:
    """Start a run or carry on with one of the same settings; other settings are refused with the differing keys.

    A setting that an older run does not know counts as its default (`defaults`).
    """
    settings, defaults = plain(settings), plain(defaults or {})
    manifest = path / "run.json"
    if manifest.exists() and overwrite:
        _lay_aside(path)
    sweep(path)
    if manifest.exists():
        old = read_json(manifest)
        if old.get("verb") != verb or not same(old.get("settings", {}), settings, defaults):
            raise StoreError(
                f"{path} holds a run of '{old.get('verb')}' with other settings:\n"
                + "\n".join(difference({**defaults, **old.get("settings", {})}, settings))
                + "\nChoose another --out, or add --overwrite to replace it."
            )
        return Run(path, verb, settings)
    foreign = [p.name for p in path.iterdir() if p.name not in (LOCK, REPLACED) and not p.name.startswith(".run.json")]
    if foreign:
        raise StoreError(
            f"--out {path} is a directory that is no run of budwood (it holds {', '.join(sorted(foreign)[:3])}"
            f"{' …' if len(foreign) > 3 else ''}). Give an empty or a new directory."
        )
    write_json(
        manifest,
        {
            "format": FORMAT,
            "verb": verb,
            "status": "running",
            "started": now(),
            "settings": settings,
            **facts,
            "versions": versions(),
        },
    )
    return Run(path, verb, settings)


def _lay_aside(path: Path) -> None:
    """Empty a run's directory; what was there is kept beside until the new run is done, in case that is refused.

    Where something is laid aside already, what is here was begun in its place and never done: it is not kept.
    """
    children = [p for p in path.iterdir() if p.name not in (LOCK, REPLACED)]
    aside = path / REPLACED
    if aside.exists():
        for child in children:
            shutil.rmtree(child) if child.is_dir() else child.unlink()
        return
    aside.mkdir()
    for child in children:
        child.rename(aside / child.name)


def plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON would give it back."""
    return dict(json.loads(json.dumps(value, default=str)))


def same(old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether two sets of settings are equal, missing ones counted as their defaults.

    >>> same({"a": 1}, {"a": 1, "b": 0}, {"b": 0}), same({"a": 1}, {"a": 1, "b": 2}, {"b": 0})
    (True, False)
    """
    return {**defaults, **old} == {**defaults, **new}


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line per key that differs.

    >>> difference({"lr": 1, "k": 2}, {"lr": 3, "k": 2})
    ['  lr: 1 there, 3 now']
    """
    keys = [k for k in {**old, **new} if old.get(k) != new.get(k)]
    return [f"  {k}: {old.get(k)!r} there, {new.get(k)!r} now" for k in keys]


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide the bits of a result."""
    found = {"python": platform.python_version(), "platform": f"{sys.platform}-{platform.machine()}"}
    for name in ("budwood", "torch", "transformers", "tokenizers", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found

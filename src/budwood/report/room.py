"""A run directory opened for reading: whatever is legible in it, and in words what is not."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budwood.report.names import base_of, short_model
from budwood.store.run import FORMAT

if TYPE_CHECKING:
    import pyarrow

LARGEST = 256 << 20  # bytes of a JSON file that is still read
STALE = 300.0  # seconds without a sign of life from another machine


@dataclass(frozen=True)
class Room:
    """One run. `root`: no file that lies outside is read, whatever symbolic links say."""

    path: Path
    root: Path
    manifest: dict[str, Any]
    metrics: dict[str, Any]
    cost: dict[str, Any]
    problems: tuple[str, ...]

    @classmethod
    def open(cls, path: Path, root: Path | None = None) -> Room:
        """Read the three JSON files of a run; nothing is raised, what is wrong is told in `problems`."""
        root = (root or path).resolve()
        found: dict[str, dict[str, Any]] = {}
        problems: list[str] = []
        for name in ("run", "metrics", "cost"):
            found[name], problem = _object(path / f"{name}.json", root)
            if problem:
                problems.append(problem)
        manifest = found["run"]
        if not manifest and not (path / "run.json").exists():
            problems.insert(0, "there is no run.json: the directory is no run, or was just being made")
        if manifest and manifest.get("format") != FORMAT:
            told = manifest.get("format", "none")
            problems.append(f"run.json is of format {told}, this budwood reads {FORMAT}: shown as far as it is legible")
        if manifest.get("status") == "done" and not (path / "metrics.json").exists():
            problems.append("the run is marked done, but metrics.json is missing")
        elif manifest.get("status") == "done" and not found["metrics"] and not any("metrics" in p for p in problems):
            problems.append("the run is marked done, but metrics.json is empty")
        return cls(path, root, manifest, found["metrics"], found["cost"], tuple(problems))

    @property
    def verb(self) -> str:
        """What made the run."""
        return str(self.manifest.get("verb") or self.metrics.get("verb") or "?")

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.manifest.get("task") or self.metrics.get("task") or "?")

    @property
    def status(self) -> str:
        """done, running, stopped (killed: the same command carries on), failed or broken."""
        told = self.manifest.get("status")
        if any("format" not in p for p in self.problems) or not self.manifest:
            return "broken"
        if told == "running" and not alive(self.path):
            return "stopped"
        return str(told) if told in ("done", "running", "failed") else "broken"

    @property
    def models(self) -> list[str]:
        """The models it was made of, by their short names."""
        listed = self.manifest.get("models") or self.metrics.get("models")
        return [self.model_name(x) for x in listed] if isinstance(listed, list) else []

    @property
    def contents(self) -> list[str]:
        """Hashes of its models' files, in the order of `models`: the same for the same weights under any name."""
        settings = self.manifest.get("settings")
        listed = settings.get("models") if isinstance(settings, dict) else None
        return [str(x) for x in listed] if isinstance(listed, list) else []

    def model_name(self, text: Any) -> str:
        """A model of this run by its short name."""
        parents = self.manifest.get("parents")
        return short_model(str(text), [p for p in parents if isinstance(p, str)] if isinstance(parents, list) else [])

    @cached_property
    def base(self) -> Path:
        """The folder that paths on the page are told from."""
        return base_of(self.real)

    @cached_property
    def real(self) -> Path:
        """Where it lies; links are left as they are, which asks no disk."""
        return Path(os.path.abspath(self.path))  # noqa: PTH100

    def file(self, *parts: str) -> Path | None:
        """A file of the run, or None where it is missing or a link leads out of `root`."""
        path = self.path.joinpath(*parts)
        with contextlib.suppress(OSError):
            real = path.resolve()
            if real.is_file() and real.is_relative_to(self.root):
                return path
        return None

    def json(self, *parts: str) -> Any:
        """A JSON file of the run, or None."""
        path = self.file(*parts)
        if path is None or path.stat().st_size > LARGEST:
            return None
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_text(encoding="utf-8"))
        return None

    def csv(self, *parts: str) -> list[dict[str, Any]]:
        """A CSV file as rows, numbers as numbers; empty where there is none."""
        path = self.file(*parts)
        if path is None or path.stat().st_size > LARGEST:
            return []
        with contextlib.suppress(OSError, ValueError, csv.Error), path.open(encoding="utf-8", newline="") as f:
            return [{k: value_of(v) for k, v in row.items() if k} for row in csv.DictReader(f)]
        return []

    @cached_property
    def records(self) -> pyarrow.Table | None:
        """records.parquet, or None where there is none that can be read."""
        return self.parquet("records.parquet")

    def parquet(self, *parts: str) -> pyarrow.Table | None:
        """A Parquet file as a table, or None."""
        path = self.file(*parts)
        if path is None:
            return None
        import pyarrow
        from pyarrow import parquet

        with contextlib.suppress(OSError, pyarrow.ArrowException):
            return parquet.read_table(path, memory_map=False)
        return None

    def progress(self) -> dict[str, Any]:
        """The last stage that progress.jsonl tells of."""
        path = self.file("progress.jsonl")
        if path is None:
            return {}
        with path.open("rb") as f:
            f.seek(max(0, path.stat().st_size - 4096))
            lines = f.read().decode("utf-8", "replace").splitlines()
        for line in reversed(lines):
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and "stage" in event:
                    return {k: event.get(k) for k in ("stage", "done", "total", "left", "note", "time")}
        return {}

    def below(self, *parts: str) -> Iterator[Path]:
        """Directories inside a folder of the run, in order of their names."""
        place = self.path.joinpath(*parts)
        with contextlib.suppress(OSError):
            for path in sorted(place.iterdir()):
                if path.is_dir() and path.resolve().is_relative_to(self.root):
                    yield path


def _object(path: Path, root: Path) -> tuple[dict[str, Any], str]:
    """The JSON object in a file and what is wrong with it; a missing file is no problem by itself."""
    try:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as e:
            if e.errno != errno.ELOOP:
                raise
            if not path.resolve().is_relative_to(root):  # a link: looked at more closely
                return {}, f"{path.name} is a link that leads out of the runs directory and is not followed"
            handle = os.open(path, os.O_RDONLY)
        with os.fdopen(handle, "rb") as f:
            if os.fstat(handle).st_size > LARGEST:
                return {}, f"{path.name} is larger than {LARGEST >> 20} MB and is not read"
            value = json.loads(f.read())
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, RecursionError) as e:
        return {}, f"{path.name} cannot be read ({str(e).splitlines()[0][:120]})"
    if not isinstance(value, dict):
        return {}, f"{path.name} holds no JSON object"
    return value, ""


def value_of(text: Any) -> Any:
    """A CSV cell as a number where it is one; an empty one is None.

    >>> value_of("3"), value_of("0.5"), value_of("block.1"), value_of("")
    (3, 0.5, 'block.1', None)
    """
    if not isinstance(text, str):
        return None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            found = kind(text)
            return found if found == found and abs(found) != float("inf") else None
    return text or None


def alive(path: Path) -> bool:
    """Whether the process that holds a run still lives; of another machine's, whether it left a sign lately."""
    try:
        owner = re.match(r"process (\d+) on (\S+),", (path / ".lock").read_text(encoding="utf-8"))
        if owner and owner[2] == socket.gethostname():
            os.kill(int(owner[1]), 0)
            return True
        signs = [p.stat().st_mtime for p in (path / "progress.jsonl", path / "run.json") if p.exists()]
        return bool(owner) and time.time() - max(signs, default=0.0) < STALE
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        return False

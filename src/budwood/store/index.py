"""The list of runs: an SQLite cache over the run directories, rebuilt from them whenever they differ."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from budwood.errors import StoreError, nearest

SCHEMA = "CREATE TABLE IF NOT EXISTS runs (name TEXT PRIMARY KEY, stamp INTEGER, manifest TEXT, metrics TEXT)"


@dataclass(frozen=True)
class Listed:
    """One run as the registry shows it; `broken` says what is wrong with its directory."""

    path: Path
    manifest: dict[str, Any]
    metrics: dict[str, Any]
    broken: str = ""

    @property
    def status(self) -> str:
        """done, running (or interrupted), or broken."""
        return "broken" if self.broken else str(self.manifest.get("status", "running"))


def list_runs(runs_dir: Path) -> list[Listed]:
    """Every run below `runs_dir`, oldest first; children of a run (one per seed) follow their parent."""
    if not runs_dir.is_dir():
        return []
    found = [read_listed(path, index) for index in (_open(runs_dir),) for path in directories(runs_dir)]
    return sorted(found, key=lambda r: (str(r.manifest.get("started", "")), str(r.path)))


def find_run(reference: str, runs_dir: Path) -> Path:
    """The directory of a run given by path, `run:ID`, ID or a unique prefix of it; steps of recipes are found too."""
    name = reference.removeprefix("run:")
    direct = Path(name)
    if (direct / "run.json").exists():
        return direct
    known = {str(p.relative_to(runs_dir)): p for p in directories(runs_dir)} if runs_dir.is_dir() else {}
    matches = [n for n in known if n == name or Path(n).name == name] or [n for n in known if n.startswith(name)]
    top = [n for n in matches if "/seeds/" not in n]
    if len(top or matches) == 1:
        return known[(top or matches)[0]]
    if matches:
        raise StoreError(f"'{reference}' fits {len(matches)} runs: {', '.join(matches[:4])}. Give more of the name.")
    raise StoreError(f"No run '{reference}' in {runs_dir}.{nearest(name, known)} `budwood runs` lists them.")


def read_listed(path: Path, index: sqlite3.Connection | None = None) -> Listed:
    """One run directory, from the cache where its files have not changed."""
    files = [path / "run.json", path / "metrics.json"]
    stamp = sum(f.stat().st_mtime_ns for f in files if f.exists())
    if index is not None:
        row = index.execute(
            "SELECT manifest, metrics FROM runs WHERE name = ? AND stamp = ?", (str(path), stamp)
        ).fetchone()
        if row:
            return Listed(path, json.loads(row[0]), json.loads(row[1]))
    try:
        manifest, metrics = (json.loads(f.read_text()) if f.exists() else {} for f in files)
    except (json.JSONDecodeError, OSError, UnicodeDecodeError) as e:
        return Listed(path, {}, {}, broken=f"unreadable: {e}")
    if index is not None:
        with contextlib.suppress(sqlite3.Error), index:
            values = (str(path), stamp, json.dumps(manifest), json.dumps(metrics))
            index.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?)", values)
    return Listed(path, manifest, metrics)


def directories(runs_dir: Path) -> Iterator[Path]:
    """Runs in `runs_dir`, their children (one per seed), and runs inside folders such as a recipe's."""
    for path in sorted(p for p in runs_dir.iterdir() if p.is_dir() and not p.name.startswith(".")):
        if (path / "run.json").exists():
            yield path
        inner = path / "seeds" if (path / "run.json").exists() else path
        if inner.is_dir():
            for child in sorted(p for p in inner.iterdir() if (p / "run.json").exists()):
                yield child
                seeds = child / "seeds"
                yield from sorted(p for p in seeds.iterdir() if (p / "run.json").exists()) if seeds.is_dir() else ()


def _open(runs_dir: Path) -> sqlite3.Connection | None:
    """The cache, or None where it cannot be opened: the directories are the truth, the cache only saves time."""
    try:
        index = sqlite3.connect(runs_dir / ".index.sqlite", timeout=2)
        index.execute(SCHEMA)
    except sqlite3.Error:
        with contextlib.suppress(OSError):
            (runs_dir / ".index.sqlite").unlink(missing_ok=True)
        return None
    return index

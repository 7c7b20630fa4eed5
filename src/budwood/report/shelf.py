"""The runs of a directory as a server sees them: a small list first, one run's details when asked for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budwood.errors import DataError, StoreError
from budwood.report.limits import Limits
from budwood.report.names import public
from budwood.report.room import Room
from budwood.report.tables import detail, entry, full, plain
from budwood.report.texts import Texts
from budwood.report.views.words import glossary
from budwood.store.files import digest
from budwood.store.index import directories

if TYPE_CHECKING:
    import numpy as np

    from budwood.methods.influence.scores import Matrix
    from budwood.report.views.influence import Desk

FILES = ("run.json", "metrics.json", "cost.json")
LIVE = Limits(queries=20_000, each=20, strategies=8, detail=0, records=40, suspects=200, longest=4000)
Asker = Callable[[Room, str], dict[str, Any]]  # answers a typed text from a run's index


@dataclass
class Shelf:
    """Entries of every run below `root`, read again only where their files have changed. Nothing is ever written."""

    root: Path
    ask: Asker | None = None
    _known: dict[Path, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    _paths: dict[str, Path] = field(default_factory=dict)

    def refresh(self) -> list[dict[str, Any]]:
        """The list of runs, oldest first."""
        real = self.root.resolve()
        found: dict[Path, tuple[int, dict[str, Any]]] = {}
        paths: dict[str, Path] = {}
        for path in directories(self.root) if self.root.is_dir() else ():
            if not path.resolve().is_relative_to(real):
                continue  # a link that leads out
            key = str(path.relative_to(self.root))
            stamp = _stamp(path)
            old = self._known.get(path)
            if old is None or old[0] != stamp or old[1]["status"] in ("running", "stopped"):
                room = Room.open(path, real)
                old = (stamp, entry(room, key) | {"contents": room.contents})
            found[path] = old
            paths[key] = path
        self._known, self._paths = found, paths
        return sorted((e for _, e in found.values()), key=lambda e: (e["started"] or "", e["key"]))

    def index(self) -> dict[str, Any]:
        """What the page asks for first."""
        runs = self.refresh()
        told = {"budwood": version("budwood"), "words": glossary(), "runs": runs, "story": None, "left_out": []}
        return {**told, "stamp": self.stamp()}

    def stamp(self) -> str:
        """Changes whenever a run does."""
        return digest([(str(p), s, e["status"]) for p, (s, e) in sorted(self._known.items())], 8)

    def progress(self) -> dict[str, Any]:
        """How far running jobs are."""
        runs = self.refresh()
        live = {e["key"]: self.room(e["key"]).progress() for e in runs if e["status"] == "running"}
        return {"runs": plain(live), "stamp": self.stamp()}

    def room(self, key: str) -> Room:
        """A run by its key; keys are looked up, never joined to a path."""
        if key not in self._paths:
            self.refresh()
        if key not in self._paths:
            raise StoreError("There is no such run here.")
        return Room.open(self._paths[key], self.root.resolve())

    def run(self, key: str) -> dict[str, Any]:
        """Everything about one run but the rows of its matrices."""
        room, texts = self.room(key), Texts(longest=LIVE.longest)
        told = detail(room, texts, _without_rows(room))
        if self.ask is not None and room.file("index", "index.json") is not None:
            told["asks"] = True
        return {"full": full(room, key), "detail": told, "texts": texts.kept}

    def query(
        self, key: str, query: int, strategy: str, layers: tuple[str, ...] = (), graft: str = ""
    ) -> dict[str, Any]:
        """One query's best and worst rows: one row of one matrix is read. With the key of a graft, its weights alone
        are counted, which takes a pass over the training rows.
        """
        from budwood.report.views.influence import Desk, extremes

        room, texts = self.room(key), Texts(longest=LIVE.longest)
        desk = Desk.open(room)
        if not 0 <= query < len(desk.scores.query_ids):
            raise DataError(f"There is no query {query}: the run has {len(desk.scores.query_ids)}.")
        matrix = desk.scores.find(strategy)
        if unknown := set(layers) - set(desk.parts(matrix)):
            raise DataError(f"There are no scores of the part '{min(unknown)}' in this run.")
        more: dict[str, Any] = {}
        if graft:  # shares by layer and token are of all weights, so none are sent
            score_N, warning = self.inside(room, desk, query, matrix, self.room(graft))
            top = extremes(score_N, LIVE.each)
            more |= {"note": public(warning, room.base)}
        else:
            top = desk.ranked(query, matrix, LIVE.each, layers)
            more |= {"inner": desk.inner(query, matrix, LIVE.each)}
        answer = {"top": top, "train": desk.train_rows(texts, top["rows"]), "partial": False, **more}
        return {"answer": plain(answer), "texts": texts.kept}

    @staticmethod
    def inside(room: Room, desk: Desk, query: int, matrix: Matrix, graft: Room) -> tuple[np.ndarray, str]:
        """One query's scores in the weights of a run's graft alone, and a warning where it is of another model."""
        from budwood.report.asking import in_graft

        file = graft.file(Path(str(graft.metrics.get("file", ""))).name or "none")
        if file is None:
            raise DataError(f"The run '{graft.path.name}' holds no graft file any more.")
        return in_graft(room.path, desk.scores, query, matrix, file)

    def typed(self, key: str, text: str) -> dict[str, Any]:
        """The training rows behind a text that somebody typed."""
        room, texts = self.room(key), Texts(longest=LIVE.longest)
        if self.ask is None:
            raise DataError("This server has no model at hand. Start it with --model.")
        found = self.ask(room, text)
        rows = []
        for r in found["rows"]:
            row = {k: v for k, v in r.items() if k not in ("text", "pair")}
            rows.append(row | {k: texts.add(str(r[k])) for k in ("text", "pair") if r.get(k)})
        return {"answer": plain({**found, "rows": rows}), "texts": texts.kept}


def _without_rows(room: Room) -> Limits:
    """Influence runs send their lists of queries; rows are asked for one by one."""
    if room.verb.startswith("influence"):
        return Limits(queries=LIVE.queries, each=0, strategies=LIVE.strategies, detail=0, suspects=LIVE.suspects)
    return LIVE


def _stamp(path: Path) -> int:
    total = 0
    for name in FILES:
        with contextlib.suppress(OSError):
            stat = os.stat(path / name)  # noqa: PTH116
            total += stat.st_mtime_ns + stat.st_size
    return total

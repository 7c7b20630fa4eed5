"""`influence index`: training rows as a few eigen-coordinates each, so that a new text is answered at once.

RUN/index/
  rows.npy                   [K, N] float16, kept coordinates of training rows of unit length in units of their spread
  norms.npy                  [N] exact self-influence, the squared length of every row
  coordinates.safetensors    which coordinates, their weights and spreads
  index.json train_ids.json
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from budwood.capture.gradients import Question
from budwood.config.influence import IndexConfig
from budwood.data.batch import Features, seed_of
from budwood.data.task import Task
from budwood.engine.jobs import Job
from budwood.engine.local import run_jobs
from budwood.engine.run import run_all
from budwood.errors import StoreError
from budwood.methods.influence import coordinates as coords
from budwood.methods.influence.factors import Factors, Setting
from budwood.methods.influence.fit import Bench, fitted, identity
from budwood.methods.influence.precondition import measurement
from budwood.methods.influence.score import given_factors
from budwood.methods.influence.workshop import Shop, open_shop, settings_for
from budwood.methods.session import Session
from budwood.models.reference import ModelRef
from budwood.params import tree
from budwood.store.files import read_json, write_json, writing_directory

HERE = "budwood.methods.influence.index"
SAMPLE = 512  # training rows whose coordinates' spread is measured
NUMBERS = 1 << 28  # of stored coordinates multiplied for one question
MOST = 1 << 14  # its strongest coordinates: never fewer are multiplied
CACHED = 1 << 16  # of them turned to float32 at a time: they are used while still in cache


def index(session: Session) -> dict[str, Any]:
    """The index under RUN/index; returns how many coordinates it keeps and what they hold."""
    cfg: IndexConfig = session.cfg
    own = settings_for(cfg, session.models[0].text)
    with session.progress.stage("load"):
        shop = open_shop(own, session.task)
    bench = Bench(shop, own, session.run.path / "factors", cfg, session.progress)
    factors = given_factors(cfg.factors, shop) if cfg.factors else fitted(bench)
    parameters = sum(m.out * m.columns for m in shop.maps)
    count = coords.wanted(cfg.coordinates, parameters)
    folded = int(count * cfg.sketch)
    asked = {
        **own,
        "factors": str(factors.path),
        "damping": cfg.damping[0],
        "measurement": cfg.measurement,
        "calibration": cfg.calibration,
        "count": count - folded,
        "sketch": folded,
    }
    chosen = Job(f"{HERE}:choose_coordinates", asked, session.run.file("parts", "coordinates.safetensors"))
    with session.progress.stage("choose"):
        run_jobs([chosen])
    order = np.argsort(-shop.train.lengths_N, kind="stable")
    pieces = [order[i : i + cfg.shard_rows] for i in range(0, len(order), cfg.shard_rows)]
    jobs = [
        Job(
            f"{HERE}:index_shard",
            {**asked, "chosen": str(chosen.output), "shard": i},
            session.run.file("parts", f"index-{i:05d}.safetensors"),
        )
        for i in range(len(pieces))
    ]
    with session.progress.stage("index", len(jobs), sum(j.done for j in jobs)) as bar:
        run_all(jobs, cfg, lambda job: bar.advance(1))
    kept, share, sketch = coords.load(chosen.output)
    with session.progress.stage("save"):
        _assemble(session, factors, list(zip(jobs, pieces)), chosen.output)
    for job in [chosen, *jobs]:
        job.output.unlink()
    return {
        "coordinates": count,
        "folded": sketch.size,
        "parameters": parameters,
        "share_of_coordinates": count / parameters,
        "share_of_energy": share,
        "damping": list(cfg.damping),
        "measurement": cfg.measurement,
        "n": len(shop.train),
        "train": len(shop.train),
        "bytes": session.run.file("index", "rows.npy").stat().st_size,
        "skipped": sorted(shop.skipped),
    }


def estimate(cfg: IndexConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of an index: coordinates, bytes, and seconds from a few rows that are timed."""
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    shop = open_shop(settings_for(cfg, models[0].text), task)
    parameters = sum(m.out * m.columns for m in shop.maps)
    count = coords.wanted(cfg.coordinates, parameters)
    few = np.arange(min(8, len(shop.train)))
    began = time.perf_counter()
    coords.gradients(shop, shop.train, few, Question(), lambda m, g: None)
    each = (time.perf_counter() - began) / len(few)
    rows = len(shop.train)
    return {
        "parameters": parameters,
        "coordinates": count,
        "rows": rows,
        "disk_bytes": 2 * count * rows + 4 * rows,
        "memory_bytes": 4 * parameters * (coords.ROWS + 6),
        # fitting (two passes and eigenbases), choosing, and the rows' own pass, each with turned gradients
        "seconds": round(each * (4 * rows + 2 * min(rows, SAMPLE)) * 1.5 + 2, 1),
    }


def calibration_rows(task: Task, count: int, seed: int) -> list[int]:
    """Places of a seeded sample of validation rows (of the reported split where there is no validation)."""
    rows = task.rows(calibration_split(task))
    rng = np.random.default_rng(seed_of(seed, "calibration"))
    return sorted(rng.permutation(len(rows))[:count].tolist())


def calibration_split(task: Task) -> str:
    """Where calibration queries come from."""
    return "validation" if task.splits.get("validation") else task.reported


def choose_coordinates(arguments: dict[str, Any], part: Path) -> None:
    """Job: measure energies on calibration queries and a sample of training rows; keep the strongest coordinates."""
    shop = open_shop(arguments)
    factors = Factors.open(Path(arguments["factors"]))
    task, seed = shop.read.task, shop.cfg.seed
    rows = task.rows(calibration_split(task))
    asked = shop.read.encode([rows[i] for i in calibration_rows(task, arguments["calibration"], seed)])
    question = measurement(shop.read.objective, arguments["measurement"])
    weights = coords.weights_of(factors, Setting("ekfac", arguments["damping"]), shop.maps)
    queries = coords.spread(shop, asked, np.arange(len(asked)), question, factors.bases, weights, centred=False)
    rng = np.random.default_rng(seed_of(seed, "spread"))
    some = np.sort(rng.permutation(len(shop.train))[:SAMPLE])
    train = coords.spread(shop, shop.train, some, Question(), factors.bases, weights, centred=True)
    kept, share = coords.choose(queries, train, weights, arguments["count"])
    coords.save(part, kept, share, coords.sketch_of(kept, train, weights, arguments["sketch"], seed))


def index_shard(arguments: dict[str, Any], part: Path) -> None:
    """Job: kept coordinates and norms of one shard of training rows."""
    shop = open_shop(arguments)
    factors = Factors.open(Path(arguments["factors"]))
    kept, _, sketch = coords.load(Path(arguments["chosen"]))
    size = shop.cfg.shard_rows
    order = np.argsort(-shop.train.lengths_N, kind="stable")[arguments["shard"] * size :][:size]
    weights = coords.weights_of(factors, Setting("ekfac", arguments["damping"]), shop.maps)
    stored, norms = coords.rows_of(shop, order, factors.bases, kept, weights, sketch)
    save_file({"rows": stored, "norms": norms}, part)


def _assemble(session: Session, factors: Factors, parts: list[tuple[Job, np.ndarray]], chosen: Path) -> None:
    """All shards as one file, with a row per coordinate: a question reads the coordinates it needs."""
    shop = open_shop(settings_for(session.cfg, session.models[0].text), session.task)
    kept, share, sketch = coords.load(chosen)
    size = sum(len(k.flat_K) for k in kept.values()) + sketch.size
    with writing_directory(session.run.file("index")) as part:
        shape = (size, len(shop.train))
        rows = np.lib.format.open_memmap(part / "rows.npy", mode="w+", dtype=np.float16, shape=shape)
        norms = np.zeros(len(shop.train))
        for job, piece in parts:
            found, _ = tree.load(job.output)
            rows[:, piece] = found["rows"].numpy()
            norms[piece] = found["norms"].numpy()
        rows.flush()
        np.save(part / "norms.npy", norms.astype(np.float32), allow_pickle=False)
        coords.save(part / "coordinates.safetensors", kept, share, sketch)
        write_json(part / "train_ids.json", list(shop.train.ids))
        facts = {"damping": session.cfg.damping[0], "measurement": session.cfg.measurement, **identity(shop)}
        inside = factors.path.resolve().is_relative_to(session.run.path.resolve())
        write_json(part / "index.json", {**facts, "factors": "factors" if inside else str(factors.path.resolve())})


@dataclass(frozen=True)
class Index:
    """An index on disk, ready for questions about the model of `shop`."""

    path: Path
    shop: Shop

    @classmethod
    def open(cls, run: Path, shop: Shop) -> Index:
        """The index of a run; one made for another model or other rows is refused with what differs."""
        path = run / "index"
        if not (path / "index.json").exists():
            raise StoreError(f"{run} holds no index. Make one: `budwood influence index MODEL --task TASK`.")
        found = cls(path, shop)
        Factors(path, (), found.facts).check(identity(shop))
        return found

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the index was made for."""
        return dict(read_json(self.path / "index.json"))

    @cached_property
    def factors(self) -> Factors:
        """The factors behind it."""
        own = Path(self.facts["factors"])
        return Factors.open(own if own.is_absolute() else self.path.parent / own)

    @cached_property
    def _chosen(self) -> tuple[dict[str, coords.Kept], float, coords.Sketch]:
        return coords.load(self.path / "coordinates.safetensors")

    @property
    def kept(self) -> dict[str, coords.Kept]:
        """The coordinates kept."""
        return self._chosen[0]

    @property
    def sketch(self) -> coords.Sketch:
        """How the others are folded."""
        return self._chosen[2]

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """1 / (curvature + damping) of every coordinate."""
        return coords.weights_of(self.factors, Setting("ekfac", self.facts["damping"]), self.shop.maps)

    @cached_property
    def _folds(self) -> dict[str, tuple[Tensor, Tensor]]:
        return self.sketch.folds(self.kept, self.weights)

    @cached_property
    def rows_KN(self) -> Tensor:
        """Stored coordinates as they lie on disk."""
        return torch.from_numpy(np.load(self.path / "rows.npy", mmap_mode="c", allow_pickle=False))

    @cached_property
    def norms(self) -> np.ndarray:
        """Exact self-influence of every training row."""
        return np.load(self.path / "norms.npy", allow_pickle=False)

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """Ids of the training rows, in their order."""
        return tuple(dict.fromkeys(self.shop.train.ids))

    @cached_property
    def _scale_K(self) -> Tensor:
        own = [k.weight_K * k.spread_K for k in self.kept.values()]
        return torch.cat([*own, torch.full((self.sketch.size,), self.sketch.scale)])

    @cached_property
    def _length_N(self) -> Tensor:
        return torch.from_numpy(self.norms).sqrt().clamp_min(1e-30)

    def ask(self, features: Features, most: int | None = None) -> tuple[np.ndarray, Tensor]:
        """(scores of all training rows [N], the question's coordinates) of one encoded question."""
        question = measurement(self.shop.read.objective, self.facts["measurement"])
        bases = self.factors.bases
        if self.sketch.size:
            u_K = coords.whole_coordinates(
                self.shop, features, question, bases, self.kept, self._folds, self.sketch.size
            )
            return self.answer(u_K, most), u_K
        every = np.arange(len(features))
        u_K = coords.coordinates_of(self.shop, features, every, question, bases, self.kept).sum(0)
        return self.answer(u_K, most), u_K

    def answer(self, u_K: Tensor, most: int | None = None) -> np.ndarray:
        """Scores from a question's coordinates; `most`: only its strongest coordinates are multiplied (None: as many as
        fit into `NUMBERS`).
        """
        weighed_K = u_K * self._scale_K
        count = self.rows_KN.shape[1]
        most = max(MOST, NUMBERS // max(1, count)) if most is None else most
        rows_KN = self.rows_KN
        if most < len(weighed_K):
            strong = weighed_K.abs().topk(most).indices.sort().values
            weighed_K, rows_KN = weighed_K[strong], rows_KN.index_select(0, strong)
        score_N = torch.zeros(count)
        step = max(1, CACHED // max(1, count))
        room = torch.empty(step, count)
        for first in range(0, len(weighed_K), step):
            part = room[: len(rows_KN[first : first + step])].copy_(rows_KN[first : first + step])
            score_N.addmv_(part.T, weighed_K[first : first + step])
        return self.by_row((score_N * self._length_N).numpy() / count)

    def by_row(self, score_F: np.ndarray) -> np.ndarray:
        """Scores of features summed to scores of rows."""
        if len(self.ids) == len(score_F):
            return score_F
        place = {i: n for n, i in enumerate(self.ids)}
        total = np.zeros(len(self.ids), score_F.dtype)
        np.add.at(total, [place[i] for i in self.shop.train.ids], score_F)
        return total

    def exact(self, features: Features, wanted: np.ndarray) -> np.ndarray:
        """Scores of some training features with all coordinates: one more pass over just these rows."""
        question = measurement(self.shop.read.objective, self.facts["measurement"])
        bases = self.factors.bases
        asked: dict[str, Tensor] = {}
        coords.gradients(
            self.shop,
            features,
            np.arange(len(features)),
            question,
            lambda m, g: asked.__setitem__(m.name, g.sum(0) * self.weights[m.name]),
            bases,
        )
        score = np.zeros(len(wanted))
        place = {int(n): i for i, n in enumerate(wanted)}
        for batch in self.shop.batches(self.shop.train, wanted, most=coords.ROWS):
            at = [place[int(n)] for n in batch]
            part = torch.zeros(len(batch), dtype=torch.float64)
            coords.gradients(
                self.shop,
                self.shop.train,
                batch,
                Question(),
                lambda m, g, part=part: part.add_(torch.einsum("boi,oi->b", g, asked[m.name]).double()),  # type: ignore[misc]
                bases,
            )
            score[at] = part.numpy()
        return score / len(self.shop.train)

"""`influence index`: training rows as a few numbers each, so that a new text is answered at once.

RUN/index/
  norms.npy                  [N] exact self-influence, the squared length of every row
  index.json train_ids.json
and with --entry coordinates
  rows.npy                   [K, N] float16 or [K, N/2] bytes of two 4-bit codes (see stored.py): kept coordinates of
                             training rows of unit length in units of their spread
  coordinates.safetensors    which coordinates, their weights and spreads
with --entry products
  products.npy products.safetensors rest.npy     see products.py and entries.py
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from budwood.capture.gradients import Question
from budwood.capture.stream import Map
from budwood.config.influence import IndexConfig
from budwood.data.batch import Features, seed_of
from budwood.data.task import Task
from budwood.engine.jobs import Job
from budwood.engine.local import run_jobs
from budwood.engine.run import run_all
from budwood.errors import StoreError
from budwood.methods.influence import coordinates as coords
from budwood.methods.influence import entries
from budwood.methods.influence.factors import Factors, Setting, differing
from budwood.methods.influence.fit import Bench, fitted, identity, say_damping
from budwood.methods.influence.memory import check, of_fit, of_index, of_products, rows_within, whole_products
from budwood.methods.influence.moments import Basis
from budwood.methods.influence.precondition import all_there, measurement
from budwood.methods.influence.products import Metric, Products
from budwood.methods.influence.profile import profiled
from budwood.methods.influence.queries import calibration_rows, calibration_split, warn_other_rows
from budwood.methods.influence.score import given_factors
from budwood.methods.influence.stored import Stored, assemble, most_of
from budwood.methods.influence.workshop import Shop, open_shop, rows_for, settings_for
from budwood.methods.session import Session, content
from budwood.models.reference import ModelRef
from budwood.params import tree
from budwood.store.files import digest, read_json, stamps, write_json, writing_directory

HERE = "budwood.methods.influence.index"
ENTRIES = "budwood.methods.influence.entries"
TABLE = {"coordinates": "rows.npy", "products": "products.npy"}
SAMPLE = 512  # training rows whose coordinates' spread is measured


def index(session: Session) -> dict[str, Any]:
    """The index under RUN/index; returns how many coordinates it keeps and what they hold."""
    cfg: IndexConfig = session.cfg
    warn_other_rows(session)
    own = settings_for(cfg, session.models[0].text) | rows_for(cfg, session.task, session.run.path)
    with session.progress.stage("load"):
        shop = open_shop(own, session.task)
        measurement(shop.read.objective, cfg.measurement)  # what cannot be asked is refused before the work
    bench = Bench(shop, own, session.run.path / "factors", cfg, session.progress, cfg.damping)
    parameters = sum(m.out * m.columns for m in shop.maps)
    count = kept_of(cfg, parameters)
    need = of_index(shop, count, cfg.number_bits)
    if cfg.entry == "products":
        entries.enough(shop.maps, count)
        need = of_products(shop, count, entries.calibrated(cfg.calibration, count))
    check(shop, need, *(() if cfg.factors or (bench.path / "factors.json").exists() else (of_fit(shop),)))
    factors = given_factors(cfg.factors, shop, bench.path) if cfg.factors else fitted(bench)
    asked = {
        **own,
        "factors": str(factors.path),
        "damping": cfg.damping[0],
        "measurement": cfg.measurement,
        "calibration": cfg.calibration,
        "count": count,
        "bits": cfg.number_bits,
    }
    order = np.argsort(-shop.train.lengths_N, kind="stable")
    pieces = [order[i : i + cfg.shard_rows] for i in range(0, len(order), cfg.shard_rows)]
    before, jobs = _plan(cfg.entry, asked, session.run.file("parts"), len(pieces))
    with session.progress.stage("choose"):
        run_jobs(before)
    with session.progress.stage("index", len(jobs), sum(j.done for j in jobs)) as bar:
        run_all(jobs, cfg, lambda job: bar.advance(1))
    _table.cache_clear()
    skipped = {i for job in jobs for i in tree.manifest(job.output)["skipped"]}
    rows = len(set(shop.train.ids))
    with session.progress.stage("save"):
        share = _assemble(session, shop, factors, list(zip(jobs, pieces)), before)
    shutil.rmtree(session.run.file("parts"))
    told = {
        "entry": cfg.entry,
        "coordinates": count,
        **({"answered_with": most_of(count, len(shop.train))} if cfg.entry == "coordinates" else {}),
        "calibration": cfg.calibration if cfg.entry == "coordinates" else entries.calibrated(cfg.calibration, count),
        "bits": cfg.number_bits,
        "parameters": parameters,
        "share_of_coordinates": count / parameters,
        "share_of_bytes": count * cfg.number_bits / (16 * parameters),
        "share_of_energy": share,
        "damping": list(cfg.damping),
        **say_damping(session.progress, factors, ("ekfac",), cfg.damping),
        "measurement": cfg.measurement,
        "n": rows,
        "train": rows,
        "bytes": sum(f.stat().st_size for f in session.run.file("index").iterdir()),
        "skipped": sorted(skipped),
        "not_covered": sorted(shop.left),
    }
    return profiled(session, told)


def _plan(entry: str, asked: dict[str, Any], parts: Path, shards: int) -> tuple[list[Job], list[Job]]:
    """(jobs that come first, a job per shard of training rows)."""
    if entry == "products":
        queries = Job(f"{ENTRIES}:query_file", asked, parts / "queries.bin")
        before = [queries, Job(f"{ENTRIES}:query_products", asked, parts / "queries.safetensors")]
        function, more = f"{ENTRIES}:products_shard", {"queries": str(queries.output)}
    else:
        before = [Job(f"{HERE}:choose_coordinates", asked, parts / "coordinates.safetensors")]
        function, more = f"{HERE}:index_shard", {"chosen": str(before[0].output)}
    files = (parts / f"index-{i:05d}.safetensors" for i in range(shards))
    return before, [Job(function, {**asked, **more, "shard": i}, file) for i, file in enumerate(files)]


def estimate(cfg: IndexConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of an index: coordinates, bytes, and seconds from a few rows that are timed."""
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    shop = open_shop(settings_for(cfg, models[0].text), task)
    parameters = sum(m.out * m.columns for m in shop.maps)
    count = kept_of(cfg, parameters)
    own = 0
    if cfg.entry == "products":
        entries.enough(shop.maps, count)
        own = entries.calibrated(cfg.calibration, count) * whole_products(shop)
    few = np.arange(min(8, len(shop.train)))
    began = time.perf_counter()
    coords.gradients(shop, shop.train, few, Question(), lambda m, g: None)
    each = (time.perf_counter() - began) / len(few)
    rows = len(shop.train)
    return {
        "parameters": parameters,
        "coordinates": count,
        "rows": rows,
        "disk_bytes": count * rows * cfg.number_bits // 8 + 2 * own + 4 * rows,
        "memory_bytes": 4 * parameters * (coords.ROWS + 6),
        # fitting (two passes and eigenbases), choosing, and the rows' own pass, each with turned gradients
        "seconds": round(each * (4 * rows + 2 * min(rows, SAMPLE)) * 1.5 + 2, 1),
    }


def kept_of(cfg: IndexConfig, parameters: int) -> int:
    """How many coordinates are kept: as many as go into the wished number of 16-bit numbers."""
    return min(parameters, coords.wanted(cfg.coordinates, parameters) * 16 // cfg.number_bits)


def choose_coordinates(arguments: dict[str, Any], part: Path) -> None:
    """Job: measure energies on calibration queries and a sample of training rows; keep the strongest coordinates."""
    shop = open_shop(arguments)
    factors = Factors.open(Path(arguments["factors"]))
    task, seed = shop.read.task, shop.cfg.seed
    rows = task.rows(calibration_split(task))
    asked = shop.read.encode([rows[i] for i in calibration_rows(task, arguments["calibration"], seed)])
    question = measurement(shop.read.objective, arguments["measurement"])
    weights = coords.weights_of(factors, Setting("ekfac", arguments["damping"]), shop.maps)
    most = rows_within(shop, of_index(shop, arguments["count"], arguments["bits"]), coords.ROWS)
    queries = coords.spread(shop, asked, np.arange(len(asked)), question, factors.bases, weights, False, most)
    rng = np.random.default_rng(seed_of(seed, "spread"))
    some = np.sort(rng.permutation(len(shop.train))[:SAMPLE])
    train = coords.spread(shop, shop.train, some, Question(), factors.bases, weights, True, most)
    kept, share = coords.choose(queries, train, weights, arguments["count"], factors.bases)
    coords.save(part, kept, share)


@dataclass(frozen=True)
class _Table:
    """What turns gradients into stored coordinates."""

    bases: Mapping[str, Basis]
    kept: coords.Coordinates
    weights: Mapping[str, Tensor]


def _stamp(arguments: dict[str, Any]) -> str:
    return digest([Factors.open(Path(arguments["factors"])).stamp, stamps([Path(arguments["chosen"])])])


@lru_cache(maxsize=1)  # one shard after another needs the same; the stamp says whether it is
def _table(place: str, damping: str, chosen: str, maps: tuple[Map, ...], stamp: str) -> _Table:
    factors = Factors.open(Path(place))
    weights = coords.weights_of(factors, Setting("ekfac", damping), maps)
    return _Table(factors.bases, coords.load(Path(chosen))[0], weights)


def index_shard(arguments: dict[str, Any], part: Path) -> None:
    """Job: kept coordinates and norms of one shard of training rows."""
    shop = open_shop(arguments)
    table = _table(arguments["factors"], arguments["damping"], arguments["chosen"], shop.maps, _stamp(arguments))
    size = shop.cfg.shard_rows
    order = np.argsort(-shop.train.lengths_N, kind="stable")[arguments["shard"] * size :][:size]
    bits = arguments["bits"]
    most = rows_within(shop, of_index(shop, arguments["count"], bits), coords.ROWS)
    stored, norms = coords.rows_of(shop, order, table.bases, table.kept, table.weights, bits, most)
    skipped = [i for i in (shop.train.ids[n] for n in order) if i in shop.skipped]
    tree.save(part, {"rows": stored, "norms": norms}, {"skipped": skipped})


def _assemble(
    session: Session, shop: Shop, factors: Factors, parts: list[tuple[Job, np.ndarray]], before: list[Job]
) -> float:
    """All shards as one index, laid out as questions read it; returns the share of rows' energy that it holds."""
    files, cfg = [(job.output, piece) for job, piece in parts], session.cfg
    with writing_directory(session.run.file("index")) as part:
        if cfg.entry == "products":
            entries.gather(part, files, before[1].output, dict(parts[0][0].arguments))
            held = [tree.manifest(file) for file, _ in files]
            share = sum(h["kept"] for h in held) / max(sum(h["whole"] for h in held), 1e-300)
        else:
            kept, share = coords.load(before[0].output)
            size = sum(len(k.flat_K) for k in kept.values())
            assemble(part / "rows.npy", files, size, cfg.number_bits)
            coords.save(part / "coordinates.safetensors", kept, share)
        norms = np.zeros(len(shop.train))
        for file, piece in files:
            norms[piece] = tree.load(file)[0]["norms"].numpy()
        np.save(part / "norms.npy", norms.astype(np.float32), allow_pickle=False)
        write_json(part / "train_ids.json", list(shop.train.ids))
        facts = {"damping": cfg.damping[0], "measurement": cfg.measurement, "bits": cfg.number_bits, "entry": cfg.entry}
        facts |= identity(shop)
        inside = factors.path.resolve().is_relative_to(session.run.path.resolve())
        outside = {"factors": str(factors.path.resolve()), "content": content(factors.path)} if not inside else {}
        write_json(part / "index.json", {**facts, "factors": "factors", **outside})
    return float(share)


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
        if other := differing(found.facts, identity(shop)):
            raise StoreError(
                f"{run} holds an index of another model or other settings:\n"
                + "\n".join(other)
                + "\nMake one for this model and these settings: `budwood influence index MODEL --task TASK`."
            )
        return found

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the index was made for."""
        return dict(read_json(self.path / "index.json"))

    @property
    def entry(self) -> str:
        """What is kept of a row."""
        return str(self.facts.get("entry", "coordinates"))

    @property
    def table(self) -> Path:
        """The file with the entries of all rows."""
        return self.path / TABLE[self.entry]

    @cached_property
    def factors(self) -> Factors:
        """The factors behind it."""
        own = Path(self.facts["factors"])
        found = Factors.open(own if own.is_absolute() else self.path.parent / own)
        if "content" in self.facts and self.facts["content"] != content(found.path):
            raise StoreError(
                f"The factors in {found.path} have changed since the index in {self.path} was made of them, so its "
                "numbers mean something else now. Make the index again: `budwood influence index`."
            )
        return found

    @cached_property
    def kept(self) -> dict[str, coords.Kept]:
        """The coordinates kept."""
        return coords.load(self.path / "coordinates.safetensors")[0]

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """1 / (curvature + damping) of every coordinate."""
        return coords.weights_of(self.factors, Setting("ekfac", self.facts["damping"]), self.shop.maps)

    @cached_property
    def stored(self) -> Stored:
        """Coordinates of the training rows as they lie on disk."""
        return Stored.open(self.path / "rows.npy", len(self.shop.train), self.facts["bits"])

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
        return torch.cat([k.weight_K * k.spread_K for k in self.kept.values()])

    @cached_property
    def _turns(self) -> coords.Turns:
        return coords.turns_of(self.shop.maps, self.factors.bases, self.kept)

    @cached_property
    def _length_N(self) -> Tensor:
        return torch.from_numpy(self.norms).sqrt()

    @cached_property
    def products(self) -> Products:
        """Products of the training rows and, behind them, of the calibration queries."""
        return Products.open(self.path, len(self.shop.train) + len(self.rest_CN))

    @cached_property
    def rest_CN(self) -> Tensor:
        """What the products of training rows leave out, by calibration query."""
        return torch.from_numpy(np.load(self.path / "rest.npy", allow_pickle=False))

    @cached_property
    def _metric(self) -> Metric:
        return Metric(self.factors.bases, self.weights)

    def ask(self, features: Features, most: int | None = None) -> np.ndarray:
        """Scores of all training rows [N] with one encoded question; `most`: see `answer`."""
        question = measurement(self.shop.read.objective, self.facts["measurement"])
        every = np.arange(len(features))
        if self.entry == "products":
            asked, bases = dict[str, Tensor](), self.factors.bases
            keep = lambda m, g: asked.__setitem__(m.name, self._metric.asked(m.name, g.sum(0)))  # noqa: E731
            all_there(features, every, coords.gradients(self.shop, features, every, question, keep, bases))
            score_N, known_C = self.products.scores(asked).split([len(self.shop.train), len(self.rest_CN)])
            return self.by_row((score_N + known_C @ self.rest_CN).numpy()) / len(self.ids)
        found_BK = coords.coordinates_of(self.shop, features, every, question, self._turns, self.kept)
        return self.answer(found_BK.sum(0), most)

    def answer(self, u_K: Tensor, most: int | None = None) -> np.ndarray:
        """Scores from a question's coordinates, with `most` of them (None: as many as are quickly multiplied)."""
        score_N = self.stored.product(u_K * self._scale_K, most)
        return self.by_row((score_N * self._length_N).numpy()) / len(self.ids)

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
        every = np.arange(len(features))
        keep = lambda m, g: asked.__setitem__(m.name, g.sum(0) * self.weights[m.name])  # noqa: E731
        all_there(features, every, coords.gradients(self.shop, features, every, question, keep, bases))
        score = np.zeros(len(wanted))
        place = {int(n): i for i, n in enumerate(wanted)}
        for batch in self.shop.batches(self.shop.train, wanted, most=coords.ROWS):
            part = torch.zeros(len(batch), dtype=torch.float64)

            def add(m: Map, g: Tensor, part: Tensor = part) -> None:
                if m.name in asked:  # else no gradient of the query has reached the map
                    part[: len(g)] += torch.einsum("boi,oi->b", g, asked[m.name]).double()

            took = coords.gradients(self.shop, self.shop.train, batch, Question(), add, bases)
            score[[place[int(n)] for n in took]] = part[: len(took)].numpy()
        return score / len(self.ids)

"""Entries of training rows as outer products, and what they leave out told through calibration queries.

A new query is in part a mixture of queries like it: u = sum_c beta_c u_c + something else. What entries leave out of a
row's score with every calibration query is known exactly, so the same mixture of it is the best guess of what they
leave out of its score with u. The mixture solves G beta = (scores of u with the calibration queries), which lie in the
index as rows of their own with all their products; `rest.npy` [C, N] is G^-1 times what is left out.
Shapes: C calibration queries, N training rows, B rows of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from budwood.capture.gradients import Question
from budwood.capture.stream import Map, Sides
from budwood.data.batch import Features
from budwood.errors import ConfigError
from budwood.methods.influence.coordinates import ROWS, weights_of
from budwood.methods.influence.factors import Factors, Setting
from budwood.methods.influence.memory import of_products, rows_within
from budwood.methods.influence.pairs import Meeting, OnDisk, joined
from budwood.methods.influence.precondition import Preconditioner, Work, measurement, precondition, query_blocks
from budwood.methods.influence.products import EVERY, Metric, Products, assemble, products_of
from budwood.methods.influence.queries import calibration_rows, calibration_split
from budwood.methods.influence.workshop import Shop, open_shop, sweep
from budwood.params import tree
from budwood.store.files import digest

RIDGE = 1e-3  # of the mean square of calibration queries, so that no mixture is made of rounding
SHARE = 8  # at most one number in so many of an entry is spent on calibration queries
PER_QUERY = 2  # 16-bit numbers of an entry that one calibration query takes


def calibrated(calibration: int, count: int) -> int:
    """Calibration queries of an index whose entries have `count` numbers.

    >>> calibrated(64, 24_000), calibrated(64, 160)
    (64, 10)
    """
    return min(calibration, count // (SHARE * PER_QUERY))


def enough(maps: Sequence[Map], count: int) -> None:
    """Refuse entries that would not hold an outer product of every map, even one at a time."""
    least = max(SHARE * PER_QUERY, 2 * max(m.out + m.columns for m in maps))
    if count < least:
        raise ConfigError(
            f"--coordinates gives an entry {count:,} numbers, and outer products of this model need {least:,} at the "
            "least. Give more, or --entry coordinates."
        )


@dataclass(frozen=True)
class Calibration:
    """Calibration queries of a shop, and how scores with them are weighed."""

    shop: Shop
    factors: Factors
    given: dict[str, Any]

    @cached_property
    def features(self) -> Features:
        """The queries as the model reads them."""
        task, count = self.shop.read.task, calibrated(self.given["calibration"], self.given["count"])
        rows = task.rows(calibration_split(task))
        found = self.shop.read.encode([rows[i] for i in calibration_rows(task, count, self.shop.cfg.seed)])
        # a forward pass alone leaves out, or stops at, queries without a finite loss; a long text may be several
        return found.take(sweep(self.shop, found, np.arange(min(count, len(found))), lambda batch: (), _nothing))

    @cached_property
    def metric(self) -> Metric:
        """Eigenbases and weights."""
        setting = Setting("ekfac", self.given["damping"])
        return Metric(self.factors.bases, weights_of(self.factors, setting, self.shop.maps))

    @cached_property
    def ready(self) -> Preconditioner:
        """How queries meet rows in full."""
        work = Work(len(self.features), len(self.shop.train), float(self.shop.train.lengths_N.mean()))
        return precondition(self.factors, [Setting("ekfac", self.given["damping"])], work, "turn")

    @property
    def question(self) -> Question:
        """What is asked of a query."""
        return measurement(self.shop.read.objective, self.given["measurement"])

    @property
    def numbers(self) -> int:
        """16-bit numbers of an entry that are left for products."""
        return int(self.given["count"]) - PER_QUERY * len(self.features)

    @property
    def most(self) -> int:
        """Rows of a batch."""
        return rows_within(self.shop, of_products(self.shop, self.given["count"], len(self.features)), ROWS)

    def blocks(self, file: Path) -> OnDisk:
        """Gradients of the queries in a file."""
        return OnDisk.at(file, self.ready, len(self.features), self.shop.like)

    def asked(self, file: Path, query: int) -> dict[str, Tensor]:
        """One of them as it meets products."""
        found, blocks = {}, self.blocks(file)
        for m in self.shop.maps:
            (grad_OI,) = joined(blocks, m, self.ready.blocks(m.name)[0], slice(query, query + 1))
            found[m.name] = self.metric.asked(m.name, grad_OI)
        return found


def _nothing(question: int, m: Map, s: Sides) -> None:
    """Nothing is asked, so nothing comes."""


_ready: dict[str, Calibration] = {}  # of this process: shards follow one another with the same queries


def calibration_of(arguments: dict[str, Any]) -> Calibration:
    """The calibration queries of these arguments, made ready once per process and again when anything is other."""
    shop, factors = open_shop(arguments), Factors.open(Path(arguments["factors"]))
    own = {k: arguments[k] for k in ("factors", "damping", "measurement", "calibration", "count")}
    key = digest([own, factors.stamp, shop.hash])
    if key not in _ready or _ready[key].shop is not shop:
        _ready.clear()
        _ready[key] = Calibration(shop, factors, own)
    return _ready[key]


def query_file(arguments: dict[str, Any], part: Path) -> None:
    """Job: gradients of the calibration queries in one file."""
    own = calibration_of(arguments)
    part.touch()
    every = np.arange(len(own.features))
    query_blocks(own.shop, own.ready, own.features, every, own.question, own.blocks(part).put, own.most)


def query_products(arguments: dict[str, Any], part: Path) -> None:
    """Job: all products of the calibration queries."""
    own = calibration_of(arguments)
    every = np.arange(len(own.features))
    found, _, _ = products_of(own.shop, own.features, every, own.question, own.metric, EVERY, own.most)
    tree.save(part, found, {})


def products_shard(arguments: dict[str, Any], part: Path) -> None:
    """Job: products and norms of one shard of training rows, and their full scores with the calibration queries."""
    own = calibration_of(arguments)
    shop, size = own.shop, own.shop.cfg.shard_rows
    order = np.argsort(-shop.train.lengths_N, kind="stable")[arguments["shard"] * size :][:size]
    found, norm_B, energy = products_of(shop, shop.train, order, Question(), own.metric, own.numbers, own.most)
    score_CB = torch.zeros(len(own.features), len(order), dtype=torch.float64)
    place = {int(n): i for i, n in enumerate(order)}

    def add(_: int, m: Map, took: np.ndarray, score_BC: Tensor) -> None:
        score_CB[:, [place[int(n)] for n in took]] += score_BC.T.double()

    meeting = Meeting(shop, own.ready, own.blocks(Path(arguments["queries"])), len(own.features), add)
    meeting(shop.train, order, own.most)
    skipped = [i for i in (shop.train.ids[n] for n in order) if i in shop.skipped]
    tree.save(part, {**found, "norms": norm_B, "full": score_CB.float()}, {"skipped": skipped, **energy})


def gather(place: Path, parts: Sequence[tuple[Path, np.ndarray]], queries: Path, arguments: dict[str, Any]) -> None:
    """products.npy, products.safetensors and rest.npy under `place`, of all shards with the places of their rows.

    `queries`: the products of the calibration queries, which become rows behind the training rows.
    """
    own = calibration_of(arguments)
    rows, count = len(own.shop.train), len(own.features)
    assemble(place, [*parts, (queries, rows + np.arange(count))], own.shop.maps)
    full_CN = np.zeros((count, rows), np.float32)
    for path, piece in parts:
        full_CN[:, piece] = tree.load(path)[0]["full"].numpy()
    table = Products.open(place, rows + count)
    score_CX = torch.stack([table.scores(own.asked(Path(arguments["queries"]), c)).double() for c in range(count)])
    gram_CC = score_CX[:, rows:]
    ridge = max(RIDGE * float(gram_CC.diagonal().mean()), 1e-30)
    left_CN = torch.from_numpy(full_CN).double() - score_CX[:, :rows]
    rest_CN = torch.linalg.solve(gram_CC + ridge * torch.eye(count, dtype=torch.float64), left_CN)
    np.save(place / "rest.npy", rest_CN.float().numpy(), allow_pickle=False)

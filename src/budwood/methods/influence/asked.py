"""Queries made ready to meet training rows in one process: their blocks in memory, whole or as their sides, or in a
file, within the budget.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from budwood.capture.stream import Map
from budwood.config.influence import ScoreConfig
from budwood.data.batch import Features
from budwood.data.opened import Key
from budwood.data.task import Task
from budwood.engine.jobs import Job, one_thread
from budwood.engine.local import run_jobs
from budwood.errors import ConfigError
from budwood.methods.influence.factors import Factors, Unfitted, settings_of
from budwood.methods.influence.memory import BASE, least, of_fit, sizes
from budwood.methods.influence.pairs import MET, QUERY_TILE, TILE, Blocks, OnDisk, Resident, held_for
from budwood.methods.influence.precondition import (
    Preconditioner,
    Work,
    bytes_needed,
    live_shares,
    measurement,
    precondition,
    query_blocks,
)
from budwood.methods.influence.queries import encoded, query_rows
from budwood.methods.influence.sided import SIDES, Sided, sided_bytes
from budwood.methods.influence.thin import WAY, Thin, thin_numbers
from budwood.methods.influence.workshop import TOKENS, Shop, memory_budget, open_shop
from budwood.params.select import layer_of
from budwood.store.files import canonical, digest, file_digest

HERE = "budwood.methods.influence.asked"
SPARE = 1.2  # memory asked for, times what blocks take
RESIDENT = 1 << 30  # bytes of blocks held at most: to read more from a file, batch after batch, costs some 3 %
WAITING = 8  # the part of --max-memory, one in so many, in which rows wait
CHECKED = 16  # queries on which bfloat16 is compared with float32


@dataclass(frozen=True)
class Asked:
    """Everything a shard of scores needs."""

    shop: Shop
    ready: Preconditioner
    queries: Features
    cfg: ScoreConfig
    given: dict[str, Any]

    @property
    def summed(self) -> bool:
        """Whether all queries are one row."""
        return "query" in self.cfg.aggregate

    @property
    def rows(self) -> int:
        """Rows of the blocks: pieces of queries, or 1 where they are summed."""
        return 1 if self.summed else len(self.queries)

    @property
    def half(self) -> bool:
        """Whether products are in bfloat16: decided once, whatever machine a shard is on."""
        return bool(self.given["half"])

    @cached_property
    def checked(self) -> tuple[str, ...]:
        """Queries whose scores are also computed in float32, to be compared."""
        every = list(dict.fromkeys(self.queries.ids))
        return tuple(every[:: max(1, -(-len(every) // CHECKED))]) if self.half else ()

    @cached_property
    def exact(self) -> tuple[int, ...]:
        """Rows of the blocks that belong to them."""
        if self.summed:
            return (0,) if self.half else ()
        return tuple(i for i, own in enumerate(self.queries.ids) if own in set(self.checked))

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """All modules (""), then modules or layers."""
        return ("", *dict.fromkeys(g for m in self.shop.maps for g in groups_of(m, self.cfg)))

    @cached_property
    def order(self) -> np.ndarray:
        """Training rows in the order in which they are cut into shards: long ones first."""
        return np.argsort(-self.shop.train.lengths_N, kind="stable")

    @property
    def pieces(self) -> list[np.ndarray]:
        """The rows of every shard."""
        size = self.cfg.shard_rows
        return [self.order[i : i + size] for i in range(0, len(self.order), size)]

    @cached_property
    def file(self) -> Path:
        """Where blocks lie that do not fit into memory; a file of other blocks has another name."""
        places = OnDisk.at(Path(), self.ready, self.rows, self.shop.like).places
        layout = digest([[*key, *place] for key, place in places.items()])
        return Path(self.given["place"]) / "parts" / f"queries-{layout[:12]}.bin"

    @cached_property
    def blocks(self) -> Blocks:
        """All query blocks: computed here, or from the file that `settle` has made of them."""
        rank, like = self.cfg.query_rank, self.shop.like
        if not self.sided and self.file.exists():
            return OnDisk.at(self.file, self.ready, self.rows, like)
        blocks: Resident | Thin
        if rank is not None:
            blocks = Thin(self.rows, like, rank)
        else:
            blocks = Sided(self.rows, like) if self.sided else Resident(self.rows, like, self.summed)
        self.fill(blocks)
        return blocks

    @cached_property
    def sided(self) -> bool:
        """Whether queries whose whole blocks are too large to be held are kept as their sides.

        Settled by the queries and --max-memory, never by what is free just now: a run that is carried on does the same.
        """
        if self.cfg.query_rank is not None or self.summed or self.cfg.per_token:
            return False
        return better_sided(self.ready, self.queries, None if self.cfg.max_memory is None else room(self))

    def fill(self, blocks: Blocks) -> None:
        """Compute all query blocks, on one thread as every shard is: workers that do so each have the same ones."""
        question = measurement(self.shop.read.objective, self.cfg.measurement)
        every, most = np.arange(len(self.queries)), self.cfg.query_batch or 64
        put_sides = blocks.put_sides if isinstance(blocks, Sided) else None
        with one_thread():
            query_blocks(self.shop, self.ready, self.queries, every, question, blocks.put, most, put_sides)

    def settle(self) -> None:
        """Before any shard: blocks that are too large to be held by each worker, and so are their sides, go to a file,
        once for all workers.
        """
        if not self.sided and self.file.exists():
            return
        if self.check():
            run_jobs([Job(f"{HERE}:query_file", self.given, self.file)], 1)
        elif self.cfg.workers == 1 and self.cfg.engine == "local":
            assert self.blocks is not None  # the shards are computed in this process: computed and timed here

    def check(self, also: int = 0) -> bool:
        """Whether blocks go to a file; too little memory or disk is refused. `also`: memory for other steps."""
        left, rank = room(self, also), self.cfg.query_rank
        if rank is not None and (thin := self.thin_bytes) > left:
            raise ConfigError(
                f"{self.rows} queries of --query-rank {rank} take {thin / 1e6:,.0f} MB in each worker, and there are "
                f"{max(0, left) / 1e6:,.0f} MB for them. Give a smaller rank, more --max-memory, or leave --query-rank "
                "away: whole gradients that do not fit lie on disk."
            )
        need = bytes_needed(self.ready, self.rows)
        if rank is not None or self.summed or self.sided or (need <= RESIDENT and need * SPARE < left):
            return False
        place = Path(self.given["place"])
        free = shutil.disk_usage(next(p for p in (place, *place.absolute().parents) if p.exists())).free
        if need > free:  # rather than fill it for an hour and fail then
            raise ConfigError(
                f"The gradients of {self.rows} queries take {need / 1e9:,.1f} GB of disk while they are scored, and "
                f"where {place} lies {free / 1e9:,.1f} GB are free. Keep queries as outer products in memory "
                "(--query-rank 32), ask fewer --queries, or give an --out with more room."
            )
        return True

    @property
    def thin_bytes(self) -> int:
        """Memory of queries as outer products; none where they are not kept so."""
        if self.cfg.query_rank is None:
            return 0
        numbers = thin_numbers(self.ready.factors.maps, self.cfg.query_rank, self.ready)
        return int(SPARE * numbers * self.rows * self.shop.like.element_size())


def groups_of(m: Map, cfg: ScoreConfig) -> list[str]:
    """The groups a map belongs to, besides all."""
    layer = layer_of(f"{m.name}.weight")
    layer_name = f"layer.{layer}" if layer is not None else "head"
    return [g for g, wanted in ((m.name, cfg.per_module), (layer_name, cfg.per_layer)) if wanted]


def asked_of(arguments: dict[str, Any], task: Task | None = None) -> Asked:
    """What these arguments ask, made ready once per process, and again when model, rows or factors are other ones."""
    shop = open_shop(arguments, task)
    now = file_digest(Path(arguments["factors"]) / "factors.json")
    key = Key(canonical({"now": now, "given": arguments}), task)
    if (found := _asked(key)).shop is not shop:
        _asked.cache_clear()
        found = _asked(key)
    return found


@lru_cache(maxsize=1)
def _asked(key: Key) -> Asked:
    given = json.loads(key.settings)["given"]
    cfg = ScoreConfig(**given["score"])
    return _made(open_shop(given, key.task), cfg, Factors.open(Path(given["factors"])), given)


def _made(shop: Shop, cfg: ScoreConfig, factors: Factors, given: dict[str, Any]) -> Asked:
    queries = encoded(shop.read, query_rows(shop.read.task, cfg))
    work = Work(len(queries), len(shop.train), float(shop.train.lengths_N.mean()), live_shares(shop))
    settings = settings_of(cfg.strategy, cfg.damping)
    # scores by token need queries turned back to weights
    way = "back" if cfg.per_token else WAY if cfg.query_rank is not None else None
    return Asked(shop, precondition(factors, settings, work, way), queries, cfg, given)


def check_room(shop: Shop, cfg: ScoreConfig, given: dict[str, Any], fitted_already: bool) -> None:
    """Refuse memory or a disk that does not do for scores, or for the fit before them, while nothing is done yet."""
    fit = 0 if cfg.factors or fitted_already else least(shop, of_fit(shop))
    _made(shop, cfg, Unfitted.of(shop.maps), given).check(fit)


def better_sided(ready: Preconditioner, queries: Features, left: int | None = None) -> bool:
    """Whether blocks are too large to be held, but not their sides; `left`: bytes for them (None: the usual)."""
    need, whole = sided_bytes(ready, queries), bytes_needed(ready, len(queries))
    if need is None or need > SIDES:
        return False
    if left is None:
        return whole > RESIDENT
    return need * SPARE < left and (whole > RESIDENT or whole * SPARE >= left)


def query_file(arguments: dict[str, Any], part: Path) -> None:
    """Job: all query blocks in one file, for queries that do not fit into memory."""
    asked = asked_of(arguments)
    asked.fill(OnDisk.at(part, asked.ready, asked.rows, asked.shop.like))


def held_bytes(asked: Asked) -> int:
    """Bytes of training rows that wait for the queries: the usual, or a part of --max-memory."""
    usual, wish = _waiting(asked), asked.cfg.max_memory
    return usual if wish is None else min(usual, memory_budget(wish) // WAITING)


def _waiting(asked: Asked) -> int:
    return held_for(bytes_needed(asked.ready, asked.rows), asked.given["held"])


def room(asked: Asked, also: int = 0) -> int:
    """Bytes that one worker has for query blocks, after model, activations, tiles and sums; too little is refused, and
    so is less than `also`, which another step of the run takes.
    """
    cfg, shop, size = asked.cfg, asked.shop, asked.shop.like.element_size()
    settings = len(asked.ready.settings)
    fixed = BASE + 3 * size * sum(p.numel() for p in shop.model.parameters())
    fixed += size * sizes(shop).sides * bool(asked.ready.bases)
    fixed += size * sum(w.numel() for w in asked.ready.weights.values() if w is not None)
    # gradients of rows, made and weighed (or what queries make of single positions); queries, read and weighed; both
    # once more in bfloat16
    every = settings * asked.rows * sum(m.out * m.columns for m in shop.maps)
    fixed += size * (3 * TILE + 3 * min(QUERY_TILE, every))
    sides = sum(m.out + (m.columns if m.source == m.name else 0) for m in shop.maps)
    longest = max(int(f.lengths_N.max()) for f in (shop.train, asked.queries))
    fixed += 3 * size * sides * max(TOKENS, longest)  # activations of a batch and its sides
    met = min(cfg.train_batch or MET, len(shop.train))
    fixed += 3 * settings * asked.rows * size * met  # scores of a product, put together
    fixed += settings * asked.rows * 8 * len(asked.groups) * min(cfg.shard_rows, len(shop.train))  # and of a shard
    if cfg.per_token:
        fixed += settings * asked.rows * 8 * int((shop.train.lengths_N[asked.pieces[0]] + 1).sum())
    waiting = _waiting(asked)
    # what is free is shared; what was asked for is each worker's own, so that no batch depends on their number
    budget = memory_budget(None) // cfg.workers if cfg.max_memory is None else memory_budget(cfg.max_memory)
    if cfg.max_memory is not None:
        # rows wait in an eighth of what is given, or in less: with so much, the eighth is there besides the rest
        enough = fixed + (bytes_needed(asked.ready, 1) if asked.summed else asked.thin_bytes)
        enough = max(also, min(enough + waiting, enough * WAITING // (WAITING - 1) + 1))
        if budget < enough:
            what, less = (
                ("the fit before the scores", "fewer --modules or a smaller --max-length")
                if enough == also
                else (f"{asked.rows} queries", "fewer --queries")
            )
            raise ConfigError(
                f"--max-memory {cfg.max_memory} is too little for {what}: it takes at least "
                f"{math.ceil(enough / 1e6):,} MB in each worker. Give more memory, or {less}."
            )
    return budget - fixed - held_bytes(asked)

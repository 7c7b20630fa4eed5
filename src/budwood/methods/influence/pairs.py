"""Queries meet training rows: one pass over the rows for all queries and all settings.

Shapes: S settings, Q queries, B training rows of a batch, O out, I in (with the bias's 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from budwood.capture.stream import Map
from budwood.data.batch import Features
from budwood.linalg.kron import outer_
from budwood.methods.influence.moments import Turner, with_one
from budwood.methods.influence.precondition import Preconditioner, Term, ask_loss
from budwood.methods.influence.workshop import ROWS, Shop, sweep

TILE = 1 << 23  # numbers of gradients made at a time: most are used while still in cache
# Numbers of query blocks that one product takes, and that are read at a time where they lie on disk. Not by the memory
# that is free: sums cut at other places have other last bits.
QUERY_TILE = 1 << 24
HELD = 1 << 30  # bytes of both sides of training rows that wait for a product: every block is read once for all of them
EVERY = slice(None)


class Blocks(Protocol):
    """Query blocks, wherever they lie."""

    def put(self, name: str, block: str, at: np.ndarray, values_QOI: Tensor) -> None:
        """Take some queries of a block."""

    def rows(self, name: str, block: str, first: int, last: int, queries: slice = EVERY) -> Tensor:
        """[Q, (last - first) * I]: outputs first..last of a block, for some queries."""


@dataclass
class Resident:
    """Query blocks in memory; `summed`: all queries in one row."""

    queries: int
    like: Tensor
    summed: bool = False
    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def put(self, name: str, block: str, at: np.ndarray, values_QOI: Tensor) -> None:
        """Take some queries of a block."""
        whole = self.tensors.get((name, block))
        if whole is None:
            whole = self.tensors[name, block] = self.like.new_zeros(self.queries, *values_QOI.shape[1:])
        if self.summed:
            whole += values_QOI.sum(0)
        else:
            whole[torch.from_numpy(at)] = values_QOI

    def rows(self, name: str, block: str, first: int, last: int, queries: slice = EVERY) -> Tensor:
        """A view of some outputs."""
        return self.tensors[name, block][queries, first:last].flatten(1)


@dataclass
class OnDisk:
    """Query blocks in a file, read into memory tile by tile: never more of it there than one tile."""

    path: Path
    queries: int
    like: Tensor
    places: Mapping[tuple[str, str], tuple[int, int, int]]  # first byte, outputs, columns

    @classmethod
    def at(cls, path: Path, ready: Preconditioner, queries: int, like: Tensor) -> OnDisk:
        """The layout of every block in one file; the file itself is written by `put`."""
        places: dict[tuple[str, str], tuple[int, int, int]] = {}
        start = 0
        for m in ready.factors.maps:
            for block in ready.blocks(m.name):
                places[m.name, block] = (start, m.out, m.columns)
                start += queries * m.out * m.columns * like.element_size()
        return cls(path, queries, like, places)

    def put(self, name: str, block: str, at: np.ndarray, values_QOI: Tensor) -> None:
        """Take some queries of a block."""
        start, out, columns = self.places[name, block]
        size = out * columns * self.like.element_size()
        with self.path.open("r+b" if self.path.exists() else "w+b") as f:
            for q, values in zip(at, values_QOI.contiguous().numpy()):
                f.seek(start + int(q) * size)
                f.write(memoryview(values).cast("B"))

    def rows(self, name: str, block: str, first: int, last: int, queries: slice = EVERY) -> Tensor:
        """Some outputs, read from the file."""
        start, out, columns = self.places[name, block]
        width = columns * self.like.element_size()
        wanted = range(self.queries)[queries]
        found = np.empty((len(wanted), (last - first) * width), np.uint8)
        with self.path.open("rb", buffering=0) as f:
            for i, q in enumerate(wanted):
                f.seek(start + (q * out + first) * width)
                f.readinto(memoryview(found[i]))
        return torch.from_numpy(found).view(self.like.dtype)


Add = Callable[[int, Map, np.ndarray, Tensor], None]


@dataclass(frozen=True)
class _Passed:
    """Training rows that went through the model and wait for the queries: (g, a) of every map."""

    rows: np.ndarray
    sides: dict[str, tuple[Tensor, Tensor]]
    turner: Turner

    @cached_property
    def bytes(self) -> int:
        """Memory of the sides; an input that several maps share counts once."""
        each = {t.data_ptr(): t.numel() * t.element_size() for pair in self.sides.values() for t in pair}
        return sum(each.values())


def _plain(m: Map, g_BTO: Tensor, a_BTI: Tensor) -> tuple[Tensor, Tensor]:
    return g_BTO, with_one(a_BTI, m)


@dataclass
class Meeting:
    """Training rows meeting all queries: `add(setting, map, rows, score_BQ)` gets every map's part.

    With `half`, products are in bfloat16; queries at `exact` have a further column each, in full precision. Rows
    wait for each other until they take `held` bytes.
    """

    shop: Shop
    ready: Preconditioner
    blocks: Blocks
    queries: int
    add: Add
    half: bool = False
    exact: Sequence[int] = ()
    held: int = HELD
    _rooms: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, features: Features, order: np.ndarray, most: int = ROWS) -> None:
        """One pass over the rows at `order`."""
        waiting: list[_Passed] = []
        for index in self.shop.batches(features, order, most=most):
            if sum(len(p.rows) for p in waiting) + len(index) > most or sum(p.bytes for p in waiting) >= self.held:
                self._meet_all(waiting)
                waiting.clear()
            sides: dict[str, tuple[Tensor, Tensor]] = {}
            use = lambda _, m, s, sides=sides: sides.__setitem__(m.name, s.live())  # noqa: E731
            took = sweep(self.shop, features, index, ask_loss, use)
            waiting.append(_Passed(took, sides, Turner(self.ready.bases)))
        self._meet_all(waiting)

    def _meet_all(self, passed: Sequence[_Passed]) -> None:
        """Products of all queries with some batches."""
        for m in self.shop.maps:
            mine = [p for p in passed if m.name in p.sides]
            terms = self.ready.terms[m.name]
            for turned in (False, True):
                some = [t for t in terms if t.turned == turned]
                if some and mine:
                    pairs = [p.turner(m, *p.sides[m.name]) if turned else _plain(m, *p.sides[m.name]) for p in mine]
                    rows = np.concatenate([p.rows for p in mine])
                    for term, score_BQ in zip(some, self._meet(m, some, pairs)):
                        self.add(term.setting, m, rows, score_BQ)
            for p in mine:
                del p.sides[m.name]

    def _meet(self, m: Map, terms: list[Term], pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """score_BQ of every term for one map: gradients are made tile by tile and multiplied while in cache."""
        ends = np.cumsum([0, *(len(g_BTO) for g_BTO, _ in pairs)]).tolist()
        count = ends[-1]
        scores = [self.shop.like.new_zeros(count, self.queries + len(self.exact)) for _ in terms]
        high, wide = tile(m, count, self.queries)
        room = self._room("made", count * high * m.columns)
        few = count <= self.queries  # weights go to the side that is smaller
        each = high * m.columns * (count if few else wide)
        weighed = self._room("weighed", each) if any(t.weight_OI is not None for t in terms) else room
        for first in range(0, m.out, high):
            last = min(m.out, first + high)
            size = (count, last - first, m.columns)
            made_BOI = room[: count * size[1] * size[2]].view(size)
            for a, b, (g_BTO, a_BTI) in zip(ends, ends[1:], pairs):
                outer_(made_BOI[a:b], g_BTO[:, :, first:last], a_BTI)
            read: tuple[tuple[str, slice], Tensor] | None = None
            for score_BQ, term in sorted(zip(scores, terms), key=lambda x: x[1].block):
                weight_OI = None if term.weight_OI is None else term.weight_OI[first:last]
                left = made_BOI
                if weight_OI is not None and few:
                    left = torch.mul(made_BOI, weight_OI, out=weighed[: made_BOI.numel()].view(size))
                for q in range(0, self.queries, wide):
                    some = slice(q, min(self.queries, q + wide))
                    if read is None or read[0] != (term.block, some):  # read once for settings that share it
                        read = (term.block, some), self.blocks.rows(m.name, term.block, first, last, some)
                    right_QX = read[1]
                    if weight_OI is not None and not few:
                        own = weighed[: right_QX.numel()].view_as(right_QX)
                        right_QX = torch.mul(right_QX, weight_OI.flatten(), out=own)
                    self._multiply(score_BQ, left.flatten(1), right_QX, some)
        return scores

    def _multiply(self, score_BQ: Tensor, left_BX: Tensor, right_QX: Tensor, some: slice) -> None:
        """Add the products with some queries."""
        if not self.half:
            score_BQ[:, some].addmm_(left_BX, right_QX.T)
            return
        score_BQ[:, some] += (left_BX.bfloat16() @ right_QX.bfloat16().T).to(score_BQ)
        for i, q in enumerate(self.exact):
            if some.start <= q < some.stop:
                score_BQ[:, self.queries + i] += left_BX @ right_QX[q - some.start]

    def _room(self, name: str, size: int) -> Tensor:
        """Memory that is used again by every map and batch."""
        if name not in self._rooms or len(self._rooms[name]) < size:
            self._rooms[name] = self.shop.like.new_empty(size)
        return self._rooms[name][:size]


def tile(m: Map, count: int, queries: int) -> tuple[int, int]:
    """(outputs, queries) that one product of `count` training rows takes: neither side outgrows its tile.

    >>> narrow = Map("m", "m.weight", None, 768, 768, "m")
    >>> tile(narrow, 256, 64), tile(narrow, 1, 2000), tile(narrow, 1, 50_000)
    ((42, 64), (10, 2000), (1, 21845))
    """
    high = min(m.out, TILE // max(1, count * m.columns), QUERY_TILE // max(1, queries * m.columns))
    high = max(1, high)
    return high, max(1, min(queries, QUERY_TILE // (high * m.columns)))


def multiplies_bf16() -> bool:
    """Whether this machine multiplies bfloat16 faster than float32."""
    ask = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool((ask and ask()) or (amx and amx()))

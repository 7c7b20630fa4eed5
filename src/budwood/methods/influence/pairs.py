"""Queries meet training rows: one pass over the rows for all queries and all settings.

Shapes: S settings, Q queries, B training rows of a batch, O out, I in (with the bias's 1), X numbers of a tile,
E queries scored once more in full precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from budwood.capture.stream import Map
from budwood.data.batch import Features
from budwood.errors import StoreError
from budwood.linalg.kron import outer_
from budwood.methods.influence.moments import Turner
from budwood.methods.influence.precondition import Part, Preconditioner, Term, ask_loss, bytes_needed, parts_of
from budwood.methods.influence.workshop import ROWS, Shop, sweep
from budwood.store.memory import installed_bytes

TILE = 1 << 24  # numbers of gradients made at a time: more would take memory and save nothing
MET = 512  # most training rows per product: every block is read, and weighed, once for all of them
# Numbers of query blocks that one product takes, and that are read at a time where they lie on disk. Not by the memory
# that is free: sums cut at other places have other last bits.
QUERY_TILE = 1 << 24
HELD, MOST_HELD = 3 << 28, 5 << 30  # bytes of both sides of training rows that wait for a product: see `held_for`
EVERY = slice(None)


class Blocks(Protocol):
    """Query blocks, part by part (see `parts_of`), wherever they lie."""

    @property
    def queries(self) -> int:
        """How many queries there are."""

    @property
    def like(self) -> Tensor:
        """An empty tensor of their type and place."""

    def put(self, name: str, block: str, at: np.ndarray, values_QOI: Tensor) -> None:
        """Take some queries of a block."""

    def rows(
        self, name: str, block: str, first: int, last: int, queries: slice = EVERY, room: Tensor | None = None
    ) -> Tensor:
        """[Q, (last - first) * I]: outputs first..last of a block, for some queries; `room` may be used for them."""


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

    def rows(
        self, name: str, block: str, first: int, last: int, queries: slice = EVERY, room: Tensor | None = None
    ) -> Tensor:
        """A view of some outputs; zeros where no query's gradient has reached the map."""
        if (name, block) not in self.tensors and room is not None:
            return room.zero_().view(len(range(self.queries)[queries]), -1)
        return self.tensors[name, block][queries, first:last].flatten(1)


@dataclass
class OnDisk:
    """Query blocks in a file, read into memory tile by tile: never more of it there than one tile."""

    path: Path
    queries: int
    like: Tensor
    places: Mapping[tuple[str, str], tuple[int, int, int]]  # of a map's part: first byte, outputs, columns

    @classmethod
    def at(cls, path: Path, ready: Preconditioner, queries: int, like: Tensor) -> OnDisk:
        """The layout of every block in one file; the file itself is written by `put`."""
        places: dict[tuple[str, str], tuple[int, int, int]] = {}
        start = 0
        for m in ready.factors.maps:
            for part in (p for block in ready.blocks(m.name) for p in parts_of(m, block)):
                places[m.name, part.name] = (start, m.out, part.wide)
                start += queries * m.out * part.wide * like.element_size()
        return cls(path, queries, like, places)

    @property
    def bytes(self) -> int:
        """The size of the file."""
        numbers = sum(out * columns for _, out, columns in self.places.values())
        return self.queries * numbers * self.like.element_size()

    def put(self, name: str, block: str, at: np.ndarray, values_QOI: Tensor) -> None:
        """Take some queries of a block."""
        start, out, columns = self.places[name, block]
        size = out * columns * self.like.element_size()
        if not self.path.exists():  # all of it at once: blocks that nothing is put into are zeros here too
            with self.path.open("wb") as f:
                f.truncate(self.bytes)
        with self.path.open("r+b", buffering=0) as f:  # a buffer would only copy
            for q, values_OI in zip(at, values_QOI):
                f.seek(start + int(q) * size)
                left = memoryview(values_OI.contiguous().numpy()).cast("B")
                while left:  # one call may take less than all of it
                    left = left[f.write(left) :]

    def rows(
        self, name: str, block: str, first: int, last: int, queries: slice = EVERY, room: Tensor | None = None
    ) -> Tensor:
        """Some outputs, read from the file; memory that is used again takes them several times faster than new one."""
        start, out, columns = self.places[name, block]
        width = columns * self.like.element_size()
        wanted = range(self.queries)[queries]
        size = (len(wanted), (last - first) * columns)
        found = self.like.new_empty(size) if room is None else room.view(size)
        with self.path.open("rb", buffering=0) as f:
            for q, own in zip(wanted, found.numpy()):
                f.seek(start + (q * out + first) * width)
                room_bytes = memoryview(own).cast("B")
                while room_bytes:  # one call may bring less than all of it
                    if not (count := f.readinto(room_bytes)):
                        raise StoreError(f"{self.path} is cut short. Delete it, and run the command again.")
                    room_bytes = room_bytes[count:]
        return found


def joined(blocks: Blocks, m: Map, block: str, queries: slice = EVERY) -> Tensor:
    """[Q, O, I] of a block, its parts put together."""
    count, each = len(range(blocks.queries)[queries]), []
    for p in parts_of(m, block):
        room = blocks.like.new_empty(count * m.out * p.wide)
        each.append(blocks.rows(m.name, p.name, 0, m.out, queries, room).view(count, m.out, -1))
    return each[0] if len(each) == 1 else torch.cat(each, 2)


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


@dataclass(frozen=True)
class _Cut:
    """Some outputs of a part: what one product takes."""

    part: Part
    at: slice

    @property
    def size(self) -> int:
        """Numbers in it."""
        return int(self.at.stop - self.at.start) * self.part.wide

    def weight(self, term: Term) -> Tensor:
        """A setting's weights there."""
        assert term.weight_OI is not None
        return term.weight_OI[self.at, self.part.columns].flatten()


@dataclass
class Meeting:
    """Training rows meeting all queries: `add(setting, map, rows, score_BQ)` gets every map's part.

    With `half`, products are in bfloat16; queries at `exact` have a further column each, in full precision. Rows
    wait for each other until they take `held` bytes (None: what `held_for` says).
    """

    shop: Shop
    ready: Preconditioner
    blocks: Blocks
    queries: int
    add: Add
    half: bool = False
    exact: Sequence[int] = ()
    held: int | None = None
    _rooms: dict[str, Tensor] = field(default_factory=dict)
    _last: tuple[tuple[str, int, int], Tensor] | None = None  # what was read last

    def __call__(self, features: Features, order: np.ndarray, most: int = MET) -> None:
        """One pass over the rows at `order`; at most `most` of them meet the queries at a time."""
        if not self.queries:
            return
        waiting: list[_Passed] = []
        held = held_for(bytes_needed(self.ready, self.queries)) if self.held is None else self.held
        for index in self.shop.batches(features, order, most=min(most, ROWS)):
            if sum(len(p.rows) for p in waiting) + len(index) > most or sum(p.bytes for p in waiting) >= held:
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
                alike = sorted((t for t in terms if t.turned == turned), key=lambda t: t.block)
                if alike and mine:
                    pairs = [p.turner(m, *p.sides[m.name]) if turned else p.sides[m.name] for p in mine]
                    rows = np.concatenate([p.rows for p in mine])
                    for term, score_BQ in zip(alike, self._meet(m, alike, pairs)):
                        self.add(term.setting, m, rows, score_BQ)
            for p in mine:
                del p.sides[m.name]

    def _meet(self, m: Map, terms: Sequence[Term], pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """score_BQ of every term for one map: gradients are made tile by tile and multiplied at once."""
        count, like = sum(len(g_BTO) for g_BTO, _ in pairs), self.shop.like
        few = count <= self.queries  # weights go to the side that is smaller
        self._last = None  # tiles may be cut elsewhere now
        if not few and not self.half and all(g_BTO.shape[1] == 1 for g_BTO, _ in pairs):
            return self._meet_single(m, terms, pairs)
        # one product for several settings is the faster one; few rows are enough work for it with every single one
        groups = [[t] for t in terms] if few else [list(terms)]
        high, wide = tile(m, count, self.queries * len(groups[0]))
        wide = max(1, wide // len(groups[0]))
        some = [slice(q, min(self.queries, q + wide)) for q in range(0, self.queries, wide)]
        sums = [[like.new_zeros(count, len(group), q.stop - q.start) for q in some] for group in groups]
        sure_BSE = like.new_zeros(count, len(terms), len(self.exact))
        for cut, made_BX in self._made(m, parts_of(m, terms[0].block), pairs, count, high):
            for s, group in enumerate(groups):
                left_BX = self._weighed(made_BX, group[0], cut) if few else made_BX
                for q, sum_BSQ in zip(some, sums[s]):
                    right_SQX = self._several(m, cut, group, q, weigh=not few)
                    self._multiply(sum_BSQ.flatten(1), left_BX, right_SQX.flatten(0, 1))
                    for e, exact in enumerate(self.exact):
                        if q.start <= exact < q.stop:
                            sure_BSE[:, s : s + len(group), e] += left_BX @ right_SQX[:, exact - q.start].T
        score_BSQ = torch.cat([torch.cat(group_sums, 2) for group_sums in sums], 1)
        return list(torch.cat([score_BSQ, sure_BSE], 2).unbind(1))

    def _meet_single(self, m: Map, terms: Sequence[Term], pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The same of rows that have one position: gᵀ (V_q a) takes as many FLOPs, and no gradient is made."""
        assert not self.exact  # columns that only `half` has
        g_BO, a_BI = (torch.cat([pair[side][:, 0] for pair in pairs]) for side in (0, 1))
        width = self.queries * len(terms)
        most = max(1, TILE // max(1, len(g_BO) * width))  # outputs whose V_q a fit into a tile
        high, wide = tile(m, 1, width)
        high, wide = min(high, most), max(1, wide // len(terms))
        total_BSQ = g_BO.new_zeros(len(g_BO), len(terms), self.queries)
        for part in parts_of(m, terms[0].block):
            for first in range(0, m.out, high):
                cut = _Cut(part, slice(first, min(m.out, first + high)))
                left_BO = g_BO[:, cut.at]
                for q in range(0, self.queries, wide):
                    some = slice(q, min(self.queries, q + wide))
                    right_SQX = self._several(m, cut, terms, some, weigh=True)
                    if part.bias:
                        total_BSQ[:, :, some] += torch.einsum("bo,sqo->bsq", left_BO, right_SQX)
                        continue
                    right_XI = right_SQX.reshape(-1, part.wide)
                    met = self._room("met", len(a_BI) * len(right_XI)).view(len(a_BI), -1)
                    torch.mm(a_BI, right_XI.T, out=met)
                    met_BXO = met.view(len(a_BI), -1, left_BO.shape[1])
                    total_BSQ[:, :, some] += torch.bmm(met_BXO, left_BO[:, :, None]).view(len(g_BO), len(terms), -1)
        return list(total_BSQ.unbind(1))

    def _made(
        self, m: Map, parts: Sequence[Part], pairs: Sequence[tuple[Tensor, Tensor]], count: int, high: int
    ) -> Iterator[tuple[_Cut, Tensor]]:
        """(where, made_BX) of all training gradients of a map, tile by tile in the same memory, then the bias."""
        ends = np.cumsum([0, *(len(g_BTO) for g_BTO, _ in pairs)]).tolist()
        for part in parts:
            step = high * m.into if part.bias else high  # as many numbers in either case
            for first in range(0, m.out, step):
                at = slice(first, min(m.out, first + step))
                if part.bias:
                    yield _Cut(part, at), torch.cat([g_BTO[:, :, at].sum(1) for g_BTO, _ in pairs])
                    continue
                made_BX = self._room("made", count * (at.stop - first) * part.wide).view(count, -1)
                for a, b, (g_BTO, a_BTI) in zip(ends, ends[1:], pairs):
                    outer_(made_BX[a:b].view(b - a, -1, part.wide), g_BTO[:, :, at], a_BTI)
                yield _Cut(part, at), made_BX

    def _several(self, m: Map, cut: _Cut, group: Sequence[Term], some: slice, weigh: bool) -> Tensor:
        """right_SQX: some queries of one or several settings, weighed or as they are, one behind the other.

        A block is read once for settings that share it.
        """
        plain = [not weigh or t.weight_OI is None for t in group]
        if len(group) == 1 and plain[0]:
            return self._read(m, cut, group[0].block, some)[None]
        size = (some.stop - some.start, cut.size)
        room = self._room("several", len(group) * size[0] * size[1]).view(len(group), *size)
        for i in sorted(range(len(group)), key=lambda i: (group[i].block, not plain[i])):
            term, own_QX = group[i], room[i]
            if plain[i]:
                found_QX = self._read(m, cut, term.block, some, own_QX)
                if found_QX.data_ptr() != own_QX.data_ptr():
                    own_QX.copy_(found_QX)
            else:
                torch.mul(self._read(m, cut, term.block, some), cut.weight(term), out=own_QX)
        return room

    def _read(self, m: Map, cut: _Cut, block: str, some: slice, room: Tensor | None = None) -> Tensor:
        """Some outputs of a block for some queries, in `room` or where they are; what was read last is still there."""
        name = next(p.name for p in parts_of(m, block) if p.bias == cut.part.bias)
        key = (name, cut.at.start, some.start)
        if self._last is None or self._last[0] != key:
            place = self._room("read", (some.stop - some.start) * cut.size) if room is None else room
            self._last = key, self.blocks.rows(m.name, name, cut.at.start, cut.at.stop, some, place)
        return self._last[1]

    def _weighed(self, made_BX: Tensor, term: Term, cut: _Cut) -> Tensor:
        """Training gradients times the weights of a setting."""
        if term.weight_OI is None:
            return made_BX
        out = self._room("weighed", made_BX.numel()).view_as(made_BX)
        return torch.mul(made_BX, cut.weight(term), out=out)

    def _multiply(self, sum_BQ: Tensor, left_BX: Tensor, right_QX: Tensor) -> None:
        """Add the products with some queries."""
        if self.half:
            sum_BQ += (left_BX.bfloat16() @ right_QX.bfloat16().T).to(sum_BQ)
        else:
            sum_BQ.addmm_(left_BX, right_QX.T)

    def _room(self, name: str, size: int) -> Tensor:
        """Memory that is used again by every map and batch."""
        if name not in self._rooms or len(self._rooms[name]) < size:
            self._rooms[name] = self.shop.like.new_empty(size)
        return self._rooms[name][:size]


def held_for(blocks: int, most: int = MOST_HELD) -> int:
    """Bytes of training rows that wait for so many bytes of query blocks: every product reads all blocks, so that the
    more there is to read, the more rows wait, in `most` bytes at most.
    """
    return max(HELD, min(most, blocks * 3 // 4 - (1 << 30)))


def most_held() -> int:
    """The most bytes that rows wait in on this machine: a quarter of its memory. A run asks once, when it begins."""
    return min(MOST_HELD, installed_bytes() // 4)


def tile(m: Map, count: int, queries: int) -> tuple[int, int]:
    """(outputs, queries) that one product of `count` training rows takes: neither side outgrows its tile.

    >>> narrow = Map("m", "m.weight", None, 768, 768, "m")
    >>> tile(narrow, 256, 64), tile(narrow, 1, 2000), tile(narrow, 1, 50_000)
    ((85, 64), (10, 2000), (1, 21845))
    """
    high = min(m.out, TILE // max(1, count * m.columns), QUERY_TILE // max(1, queries * m.columns))
    high = max(1, high)
    return high, max(1, min(queries, QUERY_TILE // (high * m.columns)))


def multiplies_bf16() -> bool:
    """Whether this machine multiplies bfloat16 faster than float32."""
    ask = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool((ask and ask()) or (amx and amx()))

"""Coordinates of training rows as they lie on disk: 16 bits each, or 4, two training rows to a byte.

A score is a sum over very many coordinates, so errors of single ones cancel: of the same bytes, four times as many
coordinates in 4 bits tell far more than a quarter of them in 16.
Shapes: K coordinates, N training rows, H bytes of one coordinate (half of N, in whole words of 8).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

STEP = 0.45  # between neighbouring codes of 4 bits, in units of a coordinate's spread
MIDDLE = 7.5  # the code of 0
LOW = 0x0F0F0F0F0F0F0F0F  # the lower half of every byte of a word
NUMBERS = 1 << 29  # of stored coordinates multiplied for one question
MOST = 1 << 14  # its strongest coordinates: never fewer are multiplied
CACHED = 1 << 20  # numbers turned to float32 at a time: they are used while still in cache
BLOCK = 1 << 27  # numbers assembled at a time


def encoded(value: Tensor, bits: int) -> Tensor:
    """Values in units of their spread as float16, or as codes 0..15.

    >>> encoded(torch.tensor([-9.0, -0.3, 0.1, 9.0]), 4)
    tensor([ 0,  7,  8, 15], dtype=torch.uint8)
    """
    if bits == 16:
        return value.clamp(-65000, 65000).half()
    return (value / STEP + MIDDLE).round_().clamp_(0, 2 * MIDDLE).to(torch.uint8)


def packed(code_KN: np.ndarray) -> np.ndarray:
    """byte_KH: the first half of the rows in the lower, the second in the upper four bits.

    >>> packed(np.array([[1, 2, 3]], np.uint8)).shape, int(packed(np.array([[1, 2, 3]], np.uint8))[0, 0])
    ((1, 8), 1)
    """
    half = packed_bytes(code_KN.shape[1])
    both = np.zeros((len(code_KN), 2 * half), np.uint8)
    both[:, : code_KN.shape[1]] = code_KN
    return both[:, :half] | both[:, half:] << 4


def packed_bytes(rows: int) -> int:
    """Bytes of one coordinate of all rows."""
    return -(-rows // 16) * 8


def assemble(path: Path, parts: Sequence[tuple[Path, np.ndarray]], size: int, bits: int) -> None:
    """One file with a line per coordinate of the tensors "rows" [K, B] of all parts, each with its places among N."""
    rows = sum(len(place) for _, place in parts)
    shape = (size, rows if bits == 16 else packed_bytes(rows))
    kind = np.float16 if bits == 16 else np.uint8
    table = np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
    step = max(1, BLOCK // max(1, rows))
    for first in range(0, size, step):
        last = min(size, first + step)
        block = np.zeros((last - first, rows), kind)
        for part, place in parts:
            with safe_open(part, framework="np") as f:
                block[:, place] = f.get_slice("rows")[first:last]
        table[first:last] = block if bits == 16 else packed(block)
    table.flush()


def most_of(kept: int, rows: int) -> int:
    """How many of the coordinates kept of so many training rows are multiplied for one question.

    >>> most_of(1000, 2400), most_of(10_000_000, 2400), most_of(10_000_000, 10**6)
    (1000, 223696, 16384)
    """
    return min(kept, max(MOST, NUMBERS // max(1, rows)))


@dataclass(frozen=True)
class Stored:
    """The table of a file that `assemble` wrote."""

    table: Tensor
    rows: int
    bits: int

    @classmethod
    def open(cls, path: Path, rows: int, bits: int) -> Stored:
        """Mapped, not read."""
        return cls(torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False)), rows, bits)

    @property
    def most(self) -> int:
        """Coordinates that a question is answered with: all, or as many of the strongest as `NUMBERS` allow."""
        return most_of(len(self.table), self.rows)

    def product(self, weight_K: Tensor, most: int | None = None) -> Tensor:
        """sum_N over coordinates of weight times stored value; `most`: only the strongest weights are multiplied
        (None: as many as `NUMBERS` allow).
        """
        most = self.most if most is None else most
        strong = weight_K.abs().topk(most).indices.sort().values if most < len(weight_K) else None
        weight_K = weight_K if strong is None else weight_K[strong]
        wide = self.table.shape[1]
        total = torch.zeros(1 if self.bits == 16 else 2, wide)
        step = max(1, CACHED // max(1, wide))
        room, word = torch.empty(step, wide), torch.empty(step, wide // 8, dtype=torch.int64)
        for first in range(0, len(weight_K), step):
            weight = weight_K[first : first + step]
            own = slice(first, first + step)
            block = self.table[own] if strong is None else self.table.index_select(0, strong[own])
            if self.bits == 16:
                total[0].addmv_(room[: len(weight)].copy_(block).T, weight)
                continue
            for half, words in enumerate(_halves(block, word[: len(weight)])):
                total[half].addmv_(room[: len(weight)].copy_(words.view(torch.uint8)).T, weight)
        if self.bits == 16:
            return total[0]
        return (total.flatten()[: self.rows] - MIDDLE * weight_K.double().sum().float()) * STEP

    def values(self) -> np.ndarray:
        """[K, N] as float32, in units of the spread."""
        if self.bits == 16:
            return self.table.float().numpy()
        both = torch.cat([self.table & 15, self.table >> 4], 1)[:, : self.rows]
        return ((both.float() - MIDDLE) * STEP).numpy()


def _halves(byte_KH: Tensor, room: Tensor) -> Iterator[Tensor]:
    """The lower, then the upper four bits of every byte, eight bytes to a word; both in `room`, one after the other."""
    words = byte_KH.view(torch.int64)
    yield torch.bitwise_and(words, LOW, out=room)
    torch.bitwise_right_shift(words, 4, out=room)
    yield room.bitwise_and_(LOW)

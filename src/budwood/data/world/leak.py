"""Eight-word windows as 64-bit hashes: which passages repeat a stretch of a test row.

Shapes: W words, N windows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from budwood.data.task import Row

WIDTH = 8


def stretches(row: Row) -> tuple[str, ...]:
    """The running texts of a row, each looked at on its own."""
    return (row.text, row.pair or "", " ".join(row.words or ()))


class Codes(dict[str, int]):
    """A 64-bit number per word, a function of the word alone."""

    def __missing__(self, word: str) -> int:
        code = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        self[word] = code
        return code


def windows(texts: Sequence[str], codes: Codes) -> tuple[np.ndarray, np.ndarray]:
    """(hash of every window, index of its text); a window never spans two texts."""
    words = [text.lower().split() for text in texts]
    owner_W = np.repeat(np.arange(len(words)), [len(w) for w in words])
    code_W = np.fromiter(map(codes.__getitem__, chain.from_iterable(words)), dtype=np.uint64, count=len(owner_W))
    if len(code_W) < WIDTH:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    count = len(code_W) - WIDTH + 1
    hash_N = np.zeros(count, dtype=np.uint64)
    for k in range(WIDTH):
        hash_N = hash_N * np.uint64(0x9E3779B97F4A7C15) + code_W[k : k + count]
        hash_N ^= hash_N >> np.uint64(29)
    whole_N = owner_W[:count] == owner_W[WIDTH - 1 :]
    return hash_N[whole_N], owner_W[:count][whole_N]


def leaking(texts: Sequence[str], rows: Iterable[Row]) -> set[int]:
    """Indices of the texts that share an eight-word window with any of the rows."""
    codes = Codes()
    forbidden_N, _ = windows([s for row in rows for s in stretches(row)], codes)
    hash_N, owner_N = windows(texts, codes)
    return set(owner_N[np.isin(hash_N, np.unique(forbidden_N))].tolist())

"""Queries as few outer products per map: many of them in the memory of a few, ranks nearly those of whole gradients.

A query's gradient in one map is a sum of one outer product per position, so that of a query of at most R positions is
kept whole. Where R outer products take no less room than the gradient itself, the gradient is kept.
Shapes: Q queries, O out, I in (with the bias's 1), R outer products kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from budwood.capture.stream import Map
from budwood.engine.jobs import one_thread
from budwood.errors import ConfigError
from budwood.linalg.lowrank import of_rank
from budwood.methods.influence.pairs import EVERY
from budwood.methods.influence.precondition import TURNED, Preconditioner, parts_of

SEED = 0  # of the search for outer products: the same queries are kept alike in every worker
WAY = "turn"  # the query's own gradient is cut, not the preconditioned one: alike for all dampings and numbers of rows


@dataclass
class Thin:
    """Query blocks of at most `rank` outer products each, made whole again tile by tile."""

    queries: int
    like: Tensor
    rank: int
    tensors: dict[tuple[str, str], tuple[Tensor, ...]] = field(default_factory=dict)

    def put(self, name: str, block: str, at: np.ndarray, values_QOI: Tensor) -> None:
        """Take some queries of a block."""
        sides = (values_QOI,) if whole(self.rank, *values_QOI.shape[1:]) else self._cut(name, values_QOI)
        if (name, block) not in self.tensors:
            self.tensors[name, block] = tuple(self.like.new_zeros(self.queries, *s.shape[1:]) for s in sides)
        for kept, side in zip(self.tensors[name, block], sides):
            kept[torch.from_numpy(at)] = side

    def _cut(self, name: str, values_QOI: Tensor) -> tuple[Tensor, ...]:
        try:
            with one_thread():  # the search has other last bits on several
                return of_rank(values_QOI, self.rank, SEED)
        except torch.linalg.LinAlgError as e:
            raise ConfigError(
                f"Gradients of queries in '{name}' cannot be written as outer products ({e}): are they finite? Leave "
                "--query-rank away, or the module out with --modules."
            ) from e

    def rows(
        self, name: str, block: str, first: int, last: int, queries: slice = EVERY, room: Tensor | None = None
    ) -> Tensor:
        """[Q, (last - first) * I]: outputs first..last of a block, for some queries; zeros where no gradient has
        reached the map.
        """
        if (name, block) not in self.tensors and room is not None:
            return room.zero_().view(len(range(self.queries)[queries]), -1)
        left_QOR, *right = self.tensors[name, block]
        some_QOR = left_QOR[queries, first:last]
        return (torch.bmm(some_QOR, right[0][queries]) if right else some_QOR).flatten(1)


def whole(rank: int, out: int, columns: int) -> bool:
    """Whether so many outer products take no less room than the matrix.

    >>> whole(32, 768, 769), whole(32, 2, 769)
    (False, True)
    """
    return rank * (out + columns) >= out * columns


def thin_numbers(maps: tuple[Map, ...], rank: int, ready: Preconditioner | None = None) -> int:
    """Numbers per query in all blocks; without `ready`, in one block per map."""
    found = 0
    for m in maps:
        for part in (p for b in ((TURNED,) if ready is None else ready.blocks(m.name)) for p in parts_of(m, b)):
            found += min(rank * (m.out + part.wide), m.out * part.wide)
    return found

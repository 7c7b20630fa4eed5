"""Query blocks that are never made whole: both sides of every query's gradient, multiplied tile by tile.

A query's gradient in one map is a sum of one outer product per position, so a short query's two sides are a fraction
of it. Where whole blocks would not be held in memory, making them anew for every product of training rows costs less
than writing them to a file and reading them back. Blocks turned back to weights are no such sums, and biases are as
short as a side: both are kept whole.
Shapes: Q queries, T positions, O out, I in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from budwood.data.batch import Features
from budwood.methods.influence.pairs import EVERY, Resident
from budwood.methods.influence.precondition import RAW, TURNED, Preconditioner, parts_of

SHORT = 48  # mean positions of a query up to which making a block is faster than reading it from a file
SIDES = 1 << 29  # bytes of sides held at most, by every worker


@dataclass
class Sided(Resident):
    """Query blocks in memory: `put` keeps whole ones, `put_sides` those that are made of their sides when asked for."""

    sides: dict[tuple[str, str], list[tuple[Tensor, Tensor] | None]] = field(default_factory=dict)

    def put_sides(self, name: str, block: str, at: np.ndarray, left_QTO: Tensor, right_QTI: Tensor) -> None:
        """Take some queries of a block, as what its gradients are the products of."""
        every = self.sides.setdefault((name, block), [None] * self.queries)
        for q, left_TO, right_TI in zip(at, left_QTO, right_QTI):
            live_T = (left_TO != 0).any(1)  # a shorter query of its batch is padded
            every[int(q)] = (left_TO[live_T].T.contiguous(), right_TI[live_T].contiguous())

    def rows(
        self, name: str, block: str, first: int, last: int, queries: slice = EVERY, room: Tensor | None = None
    ) -> Tensor:
        """Some outputs, made in `room` where only their sides are kept."""
        if (name, block) not in self.sides:
            return super().rows(name, block, first, last, queries, room)
        every = self.sides[name, block]
        some = every[queries]
        columns = next(right_TI.shape[1] for _, right_TI in filter(None, every))
        size = (len(some), last - first, columns)
        made_QOI = self.like.new_empty(size) if room is None else room.view(size)
        for own_OI, pair in zip(made_QOI, some):
            if pair is None:  # no gradient has reached this map
                own_OI.zero_()
            else:
                torch.mm(pair[0][first:last], pair[1], out=own_OI)
        return made_QOI.flatten(1)


def is_sum(block: str) -> bool:
    """Whether a block is a sum of outer products, one per position."""
    return block in (RAW, TURNED)


def sided_bytes(ready: Preconditioner, queries: Features) -> int | None:
    """Memory of `Sided` for these queries; None where they are so long that whole blocks in a file are the faster way.

    A map that a model applies several times has as many positions; one that is read at a single token is counted by
    the share of that token in a training row.
    """
    size = torch.empty(0, dtype=torch.float32).element_size()
    tokens = int(queries.lengths_N.sum())
    whole = sides = products = made = 0.0
    for m in ready.factors.maps:
        positions = tokens * ready.live.get(m.name, 1.0)
        for block in ready.blocks(m.name):
            if not is_sum(block):
                whole += m.out * m.columns * len(queries)
                continue
            for part in parts_of(m, block):
                if part.bias:
                    whole += m.out * len(queries)
                else:
                    sides += positions * (m.out + part.wide)
            products += positions * m.out * m.columns
            made += m.out * m.columns
    if products > SHORT * made * len(queries):
        return None
    return int(size * (whole + sides))

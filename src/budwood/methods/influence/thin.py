"""Queries as few outer products per map: many of them in the memory of a few, ranks nearly those of whole gradients.

Shapes: Q queries, O out, I in (with the bias's 1), R outer products kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from budwood.linalg.lowrank import of_rank
from budwood.methods.influence.pairs import EVERY
from budwood.methods.influence.precondition import Preconditioner

SEED = 0  # of the search for outer products: the same queries are kept alike in every worker


@dataclass
class Thin:
    """Query blocks of at most `rank` outer products each, made whole again tile by tile."""

    queries: int
    like: Tensor
    rank: int
    tensors: dict[tuple[str, str], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def put(self, name: str, block: str, at: np.ndarray, values_QOI: Tensor) -> None:
        """Take some queries of a block."""
        left_QOR, right_QRI = of_rank(values_QOI, self.rank, SEED)
        if (name, block) not in self.tensors:
            empty = (self.like.new_zeros(self.queries, *side.shape[1:]) for side in (left_QOR, right_QRI))
            self.tensors[name, block] = (next(empty), next(empty))
        for whole, side in zip(self.tensors[name, block], (left_QOR, right_QRI)):
            whole[torch.from_numpy(at)] = side

    def rows(self, name: str, block: str, first: int, last: int, queries: slice = EVERY) -> Tensor:
        """[Q, (last - first) * I]: outputs first..last of a block, for some queries."""
        left_QOR, right_QRI = self.tensors[name, block]
        return torch.bmm(left_QOR[queries, first:last], right_QRI[queries]).flatten(1)


def thin_bytes(ready: Preconditioner, queries: int, rank: int, like: Tensor) -> int:
    """Memory of all blocks of all queries."""
    numbers = sum(
        min(rank, m.out, m.columns) * (m.out + m.columns) * len(ready.blocks(m.name)) for m in ready.factors.maps
    )
    return numbers * queries * like.element_size()

"""Lock-step training by several processes (`torchrun`): each takes a share of the rows, gradients are summed.

With one process everything here does nothing. Sums over ranks have other last bits than one process's; all else is the
same: order of rows, learning rates, clipping, penalties.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from budwood.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """How many processes train together, and which this one is."""

    size: int = 1
    rank: int = 0

    def share(self, index_B: np.ndarray) -> np.ndarray:
        """This process's rows of an update.

        >>> Ranks(2, 1).share(np.arange(5)).tolist(), Ranks().share(np.arange(3)).tolist()
        ([3, 4], [0, 1, 2])
        """
        return np.array_split(index_B, self.size)[self.rank]

    def summed(
        self, grads: dict[str, Tensor], params: Mapping[str, Tensor], loss: float
    ) -> tuple[dict[str, Tensor], float]:
        """Gradients and loss added over all processes, in one message; a parameter nobody used has none."""
        if self.size == 1:
            return grads, loss
        flat = [grads[n].reshape(-1) if n in grads else torch.zeros(p.numel()) for n, p in params.items()]
        used = torch.tensor([float(n in grads) for n in params] + [loss], dtype=torch.float64)
        whole = torch.cat(flat)
        dist.all_reduce(whole)
        dist.all_reduce(used)
        parts = whole.split([p.numel() for p in params.values()])
        found = {n: part.view_as(p) for (n, p), part, u in zip(params.items(), parts, used) if u > 0}
        return found, float(used[-1])

    def alike(self, tensors: Mapping[str, Tensor], done: int) -> int:
        """The first process's tensors and count of updates, everywhere; returns the count."""
        if self.size == 1:
            return done
        count = torch.tensor([done])
        dist.broadcast(count, 0)
        with torch.no_grad():
            for tensor in tensors.values():
                dist.broadcast(tensor.data, 0)
        return int(count)


def ranks() -> Ranks:
    """The group this process belongs to."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    return Ranks(dist.get_world_size(), dist.get_rank())


def wanted() -> int:
    """How many processes `torchrun` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """The group of all processes that `torchrun` started, on gloo; fewer than promised is an error."""
    dist.init_process_group("gloo")
    try:
        found = ranks()
        if found.size != wanted():
            raise ConfigError(f"WORLD_SIZE is {wanted()} and {found.size} processes came. Start with torchrun.")
        yield found
    finally:
        dist.destroy_process_group()


def tell(going: bool) -> bool:
    """Whether the first process has work for all: it says so, the others listen."""
    word = torch.tensor([int(going)])
    dist.broadcast(word, 0)
    return bool(word.item())

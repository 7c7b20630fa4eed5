"""Lock-step training by several processes (`torchrun`): each takes a share of the rows, gradients are summed.

With one process everything here does nothing. Sums over ranks have other last bits than one process's; all else is the
same: order of rows, learning rates, clipping, penalties.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from budwood.errors import ConfigError
from budwood.models.sites import sites


@dataclass(frozen=True)
class Ranks:
    """How many processes train together, and which this one is."""

    size: int = 1
    rank: int = 0
    sharded: bool = False  # every process holds a part of each weight (FSDP2), not all of it

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
        if self.sharded:  # already reduced, as a mean over processes
            total = torch.tensor([loss], dtype=torch.float64)
            dist.all_reduce(total)
            return {n: _part(g) * self.size for n, g in grads.items()}, float(total)
        flat = [grads[n].reshape(-1) if n in grads else torch.zeros(p.numel()) for n, p in params.items()]
        used = torch.tensor([float(n in grads) for n in params] + [loss], dtype=torch.float64)
        whole = torch.cat(flat)
        dist.all_reduce(whole)
        dist.all_reduce(used)
        parts = whole.split([p.numel() for p in params.values()])
        found = {n: part.view_as(p) for (n, p), part, u in zip(params.items(), parts, used) if u > 0}
        return found, float(used[-1])

    def own(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this process updates: its part of sharded weights, else the weights themselves."""
        return {n: _part(p) for n, p in params.items()} if self.sharded else dict(params)

    def norm(self, grads: Mapping[str, Tensor]) -> float | None:
        """Joint norm of gradients of which every process holds a part; None: they are whole here."""
        if not self.sharded:
            return None
        square = torch.stack([g.double().square().sum() for g in grads.values()]).sum()
        dist.all_reduce(square)
        return float(square.sqrt())

    def alike(self, tensors: Mapping[str, Tensor], done: int) -> int:
        """The first process's tensors and count of updates, everywhere; returns the count."""
        if self.size == 1 or self.sharded:
            return done
        count = torch.tensor([done])
        dist.broadcast(count, 0)
        with torch.no_grad():
            for tensor in tensors.values():
                dist.broadcast(tensor.data, 0)
        return int(count)


def _part(tensor: Tensor) -> Tensor:
    """The piece of a distributed tensor that lies here, sharing its memory."""
    own: Any = tensor.detach()
    found: Tensor = own.to_local()
    return found


def ranks(model: nn.Module | None = None) -> Ranks:
    """The group this process belongs to, and whether the model is cut across it."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    cut = model is not None and any(hasattr(p, "to_local") for p in model.parameters())
    return Ranks(dist.get_world_size(), dist.get_rank(), cut)


@contextlib.contextmanager
def sharded(model: nn.Module) -> Iterator[nn.Module]:
    """A twin whose weights, gradients and optimiser state are cut across all processes (FSDP2); ends in `model`.

    Start and end need room for the whole weights in every process; training itself for its part of them.
    """
    from torch.distributed.fsdp import fully_shard

    twin = copy.deepcopy(model)
    for _, block in sites(twin).blocks:
        fully_shard(block)
    fully_shard(twin)
    yield twin
    trained: dict[str, Any] = dict(twin.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(trained[name].full_tensor())


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

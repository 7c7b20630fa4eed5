"""States of some rows, all layers at once: read from the feature store, or made anew by running the model.

Shapes: B rows asked for, m states of theirs laid end to end, L layers, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from budwood.capture.features import SHARD, Stored, open_reading, states
from budwood.data.task import Task

# index_B of encoded rows -> states_LmD, float32, new each time: whoever asks may change it
Supply = Callable[[np.ndarray], Tensor]
HELD = 1 << 30  # most 16-bit numbers kept in memory; more are read from disk row by row


def states_at(offsets_N1: np.ndarray, index_B: np.ndarray) -> np.ndarray:
    """at_m: which states belong to the rows at `index_B`, in their order.

    >>> states_at(np.array([0, 2, 3, 5]), np.array([2, 0])).tolist()
    [3, 4, 0, 1]
    """
    size_B = np.diff(offsets_N1)[index_B]
    ends_B = np.cumsum(size_B)
    return np.arange(int(size_B.sum())) + np.repeat(offsets_N1[:-1][index_B] - ends_B + size_B, size_B)


class Kept:
    """Rows of stored layers; what is small enough is read once and held, 16 bits a number."""

    def __init__(self, stored: Stored, layers: Sequence[int]) -> None:
        self.offsets_N1, self.layers = stored.offsets_N1, list(layers)
        self.files: list[Any] = [safe_open(p, "pt") for p in sorted(stored.directory.glob("*.safetensors"))]
        self.scale_SL = torch.stack([f.get_tensor("scale")[self.layers] for f in self.files])
        width = self.files[0].get_slice("layer.0").get_shape()[1]
        small = int(self.offsets_N1[-1]) * width * len(self.layers) <= HELD
        self.held: list[Tensor] = [self._read(s, slice(None)) for s in range(len(self.files))] if small else []

    def __call__(self, index_B: np.ndarray) -> Tensor:
        """states_LmD of the rows at `index_B`."""
        shard_B = index_B // SHARD
        if (shard_B == shard_B[0]).all():
            return self._shard(int(shard_B[0]), index_B)
        place_B = np.argsort(shard_B, kind="stable")
        parts = [self._shard(int(s), index_B[shard_B == s]) for s in np.unique(shard_B)]
        size_B = np.diff(self.offsets_N1)[index_B]
        sorted_N1 = np.concatenate([[0], np.cumsum(size_B[place_B])])
        return torch.cat(parts, 1)[:, torch.from_numpy(states_at(sorted_N1, np.argsort(place_B)))]

    def _shard(self, number: int, index_B: np.ndarray) -> Tensor:
        base = self.offsets_N1[number * SHARD]
        if self.held:
            found = self.held[number][:, torch.from_numpy(states_at(self.offsets_N1, index_B) - base)]
        else:
            edges = [slice(int(self.offsets_N1[i] - base), int(self.offsets_N1[i + 1] - base)) for i in index_B]
            found = torch.cat([self._read(number, e) for e in edges], 1)
        return found.float().mul_(self.scale_SL[number][:, None, None])

    def _read(self, number: int, where: slice) -> Tensor:
        return torch.stack([self.files[number].get_slice(f"layer.{n}")[where] for n in self.layers])


class Fresh:
    """Rows through the model each time they are asked for: nothing is kept."""

    def __init__(self, stored: Stored, layers: Sequence[int], task: Task | None = None) -> None:
        self.read, self.layers, self.kind = open_reading(stored.ask, task), list(layers), stored.ask.kind
        self.feed = self.read.feed(stored.encoded)

    def __call__(self, index_B: np.ndarray) -> Tensor:
        """states_LmD of the rows at `index_B`."""
        found = states(
            self.read.loaded.model, self.feed(index_B, 0), self.kind, self.read.loaded.tokenizer.mask_token_id
        )
        return torch.stack([found[n] for n in self.layers]).cpu()

"""Sums and counts of named tensors, divided once at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from budwood.errors import TreeError, nearest
from budwood.params import tree


@dataclass
class Sums:
    """Named sums over `count` examples.

    >>> import torch
    >>> sums = Sums()
    >>> sums.add({"w": torch.tensor([2.0, 4.0])}, 2)
    >>> sums.add({"w": torch.tensor([1.0, 5.0])}, 1)
    >>> sums.mean()
    {'w': tensor([1., 3.])}
    """

    total: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0

    def add(self, part: Mapping[str, Tensor], count: int) -> None:
        """Add the sums of `count` more examples; names and shapes must be those of the first call."""
        if not self.total:
            self.total = {name: value.detach().clone() for name, value in part.items()}
        else:
            tree.check(self.total, part)
            for name, value in part.items():
                self.total[name] += value.detach()
        self.count += count

    def merge(self, other: Sums) -> None:
        """Add another's sums and count (a shard's; shards are merged in their order so that bytes repeat)."""
        if other.total:
            self.add(other.total, other.count)
        else:
            self.count += other.count

    def mean(self, in_place: bool = False) -> dict[str, Tensor]:
        """Every sum divided by the count; `in_place` spends the sums instead of a second tree."""
        if not self.count:
            raise TreeError("These sums hold no examples, so they have no mean. Add at least one batch.")
        if in_place:
            return {name: value.div_(self.count) for name, value in self.total.items()}
        return {name: value / self.count for name, value in self.total.items()}

    def save(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Write sums, count and manifest as one safetensors file, whole or not at all."""
        tree.save(path, self.total, {**manifest, "count": self.count})

    @classmethod
    def load(cls, path: Path, names: tuple[str, ...] | None = None) -> tuple[Sums, dict[str, Any]]:
        """The sums and the manifest that `save` wrote; `names`, where given, must all be there."""
        total, manifest = tree.load(path)
        if "count" not in manifest:
            raise TreeError(f"'{path}' holds tensors but no count, so they are not sums. Make them again.")
        for name in names or ():
            if name not in total:
                raise TreeError(f"'{path}' has no sum '{name}'.{nearest(name, total)}")
        return cls(total, int(manifest["count"])), manifest

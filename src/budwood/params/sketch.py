"""A few hundred weights that tell a model's descendants from strangers of the same shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from budwood.params.tree import HEAD

PER_TENSOR = 16  # numbers taken of every matrix, evenly spaced


def sketch(parameters: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Some numbers of every matrix of the backbone, under its name.

    >>> sketch({"a.weight": torch.arange(64.0).view(8, 8), "a.bias": torch.ones(8)})["a.weight"][:3]
    [0.0, 4.0, 8.0]
    """
    found = {}
    for name, value in parameters.items():
        if value.dim() >= 2 and not name.startswith((HEAD, "pooler.")):
            flat = value.detach().reshape(-1)
            place = torch.arange(PER_TENSOR, device=flat.device) * flat.numel() // PER_TENSOR
            found[name] = [round(x, 6) for x in flat[place].float().tolist()]
    return found


def likeness(known: Mapping[str, Sequence[float]], parameters: Mapping[str, Tensor]) -> float:
    """Correlation of a sketch with a model's own: near 1 for what was trained from it, near 0 for another start.

    >>> likeness({"w": [1.0] * 8 + [-1.0] * 8}, {"w": torch.tensor([[1.1] * 8, [-0.9] * 8])}) > 0.99
    True
    """
    own = sketch(parameters)
    names = [n for n in known if n in own]
    # every tensor counts alike, whatever its size: norms of the largest would decide otherwise
    both = [torch.tensor([known[n], own[n]], dtype=torch.float64) for n in names]
    pairs = torch.cat([x / x.square().mean().sqrt().clamp_min(1e-12) for x in both], 1) if both else torch.zeros(2, 0)
    if pairs.shape[1] < 2:
        return 1.0
    return float(torch.corrcoef(pairs)[0, 1].nan_to_num(1.0))

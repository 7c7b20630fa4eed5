"""Sparing positions that the loss never reads.

A classifier that reads its first token uses, of its last block, the queries of that token and what is made of them: the
same layers at all other positions are work for nothing, a seventh of every pass through six layers.
Shapes: B examples, T positions, I in, O out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from budwood.capture.uses import kind_of, layout_of, linear_io
from budwood.data.batch import Batch
from budwood.models.mode import in_mode
from budwood.models.objective import Objective
from budwood.params.tree import named

CLOSE = 1e-4  # logits that differ by less, as a share of the largest, are the same but for rounding


def read_first(model: nn.Module, objective: Objective, batch: Batch, weights: Collection[str]) -> tuple[str, ...]:
    """Those of `weights` whose linear layers are read at the first position alone, as seen on a batch.

    A gradient that is zero everywhere else names them; then all else of theirs is made NaN, and logits that stay as
    they were show that it has no part in them.
    """
    longest = max(x.shape[1] for x in batch.inputs.values() if x.dim() > 1)
    targets = objective.targets(batch)
    owners = _owners(model, weights)
    found = []
    with in_mode(model, training=False), linear_io(model, list(owners), layout_of(batch, targets)) as io:
        logits_MC = objective.logits(model, batch)
        io.backward(objective.loss(logits_MC, targets).sum())
        for name in owners:
            uses = io.uses(name)
            if len(uses) == 1 and uses[0].g_BTO.shape[1] == longest > 1:
                live_BT = (uses[0].g_BTO != 0).any(-1)
                if live_BT[:, 0].all() and not live_BT[:, 1:].any():
                    found.append(name)
    if not found:
        return ()
    with in_mode(model, training=False), torch.no_grad(), spared(model, found, fill=torch.nan):
        spared_MC, plain_MC = objective.logits(model, batch), logits_MC.detach()
    near = torch.allclose(spared_MC, plain_MC, rtol=0, atol=CLOSE * float(plain_MC.abs().max()))
    return tuple(found) if near else ()


@contextlib.contextmanager
def spared(model: nn.Module, weights: Collection[str], fill: float = 0.0) -> Iterator[None]:
    """Inside the block the linear layers of these weights work on the first position and put `fill` at all others.

    >>> layer = nn.Linear(2, 2)
    >>> with spared(layer, ["weight"]):
    ...     layer(torch.ones(1, 3, 2))[0, 1:]
    tensor([[0., 0.],
            [0., 0.]], grad_fn=<SliceBackward0>)
    """
    owners = _owners(model, weights)
    try:
        for module in owners.values():
            module.forward = _first_alone(module, fill)
        yield
    finally:
        for module in owners.values():
            module.__dict__.pop("forward", None)


def _first_alone(module: Any, fill: float) -> Any:
    def forward(input: Tensor) -> Tensor:  # named as the layer names it
        if input.dim() != 3 or input.shape[1] == 1:
            return F.linear(input, module.weight, module.bias)
        return F.pad(F.linear(input[:, :1], module.weight, module.bias), (0, 0, 0, input.shape[1] - 1), value=fill)

    return forward


def _owners(model: nn.Module, weights: Collection[str]) -> Mapping[str, Any]:
    """The linear layer of each weight, where it is one layer's own and nothing took the place of its forward pass."""
    names = {id(p): n for n, p in named(model).items() if n in set(weights)}
    found: dict[str, list[Any]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and id(weight) in names:
            found.setdefault(names[id(weight)], []).append(module)
    return {
        n: ms[0]
        for n, ms in found.items()
        if len(ms) == 1 and kind_of(ms[0]) == "linear" and "forward" not in vars(ms[0])
    }

"""Sparing positions that the loss never reads.

A classifier that reads its first token uses, of its last block, the queries of that token and what is made of them: the
same layers at all other positions are work for nothing, a seventh of every pass through six layers.
Shapes: B examples, T positions, I in, O out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from budwood.capture.stream import Sides, stream
from budwood.capture.uses import LinearIO, kind_of, layout_of, linear_io
from budwood.data.batch import Batch
from budwood.models.mode import in_mode
from budwood.models.objective import Objective
from budwood.params.tree import named

FILL = 1.0  # what stands at other positions: at 0 a ReLU has no slope, and what is read there could not be told
CLOSE = 1e-4  # logits and gradients that differ by less, as a share of the largest, are the same but for rounding
READS_ONE = ("head",)  # objectives that read a row at one place; others read where a row says


def read_first(
    model: nn.Module, objective: Objective, batches: Iterable[Batch], weights: Collection[str]
) -> tuple[str, ...]:
    """Those of `weights` whose linear layers are read at the first position alone, as seen on some batches.

    A gradient that is zero everywhere else names them. Then all else of theirs is made NaN, and logits without NaN show
    that it has no part in them; with a number in its place logits and gradients stay as they were.
    """
    if objective.name not in READS_ONE:
        return ()
    found, seen = list(_owners(model, weights)), False
    for batch in batches:
        times = max(x.shape[1] for x in batch.inputs.values() if x.dim() > 1)
        if times == 1:
            continue  # tells nothing
        seen = True
        logits_MC, grads = _passed(model, objective, batch, found, times)
        found = [n for n in found if n in grads]
        if not found:
            return ()
        with spared(model, found, fill=torch.nan):
            if _passed(model, objective, batch, found, times)[0].isnan().any():
                return ()
        with spared(model, found):
            again_MC, others = _passed(model, objective, batch, found, times)
        pairs = [(again_MC, logits_MC), *((others.get(n, grads[n] + torch.nan), grads[n]) for n in found)]
        if not all(torch.allclose(x, y, rtol=0, atol=CLOSE * float(y.abs().max())) for x, y in pairs):
            return ()
    return tuple(found) if seen else ()


def _passed(
    model: nn.Module, objective: Objective, batch: Batch, weights: list[str], times: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """(logits, output gradients that live at the first of `times` positions alone) of a pass as influence makes it,
    hooks and all. Other gradients are let go as they come.
    """
    targets = objective.targets(batch)
    found: dict[str, Tensor] = {}

    def take(weight: str, sides: Sides) -> None:
        if _first_alone_lives(sides.g_BTO, times):
            found[weight] = sides.g_BTO

    with in_mode(model, training=False), linear_io(model, weights, layout_of(batch, targets)) as io:
        logits_MC = objective.logits(model, batch)
        stream(io, objective.loss(logits_MC, targets).sum(), take)
    return logits_MC.detach(), found


def _first_alone_lives(g_BTO: Tensor, times: int) -> bool:
    live_BT = (g_BTO != 0).any(-1)
    return live_BT.shape[1] == times and bool(live_BT[:, 0].all()) and not live_BT[:, 1:].any()


def reads_more(io: LinearIO, weights: Collection[str], logits_MC: Tensor) -> bool:
    """Whether logits have a gradient at more than the first position of spared layers, as seen at the last of them."""
    last = next((r for r in reversed(io.records) if r.weight in weights), None)
    if last is None or not logits_MC.requires_grad:
        return False
    unlike_C = torch.arange(1, logits_MC.shape[-1] + 1).to(logits_MC)  # plain sums of opposite classes are nothing
    (grad,) = torch.autograd.grad((logits_MC * unlike_C).sum(), [last.edge], retain_graph=True, allow_unused=True)
    return grad is not None and bool(grad[:, 1:].any())


@contextlib.contextmanager
def spared(model: nn.Module, weights: Collection[str], fill: float = FILL) -> Iterator[None]:
    """Inside the block the linear layers of these weights work on the first position and put `fill` at all others.

    >>> layer = nn.Linear(2, 2)
    >>> with spared(layer, ["weight"]):
    ...     layer(torch.ones(1, 3, 2))[0, 1:]
    tensor([[1., 1.],
            [1., 1.]], grad_fn=<SliceBackward0>)
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
        first_BO = F.linear(input[:, 0], module.weight, module.bias)  # of a matrix: one product, no batch of them
        return F.pad(first_BO[:, None], (0, 0, 0, input.shape[1] - 1), value=fill)

    return forward


def _owners(model: nn.Module, weights: Collection[str]) -> Mapping[str, Any]:
    """The linear layer of each weight, where it is one layer's own, called by itself, and nothing took the place of its
    forward pass.
    """
    if not weights:
        return {}
    wanted = set(weights)
    names = {id(p): n for n, p in named(model).items() if n in wanted}
    found: dict[str, list[Any]] = {}
    uncalled = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and id(weight) in names:
            found.setdefault(names[id(weight)], []).append(module)
    return {
        n: ms[0]
        for n, ms in found.items()
        if len(ms) == 1 and kind_of(ms[0]) == "linear" and "forward" not in vars(ms[0]) and id(ms[0]) not in uncalled
    }

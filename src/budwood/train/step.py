"""Update rules as functions of (parameters, gradients, state), and the learning rate as a function of the step.

State is a flat mapping of named tensors, so that it can be saved and loaded bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """An update rule with its constants."""

    optimizer: str = "adamw"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum: float = 0.0


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay applies to matrices, not to biases and norms.

    >>> decays("encoder.layer.0.output.dense.weight", torch.zeros(2, 2)), decays("x.bias", torch.zeros(2))
    (True, False)
    """
    return parameter.ndim > 1 and not name.endswith("bias")


def initial_state(rule: Rule, params: Named) -> dict[str, Tensor]:
    """State before the first update."""
    slots = {"adamw": ("m", "v"), "sgd": ("m",) if rule.momentum else ()}[rule.optimizer]
    return {f"{slot}:{name}": torch.zeros_like(p) for slot in slots for name, p in params.items()}


@dataclass(frozen=True)
class Now:
    """The learning rate and number of one update, and the decay of the parameters it is for; `step` counts from 1."""

    lr: float
    step: int
    decay: float = 0.0


@torch.no_grad()
def update(rule: Rule, params: Named, grads: Named, state: Named, lr: float, step: int) -> None:
    """One update in place; `step` counts from 1. The formulas are those of `torch.optim.AdamW` and `SGD`."""
    for decay in (True, False):
        names = [n for n, p in params.items() if n in grads and decays(n, p) == decay]
        if names:
            values, moves = [params[n] for n in names], [grads[n] for n in names]
            slots = [[state[f"{slot}:{n}"] for n in names] for slot in ("m", "v") if f"{slot}:{names[0]}" in state]
            UPDATES[rule.optimizer](rule, values, moves, slots, Now(lr, step, rule.weight_decay if decay else 0.0))


def _adamw(rule: Rule, values: list[Tensor], grads: list[Tensor], slots: list[list[Tensor]], now: Now) -> None:
    counter = torch.tensor(float(now.step), device=values[0].device)
    torch._fused_adamw_(  # reads each tensor once
        values,
        grads,
        slots[0],
        slots[1],
        [],
        [counter] * len(values),
        lr=now.lr,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=now.decay,
        eps=rule.epsilon,
        amsgrad=False,
        maximize=False,
    )


def _sgd(rule: Rule, values: list[Tensor], grads: list[Tensor], slots: list[list[Tensor]], now: Now) -> None:
    moves = list(torch._foreach_add(grads, values, alpha=now.decay)) if now.decay else grads
    if rule.momentum:
        torch._foreach_mul_(slots[0], rule.momentum)
        torch._foreach_add_(slots[0], moves)
        moves = slots[0]
    torch._foreach_add_(values, moves, alpha=-now.lr)


UPDATES = {"adamw": _adamw, "sgd": _sgd}


@torch.no_grad()
def clip(grads: Named, limit: float, norm: float | None = None) -> float:
    """Scale all gradients so that their joint norm is at most `limit` (0 = leave); returns the norm before.

    `norm` is given where only parts of the gradients are here.
    """
    values = list(grads.values())
    if norm is None:
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values))))
    if limit and norm > limit:
        torch._foreach_mul_(values, limit / (norm + 1e-6))
    return norm


def rate(step: int, total: int, peak: float, warmup: float, shape: str) -> float:
    """Learning rate of update `step` (from 0 to total - 1): linear rise, then linear, cosine or constant.

    >>> [rate(s, 4, 1.0, 0, "linear") for s in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    rise = int(warmup) if warmup >= 1 else math.ceil(warmup * total)
    if step < rise:
        return peak * (step + 1) / (rise + 1)
    share = (step - rise) / max(1, total - rise)
    return peak * {"linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share)), "constant": 1.0}[shape]

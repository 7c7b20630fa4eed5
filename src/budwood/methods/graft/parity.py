"""The published way to learn a mask: sigmoids of free scores around a base mask, plain gradient steps, no exact size.

gate = start + (1 - 2 start) x sigmoid(S - bias), S drawn from [0, 1); S -= rate x (1 - 2 start) x g x change x s (1-s).
One step uses the gradient over all training rows; the rounded mask that scores best is kept. Unlike the original, the
score is that of the training rows alone: development rows are never part of the choice.
Shapes: P graftable weights end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from budwood.data.batch import seed_of
from budwood.methods.graft.learned import soft
from budwood.methods.graft.pair import Pair
from budwood.methods.graft.rules import gradient, mask_of, movement
from budwood.params import mask as masks
from budwood.params.mask import Mask


@dataclass(frozen=True)
class Published:
    """The numbers of the original: epochs, rate, bias of the sigmoid, seed."""

    epochs: int
    rate: float
    bias: float
    seed: int
    advance: Callable[[int, str], None] = lambda n, note: None


def published(pair: Pair, count: int, plan: Published, score: Callable[[Mask], float]) -> Mask:
    """The best rounded mask; `count` is the size of the mask it starts from, its own size is whatever comes out."""
    start_P = torch.zeros_like(pair.delta_P)
    start_P[masks.join(mask_of(pair, movement(pair), count), pair.sizes)] = 1.0
    sign_P = 1 - 2 * start_P
    torch_seed = torch.Generator().manual_seed(seed_of(plan.seed, "published mask"))
    free_P = torch.rand(len(start_P), generator=torch_seed)
    gate = lambda: start_P + sign_P * torch.sigmoid(free_P - plan.bias)  # noqa: E731
    best, found = -float("inf"), mask_of(pair, start_P, count)
    for _ in range(plan.epochs):
        with soft(pair) as put:
            put(gate())
            step_P = gradient(pair)
        open_P = torch.sigmoid(free_P - plan.bias)
        free_P -= plan.rate * sign_P * step_P * pair.delta_P * open_P * (1 - open_P)
        now = masks.split((gate() > 0.5).nonzero()[:, 0], pair.sizes)
        value = score(now)
        if value > best:
            best, found = value, now
        plan.advance(1, f"score {value:.3f}, {masks.count(now):,} weights")
    return found

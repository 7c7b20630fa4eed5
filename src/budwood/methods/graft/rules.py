"""Rules that rank weights for a graft: movement, first-order, Fisher, random. `learned` has a file of its own.

Shapes: P graftable weights end to end, B examples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from budwood.capture.gradients import Question, cover, per_example_square_sum
from budwood.data.batch import Batch, budget_batches, seed_of
from budwood.methods.graft.pair import Pair, mask_rows
from budwood.params import mask as masks
from budwood.params.apply import requiring_grad
from budwood.params.mask import Mask
from budwood.params.tree import named
from budwood.train.penalty import read_fisher

TOKENS = 4096  # padded tokens per batch


def batches(pair: Pair, most: int | None = None) -> Iterator[Batch]:
    """The training rows in batches; `most` caps the rows, longest first."""
    features = pair.read.encode(mask_rows(pair))
    feed = pair.read.feed(features)
    for index in budget_batches(features.lengths_N, TOKENS, 256):
        yield feed(index, 0)


def movement(pair: Pair) -> Tensor:
    """|tuned - base|."""
    return pair.delta_P.abs()


def first_order(pair: Pair) -> Tensor:
    """-gradient x (tuned - base): how much of the loss each weight's move takes off, seen from the base."""
    return gradient(pair).mul_(pair.delta_P).neg_()


def gradient(pair: Pair) -> Tensor:
    """grad_P of the mean loss over the training rows, with the model as it is now, in evaluation mode."""
    model, objective = pair.read.loaded.model, pair.read.objective
    total_P, rows = torch.zeros_like(pair.delta_P), 0
    with requiring_grad(model, tuple(pair.shapes)):
        parameters = named(model)
        for batch in batches(pair):
            loss_B = objective.loss(objective.logits(model, batch), objective.targets(batch))
            grads = torch.autograd.grad(loss_B.sum(), [parameters[n] for n in pair.shapes], allow_unused=True)
            for part, grad in zip(total_P.split(list(pair.sizes.values())), grads):
                if grad is not None:
                    part.add_(grad.reshape(-1))
            rows += len(batch)
    return total_P.div_(rows)


def fisher(pair: Pair, path: Path | None) -> Tensor:
    """Fisher x (tuned - base)^2, of a Fisher file, or of the training rows with their true labels at the base."""
    model = pair.read.loaded.model
    if path is not None:
        found: Mapping[str, Tensor] = read_fisher(path, model)[0]
    else:
        found = _empirical(pair)
    parts = [found[n].reshape(-1) if n in found else torch.zeros(size) for n, size in pair.sizes.items()]
    return torch.cat(parts).mul_(pair.delta_P).mul_(pair.delta_P)


def _empirical(pair: Pair) -> dict[str, Tensor]:
    """Mean over training rows of the squared gradient of the loss, at the base."""
    model, objective = pair.read.loaded.model, pair.read.objective
    total: dict[str, Tensor] = {}
    coverage = None
    for batch in batches(pair):
        coverage = coverage or cover(model, objective, batch)
        for name, value in per_example_square_sum(model, objective, batch, (Question(),), coverage).items():
            total[name] = total[name].add_(value) if name in total else value
    return total


def mask_of(pair: Pair, score_P: Tensor, count: int, per_tensor: bool = False) -> Mask:
    """The mask of exactly `count` weights with the highest scores."""
    parts = dict(zip(pair.shapes, score_P.split(list(pair.sizes.values()))))
    return masks.top(parts, count, per_tensor)


def random_mask(pair: Pair, count: int, seed: int) -> Mask:
    """Any weights: what a graft has to beat."""
    return masks.random(pair.sizes, count, seed_of(seed, "random mask", count))


RULES: dict[str, Callable[[Pair], Tensor]] = {"movement": movement, "first-order": first_order}


def score(pair: Pair, rule: str, path: Path | None = None) -> Tensor:
    """score_P of a rule that ranks all weights once."""
    return fisher(pair, path) if rule == "fisher" else RULES[rule](pair)


def chosen_rows(count: int, size: int, seed: int, step: int) -> np.ndarray:
    """Rows of one step: the whole set in turn, shuffled anew every time it is used up."""
    per_pass = max(1, -(-count // size))
    order = np.random.default_rng(seed_of(seed, "mask rows", step // per_pass)).permutation(count)
    return order[(step % per_pass) * size : (step % per_pass + 1) * size]

"""Frozen lower layers are run once: later retrains begin at their stored output.

Only where that changes nothing but last bits: embeddings and the first K blocks do not train and drop nothing out, the
text is not masked anew, and the states fit in memory. The rule looks at recipe and rows alone, so every worker of every
engine decides alike.
Shapes: F features, P tokens of all features, B examples of a batch, T positions, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from budwood.data.batch import Batch, Features, budget_batches
from budwood.models.reading import Reading, RowFeed
from budwood.models.sites import sites
from budwood.params.select import is_embedding
from budwood.params.tree import named
from budwood.train.evaluate import TOKENS, evaluating

MOST = 1 << 28  # numbers kept: 1 GB


def frozen_depth(model: nn.Module) -> int:
    """How many of the first blocks give the same states in every retrain; 0: none."""
    place = sites(model)
    blocks = [block for _, block in place.blocks]
    if len(blocks) != place.n_layers:  # one block used several times
        return 0
    if any(p.requires_grad for name, p in named(model).items() if is_embedding(name)):
        return 0
    depth = 0
    while depth < len(blocks) and not any(p.requires_grad for p in blocks[depth].parameters()):
        depth += 1
    above = {id(m) for block in blocks[depth:] for m in block.modules()}
    below = [m for m in place.backbone.modules() if id(m) not in above]
    return 0 if any(_drops(m) for m in below) else depth


def _drops(module: nn.Module) -> bool:
    rates = [module.p] if isinstance(module, nn.Dropout) else []
    rates += [getattr(module, n, 0.0) for n in ("dropout_prob", "attention_dropout", "attn_dropout")]
    return any(isinstance(r, float) and r > 0 for r in rates)


@dataclass
class States:
    """Outputs of the last frozen block for all features, laid end to end."""

    state_PD: Tensor
    offsets_F1: np.ndarray
    depth: int
    wrapped: bool  # the block returns a tuple
    now: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def batch(self, width: int) -> Tensor:
        """state_BTD of the features in the batch that is being read, 0 where it is padded."""
        start_B = torch.from_numpy(self.offsets_F1[self.now])
        length_B = torch.from_numpy(self.offsets_F1[self.now + 1]) - start_B
        step_T = torch.arange(width)
        real_BT = step_T < length_B[:, None]
        index_BT = torch.where(real_BT, start_B[:, None] + step_T, 0)
        return self.state_PD[index_BT] * real_BT[:, :, None]


def keep_states(read: Reading, features: Features) -> States | None:
    """The states of a reading's frozen part, or None where nothing can be kept."""
    model: Any = read.loaded.model
    depth = frozen_depth(model)
    size = int(features.offsets_N1[-1]) * int(model.config.hidden_size)
    if not depth or read.masking is not None or size > MOST or read.device != "cpu":
        return None
    state_PD = torch.zeros(int(features.offsets_N1[-1]), int(model.config.hidden_size))
    feed = read.feed(features)
    seen: list[Any] = []
    hook = sites(model).blocks[depth - 1][1].register_forward_hook(lambda module, given, out: seen.append(out))
    try:
        with evaluating(model):
            for index in budget_batches(features.lengths_N, TOKENS):
                seen.clear()
                read.objective.logits(model, feed(index, 0))
                out_BTD = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
                for row, n in enumerate(index):
                    first, last = features.offsets_N1[n : n + 2]
                    state_PD[first:last] = out_BTD[row, : last - first]
    finally:
        hook.remove()
    return States(state_PD, np.asarray(features.offsets_N1), depth, isinstance(seen[0], tuple))


@dataclass(frozen=True)
class FeedOfStates:
    """A feed that tells which features of the whole set its batch holds; `member` maps its own to theirs."""

    feed: RowFeed
    states: States
    member: np.ndarray

    @property
    def lengths_N(self) -> np.ndarray:
        """Tokens of each feature."""
        return self.feed.lengths_N

    def __call__(self, index: np.ndarray, epoch: int = 0) -> Batch:
        """The features at `index` as a batch."""
        self.states.now = self.member[index]
        return self.feed(index, epoch)


@contextlib.contextmanager
def starting_at(model: nn.Module, states: States) -> Iterator[None]:
    """Inside, the frozen blocks give the stored states instead of computing them."""
    blocks = [block for _, block in sites(model).blocks[: states.depth]]

    def skip(last: bool) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *rest: Any, **named_rest: Any) -> Any:
            out = states.batch(hidden_states.shape[1]) if last else hidden_states
            return (out,) if states.wrapped else out

        return forward

    for block in blocks:
        block.__dict__["forward"] = skip(block is blocks[-1])
    try:
        yield
    finally:
        for block in blocks:
            del block.__dict__["forward"]

"""The quadratic rival of cross-entropy for language models: mean of -f.phi_w + |phi f|^2 / 2 over the next words w.

With G = phi^T phi the second term is f^T G f / 2, so that no logits over the vocabulary are made. For a fixed output
embedding its best f is (phi^T phi)^-1 phi^T p*, p* being the true chances of the next word.
Shapes: M places, D width of f, V vocabulary, B examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from budwood.data.batch import IGNORE, Batch
from budwood.models.objective import Reduce, Targets, Tokens, per_row
from budwood.models.output import output_module, states_at


def quad_scores(state_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, word_M: Tensor) -> Tensor:
    """score_M2: the logit of the word, and half the squared norm of all logits by way of the Gram matrix."""
    word_M = word_M.to(state_MD.device)
    said_M = (state_MD * weight_VD[word_M]).sum(1)
    half_M = ((state_MD @ (weight_VD.T @ weight_VD)) * state_MD).sum(1) / 2
    if bias_V is not None:
        said_M = said_M + bias_V[word_M]
        half_M = half_M + state_MD @ (weight_VD.T @ bias_V) + bias_V.square().sum() / 2
    return torch.stack([said_M, half_M], 1)


@dataclass(frozen=True)
class Quad:
    """Every position with a next word is a readout of two numbers, as `quad_scores` makes them."""

    reduce: Reduce = "mean"
    name: str = "quad"

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """score_M2 at the positions with a target, row by row."""
        target_BT = batch.targets["target"]
        rows_M, positions_M = (target_BT != IGNORE).nonzero(as_tuple=True)
        state_MD = states_at(model, batch.inputs, rows_M, positions_M)
        module = output_module(model)
        return quad_scores(state_MD, module.weight, getattr(module, "bias", None), target_BT[rows_M, positions_M])

    def targets(self, batch: Batch) -> Targets:
        """The next words, row by row."""
        return Tokens(lm=True).targets(batch)

    def loss(self, logits_MC: Tensor, targets: Targets) -> Tensor:
        """Minus the word's logit plus half the squared norm, mean (or sum) over the words of each example."""
        return per_row(logits_MC[:, 1] - logits_MC[:, 0], targets, self.reduce)

    def margin(self, logits_MC: Tensor, targets: Targets) -> Tensor:
        """Minus the loss: there is no rival class to compare with."""
        return -self.loss(logits_MC, targets)

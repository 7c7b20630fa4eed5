"""A loss that knows numbers: to say 18 for 19 is a smaller mistake than to say 91.

Shapes: M readouts, V vocabulary, U tokens that are numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from budwood.data.arithmetic import parse_number


def number_values(tokenizer: Any) -> Tensor:
    """value_V: log(1 + number) of every token that spells one, NaN for the others."""
    size = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
    value_V = torch.full((size,), float("nan"))
    for token, place in tokenizer.get_vocab().items():
        number = parse_number([token]) if token.strip("#Ġ▁").isascii() else None
        if number is not None and number >= 0:
            value_V[place] = torch.tensor(float(number)).log1p()
    return value_V


def number_distance(logits_MV: Tensor, label_M: Tensor, value_V: Tensor) -> Tensor:
    """distance_M: mean |log(1 + said) - log(1 + right)| over the numbers a model would say; 0 where none is right.

    What is said is the distribution over number tokens alone, so words take no part.

    >>> value = torch.tensor([0.0, 1.0, float("nan")])
    >>> number_distance(torch.tensor([[0.0, 0.0, 9.0]]), torch.tensor([1]), value)
    tensor([0.5000])
    """
    value_V = value_V.to(logits_MV)
    at_U = value_V.isfinite().nonzero()[:, 0]
    right_M = value_V[label_M]
    said_MU = logits_MV[:, at_U].softmax(1)
    gap_MU = (value_V[at_U][None] - right_M.nan_to_num()[:, None]).abs()
    return torch.where(right_M.isfinite(), (said_MU * gap_MU).sum(1), 0.0)

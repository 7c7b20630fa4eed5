"""Inputs and output gradients as they arrive during the backward pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from budwood.capture.gradients import layout_of, linear_io
from budwood.capture.stream import Sides, stream
from budwood.data.batch import Features
from budwood.errors import ModelError
from budwood.models.objective import Head
from budwood.models.reading import RowFeed


class Careless(nn.Module):
    """A classifier that changes the input of its linear layer after use."""

    def __init__(self, careless: bool) -> None:
        super().__init__()
        self.words, self.careless = nn.Embedding(9, 4), careless
        self.classifier = nn.Linear(4, 2)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.words(input_ids[:, 0]) * 1
        logits = self.classifier(x)
        if self.careless:
            x.mul_(2)
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("careless", [False, True])
@pytest.mark.parametrize("way", ["stream", "backward"])
def test_an_input_that_is_overwritten_is_refused_by_name(way: str, careless: bool) -> None:
    torch.manual_seed(0)
    model, objective = Careless(careless), Head()
    features = Features.from_lists(["a", "b"], {"input_ids": [[3], [5]]}, {"label": [0, 1]})
    batch = RowFeed(features, 0)([0, 1])  # type: ignore[arg-type]
    targets = objective.targets(batch)
    with linear_io(model, ["classifier.weight", "classifier.bias"], layout_of(batch, targets)) as io:
        value = objective.loss(objective.logits(model, batch), targets).sum()
    seen: list[Sides] = []

    def go() -> None:
        if way == "stream":
            stream(io, value, lambda weight, s: seen.append(s))
        else:
            io.backward(value)
            seen.append(io.uses("classifier.weight")[0])  # type: ignore[arg-type]

    if careless:
        with pytest.raises(ModelError, match=r"changes the input of 'classifier.weight'.*--modules"):
            go()
        return
    go()
    assert len(seen) == 1

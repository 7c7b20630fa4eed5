"""Positions that no loss reads are not worked out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from budwood.capture.spare import read_first, spared
from budwood.capture.stream import Map, Sides
from budwood.data.batch import Features
from budwood.methods.influence.moments import covariances
from budwood.methods.influence.precondition import ask_loss
from budwood.methods.influence.workshop import sweep
from budwood.models.objective import Head
from budwood.models.reading import RowFeed
from tests.cases import FAMILIES
from tests.methods.influence.toys import toy

LAST = ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")


def test_of_the_last_block_queries_and_what_follows_them_are_read_at_the_first_token_alone() -> None:
    _, shop = toy("bert")
    last = max(int(m.name.split(".")[2]) for m in shop.maps if m.name.startswith("encoder.layer"))
    assert sorted(shop.first) == sorted(f"encoder.layer.{last}.{name}.weight" for name in LAST)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole_pass(family: str) -> None:
    _, shop = toy(family)
    whole = replace(shop, first=())
    found: list[dict[str, Tensor]] = [{}, {}]
    for kept, one in zip(found, (shop, whole)):

        def use(_: int, m: Map, s: Sides, kept: dict[str, Tensor] = kept) -> None:
            kept[m.name] = torch.einsum("bto,bti->boi", s.g_BTO, s.a_BTI)

        sweep(one, one.train, np.arange(len(one.train)), ask_loss, use)
    assert found[0].keys() == found[1].keys()
    for name, grad in found[1].items():
        assert torch.allclose(found[0][name], grad, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_covariances_count_what_they_counted(fisher: str) -> None:
    _, shop = toy("bert", fisher=fisher)
    order = np.arange(len(shop.train))
    assert shop.first
    got, want = covariances(shop, order), covariances(replace(shop, first=()), order)
    for key, value in want.items():
        assert torch.allclose(got[key], value, rtol=1e-9, atol=1e-12), key


class Peeking(nn.Module):
    """A classifier of its first token; the steps of the others count too, though no gradient tells of it."""

    def __init__(self, peeks: bool) -> None:
        super().__init__()
        self.words, self.dense, self.classifier = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.peeks = peeks

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        x = self.dense(self.words(input_ids))
        rest = x[:, 1:].floor().sum(1) if self.peeks else 0
        return SimpleNamespace(logits=self.classifier(x[:, 0] + rest))


@pytest.mark.parametrize("peeks", [False, True])
def test_a_layer_that_counts_without_a_gradient_is_not_spared(peeks: bool) -> None:
    torch.manual_seed(0)
    model = Peeking(peeks)
    features = Features.from_lists(["a", "b"], {"input_ids": [[3, 4, 1], [5, 2]]}, {"label": [0, 1]})
    batch = RowFeed(features, 0)(np.arange(2))
    found = read_first(model, Head(), batch, ["dense.weight", "classifier.weight"])
    assert found == (() if peeks else ("dense.weight",))


def test_a_model_is_itself_again_after_an_error() -> None:
    model = Peeking(False)
    ids = torch.tensor([[1, 2, 3]])
    want = model.dense(model.words(ids))
    with pytest.raises(RuntimeError), spared(model, ["dense.weight"]):
        assert not model.dense(model.words(ids))[:, 1:].any()
        raise RuntimeError
    assert torch.equal(model.dense(model.words(ids)), want) and "forward" not in vars(model.dense)

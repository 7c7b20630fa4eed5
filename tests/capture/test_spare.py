"""Positions that no loss reads are not worked out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from budwood.capture.spare import FILL, read_first, spared
from budwood.capture.stream import Map, Sides
from budwood.config.influence import FitConfig
from budwood.data.batch import Features
from budwood.methods.influence.moments import covariances
from budwood.methods.influence.precondition import ask_loss
from budwood.methods.influence.workshop import shop_of, sweep
from budwood.models.objective import Head
from budwood.models.pooled import Pooled
from budwood.models.reading import RowFeed
from tests.cases import ENCODERS, FAMILIES, case
from tests.methods.influence.test_core import Attention
from tests.methods.influence.toys import reading_of, toy

LAST = ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")


def test_of_the_last_block_queries_and_what_follows_them_are_read_at_the_first_token_alone() -> None:
    _, shop = toy("bert")
    last = max(int(m.name.split(".")[2]) for m in shop.maps if m.name.startswith("encoder.layer"))
    assert sorted(shop.first) == sorted(f"encoder.layer.{last}.{name}.weight" for name in LAST)


# ALBERT applies one layer several times, decoders read their last token
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole_pass(family: str) -> None:
    _, shop = toy(family)
    whole = replace(shop, first=())
    assert bool(shop.first) == (family in ENCODERS and family != "albert")
    found: list[dict[str, Tensor]] = [{}, {}]
    for kept, one in zip(found, (shop, whole)):

        def use(_: int, m: Map, s: Sides, kept: dict[str, Tensor] = kept) -> None:
            kept[m.name] = torch.einsum("bto,bti->boi", s.g_BTO, s.a_BTI)

        sweep(one, one.train, np.arange(len(one.train)), ask_loss, use)
    assert found[0].keys() == found[1].keys()
    for name, grad in found[1].items():
        assert torch.allclose(found[0][name], grad, rtol=1e-9, atol=1e-12), name


def test_a_batch_that_reads_the_first_token_passes_once() -> None:
    _, shop = toy("bert")
    passes: list[int] = []
    handle = shop.model.register_forward_hook(lambda *_: passes.append(1))
    sweep(shop, shop.train, np.arange(len(shop.train)), ask_loss, lambda i, m, s: None)
    handle.remove()
    assert shop.first and len(passes) == 1


def test_other_objectives_are_left_alone_even_where_these_rows_read_their_first_token() -> None:
    feed = RowFeed(features_of([3, 4, 1], [5, 2]), 0)
    batches = [feed(np.array([n])) for n in range(2)]
    assert read_first(Reader(), Head(), batches, ["dense.weight"]) == ("dense.weight",)
    assert read_first(Reader(), Head(name="elsewhere"), batches, ["dense.weight"]) == ()


def test_our_own_head_on_the_first_token_spares_as_well() -> None:
    c = case("bert", "head", rows=6)
    for pool, spares in (("cls", True), ("mean", False), ("last", False)):
        model = Pooled(c.model.bert, pool, ("a", "b", "c"), None).double()  # type: ignore[arg-type]
        read = reading_of(model, c.objective, ("a", "b", "c"))
        assert bool(shop_of(read, c.features, FitConfig(task="toy", fisher="empirical")).first) == spares, pool


def test_a_layer_that_attention_applies_without_calling_it_is_not_spared() -> None:
    feed = RowFeed(features_of([3, 4, 1], [5, 2]), 0)
    assert read_first(Attention(), Head(), [feed(np.array([0]))], ["attend.out_proj.weight"]) == ()


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_covariances_count_what_they_counted(fisher: str) -> None:
    _, shop = toy("bert", fisher=fisher)
    order = np.arange(len(shop.train))
    assert shop.first
    got, want = covariances(shop, order), covariances(replace(shop, first=()), order)
    for key, value in want.items():
        assert torch.allclose(got[key], value, rtol=1e-9, atol=1e-12), key


MARK = 8


class Reader(nn.Module):
    """A classifier of its first token that may have ways of its own."""

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.dense, self.classifier = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.way = way

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        x = self.dense(self.words(input_ids))
        if self.way == "peeks":  # other positions count, though no gradient tells of it
            x = x[:, :1] + x[:, 1:].detach().mean(1, keepdim=True)
        if self.way == "bursts":  # and large ones would, which these rows have none of
            x = x[:, :1] + (x[:, 1:].detach() - 100).relu().mean(1, keepdim=True)
        if self.way == "divides":  # what stands in their place has no finite gradient
            x = x / (x - FILL).norm(dim=-1, keepdim=True)
        if self.way == "bends":  # zeros in their place would have no gradient at all
            x = x.relu()
        marks = self.way in ("marks", "bends")
        at_B = (input_ids == MARK).long().argmax(1) if marks else torch.zeros(len(x), dtype=torch.long)
        return SimpleNamespace(logits=self.classifier(x[torch.arange(len(x)), at_B]))


def features_of(*rows: list[int]) -> Features:
    ids = [str(n) for n in range(len(rows))]
    return Features.from_lists(ids, {"input_ids": rows}, {"label": [n % 2 for n in range(len(rows))]})


WAYS = {"plain": True, "marks": True, "bends": True, "peeks": False, "bursts": False, "divides": False}


@pytest.mark.parametrize("way,spares", WAYS.items())
def test_what_counts_without_a_gradient_or_cannot_be_filled_is_not_spared(way: str, spares: bool) -> None:
    feed = RowFeed(features_of([3, 4, 1], [5, 2], [7]), 0)
    batches = [feed(np.array([n])) for n in range(3)]
    weights = ["dense.weight", "classifier.weight"]
    assert read_first(Reader(way), Head(), batches, weights) == (("dense.weight",) if spares else ())
    assert read_first(Reader(way), Head(), batches[2:], weights) == ()  # one position tells nothing


@pytest.mark.parametrize("way", ["marks", "bends"])
def test_rows_that_read_another_position_are_passed_whole(way: str) -> None:
    rows = [[3, 4, 1], [5, 2], [5, MARK, 2], [1, 2, MARK]]
    model = Reader(way).double()
    model.classifier.weight.data[1] = -model.classifier.weight[0]  # the sum of both logits tells nothing
    shop = shop_of(reading_of(model, Head(), ("a", "b")), features_of(*rows), FitConfig(task="toy", fisher="empirical"))
    shop = replace(shop, first=("dense.weight",))
    for n in range(len(rows)):
        kept: dict[str, Tensor] = {}

        def use(_: int, m: Map, s: Sides, kept: dict[str, Tensor] = kept) -> None:
            kept[m.name] = torch.einsum("bto,bti->oi", s.g_BTO, s.a_BTI)

        sweep(shop, shop.train, np.array([n]), ask_loss, use)
        batch = RowFeed(shop.train, 0)(np.array([n]))
        loss_B = shop.read.objective.loss(shop.read.objective.logits(model, batch), shop.read.objective.targets(batch))
        (want,) = torch.autograd.grad(loss_B.sum(), [model.dense.weight])
        assert torch.allclose(kept["dense"], want)


def test_a_model_is_itself_again_after_an_error() -> None:
    model = Reader()
    ids = torch.tensor([[1, 2, 3]])
    want = model.dense(model.words(ids))
    with pytest.raises(RuntimeError), spared(model, ["dense.weight"]):
        assert (model.dense(model.words(ids))[:, 1:] == FILL).all()
        raise RuntimeError
    assert torch.equal(model.dense(model.words(ids)), want) and "forward" not in vars(model.dense)

"""Values put into a model come out again."""

from __future__ import annotations

import pytest
import torch

from budwood.errors import TreeError
from budwood.params.apply import applied, requiring_grad
from budwood.params.tree import named, scale, values
from tests.cases import build


def test_values_are_set_and_restored_also_after_an_exception():
    model = build("bert")
    old = values(model)
    with pytest.raises(RuntimeError, match="stop"), applied(model, scale(old, 2.0)):
        torch.testing.assert_close(values(model), scale(old, 2.0))
        raise RuntimeError("stop")
    torch.testing.assert_close(values(model), old, rtol=0, atol=0)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


def test_values_that_do_not_fit_leave_the_model_alone():
    model = build("bert")
    old = values(model)
    name = "embeddings.LayerNorm.weight"
    for bad in ({name: torch.zeros(16), "embeddings.LayerNorm.wait": torch.zeros(16)}, {name: torch.zeros(3)}):
        with pytest.raises(TreeError, match="embeddings.LayerNorm"), applied(model, bad):
            pass
    torch.testing.assert_close(values(model), old, rtol=0, atol=0)


def test_flags_come_back():
    model = build("bert")
    names = named(model)
    first, second = list(names)[:2]
    names[first].requires_grad_(False)
    with requiring_grad(model, [first]):
        assert [n for n, p in names.items() if p.requires_grad] == [first]
    assert [n for n, p in names.items() if not p.requires_grad] == [first]
    with pytest.raises(TreeError, match="no parameter"), requiring_grad(model, ["nothing"]):
        pass
    assert names[second].requires_grad

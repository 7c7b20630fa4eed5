"""Activations against what the library itself returns."""

from __future__ import annotations

import pytest
import torch

from budwood.capture.activations import activations, collect
from budwood.models.sites import hidden_states, model_inputs
from tests.cases import FAMILIES, LAYERS, case


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_output_hidden_states(family):
    c = case(family, "lm", dtype=torch.float32)
    inputs = c.batch().inputs
    with torch.no_grad():
        want = hidden_states(c.model, inputs)
    got = collect(c.model, inputs)
    assert len(got) == LAYERS + 1
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32 and not a.requires_grad
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_every_pass_begins_anew_and_hooks_come_off():
    c = case("gpt2", "head", dtype=torch.float32)
    c.model.train()
    with pytest.raises(KeyError), activations(c.model) as states:
        for index in ([0, 1], [2]):
            c.model(**model_inputs(c.model, c.batch(index).inputs))
        assert len(states) == LAYERS + 1 and states[0].shape[0] == 1 and states[0].requires_grad
        raise KeyError("stop")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in c.model.modules())
    collect(c.model, c.batch().inputs)
    assert c.model.training


def test_real_albert_has_one_entry_per_use_of_its_block(shared):
    from budwood.models.load import load
    from budwood.models.reference import resolve

    loaded = load(resolve(str(shared / "models" / "rxnmapper-albert-smiles-mlm")), "mlm")
    inputs = dict(loaded.tokenizer("CCO>>CC=O", return_tensors="pt"))
    got = collect(loaded.model, inputs)
    want = hidden_states(loaded.model, inputs)
    assert len(got) == 13
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)

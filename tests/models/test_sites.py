"""The sites of every family: blocks, hidden states, and the LM head applied at chosen places only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from budwood.errors import ModelError
from budwood.models.sites import backbone_of, hidden_states, lm_logits, model_inputs, sites
from tests.cases import DECODERS, FAMILIES, LAYERS, VOCABULARY, WIDTH, build, case


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_and_layers(family):
    found = sites(build(family))
    assert found.n_layers == LAYERS
    assert len(found.blocks) == (1 if family == "albert" else LAYERS)
    assert [name for name, _ in found.blocks] == [f"block.{i}" for i in range(len(found.blocks))]
    assert (found.final_norm is not None) == (family in DECODERS)
    assert found.embeddings is not None and found.lm_head is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_embeddings_and_every_block(family):
    c = case(family, "lm")
    batch = c.batch()
    states = hidden_states(c.model, batch.inputs)
    assert len(states) == LAYERS + 1
    assert all(s.shape == (*batch.inputs["input_ids"].shape, WIDTH) for s in states)
    last = backbone_of(c.model)(**model_inputs(c.model, batch.inputs))[0]
    torch.testing.assert_close(states[-1], last, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_lm_logits_equal_the_full_forward(family, dtype):
    c = case(family, "lm", dtype=dtype)
    batch = c.batch()
    rows, positions = torch.tensor([2, 0, 0, 3]), torch.tensor([1, 0, 4, 2])
    with torch.no_grad():
        full = c.model(**model_inputs(c.model, batch.inputs)).logits[rows, positions]
        some = lm_logits(c.model, batch.inputs, rows, positions)
    assert some.shape == (4, VOCABULARY)
    torch.testing.assert_close(some, full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["deberta", "deberta-v2"])
def test_lm_logits_of_the_newer_deberta_head(family):
    model = build(family, legacy=False)
    inputs = case(family, "lm").batch().inputs
    rows, positions = torch.tensor([1]), torch.tensor([2])
    full = model(**model_inputs(model, inputs)).logits[rows, positions]
    torch.testing.assert_close(lm_logits(model, inputs, rows, positions), full)


def test_unknown_type_finds_its_longest_list_and_goes_through_the_full_forward():
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=24,
        pad_token_id=1,
    )
    model = ModernBertForMaskedLM(config).eval()
    found = sites(model)
    assert len(found.blocks) == LAYERS and found.lm_head is None
    inputs = case("bert", "lm").batch().inputs
    rows, positions = torch.tensor([1, 0]), torch.tensor([2, 3])
    full = model(**model_inputs(model, inputs)).logits[rows, positions]
    torch.testing.assert_close(lm_logits(model, inputs, rows, positions), full)


def test_a_model_without_layers_is_refused():
    with pytest.raises(ModelError, match="No blocks were found in a Linear"):
        sites(nn.Linear(2, 2))


def test_token_types_are_dropped_where_they_would_be_read_as_words():
    model = build("gpt2")
    given = {"input_ids": torch.tensor([[4, 5]]), "token_type_ids": torch.tensor([[0, 1]])}
    assert set(model_inputs(model, given)) == {"input_ids"}
    assert set(model_inputs(build("bert"), given)) == {"input_ids", "token_type_ids"}

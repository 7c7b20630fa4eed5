"""The state before the output embedding: with it and the embedding, the model's own logits come out."""

from __future__ import annotations

import pytest
import torch

from budwood.errors import ModelError
from budwood.models.output import is_tied, states_at, vocabulary_of
from budwood.models.sites import lm_logits
from tests.cases import FAMILIES, build, case

WITHOUT = ("deberta", "deberta-v2")  # their head multiplies by the embedding without a module


@pytest.mark.parametrize("family", FAMILIES)
def test_state_and_embedding_give_the_logits(family: str) -> None:
    made = case(family, "words", rows=4)
    batch = made.batch()
    rows, places = torch.arange(4), batch.targets["read_at"]
    with torch.no_grad():
        if family in WITHOUT:
            try:
                state = states_at(made.model, batch.inputs, rows, places)
            except ModelError:
                return
        else:
            state = states_at(made.model, batch.inputs, rows, places)
        wanted = lm_logits(made.model, batch.inputs, rows, places)
        torch.testing.assert_close(vocabulary_of(made.model).logits(state), wanted, rtol=1e-9, atol=1e-9)


def test_untied_embeddings_are_the_output_side() -> None:
    model = build("gpt2", "lm", tie_word_embeddings=False)
    assert not is_tied(model)
    assert vocabulary_of(model).weight_VD.data_ptr() == model.lm_head.weight.data_ptr()
    assert is_tied(build("gpt2", "lm"))

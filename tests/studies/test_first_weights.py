"""Heads of the untrained tiny-bert look where they are meant to look."""

from __future__ import annotations

import pytest
import torch

from budwood.studies import pretrain
from budwood.studies.vocabulary import make_tokenizer


@pytest.fixture(scope="module")
def attention() -> torch.Tensor:
    """Attention [L, H, T, T] of the untrained model over a row in which tokens 6 to 8 stand twice."""
    texts = [" ".join(f"w{i}" for i in range(60)) + " ."]
    model = pretrain.make_model("tiny-bert", make_tokenizer("tiny-bert", texts, 300), seed=0).eval()
    model.set_attn_implementation("eager")
    size = model.config.vocab_size
    ids = torch.tensor([[*range(6, 20), 6, 7, 8, *range(20, 26)]]) % size
    with torch.no_grad():
        return torch.stack(model(input_ids=ids, output_attentions=True).attentions)[:, 0]


@pytest.mark.parametrize(("head", "offset"), [(0, -1), (1, 1)])
def test_first_block_looks_at_neighbours(attention: torch.Tensor, head: int, offset: int) -> None:
    share = {d: float(attention[0, head].diagonal(d).mean()) for d in range(-4, 5)}
    assert max(share, key=lambda d: share[d]) == offset
    assert share[offset] > 2 / attention.shape[-1]  # twice what looking everywhere alike gives


def test_heads_look_at_equal_words(attention: torch.Tensor) -> None:
    alike = [(0, 14), (1, 15), (2, 16)]
    for layer, heads in ((0, [2]), (1, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (3, [0, 1, 2, 3])):
        seen = attention[layer, heads].mean(0)
        equal = sum(float(seen[again, first]) for first, again in alike) / len(alike)
        strangers = sum(float(seen[again, 3:14].mean()) for _, again in alike) / len(alike)
        assert equal > 1.25 * strangers, layer

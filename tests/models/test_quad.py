"""The quadratic objective: Gram form against all logits, gradients, and what it converges to on a known chain."""

from __future__ import annotations

import pytest
import torch

import budwood as bw
from budwood.errors import ConfigError
from budwood.models.objective import Tokens
from budwood.models.quad import Quad, quad_scores
from tests.cases import case


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_gram_form_equals_all_logits(family: str) -> None:
    made = case(family, "lm")
    batch = made.batch()
    quad = Quad()
    score = quad.logits(made.model, batch)
    every = Tokens(lm=True).logits(made.model, batch)
    word = quad.targets(batch).label_M
    torch.testing.assert_close(score[:, 0], every.gather(1, word[:, None])[:, 0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(score[:, 1], every.square().sum(1) / 2, rtol=1e-9, atol=1e-9)
    direct = (every.square().sum(1) / 2 - every.gather(1, word[:, None])[:, 0]).mean()
    weight = next(made.model.parameters())
    (wanted,) = torch.autograd.grad(direct, weight, retain_graph=True)
    (found,) = torch.autograd.grad((score[:, 1] - score[:, 0]).mean(), weight)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)


def test_gradient_by_finite_differences() -> None:
    draw = torch.Generator().manual_seed(0)
    state, weight = (torch.randn(*s, generator=draw, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (7, 4)))
    bias = torch.randn(7, generator=draw, dtype=torch.float64, requires_grad=True)
    word = torch.tensor([1, 6, 2])
    assert torch.autograd.gradcheck(lambda *x: quad_scores(*x, word), (state, weight, bias))


def test_learns_the_projection_of_the_true_chances() -> None:
    """A free state per context of a chain with known chances ends at (phi^T phi)^-1 phi^T p*."""
    draw = torch.Generator().manual_seed(1)
    contexts, words, width = 6, 12, 5
    truth = (2 * torch.randn(contexts, words, generator=draw, dtype=torch.float64)).softmax(1)
    weight = torch.randn(words, width, generator=draw, dtype=torch.float64)
    state = torch.zeros(contexts, width, dtype=torch.float64, requires_grad=True)
    drawn = torch.multinomial(truth, 4000, replacement=True, generator=draw)
    optimizer = torch.optim.LBFGS([state], max_iter=200)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        score = quad_scores(state.repeat_interleave(4000, 0), weight, None, drawn.flatten())
        loss = (score[:, 1] - score[:, 0]).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    wanted = torch.linalg.solve(weight.T @ weight, weight.T @ truth.T).T
    cosine = torch.nn.functional.cosine_similarity(state.detach(), wanted)
    assert float(cosine.min()) >= 0.99


def test_finetune_with_a_fixed_embedding(tmp_path) -> None:  # type: ignore[no-untyped-def]
    more = {"limit": 40, "limit_eval": 20, "max_steps": 4, "threads": 1}
    done = bw.finetune(
        "tiny-gpt", "tiny-text", mode="clm", objective="quad", output_embedding="fixed", out=tmp_path / "q", **more
    )
    assert done.metrics["objective"] == "quad" and done.metrics["quad_loss"] is not None
    from safetensors.torch import load_file

    from budwood.models.reference import resolve

    start = load_file(resolve("tiny-gpt").path / "model.safetensors")
    end = load_file(done.model / "model.safetensors")
    name = next(n for n in start if n.endswith("wte.weight"))
    assert torch.equal(start[name], end[name])
    assert any(not torch.equal(start[n], end[n]) for n in start if n in end)
    with pytest.raises(ConfigError, match="--objective quad"):
        bw.finetune("tiny-bert", "tiny-sentiment", objective="quad", out=tmp_path / "x", **more)

"""The update rules are torch's own, and the schedule does what it says."""

from __future__ import annotations

import pytest
import torch

from budwood.train.step import Rule, clip, decays, initial_state, rate, update


def reference(optimizer: str, weight: torch.Tensor, bias: torch.Tensor) -> torch.optim.Optimizer:
    groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    if optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.99), eps=1e-6)
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_updates_equal_torch(optimizer: str) -> None:
    draw = torch.Generator().manual_seed(0)
    params = {"a.weight": torch.randn(3, 4, generator=draw), "a.bias": torch.randn(3, generator=draw)}
    twins = {k: v.clone().requires_grad_() for k, v in params.items()}
    torch_rule = reference(optimizer, twins["a.weight"], twins["a.bias"])
    rule = Rule(optimizer, weight_decay=0.1, beta1=0.8, beta2=0.99, epsilon=1e-6, momentum=0.9)
    state = initial_state(rule, params)
    for step in range(1, 8):
        grads = {k: torch.randn(v.shape, generator=draw) for k, v in params.items()}
        for name, twin in twins.items():
            twin.grad = grads[name].clone()
        torch_rule.step()
        update(rule, params, grads, state, 0.01, step)
    for name in params:
        torch.testing.assert_close(params[name], twins[name].detach(), rtol=1e-6, atol=1e-7)


def test_sgd_without_momentum_keeps_no_state() -> None:
    assert initial_state(Rule("sgd"), {"w": torch.ones(2)}) == {}


def test_clip_scales_to_the_limit_and_reports_the_norm_before() -> None:
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    assert clip(grads, 1.0) == pytest.approx(5.0)
    assert float(torch.cat(list(grads.values())).norm()) == pytest.approx(1.0, rel=1e-5)
    assert clip(grads, 0.0) == pytest.approx(1.0, rel=1e-5)  # 0 only measures


def test_decay_spares_vectors() -> None:
    assert not decays("LayerNorm.weight", torch.ones(4))
    assert decays("wte.weight", torch.ones(4, 4))


def test_rates_rise_then_fall() -> None:
    rates = [rate(s, 10, 1.0, 0.2, "linear") for s in range(10)]
    assert rates[0] < rates[1] < rates[2] == 1.0
    assert rates[2:] == sorted(rates[2:], reverse=True) and rates[-1] > 0
    assert rate(9, 10, 1.0, 4, "constant") == 1.0
    assert rate(5, 9, 1.0, 1, "cosine") == pytest.approx(0.5)

"""What --damping auto looks at."""

from __future__ import annotations

import pytest
import torch

from budwood.errors import ConfigError
from budwood.linalg.kron import inverse
from budwood.methods.influence import evidence
from budwood.methods.influence.factors import Factors, Setting


@pytest.mark.parametrize(("out", "into"), [(512, 512), (384, 384), (512, 513), (1024, 256)])
def test_a_sample_agrees_as_all_numbers_do(out: int, into: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the widths have factors in common with what is stepped by: the strongest input is the last column."""
    generator = torch.Generator().manual_seed(0)
    spectrum_I = torch.arange(into, 0, -1).double().flip(0).pow(1.5)
    spectrum_I[-1] *= 1000
    curvature = torch.arange(1, out + 1).double().pow(1.5)[:, None] * spectrum_I
    draws = [torch.randn(16, out, into, generator=generator).square().mean(0) for _ in range(2)]
    pair = [tuple(curvature * d for d in draws)]
    few = evidence.weigh(pair)
    monkeypatch.setattr(evidence, "SAMPLE", out * into)
    every = evidence.weigh(pair)
    for one, other in zip(few["sweep"], every["sweep"]):
        assert one["agreement"] == pytest.approx(other["agreement"], abs=0.03)
    assert few["best"] == every["best"]


def test_a_curvature_without_a_finite_inverse_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    factors = Factors(tmp_path, (), {})
    monkeypatch.setattr(Factors, "curvature", lambda self, strategy, name: torch.tensor([[1e-40, 1.0]]))
    assert torch.isfinite(factors.inverse(Setting("ekfac", "1e-08"), "layer.0")).all()
    with pytest.raises(ConfigError, match="curvature of 'layer.0' has no finite inverse at --damping 0: .* 0.1mean"):
        factors.inverse(Setting("ekfac", "0"), "layer.0")
    assert torch.isinf(inverse(torch.tensor([1e-40]), 0.0).float()).all()
    monkeypatch.setattr(Factors, "curvature", lambda self, strategy, name: torch.tensor([[torch.nan, 1.0]]))
    with pytest.raises(ConfigError, match="is not finite .* leave the module out"):
        factors.inverse(Setting("ekfac", "1e-08"), "layer.0")


def test_evidence_that_is_no_number_asks_for_the_most_damping() -> None:
    broken = torch.full((4, 4), torch.nan)
    assert evidence.weigh([(broken, broken)])["best"] == max(evidence.SHARES)

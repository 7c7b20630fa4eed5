"""Labels that are drawn for the curvature against the same labels given, and against all of them enumerated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from budwood.capture import questions
from budwood.config.influence import FitConfig
from budwood.errors import ModelError
from budwood.methods.influence.factors import Setting
from budwood.methods.influence.moments import second_moments
from budwood.methods.influence.workshop import shop_of
from tests.cases import case
from tests.methods.influence.toys import ALL, dense_scores, fit, gradients, reading_of, scores, toy

DRAWN = torch.tensor([2, 0, 1, 1, 2, 0])


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws that are known: the label of a row is decided by its place."""
    monkeypatch.setattr(questions, "sample_labels", lambda logits, targets, index, seed: DRAWN[list(index)])


def test_drawn_labels_are_those_of_the_factors(injected: None, tmp_path: Path) -> None:
    c, shop = toy("bert", fisher="sampled")
    factors = fit(shop, tmp_path)

    def drawn(place: int) -> Any:
        return lambda z, t: nn.functional.cross_entropy(z, DRAWN[place : place + 1], reduction="none")

    by_row = [gradients(c, shop, drawn(n)) for n in range(6)]
    train = {k: torch.stack([by_row[n][k][n] for n in range(6)]) for k in by_row[0]}
    for m in shop.maps:
        torch.testing.assert_close(factors.tensor(f"diagonal/{m.name}"), train[m.name].square().mean(0))
        basis = factors.basis(m.name)
        turned = basis.q_OO.T @ train[m.name] @ basis.q_II
        torch.testing.assert_close(factors.tensor(f"ekfac/{m.name}"), turned.square().mean(0))
    setting = Setting("identity")
    query = gradients(c, shop, lambda z, t: -c.objective.margin(z, t))
    want = dense_scores(query, gradients(c, shop), factors, setting)  # rows themselves keep their own labels
    np.testing.assert_allclose(scores(shop, factors, [setting], np.arange(6))[0], want, rtol=1e-8, atol=1e-12)


def test_drawn_labels_average_to_the_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    c, exact = toy("bert", fisher="exact")
    _, drawing = toy("bert", fisher="sampled")
    want = second_moments(exact, np.arange(6), None, True)
    with torch.no_grad():
        batch = c.batch()
        chance = c.objective.logits(c.model, batch).softmax(-1)
    total: dict[str, Tensor] = {k: torch.zeros_like(v) for k, v in want.items()}
    for label in range(3):
        monkeypatch.setattr(questions, "sample_labels", lambda z, t, index, seed, y=label: torch.full((len(index),), y))
        for n in range(6):
            for key, value in second_moments(drawing, np.array([n]), None, True).items():
                total[key] += chance[n, label] * value
    for key in want:
        torch.testing.assert_close(total[key], want[key], rtol=1e-8, atol=1e-14)


class Bare(nn.Module):
    """A classifier without any layer that is understood."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(200, 3))

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return type("Out", (), {"logits": self.table[input_ids[:, 0]]})()


def test_a_model_without_any_supported_module_is_refused() -> None:
    c = case("bert", "head", rows=6)
    read = reading_of(Bare().double(), c.objective, ("a", "b", "c"))
    with pytest.raises(ModelError, match=r"No module of this Bare can be scored \(table: .*at least one linear layer"):
        shop_of(read, c.features, FitConfig(task="toy", fisher="empirical", strategy=ALL))

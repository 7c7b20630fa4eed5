"""Outer products: sums of them are what they were made of, however many positions there are."""

from __future__ import annotations

import pytest
import torch

from budwood.linalg.lowrank import of_rank, outer_products, separable_root


@pytest.mark.parametrize("positions", [1, 3, 5, 9])
def test_outer_products_add_up_to_the_matrix(positions: int) -> None:
    draw = torch.Generator().manual_seed(positions)
    g, a = torch.randn(4, positions, 5, generator=draw), torch.randn(4, positions, 7, generator=draw)
    g[1, positions // 2 :] = 0  # padding
    left, strength, right = outer_products(g, a)
    torch.testing.assert_close(torch.einsum("bro,br,bri->boi", left, strength, right), g.transpose(1, 2) @ a)
    assert (strength.diff(dim=1) <= 1e-6).all()
    same = torch.eye(strength.shape[1]).expand(4, -1, -1)
    torch.testing.assert_close(left @ left.transpose(1, 2), same, atol=1e-5, rtol=0)
    torch.testing.assert_close(right @ right.transpose(1, 2), same, atol=1e-5, rtol=0)


def test_the_root_of_an_outer_product_is_found_and_zeros_do_no_harm() -> None:
    x, y = torch.tensor([0.1, 3.0]), torch.tensor([2.0, 5.0, 0.5])
    torch.testing.assert_close(torch.outer(*separable_root(torch.outer(x, y).square())), torch.outer(x, y))
    for part in separable_root(torch.zeros(2, 3)):
        assert torch.isfinite(part).all() and (part > 0).all()


@pytest.mark.parametrize("rank", [1, 3, 12, 30])
def test_of_rank_is_near_the_best(rank: int) -> None:
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 40, 30, generator=draw, dtype=torch.float64) * torch.logspace(0, -3, 30, dtype=torch.float64)
    left, right = of_rank(x, rank, seed=0)
    assert left.shape == (3, 40, rank) and right.shape == (3, rank, 30)
    best = torch.linalg.svdvals(x)[:, rank:].square().sum(1).sqrt()
    found = torch.linalg.matrix_norm(x - left @ right)
    assert (found <= 1.02 * best + 1e-9).all()
    again = of_rank(x, rank, seed=0)
    assert torch.equal(left, again[0]) and torch.equal(right, again[1])

"""Matrices as sums of few outer products.

Shapes: B matrices, T summands given, R outer products found, D of them while searching, O out, I in.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLAT = 1e-12  # of the largest weight: smaller ones count as this in logarithms
MORE, TURNS = 8, 2  # of a search: outer products beyond those asked for, products with the matrix and its transpose


def outer_products(g_BTO: Tensor, a_BTI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(left_BRO, strength_BR, right_BRI): every sum_t g_bt a_btᵀ as outer products of orthogonal unit vectors, the
    strongest first. R is the least of T, O and I: nothing is left out.

    >>> left, strength, right = outer_products(torch.tensor([[[3.0, 0.0]]]), torch.tensor([[[0.0, 2.0, 0.0]]]))
    >>> round(float(strength), 4), round(float((strength * left * right[..., 1:2])[0, 0, 0]), 4)
    (6.0, 6.0)
    """
    g_BOT, a_BIT = g_BTO.transpose(1, 2), a_BTI.transpose(1, 2)
    if g_BTO.shape[1] >= min(g_BTO.shape[2], a_BTI.shape[2]):
        left_BOR, strength_BR, right_BRI = torch.linalg.svd(torch.bmm(g_BOT, a_BTI), full_matrices=False)
        return left_BOR.transpose(1, 2), strength_BR, right_BRI
    # few summands: the same in the small space that they span
    q_BOT, g_BTT = torch.linalg.qr(g_BOT)
    q_BIT, a_BTT = torch.linalg.qr(a_BIT)
    left_BTR, strength_BR, right_BRT = torch.linalg.svd(torch.bmm(g_BTT, a_BTT.transpose(1, 2)))
    return torch.bmm(q_BOT, left_BTR).transpose(1, 2), strength_BR, torch.bmm(right_BRT, q_BIT.transpose(1, 2))


def separable_root(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """(x_O, y_I): x yᵀ is, in logarithms, nearest to the square root of the weights.

    >>> x, y = separable_root(torch.tensor([[4.0, 16.0], [16.0, 64.0]]))
    >>> torch.outer(x, y).round(decimals=4).tolist()
    [[2.0, 4.0], [4.0, 8.0]]
    """
    exact = weight_OI.double()
    log_OI = exact.clamp_min(max(float(exact.max()) * FLAT, 1e-30)).log() / 2
    middle = log_OI.mean() / 2
    return (log_OI.mean(1) - middle).exp().float(), (log_OI.mean(0) - middle).exp().float()


def of_rank(x_BOI: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """(left_BOR, right_BRI): left right is close to the nearest matrix of this rank.

    The space of the strongest outer products is searched from a seeded random one, which comes within a few per cent of
    the nearest; where the rank is no less than that space could be, nothing is searched.

    >>> left, right = of_rank(torch.tensor([[[2.0, 0.0], [0.0, 1.0]]]), 1, seed=0)
    >>> (left @ right).round(decimals=4).tolist()
    [[[2.0, 0.0], [0.0, 0.0]]]
    """
    _, out, into = x_BOI.shape
    rank, wide = min(rank, out, into), min(rank + MORE, out, into)
    if wide < min(out, into):
        draw = torch.Generator().manual_seed(seed)
        space_BOD = x_BOI @ torch.randn(into, wide, generator=draw).to(x_BOI)
        for _ in range(TURNS):
            space_BOD = x_BOI @ (x_BOI.transpose(1, 2) @ torch.linalg.qr(space_BOD)[0])
        base_BOD = torch.linalg.qr(space_BOD)[0]
        left_BDR, strength_BR, right_BRI = torch.linalg.svd(base_BOD.transpose(1, 2) @ x_BOI, full_matrices=False)
        left_BOR = base_BOD @ left_BDR
    else:
        left_BOR, strength_BR, right_BRI = torch.linalg.svd(x_BOI, full_matrices=False)
    return (left_BOR * strength_BR[:, None])[..., :rank], right_BRI[:, :rank]

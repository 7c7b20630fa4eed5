"""Matrices as sums of few outer products.

Shapes: B matrices, T summands given, R outer products found, O out, I in.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLAT = 1e-12  # of the largest weight: smaller ones count as this in logarithms


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

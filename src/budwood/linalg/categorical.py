"""The covariance of a draw from a categorical distribution, factored.

Shapes: B examples, K classes, J = K - 1 factors.
"""

from __future__ import annotations

import torch
from torch import Tensor


def covariance_factors(logits_BK: Tensor) -> Tensor:
    """s_BJK with sum_j s_j s_jᵀ = diag(p) - p pᵀ, p = softmax(logits): K - 1 vectors instead of K outcomes.

    The lower-triangular (Cholesky) factor of the multinomial covariance in closed form (Tanabe & Sagae 1992). With two
    classes it is sqrt(p0 p1) (1, -1).

    >>> z = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    >>> p = z.softmax(1)
    >>> s = covariance_factors(z)
    >>> bool(torch.allclose(torch.einsum("bjk,bjl->bkl", s, s), torch.diag_embed(p) - p[:, :, None] * p[:, None, :]))
    True
    """
    p_BK = logits_BK.double().softmax(1)
    classes = p_BK.shape[1]
    # the share left behind class j, summed from the small end so that nothing cancels
    left_BK = p_BK.flip(1).cumsum(1).flip(1)  # q_{j-1} = p_j + ... + p_K
    before_BJ, after_BJ = left_BK[:, :-1], left_BK[:, 1:]
    tiny = torch.finfo(p_BK.dtype).tiny
    diagonal_BJ = (p_BK[:, :-1] * after_BJ / before_BJ.clamp_min(tiny)).sqrt()
    column_BJ = (p_BK[:, :-1] / (after_BJ * before_BJ).clamp_min(tiny)).sqrt()
    below_JK = torch.ones(classes - 1, classes, device=p_BK.device).triu(1).to(p_BK.dtype)
    factor_BJK = -p_BK[:, None, :] * column_BJ[:, :, None] * below_JK
    at_J = torch.arange(classes - 1, device=p_BK.device)
    factor_BJK[:, at_J, at_J] = diagonal_BJ
    return factor_BJK.to(logits_BK.dtype)

"""Kronecker-factored curvature: symmetric sums, eigenbases, and second moments in them.

A matrix of weights [O, I] has the gradient V_n = sum_t g_t a_tᵀ on row n (a bias is a further input that is always 1).
Shapes: R rows of a sum, D columns, B examples, T positions, O out, I in (with the bias's 1), Q queries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from budwood.errors import BudwoodError

PARTS = 12  # column blocks of a symmetric product; 13/24 of the work, and blocks still wide enough to be fast
NARROW = 96  # columns below which a symmetric product is not worth cutting
PAIRS = 5  # positions up to which the square of a sum is written out over pairs of them
LINE = 16  # numbers of float32 in a cache line
SOLVED_BY_TORCH = 256  # columns up to which torch's eigensolver is the faster one
JITTERS = (0.0, 1e-12, 1e-9, 1e-6)  # of the mean eigenvalue, tried in turn


class EigenError(BudwoodError):
    """A curvature factor without an eigenbasis."""


def aligned(like: Tensor, *shape: int) -> Tensor:
    """An empty tensor whose rows begin with a cache line, whatever their width.

    Products write 1,537 numbers to a row (1,536 inputs and the bias) at three quarters of the speed of 1,536 where
    rows follow each other without a gap.

    >>> x = aligned(torch.zeros(0), 2, 1537)
    >>> x.shape, x.stride()
    (torch.Size([2, 1537]), (1552, 1))
    """
    return like.new_empty(*shape[:-1], -(-shape[-1] // LINE) * LINE)[..., : shape[-1]]


def gram_(total_DD: Tensor, x_RD: Tensor) -> None:
    """Add xᵀx to the upper triangle (in blocks) of `total_DD`; the rest is left to `mirrored`."""
    columns = x_RD.shape[1]
    step = max(NARROW, -(-columns // PARTS))
    for first in range(0, columns, step):
        last = first + step
        total_DD[first:last, first:].addmm_(x_RD[:, first:last].T, x_RD[:, first:])


def mirrored(total_DD: Tensor) -> Tensor:
    """The symmetric matrix whose upper triangle `gram_` filled.

    >>> total = torch.zeros(2, 2)
    >>> gram_(total, torch.tensor([[1.0, 2.0]]))
    >>> mirrored(total)
    tensor([[1., 2.],
            [2., 4.]])
    """
    upper = total_DD.triu()
    return upper + upper.triu(1).T


def eigenbasis(matrix_DD: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(eigenvectors as columns, eigenvalues >= 0 ascending) of a symmetric matrix in float64.

    A matrix with NaN or infinity is refused by name; one on which the solver fails is tried again with a little more
    on its diagonal.
    """
    exact = matrix_DD.double()
    if not torch.isfinite(exact).all():
        bad = int((~torch.isfinite(exact)).sum())
        raise EigenError(
            f"The curvature factor of '{name}' has {bad:,} entries that are not finite: a gradient or an activation "
            "overflowed. Leave the module out with --modules, or look at the rows with --skip-nan."
        )
    size = float(exact.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny))
    for jitter in JITTERS:
        try:
            more = torch.eye(len(exact)).to(exact) * (jitter * size) if jitter else 0.0
            values, vectors = _eigh(exact + more)
        except (torch.linalg.LinAlgError, np.linalg.LinAlgError):
            continue
        return vectors, values.clamp_min(0)
    raise EigenError(f"The curvature factor of '{name}' has no eigenbasis that the solver finds. Leave it out.")


def _eigh(matrix_DD: Tensor) -> tuple[Tensor, Tensor]:
    """(ascending eigenvalues, eigenvectors) by whichever library is faster, on as many threads as torch has."""
    if len(matrix_DD) <= SOLVED_BY_TORCH or matrix_DD.device.type != "cpu":
        values, vectors = torch.linalg.eigh(matrix_DD)
        return values, vectors
    from scipy.linalg import eigh
    from threadpoolctl import threadpool_limits

    with threadpool_limits(torch.get_num_threads(), user_api="blas"):  # scipy's would be those of the machine
        found = eigh(matrix_DD.numpy(), driver="evd", check_finite=False)
    return torch.from_numpy(found[0]), torch.from_numpy(found[1])


def rotate_first(positions: int, out: int, into: int) -> bool:
    """Whether turning activations and output gradients is cheaper than turning the gradient they make.

    >>> rotate_first(64, 768, 769), rotate_first(2048, 768, 769)
    (True, False)
    """
    return positions * (into**2 + out**2) < out * into * (out + into)


def square_sum_(total_OI: Tensor, g_BTO: Tensor, a_BTI: Tensor, turn: tuple[Tensor, Tensor] | None = None) -> None:
    """Add sum_b (sum_t g_bt a_btᵀ)² to `total_OI`, elementwise squares.

    One position: a single product of squares. Few: products over pairs of positions. Otherwise each example's
    gradient is made in a buffer that stays in cache and is added at once. `turn` = (Q_G, Q_A) turns the gradient itself
    (the cheaper order for long rows).
    """
    count, times, _ = g_BTO.shape
    if turn is None and times <= PAIRS:
        t_P, s_P = torch.triu_indices(times, times)
        twice_P1 = torch.where(t_P == s_P, 1.0, 2.0).to(g_BTO)[:, None]
        left_XO = (g_BTO[:, t_P] * g_BTO[:, s_P] * twice_P1).flatten(0, 1)
        total_OI.addmm_(left_XO.T, (a_BTI[:, t_P] * a_BTI[:, s_P]).flatten(0, 1))
        return
    room_OI = aligned(total_OI, *total_OI.shape)
    half_OI = aligned(total_OI, *total_OI.shape) if turn is not None else room_OI
    for b in range(count):
        torch.mm(g_BTO[b].T, a_BTI[b], out=room_OI)
        if turn is not None:
            torch.mm(room_OI, turn[1], out=half_OI)
            torch.mm(turn[0].T, half_OI, out=room_OI)
        total_OI.addcmul_(room_OI, room_OI)


def outer_(room_BOI: Tensor, g_BTO: Tensor, a_BTI: Tensor) -> Tensor:
    """Every example's gradient sum_t g_bt a_btᵀ, written into `room_BOI`."""
    if g_BTO.shape[1] == 1:
        return torch.mul(g_BTO[:, 0, :, None], a_BTI[:, 0, None, :], out=room_BOI)
    return torch.bmm(g_BTO.transpose(1, 2), a_BTI, out=room_BOI)


def inverse(curvature_OI: Tensor, damping: float) -> Tensor:
    """1 / (curvature + damping) in float64; where both are 0 nothing is known, and the answer is 0.

    >>> inverse(torch.tensor([0.0, 1.0]), 0.0)
    tensor([0., 1.], dtype=torch.float64)
    """
    damped = curvature_OI.double() + damping
    return torch.where(damped > 0, damped.reciprocal(), 0.0)


def turned(grad_QOI: Tensor, q_OO: Tensor, q_II: Tensor) -> Tensor:
    """Q_Gᵀ V Q_A of every gradient: its coordinates in the eigenbasis."""
    return torch.matmul(q_OO.T, torch.matmul(grad_QOI, q_II))


def turned_back_(grad_OI: Tensor, room_OI: Tensor, q_OO: Tensor, q_II: Tensor) -> Tensor:
    """Q_G V Q_Aᵀ in place of V: from eigen-coordinates back to weights.

    One at a time: several at once are slower, as what lies between the two products no longer fits into cache.
    """
    torch.mm(grad_OI, q_II.T, out=room_OI)
    return torch.mm(q_OO, room_OI, out=grad_OI)


def reliability(first_OI: Tensor, second_OI: Tensor, damping: float) -> tuple[float, float, float]:
    """(common, own, own) energy of scores whose curvature comes from either of two halves of the rows.

    Coordinate c weighs 1 / (curvature + damping) and carries the energy of a gradient twice. common / sqrt(own own),
    summed over maps, is the correlation to be expected between scores by the one half and by the other.

    >>> reliability(torch.ones(2), torch.ones(2), 1.0)
    (0.5, 0.5, 0.5)
    """
    first, second = first_OI.double(), second_OI.double()
    energy = (first + second).square() / 4
    one, other = inverse(first, damping), inverse(second, damping)
    return float((energy * one * other).sum()), float((energy * one * one).sum()), float((energy * other * other).sum())

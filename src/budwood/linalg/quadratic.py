"""How linear and how quadratic one set of numbers is in another: ridge fits judged on rows they have not seen.

Shapes: N rows, M held-out rows, D inputs, K outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RIDGES = tuple(10.0**e for e in range(-10, 1))


def explained(wanted_MK: Tensor, found_MK: Tensor) -> float:
    """R^2: the share of the variance around the mean that is explained; 0 is no better than the mean.

    >>> explained(torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [2.0]]))
    1.0
    """
    spread = float((wanted_MK - wanted_MK.mean(0)).double().square().sum())
    return 1 - float((wanted_MK - found_MK).double().square().sum()) / spread if spread else 0.0


def linear_r2(train: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]) -> float:
    """Held-out R^2 of output ~ A input + b; inputs and outputs are [N, D] and [N, K]."""
    return _ridge_r2(lambda a, b: a @ b.T, train, held)


def quadratic_r2(train: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]) -> float:
    """Held-out R^2 of output ~ x^T A x / 2 + b.x + c, by the kernel (1 + x.y)^2 that spans exactly these functions."""
    return _ridge_r2(lambda a, b: (1 + a @ b.T).square(), train, held)


def _ridge_r2(
    kernel: Callable[[Tensor, Tensor], Tensor], train: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]
) -> float:
    """Kernel ridge regression, its strength chosen on every fifth training row and fitted anew on all."""
    mean, size = train[0].double().mean(0), float(train[0].double().var(0).sum() ** 0.5) or 1.0
    prepare = lambda x_ND: (x_ND.double() - mean) / size  # noqa: E731
    x_ND, y_NK = prepare(train[0]), train[1].double()
    aside = torch.arange(len(x_ND)) % 5 == 4
    scores = _scores(kernel, (x_ND[~aside], y_NK[~aside]), (x_ND[aside], y_NK[aside]), RIDGES)
    best = RIDGES[max(range(len(RIDGES)), key=scores.__getitem__)]
    return _scores(kernel, (x_ND, y_NK), (prepare(held[0]), held[1].double()), (best,))[0]


def _scores(
    kernel: Callable[[Tensor, Tensor], Tensor],
    train: tuple[Tensor, Tensor],
    held: tuple[Tensor, Tensor],
    ridges: tuple[float, ...],
) -> list[float]:
    """R^2 on held-out rows at every strength, from one eigendecomposition."""
    middle = train[1].mean(0)
    value_N, vector_NN = torch.linalg.eigh(kernel(train[0], train[0]))
    turned_NK = vector_NN.T @ (train[1] - middle)
    across_MN = kernel(held[0], train[0]) @ vector_NN
    top = float(value_N[-1])
    fits = [across_MN @ (turned_NK / (value_N.clamp_min(0) + r * top)[:, None]) + middle for r in ridges]
    return [explained(held[1], f) for f in fits]

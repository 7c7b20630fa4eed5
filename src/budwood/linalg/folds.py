"""The cost of a softmax regression chosen by cross-validation, all folds and costs solved together.

Shapes: N rows, D features, S costs, F folds, K weight vectors of a problem (1 for two classes), R row sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from budwood.errors import DataError
from budwood.linalg.softmax import Problems, Solution, solve


@dataclass(frozen=True)
class Chosen:
    """A cost chosen by cross-validation and the fit on all rows at every cost.

    `score_SF` is the accuracy on each left-out fold; the first (smallest) cost with the best mean is `best`.
    """

    solution: Solution
    costs: tuple[float, ...]
    score_SF: np.ndarray
    best: int

    @property
    def cost(self) -> float:
        """The chosen C."""
        return self.costs[self.best]

    @property
    def weight_KD(self) -> Tensor:
        """Weights on all rows at the chosen cost (K = 1 for two classes)."""
        return self.solution.weight_SPKD[self.best, 0]

    @property
    def bias_K(self) -> Tensor:
        """Intercepts that go with `weight_KD`."""
        return self.solution.bias_SPK[self.best, 0]

    def predict(self, x_ND: Tensor) -> np.ndarray:
        """class_N of the chosen fit."""
        return self.solution.logits(x_ND, [(self.best, 0)])[0].argmax(1).numpy()


def stratified_folds(label_N: np.ndarray, folds: int) -> np.ndarray:
    """fold_N: scikit-learn's unshuffled stratified folds, every class dealt out evenly in the order of the rows.

    >>> stratified_folds(np.array([0, 0, 1, 1, 0, 1]), 2).tolist()
    [0, 0, 0, 1, 1, 1]
    """
    classes, first, code_N = np.unique(label_N, return_index=True, return_inverse=True)
    code_N = np.argsort(np.argsort(first))[code_N]  # classes in the order in which they appear
    if len(label_N) < folds:
        raise DataError(f"{len(label_N)} rows cannot make {folds} folds. Give more rows, or fewer with --folds.")
    order = np.sort(code_N)
    share_FK = np.stack([np.bincount(order[f::folds], minlength=len(classes)) for f in range(folds)])
    fold_N = np.empty(len(label_N), dtype=np.int64)
    for k in range(len(classes)):
        fold_N[code_N == k] = np.repeat(np.arange(folds), share_FK[:, k])
    return fold_N


def cross_validate(
    x_ND: Tensor,
    label_N: np.ndarray,
    classes: int,
    costs: Sequence[float],
    fold_N: np.ndarray,
    tolerance: float = 1e-9,
) -> Chosen:
    """Choose C by accuracy on left-out folds and fit all rows; folds and the final fit are solved together.

    >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0).long().numpy()
    >>> found = cross_validate(x, y, 2, (0.1, 1.0), stratified_folds(y, 3))
    >>> bool((found.predict(x) == y).mean() > 0.9)
    True
    """
    rising = tuple(sorted(float(c) for c in costs))
    label_N = np.asarray(label_N, dtype=np.int64)
    folds = int(fold_N.max()) + 1
    kept_FN = torch.from_numpy(fold_N[None] != np.arange(folds)[:, None])
    weight_RN = torch.cat([torch.ones(1, len(label_N)), kept_FN.float()])
    problems = Problems(
        torch.from_numpy(label_N)[None],
        weight_RN,
        torch.zeros(folds + 1, dtype=torch.long),
        torch.arange(folds + 1),
        torch.tensor(rising, dtype=torch.float64)[:, None].repeat(1, folds + 1),
        classes,
    )
    solution = solve(x_ND, problems, tolerance)
    score_SF = np.zeros((len(rising), folds))
    for f in range(folds):
        out = torch.from_numpy(np.flatnonzero(fold_N == f))
        guess_SN = solution.logits(x_ND[out], [(s, f + 1) for s in range(len(rising))]).argmax(2).numpy()
        score_SF[:, f] = (guess_SN == label_N[out.numpy()]).mean(1)
    return Chosen(solution, rising, score_SF, int(score_SF.mean(1).argmax()))

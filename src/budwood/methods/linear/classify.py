"""Logistic regression with its strength chosen by folds, on one matrix or on a stream; fixed or pooled splits.

Shapes: N rows, S costs, R sets of rows, F folds, K classes, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from budwood.errors import DataError
from budwood.linalg import softmax, streamed
from budwood.linalg.folds import stratified_folds
from budwood.linalg.metrics import accuracy, accuracy_interval


@dataclass(frozen=True)
class Split:
    """Rows to learn from and rows to be scored on, as indices."""

    train: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Judged:
    """logits_SRNK of every row by every fit, one column per class, and how many fits had not converged."""

    logits_SRNK: Tensor
    unconverged: int


class Solver(Protocol):
    """Fits every set of rows at every cost, and judges every row with each fit."""

    @property
    def dims(self) -> int:
        """How many features there are, however they are held."""

    def __call__(self, label_N: np.ndarray, classes: int, use_RN: Tensor, costs: Sequence[float]) -> Judged:
        """Every fit's word on every row."""


@dataclass(frozen=True)
class Dense:
    """Features in memory."""

    feature_ND: Tensor
    dims: int
    penalise_intercept: bool = False
    tolerance: float = 1e-10  # of the objective; decisions on outlying rows are off by its root

    def __call__(self, label_N: np.ndarray, classes: int, use_RN: Tensor, costs: Sequence[float]) -> Judged:
        """All sets and costs as columns of one solve."""
        sets = len(use_RN)
        problems = softmax.Problems(
            label_YN=torch.from_numpy(label_N)[None],
            weight_RN=use_RN.float(),
            label_P=torch.zeros(sets, dtype=torch.long),
            rows_P=torch.arange(sets),
            cost_SP=torch.tensor(costs, dtype=torch.float64)[:, None].expand(-1, sets),
            classes=classes,
            penalise_intercept=self.penalise_intercept,
        )
        found = softmax.solve(self.feature_ND, problems, self.tolerance)
        every = [(s, r) for s in range(len(costs)) for r in range(sets)]
        logits_SRNK = found.logits(self.feature_ND, every).unflatten(0, (len(costs), sets))
        return Judged(logits_SRNK, int((~found.converged_SP).sum()))


@dataclass(frozen=True)
class Stream:
    """Features made anew in every pass."""

    blocks: streamed.Blocks
    dims: int
    penalise_intercept: bool = False

    def __call__(self, label_N: np.ndarray, classes: int, use_RN: Tensor, costs: Sequence[float]) -> Judged:
        """All sets and costs share every pass."""
        sets = len(use_RN)
        use_NP = use_RN.bool().T.repeat(1, len(costs))
        strength_P = torch.tensor(costs, dtype=torch.float32).repeat_interleave(sets)
        labels = torch.from_numpy(label_N)
        problems = streamed.Regressions(labels, classes, use_NP, strength_P, self.penalise_intercept)
        found = streamed.solve(self.blocks, self.dims, problems, tolerance=1e-6)
        logits_NPK = streamed.decide(self.blocks, found.weight_PDK, len(label_N))
        if logits_NPK.shape[2] == 1:
            logits_NPK = torch.cat([torch.zeros_like(logits_NPK), logits_NPK], 2)
        logits_SRNK = logits_NPK.transpose(0, 1).unflatten(0, (len(costs), sets))
        return Judged(logits_SRNK, int((~found.converged_P).sum()))


def fold_rows(split: Split, label_N: np.ndarray, folds: int, labels: Sequence[str]) -> np.ndarray:
    """fold_N of the training rows (unshuffled, stratified), -1 elsewhere; too few rows are refused."""
    own = label_N[split.train]
    if len(own) < folds:
        raise DataError(
            f"There are {len(own)} training rows for {folds} folds. Give at least as many rows as folds, or lower "
            "--k-fold."
        )
    count = np.bincount(own, minlength=len(labels))
    if count.min() < folds:
        rare = labels[int(count.argmin())]
        raise DataError(
            f"Label '{rare}' has {count.min()} training rows, fewer than {folds} folds, so that some fold would not "
            "have it. Give more rows, or lower --k-fold."
        )
    fold_N = np.full(len(label_N), -1)
    fold_N[split.train] = stratified_folds(own, folds)
    return fold_N


@dataclass(frozen=True)
class Scored:
    """Accuracies (mean over splits), the interval of the test accuracy, the chosen C, mean test log loss, and how many
    of all fits (sets of rows x costs) had not converged.
    """

    train: float
    test: float
    low: float
    high: float
    cost: float
    loss: float
    right_N: np.ndarray  # of the first split's test rows
    unconverged: int

    def row(self) -> dict[str, float]:
        """What a table shows."""
        return {
            "train": self.train,
            "test": self.test,
            "low": self.low,
            "high": self.high,
            "C": self.cost,
            "loss": self.loss,
            "unconverged": self.unconverged,
        }


def classify(
    solver: Solver,
    label_N: np.ndarray,
    labels: Sequence[str],
    splits: Sequence[Split],
    folds: int,
    costs: Sequence[float],
) -> Scored:
    """Choose C by accuracy on left-out folds (the smallest of equals), fit all training rows, score the test rows."""
    fold_SN = [fold_rows(s, label_N, folds, labels) for s in splits]
    sets = [own >= 0 for own in fold_SN] + [(own >= 0) & (own != f) for own in fold_SN for f in range(folds)]
    use_RN = torch.from_numpy(np.stack(sets))
    judged = solver(label_N, len(labels), use_RN, costs)
    logits_SRNK = judged.logits_SRNK
    guess_SRN = logits_SRNK.argmax(3).numpy()
    chosen, per_split, losses = [], [], []
    for i, (split, fold_N) in enumerate(zip(splits, fold_SN)):
        first = len(splits) + i * folds
        held = [fold_N == f for f in range(folds)]
        score_SF = [[accuracy(g[first + f][h], label_N[h]) for f, h in enumerate(held)] for g in guess_SRN]
        best = int(np.argmax(np.mean(score_SF, axis=1).round(9)))
        chosen.append(best)
        guess_N = guess_SRN[best, i]
        per_split.append([accuracy(guess_N[part], label_N[part]) for part in (split.train, split.test)])
        wanted = torch.from_numpy(label_N[split.test])
        test_NK = logits_SRNK[best, i][torch.from_numpy(split.test)].double()
        losses.append(float(torch.nn.functional.cross_entropy(test_NK, wanted)))
    train, test = np.mean(per_split, axis=0)
    n = int(np.mean([len(s.test) for s in splits]))
    low, high = accuracy_interval(round(test * n), n)
    right_N = guess_SRN[chosen[0], 0][splits[0].test] == label_N[splits[0].test]
    middle = sorted(chosen)[len(chosen) // 2]
    loss = float(np.mean(losses))
    return Scored(float(train), float(test), low, high, float(costs[middle]), loss, right_N, judged.unconverged)

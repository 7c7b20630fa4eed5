"""Which token of its window: regularised softmax over the tokens of ragged windows, many problems at once.

A conditional logit: score_t = w . h_t, softmax within a window, no intercept (it would change nothing). Problems differ
in the token to be found, in the windows they count and in their cost; the objective is mean loss + |w|^2 / (2 C n).
Shapes: M tokens of all windows, W windows, D features, Y targets, R window sets, P problems, S costs, A problems meant.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from budwood.linalg.newton import minimise

SAMPLE = 16  # tokens per feature that suffice for a preconditioner


@dataclass(frozen=True)
class Choices:
    """Windows `starts_W` (of contiguous tokens) and problems on them.

    `gold_YW` is the flat index of the token to be found; problem p looks for `gold_P[p]` in windows counted
    `weight_RW[rows_P[p]]` times, at the costs `cost_SP[:, p]` in rising order.
    """

    starts_W: np.ndarray
    gold_YW: np.ndarray
    weight_RW: np.ndarray
    gold_P: np.ndarray
    rows_P: np.ndarray
    cost_SP: np.ndarray


@dataclass(frozen=True)
class Found:
    """weight_SPD (float64), the mean loss with penalty, and the largest |gradient|."""

    weight_SPD: Tensor
    objective_SP: Tensor
    slope_SP: Tensor
    converged_SP: Tensor


def solve_choices(x_MD: Tensor, choices: Choices, tolerance: float = 1e-9) -> Found:
    """Every problem at every cost of its path, warm-started along it."""
    job = _Windows(x_MD, choices)
    point_PD = torch.zeros(len(choices.gold_P), x_MD.shape[1], dtype=torch.float64)
    found = []
    for cost_P in choices.cost_SP:
        job.decay_P = torch.from_numpy(1.0 / (cost_P * job.total_P.numpy()))
        end = minimise(job, point_PD, tolerance)
        point_PD = end.point_PD
        found.append((point_PD.clone(), end.value_P.clone(), end.slope_P, end.converged_P))
    return Found(*(torch.stack(part) for part in zip(*found)))


def log_chances(score_PM: np.ndarray, starts_W: np.ndarray) -> np.ndarray:
    """log_PM: log softmax within each window.

    >>> np.exp(log_chances(np.array([[0.0, 0.0, 5.0]]), np.array([0, 2]))).tolist()
    [[0.5, 0.5, 1.0]]
    """
    size_W = np.diff(np.append(starts_W, score_PM.shape[1]))
    peak_PM = np.repeat(np.maximum.reduceat(score_PM, starts_W, axis=1), size_W, axis=1)
    shifted_PM = score_PM - peak_PM
    total_PW = np.add.reduceat(np.exp(shifted_PM), starts_W, axis=1)
    return shifted_PM - np.repeat(np.log(total_PW), size_W, axis=1)


class _Windows:
    """The P problems at one cost each, as `newton.minimise` wants them."""

    def __init__(self, x_MD: Tensor, choices: Choices) -> None:
        self.x_MD, self.choices = x_MD.float(), choices
        self.size_W = np.diff(np.append(choices.starts_W, len(x_MD)))
        self.window_M = torch.from_numpy(np.repeat(np.arange(len(self.size_W)), self.size_W))
        weight_PW = torch.from_numpy(choices.weight_RW[choices.rows_P].astype(np.float64))
        self.total_P = weight_PW.sum(1)
        self.share_PW = weight_PW / self.total_P[:, None]
        self.decay_P = torch.ones_like(self.total_P)
        self.chance_PM = torch.empty(len(choices.gold_P), len(x_MD))
        self.inverse_DD = torch.empty(0)

    def evaluate(self, point_AD: Tensor, index_A: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss plus penalty, and its gradient, in float64."""
        wide_MD = self.x_MD.double()
        gold_AW = torch.from_numpy(self.choices.gold_YW[self.choices.gold_P[index_A.numpy()]])
        log_AM = torch.from_numpy(log_chances((point_AD @ wide_MD.T).numpy(), self.choices.starts_W))
        share_AW = self.share_PW[index_A]
        loss_A = -(log_AM.gather(1, gold_AW) * share_AW).sum(1)
        chance_AM = log_AM.exp()
        self.chance_PM[index_A] = torch.where(chance_AM < 1e-14, 0.0, chance_AM).float()
        miss_AM = chance_AM.scatter_add(1, gold_AW, torch.full_like(share_AW, -1.0)) * share_AW[:, self.window_M]
        decay_A = self.decay_P[index_A]
        gradient_AD = miss_AM @ wide_MD + decay_A[:, None] * point_AD
        return loss_A + decay_A * point_AD.square().sum(1) / 2, gradient_AD

    def curved(self, direction_AD: Tensor, index_A: Tensor) -> Tensor:
        """Hessian times direction: the covariance of scores within windows."""
        chance_AM = self.chance_PM if len(index_A) == len(self.chance_PM) else self.chance_PM[index_A]
        drawn_AM = (direction_AD @ self.x_MD.T).mul_(chance_AM)
        mean_AW = torch.from_numpy(np.add.reduceat(drawn_AM.numpy(), self.choices.starts_W, axis=1))
        bent_AM = drawn_AM.sub_(chance_AM * mean_AW[:, self.window_M])
        bent_AM.mul_(self.share_PW[index_A].float()[:, self.window_M])
        return bent_AM @ self.x_MD + self.decay_P[index_A].float()[:, None] * direction_AD

    def prepare(self, index_A: Tensor, own: bool) -> None:
        """One inverse for all: the Hessian of the fullest problem, from a sample of windows where there are many."""
        p = int(index_A[self.total_P[index_A].argmax()])
        step = max(1, len(self.x_MD) // (SAMPLE * self.x_MD.shape[1] * 8))
        chosen_W = torch.zeros(len(self.size_W), dtype=torch.bool)
        chosen_W[torch.nonzero(self.share_PW[p] > 0)[::step, 0]] = True
        share_W = torch.where(chosen_W, self.share_PW[p], 0.0) / self.share_PW[p][chosen_W].sum()
        keep_M = chosen_W[self.window_M]
        window_M = self.window_M[keep_M]
        x_MD, chance_M = self.x_MD[keep_M], self.chance_PM[p][keep_M]
        drawn_MD = x_MD * (chance_M * share_W[window_M].float())[:, None]
        raw_WD = torch.zeros(len(self.size_W), x_MD.shape[1]).index_add_(0, window_M, x_MD * chance_M[:, None])
        middle_WD = raw_WD[chosen_W]
        block_DD = x_MD.T @ drawn_MD - middle_WD.T @ (middle_WD * share_W[chosen_W].float()[:, None])
        block_DD = block_DD.double()
        ridge = float(self.decay_P[p]) + 1e-7 * float(block_DD.diagonal().mean()) + 1e-12
        block_DD.diagonal().add_(ridge)
        self.inverse_DD = torch.linalg.inv(block_DD).float()

    def precondition(self, gradient_AD: Tensor, index_A: Tensor) -> Tensor:
        """The shared inverse times gradients."""
        return gradient_AD @ self.inverse_DD

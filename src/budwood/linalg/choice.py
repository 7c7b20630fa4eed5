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

SAMPLE = 128  # tokens per feature that suffice for a preconditioner
LIKELY = 0.04  # of an equal share of its window's chance; tokens with less do not count there
CACHE = 2**22  # bytes of states that are worked on at once


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


def solve_choices(x_MD: Tensor, choices: Choices, tolerance: float = 1e-9, start_PD: Tensor | None = None) -> Found:
    """Every problem at every cost of its path, warm-started along it, from `start_PD` or nothing."""
    job = _Windows(x_MD, choices)
    point_PD = torch.zeros(len(choices.gold_P), x_MD.shape[1], dtype=torch.float64) if start_PD is None else start_PD
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


@dataclass(frozen=True)
class _Block:
    """Whole windows whose states fit a cache: their tokens, windows, and where each begins within the block."""

    tokens: slice
    windows: slice
    starts_B: np.ndarray
    size_B: Tensor


def _blocks(starts_W: np.ndarray, tokens: int, most: int) -> list[_Block]:
    """Windows in order, cut into blocks of about `most` tokens."""
    edges_W1 = np.append(starts_W, tokens)
    cuts = np.searchsorted(edges_W1, np.arange(most, tokens, most))
    cuts = np.unique(np.concatenate([[0], cuts, [len(starts_W)]]))
    return [
        _Block(
            slice(int(edges_W1[a]), int(edges_W1[b])),
            slice(int(a), int(b)),
            edges_W1[a:b] - edges_W1[a],
            torch.from_numpy(np.diff(edges_W1[a : b + 1])),
        )
        for a, b in zip(cuts, cuts[1:])
    ]


class _Windows:
    """The P problems at one cost each, as `newton.minimise` wants them.

    Every product goes block by block: states are read once, widened to float64 in the cache, and no array of their size
    is ever made.
    """

    most = 180
    patience = 5  # a preconditioner costs about as much as four inner iterations

    def __init__(self, x_MD: Tensor, choices: Choices) -> None:
        self.x_MD, self.choices = x_MD.float(), choices
        self.blocks = _blocks(choices.starts_W, len(x_MD), max(1, CACHE // (8 * x_MD.shape[1])))
        size_W = np.diff(np.append(choices.starts_W, len(x_MD)))
        self.likely_W = torch.from_numpy(LIKELY / size_W).float()
        self.window_M = torch.from_numpy(np.repeat(np.arange(len(size_W)), size_W))
        weight_PW = torch.from_numpy(choices.weight_RW[choices.rows_P].astype(np.float64))
        self.total_P = weight_PW.sum(1)
        self.share_PW = weight_PW / self.total_P[:, None]
        self.decay_P = torch.ones_like(self.total_P)
        self.gold_P = torch.from_numpy(choices.gold_P)
        self.chance_PM = torch.empty(len(choices.gold_P), len(x_MD))
        self.inverse_DD: dict[int, Tensor] = {}  # by the token that is looked for

    def evaluate(self, point_AD: Tensor, index_A: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss plus penalty, and its gradient, in float64."""
        gold_AW = torch.from_numpy(self.choices.gold_YW[self.choices.gold_P[index_A.numpy()]])
        decay_A = self.decay_P[index_A]
        value_A = decay_A * point_AD.square().sum(1) / 2
        gradient_AD = decay_A[:, None] * point_AD
        for block in self.blocks:
            wide_TD = self.x_MD[block.tokens].double()
            log_AT = torch.from_numpy(log_chances((point_AD @ wide_TD.T).numpy(), block.starts_B))
            gold_AB, share_AB = gold_AW[:, block.windows] - block.tokens.start, self.share_PW[index_A, block.windows]
            value_A -= (log_AT.gather(1, gold_AB) * share_AB).sum(1)
            chance_AT = log_AT.exp_()
            self.chance_PM[index_A, block.tokens] = torch.where(chance_AT < 1e-14, 0.0, chance_AT).float()
            miss_AT = chance_AT.scatter_add_(1, gold_AB, torch.full_like(share_AB, -1.0))
            miss_AT.mul_(share_AB.repeat_interleave(block.size_B, 1))
            gradient_AD += miss_AT @ wide_TD
        return value_A, gradient_AD

    def curved(self, direction_AD: Tensor, index_A: Tensor) -> Tensor:
        """Hessian times direction: the covariance of scores within windows."""
        out_AD = self.decay_P[index_A].float()[:, None] * direction_AD
        for block in self.blocks:
            x_TD, chance_AT = self.x_MD[block.tokens], self.chance_PM[index_A, block.tokens]
            share_AB = self.share_PW[index_A, block.windows].float()
            drawn_AT = (direction_AD @ x_TD.T).mul_(chance_AT)
            mean_AB = torch.from_numpy(np.add.reduceat(drawn_AT.numpy(), block.starts_B, axis=1))
            drawn_AT.sub_(chance_AT.mul_(mean_AB.repeat_interleave(block.size_B, 1)))
            out_AD += drawn_AT.mul_(share_AB.repeat_interleave(block.size_B, 1)) @ x_TD
        return out_AD

    def prepare(self, index_A: Tensor, own: bool) -> None:
        """One inverse for all problems that look for the same token: the Hessian of the fullest of them."""
        for gold in self.gold_P[index_A].unique().tolist():
            mine_A = index_A[self.gold_P[index_A] == gold]
            self.inverse_DD[gold] = self._inverse(int(mine_A[self.total_P[mine_A].argmax()]))

    def _inverse(self, p: int) -> Tensor:
        """Of problem p's Hessian, by the tokens that may be chosen at all; of a sample of windows where they are many.

        A fit that has learned something gives nearly all of a window's chance to a few tokens, so that all windows
        together often cost less than a sample with all tokens would.
        """
        width = self.x_MD.shape[1]
        most = max(SAMPLE * width, 4 * len(self.x_MD) // width)
        likely_M = self.chance_PM[p] > self.likely_W[self.window_M]
        likely_M &= (self.share_PW[p] > 0)[self.window_M]
        step = -(-int(likely_M.sum()) // most)
        if step > 1:
            likely_M &= self.window_M % step == 0
        at_T = likely_M.nonzero()[:, 0]
        seen_B, window_T = self.window_M[at_T].unique(return_inverse=True)
        share_B = self.share_PW[p][seen_B].float()
        share_B /= share_B.sum()
        x_TD, chance_T = self.x_MD[at_T], self.chance_PM[p][at_T]
        chance_T = chance_T / torch.zeros(len(seen_B)).index_add_(0, window_T, chance_T)[window_T]
        drawn_TD = x_TD * chance_T[:, None]
        middle_BD = torch.zeros(len(seen_B), width).index_add_(0, window_T, drawn_TD)
        block_DD = x_TD.T @ drawn_TD.mul_(share_B[window_T][:, None])
        block_DD = (block_DD - middle_BD.T @ (middle_BD * share_B[:, None])).double()
        ridge = float(self.decay_P[p]) + 1e-7 * float(block_DD.diagonal().mean()) + 1e-12
        block_DD.diagonal().add_(ridge)
        return torch.linalg.inv(block_DD).float()

    def precondition(self, gradient_AD: Tensor, index_A: Tensor) -> Tensor:
        """The inverse of its kind times each gradient."""
        gold_A = self.gold_P[index_A]
        out_AD = torch.empty_like(gradient_AD)
        for gold, inverse_DD in self.inverse_DD.items():
            mine_A = gold_A == gold
            out_AD[mine_A] = gradient_AD[mine_A] @ inverse_DD
        return out_AD

"""Which token of its window: regularised softmax over the tokens of ragged windows, many problems at once.

A conditional logit: score_t = w . h_t, softmax within a window, no intercept (it would change nothing). Problems differ
in the token to be found, in the windows they count and in their cost; the objective is mean loss + |w|^2 / (2 C n).
Shapes: M tokens of all windows, W windows, D features, Y targets, R window sets, P problems, S costs, A problems meant,
B windows and T tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from budwood.linalg.newton import Minimum, minimise

SAMPLE, LEAST, FINER = 16, 4096, 8  # tokens per feature and in all for a preconditioner; times as many for the next
LIKELY = 0.04  # of an equal share of its window's chance; tokens with less do not count there
FAINT = -40.0  # log of a chance that counts as none, far above numbers too small to be fast
CACHE = 2**22  # bytes of states that are worked on at once
FEW = 10
SPARE, FEWEST, DRAWN = 4, 16, 2**25  # of how many tokens one is drawn, how many at least of a window, numbers at most
DOUBT = 0.2  # share of chances that counts as right already in the first step, which else goes far too far
DRAWS = 8  # Newton steps by drawn tokens
ROUGH = 1e-6  # of an objective, relative: what float32 can tell

EVEN = -1  # in place of a target: before anything is learned
Curve = tuple[Tensor, Tensor]  # spectrum_D and basis_DD of a Hessian without its decay


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


def solve_choices(
    x_MD: Tensor,
    choices: Choices,
    tolerance: float = 1e-9,
    start_PD: Tensor | None = None,
    enough: Callable[[Tensor], bool] = lambda weight_SPD: False,
    together: int = 1,
) -> Found:
    """Every problem at every cost of its path, from `start_PD` or nothing.

    One read of the states serves all problems at so many costs `together`; the next costs begin where the largest of
    those ended, which is the shorter way to large ones. `enough` is shown the weights of every such group and may end
    the path.
    """
    count = len(choices.gold_P)
    group = min(together, len(choices.cost_SP))
    point_PD = torch.zeros(count, x_MD.shape[1], dtype=torch.float64) if start_PD is None else start_PD.double()
    flat = replace(choices, gold_P=np.tile(choices.gold_P, group), rows_P=np.tile(choices.rows_P, group))
    job = _Windows(x_MD, flat)
    found = []
    for i in range(0, len(choices.cost_SP), group):
        cost_SP = choices.cost_SP[i : i + group]
        end = _minimum(job, cost_SP, tolerance, point_PD.repeat(len(cost_SP), 1))
        parts = (end.point_PD, end.value_P, end.slope_P, end.converged_P)
        found.append([part.unflatten(0, (len(cost_SP), count)) for part in parts])
        point_PD = found[-1][0][-1]
        if enough(found[-1][0]):
            break
    return Found(*(torch.cat(part) for part in zip(*found)))


def _minimum(job: _Windows, cost_SP: np.ndarray, tolerance: float, start_QD: Tensor) -> Minimum:
    """The first Q = S x P problems of a job, of one cost each: as far as float32 can tell, further in float64."""
    job.decay_P[: cost_SP.size] = 1 / (torch.from_numpy(cost_SP.ravel()) * job.total_P[: cost_SP.size])
    job.exact, job.draws, job.shortened = False, 0, 0
    end = minimise(job, start_QD, max(tolerance, ROUGH), noise=ROUGH, prepared=bool(job.curves))
    if tolerance >= ROUGH:
        return end
    job.exact = True
    return minimise(job, end.point_PD, tolerance, prepared=True)


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
    window_T: Tensor  # of every token


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
            torch.from_numpy(np.repeat(np.arange(b - a), np.diff(edges_W1[a : b + 1]))),
        )
        for a, b in zip(cuts, cuts[1:])
    ]


class _Windows:
    """The P problems at one cost each, as `newton.minimise` wants them.

    Every product goes block by block: states are read once, widened to float64 in the cache where `exact`, and no array
    of their size is ever made.
    """

    most = 180

    def __init__(self, x_MD: Tensor, choices: Choices) -> None:
        self.x_MD, self.choices, self.exact = x_MD.float(), choices, True
        self.most_tokens = max(1, CACHE // (8 * x_MD.shape[1]))
        self.blocks = _blocks(choices.starts_W, len(x_MD), self.most_tokens)
        size_W = np.diff(np.append(choices.starts_W, len(x_MD)))
        self.likely_W = torch.from_numpy(LIKELY / size_W).float()
        self.window_M = torch.from_numpy(np.repeat(np.arange(len(size_W)), size_W))
        weight_PW = torch.from_numpy(choices.weight_RW[choices.rows_P].astype(np.float64))
        self.total_P = weight_PW.sum(1)
        self.share_PW = weight_PW / self.total_P[:, None]
        self.decay_P = torch.ones_like(self.total_P)
        self.mass_PM = torch.empty(len(choices.gold_P), len(x_MD))  # of the curvature: chance times share
        self.even_P = torch.zeros(len(choices.gold_P), dtype=torch.bool)  # where all tokens are equally likely
        self.kind_P = torch.full_like(self.even_P, EVEN, dtype=torch.long)
        self.curves: dict[int, Curve] = {}
        self.drawn: tuple[Tensor, Tensor, list[_Block]] | None = None  # for the curvature at the last point
        self.draws = self.tried = self.shortened = 0  # points tried since the last draw; steps that were too long

    @property
    def patience(self) -> int:
        """A preconditioner costs about as much as five products with all tokens, or twenty with drawn ones."""
        return 8 if self.drawn is None or self.drawn[0] is self.x_MD else 16

    def evaluate(self, point_AD: Tensor, index_A: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss plus penalty, and its gradient; sums over blocks and windows' losses are float64 in any case."""
        gold_AW = torch.from_numpy(self.choices.gold_YW[self.choices.gold_P[index_A.numpy()]])
        share_AW, decay_A = self.share_PW[index_A], self.decay_P[index_A]
        self.drawn, self.tried = None, self.tried + 1
        self.even_P[index_A] = (point_AD == 0).all(1)
        value_A = decay_A * point_AD.square().sum(1) / 2
        gradient_AD = decay_A[:, None] * point_AD
        width = torch.float64 if self.exact else torch.float32
        near_AD, near_AW = point_AD.to(width), share_AW.to(width)
        doubt_A1 = DOUBT * self.even_P[index_A, None].to(width)
        for block in self.blocks:
            x_TD = self.x_MD[block.tokens].to(width)
            score_AT = _scores(near_AD, x_TD)
            peak_AB = torch.from_numpy(np.maximum.reduceat(score_AT.numpy(), block.starts_B, axis=1))
            score_AT -= peak_AB.index_select(1, block.window_T)
            gold_AB, share_AB = gold_AW[:, block.windows] - block.tokens.start, near_AW[:, block.windows]
            told_AB = score_AT.gather(1, gold_AB).double()
            mass_AT = score_AT.clamp_(min=FAINT).exp_()
            total_AB = torch.from_numpy(np.add.reduceat(mass_AT.numpy(), block.starts_B, axis=1))
            value_A += ((total_AB.double().log() - told_AB) * share_AW[:, block.windows]).sum(1)
            mass_AT *= (share_AB / total_AB).index_select(1, block.window_T)
            bent_AT = (mass_AT * (1 - doubt_A1)).scatter_add_(1, gold_AB, doubt_A1 * share_AB)
            self.mass_PM[index_A, block.tokens] = bent_AT.float()
            gradient_AD += mass_AT.scatter_add_(1, gold_AB, -share_AB) @ x_TD
        return value_A, gradient_AD

    def curved(self, direction_AD: Tensor, index_A: Tensor) -> Tensor:
        """Hessian times direction: the covariance of scores within windows; by a draw of tokens unless `exact`."""
        if self.drawn is None:
            self.drawn = self._draw(index_A)
        x_ND, mass_PN, blocks = self.drawn
        out_AD = self.decay_P[index_A].float()[:, None] * direction_AD
        share_AW = self.share_PW[index_A].float()
        once_AW = torch.where(share_AW > 0, 1 / share_AW, 0.0)
        mass_AN = mass_PN[index_A]
        for block in blocks:
            x_TD, mass_AT = x_ND[block.tokens], mass_AN[:, block.tokens]
            bent_AT = _scores(direction_AD, x_TD).mul_(mass_AT)
            mean_AB = torch.from_numpy(np.add.reduceat(bent_AT.numpy(), block.starts_B, axis=1))
            mean_AB *= once_AW[:, block.windows]
            out_AD += bent_AT.addcmul_(mass_AT, mean_AB.index_select(1, block.window_T), value=-1) @ x_TD
        return out_AD

    def _draw(self, index_A: Tensor) -> tuple[Tensor, Tensor, list[_Block]]:
        """Tokens that stand for all in a Hessian (x_ND), their mass in every problem (mass_PN), and their blocks.

        Taken at even steps of the mass of all problems together: a likely token is sure to be among them, an unlikely
        one stands for several. Every window keeps its whole mass. Where steps by drawn tokens are too long, as happens
        to large costs, or many are needed, all tokens are taken.
        """
        count, width = self.x_MD.shape
        self.shortened += self.draws > 1 and self.tried > 1
        self.draws, self.tried = self.draws + 1, 0
        wanted = min(max(count // SPARE, 2 * SAMPLE * width), DRAWN // width)
        poor = self.shortened > 1 or self.draws > DRAWS
        if self.exact or poor or 2 * wanted > count or wanted < FEWEST * len(self.likely_W):
            return self.x_MD, self.mass_PM, self.blocks
        mass_AM = self.mass_PM[index_A]
        reach_M = mass_AM.sum(0).double()
        reach_M *= wanted / reach_M.sum()
        first_W = torch.from_numpy(self.choices.starts_W)
        reach_M[first_W] = reach_M[first_W].clamp_min(1.001)  # no window goes without, whatever the rounding
        edge_M = reach_M.cumsum(0).floor()
        at_N = edge_M.diff(prepend=edge_M.new_zeros(1)).nonzero()[:, 0]
        starts_W = torch.searchsorted(at_N, torch.from_numpy(self.choices.starts_W)).numpy()
        mass_AN = mass_AM[:, at_N] / reach_M[at_N].clamp_(1e-9, 1).float()
        whole_AW = torch.from_numpy(np.add.reduceat(mass_AN.numpy(), starts_W, axis=1))
        mass_AN *= (self.share_PW[index_A].float() / whole_AW.clamp_min(1e-30)).index_select(1, self.window_M[at_N])
        mass_PN = torch.zeros(len(self.mass_PM), len(at_N))
        mass_PN[index_A] = mass_AN
        return self.x_MD[at_N], mass_PN, _blocks(starts_W, len(at_N), self.most_tokens)

    def prepare(self, index_A: Tensor, own: bool) -> None:
        """One curve for all problems that look for the same token: of the one with the largest cost.

        Before anything is learned nearly all tokens are equally likely, and one curve serves every problem.
        """
        for p in index_A.tolist():
            self.kind_P[p] = EVEN if self.even_P[p] else int(self.choices.gold_P[p])
        for kind in self.kind_P[index_A].unique().tolist():
            alike = index_A[self.kind_P[index_A] == kind]
            size = FINER * SAMPLE if kind in self.curves else SAMPLE
            self.curves[kind] = self._curve(int(alike[self.decay_P[alike].argmin()]), size)

    def _curve(self, p: int, size: int) -> Curve:
        """Of problem p's loss, by the tokens that may be chosen at all; of a sample of those where they are many.

        A fit that has learned something gives nearly all of a window's chance to a few tokens.
        """
        width = self.x_MD.shape[1]
        share_W = self.share_PW[p].float()
        likely_M = self.mass_PM[p] > (self.likely_W * share_W)[self.window_M]
        at_T = likely_M.nonzero()[:, 0]
        at_T = at_T[:: -(-len(at_T) // max(size * width, LEAST))]
        seen_B, window_T = self.window_M[at_T].unique_consecutive(return_inverse=True)
        share_B = share_W[seen_B] / share_W[seen_B].sum()
        x_TD, mass_T = self.x_MD[at_T], self.mass_PM[p][at_T]
        whole_B = torch.zeros(len(seen_B)).index_add_(0, window_T, mass_T)
        mass_T = mass_T * (share_B / whole_B)[window_T]
        drawn_TD = x_TD * mass_T[:, None]
        middle_BD = torch.zeros(len(seen_B), width).index_add_(0, window_T, drawn_TD)
        block_DD = x_TD.T @ drawn_TD - middle_BD.T @ (middle_BD / share_B[:, None])
        spectrum_D, basis_DD = torch.linalg.eigh(block_DD.double())
        spectrum_D = spectrum_D.clamp_min(0) + 1e-7 * spectrum_D.mean() + 1e-12
        return spectrum_D, basis_DD.float()

    def precondition(self, gradient_AD: Tensor, index_A: Tensor) -> Tensor:
        """The inverse of its kind's curve and its own decay times each gradient."""
        out_AD = torch.empty_like(gradient_AD)
        kind_A = self.kind_P[index_A]
        for kind in kind_A.unique().tolist():
            mine_A = kind_A == kind
            spectrum_D, basis_DD = self.curves[kind]
            stiff_AD = (spectrum_D + self.decay_P[index_A[mine_A], None]).float()
            out_AD[mine_A] = ((gradient_AD[mine_A] @ basis_DD) / stiff_AD) @ basis_DD.T
        return out_AD


def _scores(weight_AD: Tensor, x_TD: Tensor) -> Tensor:
    """score_AT; of few vectors several times faster with tokens as rows of the product."""
    if len(weight_AD) > FEW:
        return weight_AD @ x_TD.T
    return (x_TD @ weight_AD.T).T.contiguous()

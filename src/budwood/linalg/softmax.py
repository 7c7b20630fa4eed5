"""L2-regularised softmax regression, many problems on one matrix at once, each solved to convergence.

A problem is a column of labels, a set of row weights (a fold, a bootstrap draw, a prefix) and a cost C; its objective
is scikit-learn's, C * sum(loss) + |w|^2 / 2 with a free intercept, divided here by C * sum(row weights). Two classes
have one weight vector, more have one each.
Shapes: N rows, D features, E = D + 1 (features and intercept), Y label columns, R row sets, P problems, S costs in a
path, A problems meant, K weight vectors of a problem (1 for two classes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from budwood.errors import DataError
from budwood.linalg.kron import gram_, mirrored
from budwood.linalg.newton import minimise

BLOCK = 4096  # rows that are widened to float64 at a time
HELD = 1 << 24  # most numbers of a matrix of which a float64 and a transposed copy are kept
STATE = 1 << 26  # most numbers of curvature held at once; more problems go in turns
CACHE = 1 << 20  # bytes of scores that are worked on at once
SAMPLE = 16  # rows per feature that suffice for a preconditioner
TINY = 1e-14  # chances below it count as none in the curvature
THIN = 10  # columns that the time of calls and of thin products comes to
CALLS = 8e6  # what the calls that make one inverse come to
FAINT = 1e-3  # of the mean: rows that bend the objective less are left out of a preconditioner
OWN = 1 << 25  # most numbers of preconditioners of single problems


@dataclass(frozen=True)
class Problems:
    """What is solved on one matrix: labels, row weights, and which of them each problem pairs, with its costs.

    `label_YN` holds classes 0 .. classes - 1 (any value where the weight is 0); `weight_RN` is how often a row counts;
    problem p fits labels `label_P[p]` on rows `rows_P[p]` at the costs `cost_SP[:, p]`, in rising order.
    """

    label_YN: Tensor
    weight_RN: Tensor
    label_P: Tensor
    rows_P: Tensor
    cost_SP: Tensor
    classes: int
    penalise_intercept: bool = False

    @property
    def vectors(self) -> int:
        """Weight vectors of a problem."""
        return 1 if self.classes == 2 else self.classes

    def take(self, index: Tensor) -> Problems:
        """Some of the problems."""
        return Problems(
            self.label_YN,
            self.weight_RN,
            self.label_P[index],
            self.rows_P[index],
            self.cost_SP[:, index],
            self.classes,
            self.penalise_intercept,
        )


@dataclass(frozen=True)
class Solution:
    """weight_SPKD and bias_SPK in float64; objective (per row) and largest |gradient| of every problem, in float64."""

    weight_SPKD: Tensor
    bias_SPK: Tensor
    objective_SP: Tensor
    slope_SP: Tensor
    converged_SP: Tensor

    def logits(self, x_ND: Tensor, at: Tensor | Sequence[tuple[int, int]]) -> Tensor:
        """logits_ANK of the problems `at` ((stage, problem) each), float32, one column per class."""
        pairs_A2 = torch.as_tensor(at, dtype=torch.long).reshape(-1, 2)
        weight_AKD = self.weight_SPKD[pairs_A2[:, 0], pairs_A2[:, 1]].to(x_ND)
        bias_AK = self.bias_SPK[pairs_A2[:, 0], pairs_A2[:, 1]].to(x_ND)
        flat = weight_AKD.flatten(0, 1) @ x_ND.T + bias_AK.flatten()[:, None]
        logits_ANK = flat.view(*bias_AK.shape, -1).transpose(1, 2)
        if bias_AK.shape[1] == 1:
            logits_ANK = torch.cat([torch.zeros_like(logits_ANK), logits_ANK], 2)
        return logits_ANK


def solve(x_ND: Tensor, problems: Problems, tolerance: float = 1e-9) -> Solution:
    """Every problem at every cost of its path, warm-started along it."""
    _check(x_ND, problems)
    count = len(problems.label_P)
    turn = max(1, STATE // (len(x_ND) * problems.vectors))
    parts = [
        _solve_turn(x_ND, problems.take(torch.arange(i, min(i + turn, count))), tolerance)
        for i in range(0, count, turn)
    ]
    return Solution(*(torch.cat([getattr(p, n) for p in parts], 1) for n in Solution.__dataclass_fields__))


def _check(x_ND: Tensor, problems: Problems) -> None:
    if not torch.isfinite(x_ND.sum()):
        raise DataError("Features hold a value that is no finite number. Scale them before they are stored.")
    if bool((problems.weight_RN[problems.rows_P].sum(1) <= 0).any()):
        raise DataError("A probe was asked to learn from no rows at all. Give more rows or fewer folds.")


def _solve_turn(x_ND: Tensor, problems: Problems, tolerance: float) -> Solution:
    job = _Regression(x_ND, problems)
    count, wide = len(problems.label_P), job.width
    point_PD = torch.zeros(count, problems.vectors * wide, dtype=torch.float64)
    found = []
    for cost_P in problems.cost_SP:
        job.set_cost(cost_P)
        end = minimise(job, point_PD, tolerance)
        point_PD = end.point_PD
        weight_PKE = point_PD.view(count, problems.vectors, wide)
        weight_PKD = weight_PKE[..., :-1]
        bias_PK = weight_PKE[..., -1] - weight_PKD @ job.mean_D
        found.append((weight_PKD.clone(), bias_PK, end.value_P.clone(), end.slope_P, end.converged_P))
    return Solution(*(torch.stack(part) for part in zip(*found)))


class _Regression:
    """The P problems at one cost each, as `newton.minimise` wants them; a point is [K, E] laid flat."""

    patience, most = 60, 180

    def __init__(self, x_ND: Tensor, problems: Problems) -> None:
        self.given_ND, self.problems = x_ND, problems
        zero = torch.zeros(x_ND.shape[1], dtype=torch.float64)
        # a free intercept takes up any shift, and centred columns make the curvature easier to invert
        self.mean_D = zero if problems.penalise_intercept else x_ND.double().mean(0)
        self.width = x_ND.shape[1] + 1
        few = len(x_ND) * self.width <= HELD
        self.exact_NE = self._centred(slice(None), torch.float64) if few else None
        self.x_NE = self._centred(slice(None), torch.float32)
        self.x_EN = self.x_NE.T.contiguous() if few else self.x_NE.T
        self.total_P = problems.weight_RN.double().sum(1)[problems.rows_P]
        shape = (len(problems.label_P), problems.vectors, len(x_ND))
        # what a row counts in the mean of its problem; with one weight vector, times the curvature of its loss
        self.bend_PN = problems.weight_RN.float()[problems.rows_P] / self.total_P[:, None].float()
        self.chance_PKN = torch.empty(shape if problems.vectors > 1 else 0, dtype=torch.float32)
        self.flag_E = torch.ones(self.width, dtype=torch.float64)  # 1 for every weight that the penalty counts
        self.flag_E[-1] = float(problems.penalise_intercept)
        self.own, self.spent = False, 0.0
        # where the problems stand, and the mean losses and their gradients there
        self.at_PD = torch.full((shape[0], problems.vectors * self.width), torch.nan, dtype=torch.float64)
        self.loss_P = torch.empty(shape[0], dtype=torch.float64)
        self.slope_PKE = torch.empty(shape[0], problems.vectors, self.width, dtype=torch.float64)
        self.group_P = torch.zeros(shape[0], dtype=torch.long)
        self.inverse_GKEE = torch.empty(0)

    def _centred(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """x_BE: features less their means, and a column of ones for the intercept."""
        return F.pad(self.given_ND[rows].to(dtype) - self.mean_D.to(dtype), (0, 1), value=1.0)

    def set_cost(self, cost_P: Tensor) -> None:
        """Move all problems to these costs.

        Higher ones are harder. Once the inner iterations of a cost took as long as inverting the Hessian of every
        problem would, all further costs begin with that: two thirds of the iterations go.
        """
        rows, wide = min(len(self.x_NE), SAMPLE * self.width), self.width
        block = 1.2 * rows * wide**2 + 5.6 * wide**3 + CALLS  # its sums, its inverse
        self.own, self.spent = self.own or self.spent > len(self.bend_PN) * self.problems.vectors * block, 0.0
        self.decay_P = 1.0 / (cost_P.double() * self.total_P)

    def evaluate(self, point_AD: Tensor, index_A: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss plus penalty, and its gradient, in float64."""
        if not torch.equal(self.at_PD[index_A], point_AD):  # another cost is another penalty, not another loss
            self._move(point_AD, index_A)
        weight_AKE = point_AD.view(len(index_A), self.problems.vectors, self.width)
        decay_A, kept_AKE = self.decay_P[index_A], weight_AKE * self.flag_E
        value_A = self.loss_P[index_A] + decay_A * kept_AKE.square().sum((1, 2)) / 2
        gradient_AKE = self.slope_PKE[index_A] + decay_A[:, None, None] * kept_AKE
        return value_A, gradient_AKE.flatten(1)

    def _move(self, point_AD: Tensor, index_A: Tensor) -> None:
        """Losses, their gradients and the chances at a point, a block of rows at a time."""
        vectors = self.problems.vectors
        weight_AKE = point_AD.view(len(index_A), vectors, self.width)
        slope_AKE = torch.zeros_like(weight_AKE)
        loss_A = torch.zeros(len(index_A), dtype=torch.float64)
        label_A, rows_A = self.problems.label_P[index_A], self.problems.rows_P[index_A]
        for first in range(0, len(self.given_ND), BLOCK):
            rows = slice(first, first + BLOCK)
            x_BE = self._centred(rows, torch.float64) if self.exact_NE is None else self.exact_NE[rows]
            score_AKB = (weight_AKE.flatten(0, 1) @ x_BE.T).view(*weight_AKE.shape[:2], -1)
            y_AB = self.problems.label_YN[label_A, rows]
            r_AB = self.problems.weight_RN[rows_A, rows].double()
            loss_AB, chance_AKB, miss_AKB = _loss(score_AKB, y_AB)
            loss_A += torch.linalg.vecdot(loss_AB, r_AB)
            slope_AKE += (miss_AKB.mul_(r_AB[:, None]).flatten(0, 1) @ x_BE).view_as(slope_AKE)
            if vectors > 1:
                self.chance_PKN[index_A, :, rows] = _felt(chance_AKB)
            else:
                curved_AB = _felt((chance_AKB * (1 - chance_AKB))[:, 0])
                self.bend_PN[index_A, rows] = curved_AB * (r_AB / self.total_P[index_A, None]).float()
        total_A = self.total_P[index_A]
        self.at_PD[index_A] = point_AD
        self.loss_P[index_A] = loss_A / total_A
        self.slope_PKE[index_A] = slope_AKE / total_A[:, None, None]

    def curved(self, direction_AD: Tensor, index_A: Tensor) -> Tensor:
        """Hessian times direction, in float32."""
        way_AKE = direction_AD.view(len(index_A), self.problems.vectors, self.width)
        # in numbers that a product of whole matrices makes in this time
        self.spent += 4 * self.x_NE.numel() * (1.3 * way_AKE.shape[0] * way_AKE.shape[1] + THIN)
        out_AKE = self.decay_P[index_A].float()[:, None, None] * (way_AKE * self.flag_E.float())
        every = len(index_A) == len(self.bend_PN)
        bend_AN = self.bend_PN if every else self.bend_PN[index_A]
        for first in range(0, len(self.x_NE), step := max(BLOCK, CACHE // (4 * way_AKE.shape[0] * way_AKE.shape[1]))):
            rows = slice(first, first + step)  # scores of one block stay in the cache
            bend_A1B = bend_AN[:, None, rows]
            score_AKB = (way_AKE.flatten(0, 1) @ self.x_EN[:, rows]).view(*way_AKE.shape[:2], -1)
            if self.problems.vectors > 1:
                chance_AKB = self.chance_PKN[:, :, rows] if every else self.chance_PKN[index_A, :, rows]
                score_AKB.sub_((chance_AKB * score_AKB).sum(1, keepdim=True)).mul_(chance_AKB)
            score_AKB.mul_(bend_A1B)
            out_AKE += (score_AKB.flatten(0, 1) @ self.x_NE[rows]).view_as(way_AKE)
        return out_AKE.flatten(1)

    def prepare(self, index_A: Tensor, own: bool) -> None:
        """Invert the Hessians' diagonal blocks, those of the fullest problem with the same labels.

        `own`, or dear iterations before: that is too coarse; every problem has its own, if they fit.
        """
        if (own or self.own) and len(index_A) * self.problems.vectors * self.width**2 <= OWN:
            leaders = index_A
            self.group_P[index_A] = torch.arange(len(index_A))
        else:
            label_A = self.problems.label_P[index_A]
            kinds, place_A = torch.unique(label_A, return_inverse=True)
            self.group_P[index_A] = place_A
            leaders = torch.stack([_fullest(index_A[label_A == kind], self.total_P) for kind in kinds])
        self.inverse_GKEE = torch.empty(0)  # the old ones make room first
        self.inverse_GKEE = torch.empty(len(leaders), self.problems.vectors, self.width, self.width)
        for place_KEE, p in zip(self.inverse_GKEE, leaders.tolist()):
            self._invert(p, place_KEE)

    def _invert(self, p: int, out_KEE: Tensor) -> None:
        """Inverses of the diagonal blocks of one problem's Hessian, of a sample of the rows if many."""
        used_N = torch.nonzero(self.problems.weight_RN[self.problems.rows_P[p]])[:, 0]
        used = used_N[:: max(1, len(used_N) // (SAMPLE * self.width))]
        bend_KM = self.bend_PN[p, used][None] * (len(used_N) / len(used))
        if self.problems.vectors > 1:
            chance_KM = self.chance_PKN[p][:, used]
            bend_KM = chance_KM * (1 - chance_KM) * bend_KM
        ridge_E = self.decay_P[p] * self.flag_E
        for out_EE, bend_M in zip(out_KEE, bend_KM):
            out_EE.copy_(_inverted(_ridged(self._block(used, bend_M), ridge_E)))

    def _block(self, used_M: Tensor, bend_M: Tensor) -> Tensor:
        """Weighted second moments [E, E] of some rows, summed in float32."""
        felt_M = bend_M > FAINT * bend_M.mean()
        x_ME = self.x_NE[used_M[felt_M]].mul_(bend_M[felt_M].sqrt_()[:, None])
        block_EE = torch.zeros(self.width, self.width)
        gram_(block_EE, x_ME)
        return mirrored(block_EE).double()

    def precondition(self, gradient_AD: Tensor, index_A: Tensor) -> Tensor:
        """Inverse Hessians times gradients, without what is the same for all classes.

        Such a shift changes no chance, so the optimum has none of it; but a block knows only its own class, and the
        little curvature along the shift would be what most of the iterations are spent on.
        """
        vectors = self.problems.vectors
        gradient_KAE = gradient_AD.view(len(index_A), vectors, self.width).transpose(0, 1)
        if len(self.inverse_GKEE) == 1:
            out_KAE = gradient_KAE @ self.inverse_GKEE[0]
        else:
            members: dict[int, list[int]] = {}
            for a, group in enumerate(self.group_P[index_A].tolist()):
                members.setdefault(group, []).append(a)
            out_KAE = torch.empty_like(gradient_KAE)
            for group, mine in members.items():
                where = slice(mine[0], mine[-1] + 1) if mine[-1] - mine[0] < len(mine) else mine
                out_KAE[:, where] = gradient_KAE[:, where] @ self.inverse_GKEE[group]
        if vectors > 1:
            out_KAE = out_KAE - out_KAE.mean(0)
        return out_KAE.transpose(0, 1).flatten(1)


def _loss(score_AKB: Tensor, label_AB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, probabilities and probabilities minus truth; one score is that of class 1 against class 0."""
    if score_AKB.shape[1] == 1:
        score_AB, truth_AB = score_AKB[:, 0], (label_AB == 1).to(score_AKB)
        chance_AB = score_AB.sigmoid()
        loss_AB = F.softplus(score_AB) - truth_AB * score_AB
        return loss_AB, chance_AB[:, None], (chance_AB - truth_AB)[:, None]
    label_A1B = label_AB.clamp(0, score_AKB.shape[1] - 1)[:, None]  # a row that does not count may say anything
    log_AKB = score_AKB.log_softmax(1)
    chance_AKB = log_AKB.exp()
    miss_AKB = chance_AKB.scatter_add(1, label_A1B, torch.full_like(chance_AKB[:, :1], -1.0))
    return -log_AKB.gather(1, label_A1B)[:, 0], chance_AKB, miss_AKB


def _felt(x: Tensor) -> Tensor:
    """In float32 without what is next to nothing: denormal numbers multiply a hundred times slower."""
    return torch.where(x < TINY, 0.0, x).float()


def _fullest(index_A: Tensor, total_P: Tensor) -> Tensor:
    return index_A[total_P[index_A].argmax()]


def _ridged(block_EE: Tensor, ridge_E: Tensor) -> Tensor:
    """With the penalty on its diagonal, and a trace more for directions that nothing holds."""
    block_EE.diagonal().add_(ridge_E + 1e-9 * block_EE.diagonal().mean() + 1e-30)
    return block_EE


def _inverted(block_EE: Tensor) -> Tensor:
    """Inverse of a positive definite matrix; where rounding has made it less, with as much more on its diagonal."""
    more = 0.0
    for _ in range(12):
        factor, info = torch.linalg.cholesky_ex(block_EE + more * torch.eye(len(block_EE), dtype=block_EE.dtype))
        if int(info) == 0:
            return torch.cholesky_inverse(factor)
        more = max(10 * more, 1e-7 * float(block_EE.diagonal().mean()))
    raise DataError("Features are so large or so uneven that their curvature cannot be inverted. Standardise them.")

"""Logistic regressions on rows too wide to hold: batched L-BFGS over features that are made anew in every pass.

Every problem has its own rows (folds), strength and class columns, and all of them share each pass. The objective of a
problem is C x sum of losses over its rows + half the squared weights; intercepts are free, or penalised as well.
Shapes: N rows, B rows of a block, D features, P problems, K class columns (1 for two classes), H pairs of history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Blocks = Callable[[], Iterator[tuple[slice, Tensor]]]  # every pass: (rows, feature_BD)
HISTORY = 8
HALVINGS = 30
DECREASE = 1e-4  # share of the promised decrease that a step must bring


@dataclass(frozen=True)
class Regressions:
    """P problems on the same rows: who takes part in each, its strength, and everyone's class."""

    label_N: Tensor
    classes: int
    use_NP: Tensor
    strength_P: Tensor
    penalise_intercept: bool = False

    @property
    def columns(self) -> int:
        """Class columns of a problem."""
        return 1 if self.classes == 2 else self.classes


@dataclass(frozen=True)
class Solved:
    """weight_PDK with the intercept in its last row; value_P of the objective divided by C x rows; passes made."""

    weight_PDK: Tensor
    value_P: Tensor
    passes: int
    converged_P: Tensor


def solve(blocks: Blocks, dims: int, problems: Regressions, tolerance: float = 1e-7, passes: int = 400) -> Solved:
    """Minimise all problems together; a problem is done when its preconditioned gradient promises < `tolerance`."""
    count, columns = problems.use_NP.shape[1], problems.columns
    square_D = _mean_square(blocks, dims)
    ridge_P = 1 / (problems.strength_P * problems.use_NP.sum(0))
    # the curvature of the loss is at most a quarter of the mean square of a feature (half of it for many classes)
    bound = 0.25 if columns == 1 else 0.5
    curve_PD1 = bound * square_D[None, :, None] + _ridges(ridge_P, dims, problems)[:, :, None]
    point = square_D.new_zeros(count, dims + 1, columns)
    active = torch.arange(count)
    value_P, slope = _pass(blocks, problems, point, active)
    pairs: list[tuple[Tensor, Tensor]] = []
    spent, converged_P = 2, torch.zeros(count, dtype=torch.bool)
    while spent < passes:
        promise = (slope[active].square() / curve_PD1[active]).sum((1, 2)) / 2
        done = promise <= tolerance * (1e-3 + value_P[active])
        converged_P[active[done]] = True
        active = active[~done]
        if not len(active):
            break
        way = _direction(slope, pairs, curve_PD1, active)
        moved, made = _walk(blocks, problems, (point, value_P, slope), way, active)
        spent += made
        pairs = [*pairs[-HISTORY + 1 :], moved]
        stuck = moved[0][active].abs().amax((1, 2)) == 0
        converged_P[active[stuck]] = True  # rounding: no step lowers the value any more
        active = active[~stuck]
        if not len(active):
            break
    return Solved(point, value_P, spent, converged_P)


def _ridges(ridge_P: Tensor, dims: int, problems: Regressions) -> Tensor:
    """ridge_PD of every weight, the intercept's last."""
    free = F.pad(ridge_P[:, None].expand(len(ridge_P), dims), (0, 1))
    return ridge_P[:, None].expand(len(ridge_P), dims + 1) if problems.penalise_intercept else free


def decide(blocks: Blocks, weight_PDK: Tensor, rows: int) -> Tensor:
    """logits_NPK of all rows under every problem's weights; two classes have one column, zero between them."""
    count, _, columns = weight_PDK.shape
    out = weight_PDK.new_empty(rows, count, columns)
    flat = weight_PDK[:, :-1].permute(1, 0, 2).reshape(-1, count * columns)
    for where, feature_BD in blocks():
        out[where] = (feature_BD @ flat).view(-1, count, columns) + weight_PDK[:, -1]
    return out


def _mean_square(blocks: Blocks, dims: int) -> Tensor:
    """Mean square of every feature, and 1 for the intercept; never quite zero."""
    total, rows = torch.zeros(dims), 0
    for where, feature_BD in blocks():
        total = total.to(feature_BD) + feature_BD.square().sum(0)
        rows += where.stop - where.start
    mean = total / rows
    return torch.cat([mean.clamp_min(1e-9 * float(mean.max())), torch.ones(1).to(mean)])


def _pass(blocks: Blocks, problems: Regressions, point: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """value_P and slope_PDK of the active problems at a point; others are zero."""
    count, size, columns = len(active), point.shape[1], problems.columns
    use_NA = problems.use_NP[:, active].to(point.dtype)
    rows_A = use_NA.sum(0)
    ridge_A = 1 / (problems.strength_P[active].to(point) * rows_A)
    here = point[active]
    flat = here[:, :-1].permute(1, 0, 2).reshape(size - 1, count * columns)
    value_A, slope = point.new_zeros(count, dtype=torch.float64), torch.zeros_like(flat)
    free = point.new_zeros(count, columns)
    for where, feature_BD in blocks():
        logits = (feature_BD @ flat).view(-1, count, columns) + here[:, -1]
        loss_BA, residual = _losses(logits, problems.label_N[where], columns)
        value_A += (loss_BA * use_NA[where]).sum(0).double()
        residual = residual * (use_NA[where] / rows_A)[:, :, None]
        slope.addmm_(feature_BD.T, residual.reshape(len(residual), -1))
        free += residual.sum(0)
    ridge_AD1 = _ridges(ridge_A, size - 1, problems)[:, :, None]
    value_P, slope_P = value_A.new_zeros(len(point)), torch.zeros_like(point)
    value_P[active] = value_A / rows_A + (ridge_AD1 * here.double().square()).sum((1, 2)) / 2
    slope_P[active, :-1] = slope.view(size - 1, count, columns).permute(1, 0, 2)
    slope_P[active, -1] = free
    slope_P[active] += ridge_AD1 * here
    return value_P, slope_P


def _losses(logits: Tensor, label_B: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """loss_BA and its derivative by the logits."""
    if columns == 1:
        sign_B1 = (2 * label_B - 1).to(logits)[:, None]
        margin = logits[..., 0] * sign_B1
        return F.softplus(-margin), (-sign_B1 * torch.sigmoid(-margin))[..., None]
    log_p = logits.log_softmax(2)
    hot = F.one_hot(label_B, columns).to(logits)[:, None]
    return -(log_p * hot).sum(2), log_p.exp() - hot


def _direction(slope: Tensor, pairs: list[tuple[Tensor, Tensor]], curve: Tensor, active: Tensor) -> Tensor:
    """Two-loop recursion for every active problem, begun from the diagonal bound of the curvature."""
    way = slope[active].clone()
    kept = []
    for step, change in reversed(pairs):
        s, y = step[active], change[active]
        power = (s * y).sum((1, 2))
        rate = torch.where(power > 1e-30, 1 / power.clamp_min(1e-30), 0.0)  # 0: a pair without news is passed over
        share = rate * (s * way).sum((1, 2))
        way -= share[:, None, None] * y
        kept.append((s, y, rate, share))
    scale = _fitting(kept[0], curve[active]) if kept else 1.0
    way = way / curve[active] * scale
    for s, y, rate, share in reversed(kept):
        way += (share - rate * (y * way).sum((1, 2)))[:, None, None] * s
    return way


def _fitting(last: tuple[Tensor, Tensor, Tensor, Tensor], curve: Tensor) -> Tensor:
    """How much flatter the last step was than the bound says."""
    s, y, rate, _ = last
    bent = (y.square() / curve).sum((1, 2))
    return torch.where((rate > 0) & (bent > 0), (s * y).sum((1, 2)) / bent.clamp_min(1e-30), 1.0)[:, None, None]


def _walk(
    blocks: Blocks, problems: Regressions, state: tuple[Tensor, Tensor, Tensor], way: Tensor, active: Tensor
) -> tuple[tuple[Tensor, Tensor], int]:
    """Step along `way`, halved per problem until the value falls; returns (steps, changes of slope) and passes."""
    point, value_P, slope = state
    before, old = point.clone(), slope.clone()
    promise = (slope[active] * way).sum((1, 2)).double()
    share = torch.ones(len(active)).to(point)
    left, passes = torch.arange(len(active)), 0
    while len(left) and passes < HALVINGS:
        which = active[left]
        point[which] = before[which] - share[left, None, None] * way[left]
        value, new = _pass(blocks, problems, point, which)
        passes += 1
        fine = value[which] <= value_P[which] - DECREASE * share[left] * promise[left]
        good = which[fine]
        value_P[good], slope[good] = value[good], new[good]
        left = left[~fine]
        share[left] /= 2
    point[active[left]] = before[active[left]]
    return (point - before, slope - old), passes

"""Many smooth convex problems minimised at once: Newton steps by preconditioned conjugate gradients.

Problems share the matrix they are made of, so that every product is one matrix product for all of them. Gradients and
weights are float64, the inner iterations float32; a problem that is done costs nothing any more.
Shapes: P problems, A of them still active, D unknowns of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

INNER = 250  # most conjugate-gradient iterations of one Newton step
HALVINGS = 40
DECREASE = 1e-4  # share of the promised decrease that a step must bring
NEAR = 1e-6  # promised decrease, relative, at which a step that lowers nothing is rounding and not a wrong direction
EXACT = 1e-13  # relative: below it float64 cannot tell two objectives apart


class Problems(Protocol):
    """P convex problems; `index_A` names the ones meant. Points and gradients are [A, D] float64."""

    @property
    def patience(self) -> int:
        """Inner iterations after which a new preconditioner pays."""

    @property
    def most(self) -> int:
        """Inner iterations after which a finer one does."""

    def evaluate(self, point_AD: Tensor, index_A: Tensor) -> tuple[Tensor, Tensor]:
        """value_A and gradient_AD at a point, which becomes the place of the curvature of these problems."""

    def curved(self, direction_AD: Tensor, index_A: Tensor) -> Tensor:
        """The Hessian at the last point times a float32 direction."""

    def prepare(self, index_A: Tensor, own: bool) -> None:
        """Make the preconditioner anew at the last points; `own`: the finer, dearer kind."""

    def precondition(self, gradient_AD: Tensor, index_A: Tensor) -> Tensor:
        """An approximate inverse Hessian times a float32 gradient."""


@dataclass(frozen=True)
class Minimum:
    """Where the search ended: points, values, largest |gradient| (float64), and whether the target was met."""

    point_PD: Tensor
    value_P: Tensor
    slope_P: Tensor
    converged_P: Tensor
    steps: int
    products: int  # columns times inner iterations: what the work was


def minimise(
    problems: Problems,
    start_PD: Tensor,
    tolerance: float = 1e-9,
    steps: int = 60,
    noise: float = EXACT,
    prepared: bool = False,
) -> Minimum:
    """Minimise every problem until its Newton decrement is below `tolerance` times (1 + its value).

    Values that differ by less than `noise` times that count as equal: what they are rounded to. `prepared`: there is a
    preconditioner already, if of another place.
    """
    count = len(start_PD)
    point_PD = start_PD.double().clone()
    every = torch.arange(count)
    value_P, gradient_PD = problems.evaluate(point_PD, every)
    converged_P = torch.zeros(count, dtype=torch.bool)
    active_A, products, own, taken, slow = every, 0, False, 0, not prepared
    while len(active_A) and taken < steps:
        taken += 1
        fresh = slow
        if fresh:
            problems.prepare(active_A, own)
        step_AD, spent, inner = _newton_step(problems, gradient_PD[active_A].float(), active_A)
        products += spent
        finer = not own and inner > problems.most
        slow = finer or inner > problems.patience
        own = own or finer
        # what the step promises, not what the preconditioner alone would: that misses directions it takes for stiff
        decrement_A = (gradient_PD[active_A] * step_AD.double()).sum(1) / 2
        done_A = decrement_A <= tolerance * (1 + value_P[active_A])
        near_A = decrement_A <= NEAR * (1 + value_P[active_A])
        stuck_A = _walk(problems, point_PD, value_P, gradient_PD, step_AD.double(), active_A, noise)
        done_A |= stuck_A & near_A  # near the optimum float64 is at its end
        converged_P[active_A[done_A]] = True
        lost_A = stuck_A & ~done_A  # the step was wrong: tried again with a preconditioner of this place, once
        slow = slow or bool(lost_A.any())
        if fresh:
            done_A |= lost_A
        active_A = active_A[~done_A]
    return Minimum(point_PD, value_P, gradient_PD.abs().amax(1), converged_P, taken, products)


def _walk(
    problems: Problems,
    point_PD: Tensor,
    value_P: Tensor,
    gradient_PD: Tensor,
    step_AD: Tensor,
    active_A: Tensor,
    noise: float,
) -> Tensor:
    """Take each step, halved until it lowers its value; returns which problems could not be lowered."""
    promise_A = (gradient_PD[active_A] * step_AD).sum(1)
    share_A = torch.ones(len(active_A), dtype=torch.float64)
    left_A = torch.arange(len(active_A))
    for _ in range(HALVINGS):
        index = active_A[left_A]
        trial = point_PD[index] - share_A[left_A, None] * step_AD[left_A]
        value, gradient = problems.evaluate(trial, index)
        slack = noise * (1 + value_P[index].abs())
        fine = value <= value_P[index] - DECREASE * share_A[left_A] * promise_A[left_A] + slack
        good = index[fine]
        point_PD[good], value_P[good], gradient_PD[good] = trial[fine], value[fine], gradient[fine]
        left_A = left_A[~fine]
        if not len(left_A):
            break
        share_A[left_A] /= 2
    stuck_A = torch.zeros(len(active_A), dtype=torch.bool)
    stuck_A[left_A] = True
    if len(left_A):  # the curvature must belong to where the point stayed
        problems.evaluate(point_PD[active_A[left_A]], active_A[left_A])
    return stuck_A


def _newton_step(problems: Problems, gradient_AD: Tensor, index_A: Tensor) -> tuple[Tensor, int, int]:
    """Solve H step = gradient for every problem as far as it pays; returns steps, products spent, most iterations."""
    found_AD = torch.zeros_like(gradient_AD)
    left_A, rest_AD, step_AD = torch.arange(len(index_A)), gradient_AD, torch.zeros_like(gradient_AD)
    way_AD = problems.precondition(rest_AD, index_A)
    power_A = torch.linalg.vecdot(rest_AD, way_AD)
    goal_A, floor_A, total_A = power_A * 0.05**2, power_A * 1e-12, torch.zeros_like(power_A)
    spent = iterations = 0
    # problems are small, so that calls cost as much as numbers: work in place, and few of them
    while len(index_A) and iterations < INNER:
        iterations += 1
        spent += len(index_A)
        bent_AD = problems.curved(way_AD, index_A)
        length_A = power_A / torch.linalg.vecdot(way_AD, bent_AD).clamp_min_(torch.finfo(torch.float32).tiny)
        step_AD.addcmul_(length_A[:, None], way_AD)
        rest_AD = torch.addcmul(rest_AD, length_A[:, None], bent_AD, value=-1)  # `way_AD` may be the old one itself
        gained_A = length_A.mul_(power_A)
        total_A += gained_A
        ahead_AD = problems.precondition(rest_AD, index_A)
        turn_A = power_A.clamp_min_(1e-38).reciprocal_()
        power_A = torch.linalg.vecdot(rest_AD, ahead_AD)
        way_AD = torch.addcmul(ahead_AD, turn_A.mul_(power_A)[:, None], way_AD)
        # a small residual is not enough where the preconditioner is too stiff: the model must have stopped falling too
        falling_A = gained_A > total_A * (0.25 / iterations)
        on_A = ((power_A > goal_A) | falling_A) & (power_A > floor_A)
        if not on_A.all():
            found_AD[left_A[~on_A]] = step_AD[~on_A]
            left_A, index_A, goal_A, floor_A, total_A = (x[on_A] for x in (left_A, index_A, goal_A, floor_A, total_A))
            power_A, step_AD, rest_AD, way_AD = (x[on_A] for x in (power_A, step_AD, rest_AD, way_AD))
    found_AD[left_A] = step_AD
    return found_AD, spent, iterations

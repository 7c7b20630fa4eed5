"""The search itself, on problems made to lead it astray."""

from __future__ import annotations

import torch
from torch import Tensor

from budwood.linalg.newton import Minimum, minimise


class Bowl:
    """x^4 / 4 + x^2 / 2 in three unknowns; past the first step its curvature is nonsense with preconditioners `bad`."""

    patience, most = 60, 180

    def __init__(self, *bad: int) -> None:
        self.bad, self.made, self.places = bad, 0, 0

    def evaluate(self, point_AD: Tensor, index_A: Tensor) -> tuple[Tensor, Tensor]:
        self.places += 1
        self.point_AD = point_AD
        return (point_AD**4 / 4 + point_AD**2 / 2).sum(1), point_AD**3 + point_AD

    def curved(self, direction_AD: Tensor, index_A: Tensor) -> Tensor:
        if self.places > 1 and self.made in self.bad:
            return 1e-30 * direction_AD  # as if there were no bottom: the step is longer than any halving mends
        return (3 * self.point_AD**2 + 1).float() * direction_AD

    def prepare(self, index_A: Tensor, own: bool) -> None:
        self.made += 1

    def precondition(self, gradient_AD: Tensor, index_A: Tensor) -> Tensor:
        return gradient_AD


def ended(job: Bowl) -> Minimum:
    return minimise(job, torch.tensor([[2.0, -1.0, 3.0]], dtype=torch.float64))


def test_a_good_preconditioner_is_kept_to_the_bottom() -> None:
    job = Bowl()
    found = ended(job)
    assert bool(found.converged_P.all()) and float(found.point_PD.abs().max()) < 1e-4
    assert job.made == 1


def test_a_step_that_leads_nowhere_is_tried_again_with_a_fresh_preconditioner() -> None:
    job = Bowl(1)
    found = ended(job)
    assert bool(found.converged_P.all()) and float(found.point_PD.abs().max()) < 1e-4
    assert job.made == 2


class Valley:
    """A quadratic in forty unknowns, a thousand times steeper along the last than along the first."""

    patience, most = 60, 180
    steep_D = torch.logspace(0, 3, 40, dtype=torch.float64)

    def evaluate(self, point_AD: Tensor, index_A: Tensor) -> tuple[Tensor, Tensor]:
        return (self.steep_D * (point_AD - 1) ** 2).sum(1) / 2, self.steep_D * (point_AD - 1)

    def curved(self, direction_AD: Tensor, index_A: Tensor) -> Tensor:
        return self.steep_D.float() * direction_AD

    def prepare(self, index_A: Tensor, own: bool) -> None:
        pass

    def precondition(self, gradient_AD: Tensor, index_A: Tensor) -> Tensor:
        return gradient_AD  # the very tensor: the search must not change it under its own hands


def test_directions_are_conjugate() -> None:
    found = minimise(Valley(), torch.zeros(1, 40, dtype=torch.float64))
    assert bool(found.converged_P.all()) and found.products < 600  # along plain gradients: three times as many


def test_a_second_step_that_leads_nowhere_is_no_convergence() -> None:
    job = Bowl(1, 2)
    found = ended(job)
    assert not bool(found.converged_P.any()) and float(found.point_PD.abs().max()) > 0.1
    assert job.made == 2

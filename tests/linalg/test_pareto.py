"""Fronts and areas against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from budwood.linalg.pareto import front, hypervolume


@pytest.mark.parametrize("seed", range(5))
def test_front_is_what_no_other_point_beats(seed: int) -> None:
    cost = np.random.default_rng(seed).integers(0, 6, (12, 2)).astype(float)
    beaten = lambda i: any((cost[j] <= cost[i]).all() and (cost[j] < cost[i]).any() for j in range(len(cost)))
    wanted = {tuple(cost[i]) for i in range(len(cost)) if not beaten(i)}
    found = front(cost)
    assert {tuple(cost[i]) for i in found} == wanted and len(found) == len(wanted)
    assert (np.diff(cost[found, 0]) > 0).all()


def test_area_is_that_of_counted_squares() -> None:
    rng = np.random.default_rng(0)
    cost = rng.integers(0, 12, (7, 2)).astype(float)
    squares = [(x, y) for x in range(10) for y in range(10)]
    covered = sum(any(a <= x and b <= y for a, b in cost) for x, y in squares)
    assert hypervolume(cost, (10.0, 10.0)) == covered


def test_points_beyond_the_reference_and_broken_ones_count_nothing() -> None:
    assert hypervolume(np.array([[5.0, 1.0], [np.nan, 0.0]]), (4.0, 4.0)) == 0.0
    assert hypervolume(np.empty((0, 2)), (1.0, 1.0)) == 0.0

"""Ranks and correlations against scipy, selection against sorting."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from budwood.linalg.ranking import bootstrap_mean, pearson_by_row, ranks_by_row, spearman_by_row, top_k


def test_ranks_share_the_mean_on_ties() -> None:
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (5, 7), (40, 90)):
        value_QN = rng.integers(0, 12, size=shape).astype(float)
        assert np.array_equal(ranks_by_row(value_QN), stats.rankdata(value_QN, axis=1))
    assert ranks_by_row(np.empty((3, 0))).shape == (3, 0)


def test_correlations_by_row() -> None:
    rng = np.random.default_rng(1)
    a_QN, b_QN = rng.integers(0, 9, size=(30, 50)).astype(float), rng.normal(size=(30, 50))
    for q in range(30):
        assert spearman_by_row(a_QN, b_QN)[q] == pytest.approx(stats.spearmanr(a_QN[q], b_QN[q]).statistic, abs=1e-12)
        assert pearson_by_row(a_QN, b_QN)[q] == pytest.approx(stats.pearsonr(a_QN[q], b_QN[q]).statistic, abs=1e-12)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_constant_rows_and_extreme_scales_give_numbers(scale: float) -> None:
    a_QN = np.array([[1.0, 1, 1], [1, 2, 3], [0.1, 0.1, 0.1]]) * scale
    b_QN = np.array([[1.0, 2, 3], [3, 2, 1], [1, 5, 2]])
    assert pearson_by_row(a_QN, b_QN) == pytest.approx([0, -1, 0])
    assert spearman_by_row(a_QN, b_QN) == pytest.approx([0, -1, 0])
    assert pearson_by_row(np.ones((2, 1)), np.ones((2, 1))).tolist() == [0, 0]


def test_top_k_is_a_stable_sort() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        value_QN = rng.integers(0, 6, size=(4, 15)).astype(float)
        for k in (0, 1, 5, 15, 20):
            want = np.argsort(-value_QN, axis=1, kind="stable")[:, :k]
            assert np.array_equal(top_k(value_QN, k), want)


def test_bootstrap_of_a_mean() -> None:
    value_Q = np.random.default_rng(3).normal(1.0, 2.0, size=400)
    low, high = bootstrap_mean(value_Q, seed=5, draws=4000)
    half = 1.96 * value_Q.std() / 20
    assert low == pytest.approx(value_Q.mean() - half, abs=0.03) and high == pytest.approx(
        value_Q.mean() + half, abs=0.03
    )
    assert bootstrap_mean(value_Q, seed=5, draws=4000) == (low, high) != bootstrap_mean(value_Q, seed=6, draws=4000)
    assert bootstrap_mean(np.empty(0), seed=0) == (0.0, 0.0)

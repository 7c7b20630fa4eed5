"""Metrics against scikit-learn and scipy, and their degenerate cases."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

from budwood.linalg import metrics as ours


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_labels_against_scikit_learn(classes: int) -> None:
    rng = np.random.default_rng(classes)
    for _ in range(30):
        gold_N = rng.integers(0, classes, size=50)
        given_N = np.where(rng.random(50) < 0.5, gold_N, rng.integers(0, classes, size=50))
        assert ours.accuracy(given_N, gold_N) == pytest.approx(sk.accuracy_score(gold_N, given_N))
        average = "binary" if classes == 2 else "macro"
        want = sk.f1_score(gold_N, given_N, average=average, labels=None if classes == 2 else range(classes))
        assert ours.f1(given_N, gold_N, classes) == pytest.approx(want)
        assert ours.mcc(given_N, gold_N) == pytest.approx(sk.matthews_corrcoef(gold_N, given_N))


def test_numbers_against_scipy() -> None:
    rng = np.random.default_rng(0)
    gold_N = rng.integers(0, 11, size=80) / 2
    given_N = gold_N + rng.normal(size=80)
    assert ours.pearson(given_N, gold_N) == pytest.approx(stats.pearsonr(given_N, gold_N).statistic)
    assert ours.spearman(given_N, gold_N) == pytest.approx(stats.spearmanr(given_N, gold_N).statistic)


@pytest.mark.parametrize("classes", [2, 5])
def test_probabilities_against_scikit_learn(classes: int) -> None:
    rng = np.random.default_rng(classes)
    prob_NK = rng.dirichlet(np.ones(classes), size=200)
    gold_N = rng.integers(0, classes, size=200)
    assert ours.nll(prob_NK, gold_N) == pytest.approx(sk.log_loss(gold_N, prob_NK, labels=range(classes)))
    want = ((prob_NK - np.eye(classes)[gold_N]) ** 2).sum(1).mean()
    assert ours.brier(prob_NK, gold_N) == pytest.approx(want)
    if classes == 2:
        assert ours.brier(prob_NK, gold_N) == pytest.approx(2 * sk.brier_score_loss(gold_N, prob_NK[:, 1]))


def slow_ece(prob_NK: np.ndarray, gold_N: np.ndarray, bins: int) -> float:
    total = 0.0
    confidence_N, right_N = prob_NK.max(1), prob_NK.argmax(1) == gold_N
    for b in range(bins):
        inside = (confidence_N > b / bins) & (confidence_N <= (b + 1) / bins)
        if inside.any():
            total += inside.mean() * abs(right_N[inside].mean() - confidence_N[inside].mean())
    return float(total)


def test_calibration_error_by_hand_and_by_loop() -> None:
    rng = np.random.default_rng(4)
    for classes in (2, 4):
        prob_NK = rng.dirichlet(np.ones(classes), size=500)
        gold_N = rng.integers(0, classes, size=500)
        assert ours.ece(prob_NK, gold_N) == pytest.approx(slow_ece(prob_NK, gold_N, 15))
    # one bin holds 0.61 and 0.62 (one right of two), another 0.95 (right): (|1 - 1.23| + |1 - 0.95|) / 3
    prob_NK = np.array([[0.61, 0.39], [0.62, 0.38], [0.05, 0.95]])
    assert ours.ece(prob_NK, np.array([0, 1, 1])) == pytest.approx((0.23 + 0.05) / 3)
    # an edge belongs to the bin below it: 0.75 and 0.70 share one of four bins
    assert ours.ece(np.array([[0.75, 0.25], [0.70, 0.30]]), np.array([0, 1]), bins=4) == pytest.approx(0.225)
    assert ours.ece(np.array([[1.0, 0.0]]), np.array([0])) == 0


def test_degenerate_input_gives_numbers_without_warnings() -> None:
    one, many = np.ones(5, dtype=int), np.array([0, 1, 0, 1, 1])
    none = np.empty(0, dtype=int)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ours.mcc(one, many) == ours.mcc(many, one) == ours.mcc(one, one) == 0
        assert ours.pearson(one, many) == ours.spearman(many, one) == ours.pearson(many[:1], one[:1]) == 0
        assert ours.f1(np.zeros(5, dtype=int), np.zeros(5, dtype=int)) == 0
        assert ours.f1(one, one, classes=3) == 1
        assert np.isfinite(ours.nll(np.array([[1.0, 0.0]]), np.array([1])))
        for metric in (ours.accuracy, ours.f1, ours.mcc, ours.pearson, ours.spearman):
            assert metric(none, none) == 0
        for metric in (ours.ece, ours.nll, ours.brier):
            assert metric(np.empty((0, 2)), none) == 0


def test_wilson_interval_against_scipy() -> None:
    for right, total in ((0, 10), (8, 10), (10, 10), (430, 1000)):
        want = stats.binomtest(right, total).proportion_ci(method="wilson")
        assert ours.accuracy_interval(right, total) == pytest.approx((want.low, want.high), abs=1e-12)
    assert ours.accuracy_interval(0, 0) == (0, 1)


def test_bootstrap_interval_is_seeded_and_covers_the_score() -> None:
    rng = np.random.default_rng(5)
    gold_N = rng.integers(0, 2, size=300)
    given_N = np.where(rng.random(300) < 0.8, gold_N, 1 - gold_N)
    low, high = ours.bootstrap_interval(ours.accuracy, given_N, gold_N, seed=1)
    assert (low, high) == ours.bootstrap_interval(ours.accuracy, given_N, gold_N, seed=1)
    assert (low, high) != ours.bootstrap_interval(ours.accuracy, given_N, gold_N, seed=2)
    score = ours.accuracy(given_N, gold_N)
    wilson = ours.accuracy_interval(int(score * 300), 300)
    assert low < score < high and (low, high) == pytest.approx(wilson, abs=0.015)


def test_macro_f1_is_scikit_learns_also_where_a_class_is_absent() -> None:
    from sklearn.metrics import f1_score

    rng = np.random.default_rng(3)
    gold, given = rng.integers(0, 2, 60), rng.integers(0, 3, 60)
    for classes in (3, 4, 6):
        assert ours.f1(given, gold, classes) == pytest.approx(f1_score(gold, given, average="macro"))


def test_entities_by_hand() -> None:
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG"]]
    given = [["B-PER", "I-PER", "O", "B-ORG"], ["B-ORG", "I-ORG"]]
    assert ours.entity_f1(given, gold) == pytest.approx(2 * 1 / (3 + 3))
    assert ours.entity_f1(gold, gold) == 1 and ours.entity_f1([["O"]], [["O"]]) == 0
    assert ours.entities(["B-X", "B-X", "I-Y"]) == {(0, 1, "X"), (1, 2, "X"), (2, 3, "Y")}

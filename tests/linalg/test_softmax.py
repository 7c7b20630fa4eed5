"""Batched softmax regression against scikit-learn: never a higher objective, the same folds and the same choice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.model_selection import StratifiedKFold

from budwood.errors import DataError
from budwood.linalg import softmax
from budwood.linalg.folds import cross_validate, stratified_folds
from budwood.linalg.softmax import Problems, solve

COSTS = (1e-4, 1e-2, 1.0, 100.0)


def rows(classes: int, count: int = 300, width: int = 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x_ND = rng.normal(size=(count, width)) @ rng.normal(size=(width, width)) * np.exp(rng.normal(size=width)) + 3
    score_NK = x_ND @ rng.normal(size=(width, classes)) / 5 + 2 * rng.gumbel(size=(count, classes))
    return x_ND.astype(np.float32), (score_NK - score_NK.mean(0)).argmax(1)


def objective(weight_KD: np.ndarray, bias_K: np.ndarray, x_ND: np.ndarray, y_N: np.ndarray, cost: float) -> float:
    """scikit-learn's objective divided by C times the rows, the slow way."""
    score_NK = x_ND.astype(np.float64) @ weight_KD.T + bias_K
    if len(bias_K) == 1:
        score_NK = np.hstack([np.zeros_like(score_NK), score_NK])
    log_NK = score_NK - np.logaddexp.reduce(score_NK, axis=1, keepdims=True)
    return -log_NK[np.arange(len(y_N)), y_N].mean() + (weight_KD**2).sum() / (2 * cost * len(y_N))


@pytest.mark.parametrize("classes", [2, 4])
def test_objective_is_never_above_scikit_learns(classes):
    x_ND, y_N = rows(classes)
    fold_N = stratified_folds(y_N, 3)
    found = cross_validate(torch.from_numpy(x_ND), y_N, classes, COSTS, fold_N).solution
    assert bool(found.converged_SP.all())
    for s, cost in enumerate(COSTS):
        for p in range(4):
            kept = fold_N != p - 1
            peer = LogisticRegression(C=cost, max_iter=1000).fit(x_ND[kept].astype(np.float64), y_N[kept])
            want = objective(peer.coef_, peer.intercept_, x_ND[kept], y_N[kept], cost)
            weight, bias = found.weight_SPKD[s, p].numpy(), found.bias_SPK[s, p].numpy()
            mine = objective(weight, bias, x_ND[kept], y_N[kept], cost)
            assert mine <= want + 1e-9
            assert mine == pytest.approx(float(found.objective_SP[s, p]), abs=1e-9)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("layer", range(3))
def test_the_chosen_cost_scores_no_less_than_the_one_scikit_learn_chooses(classes, layer):
    x_ND, y_N = rows(classes, count=180, width=8, seed=layer)
    x_ND = (x_ND - x_ND.mean(0)) / x_ND.std(0) * (layer + 1)
    fold_N = stratified_folds(y_N, 3)
    found = cross_validate(torch.from_numpy(x_ND), y_N, classes, COSTS, fold_N)
    wide = x_ND.astype(np.float64)
    peer = np.zeros((len(COSTS), 3))
    for s, cost in enumerate(COSTS):
        for f in range(3):
            kept = fold_N != f
            fit = LogisticRegression(C=cost, max_iter=5000, tol=1e-10).fit(wide[kept], y_N[kept])
            peer[s, f] = fit.score(wide[~kept], y_N[~kept])
            weight, bias = found.solution.weight_SPKD[s, f + 1].numpy(), found.solution.bias_SPK[s, f + 1].numpy()
            mine = objective(weight, bias, x_ND[kept], y_N[kept], cost)
            # a search as long as this one ends at the optimum to the last bits
            assert mine <= objective(fit.coef_, fit.intercept_, x_ND[kept], y_N[kept], cost) + 1e-8
    theirs = LogisticRegressionCV(
        Cs=COSTS, cv=3, max_iter=5000, tol=1e-10, use_legacy_attributes=False, l1_ratios=(0.0,)
    ).fit(wide, y_N)
    np.testing.assert_allclose(found.score_SF, peer, atol=1e-12)
    assert found.score_SF.mean(1)[found.best] >= peer.mean(1)[COSTS.index(theirs.C_)]
    assert found.cost == theirs.C_ and len(set(peer.mean(1))) > 1


def test_row_weights_are_repetitions_and_two_starts_of_a_path_end_together():
    x_ND, y_N = rows(3)
    count_N = np.random.default_rng(1).integers(0, 3, len(y_N))
    x, y = torch.from_numpy(x_ND), torch.from_numpy(y_N)

    def one(x, y, weight_N, path):
        zero = torch.zeros(1, dtype=torch.long)
        cost_SP = torch.tensor(path, dtype=torch.float64)[:, None]
        return float(solve(x, Problems(y[None], weight_N[None].float(), zero, zero, cost_SP, 3)).objective_SP[-1, 0])

    many = torch.from_numpy(np.repeat(np.arange(len(y_N)), count_N))
    weighted = one(x, y, torch.from_numpy(count_N), [0.3])
    assert weighted == pytest.approx(one(x[many], y[many], torch.ones(len(many)), [0.3]), rel=1e-9)
    assert weighted == pytest.approx(one(x, y, torch.from_numpy(count_N), [1e-3, 0.01, 0.3]), rel=1e-8)


@pytest.mark.parametrize(("classes", "penalised"), [(2, False), (2, True), (4, False)])
def test_hard_costs_are_solved_with_preconditioners_of_their_own(classes, penalised, monkeypatch):
    rng = np.random.default_rng(0)
    y_YN = torch.from_numpy(rng.integers(0, classes, (2, 300)))
    x_ND = rng.normal(size=(300, 60)) @ (rng.normal(size=(60, 60)) * np.exp(rng.normal(size=60)))
    x_ND[:, :4] += 4 * y_YN[0].numpy()[:, None]
    x = torch.from_numpy(x_ND.astype(np.float32))
    weight_RN = torch.from_numpy(rng.random((5, 300)) < 0.8).float()
    label_P, rows_P = (torch.from_numpy(i.ravel()) for i in np.indices((2, 5)))
    cost_SP = torch.logspace(-4, 3, 8, dtype=torch.float64)[:, None].repeat(1, 10)
    problems = Problems(y_YN, weight_RN, label_P, rows_P, cost_SP, classes, penalised)
    counts, values = [], []
    for calls in (0.0, 1e30):  # making one costs nothing but its numbers; more than any iterations
        spent = []
        curved = softmax._Regression.curved
        with monkeypatch.context() as patch:
            patch.setattr(softmax, "CALLS", calls)
            patch.setattr(softmax._Regression, "curved", lambda *a: spent.append(1) or curved(*a))  # noqa: B023
            found = solve(x, problems)
        assert bool(found.converged_SP.all())
        values.append(found.objective_SP)
        counts.append(len(spent))
    assert counts[0] < 0.7 * counts[1]
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-9)


def test_another_cost_reads_no_rows_again():
    x_ND, y_N = rows(2)
    zero = torch.zeros(1, dtype=torch.long)
    one = torch.ones(1, dtype=torch.float64)
    job = softmax._Regression(torch.from_numpy(x_ND), Problems(torch.from_numpy(y_N)[None], torch.ones(1, 300), zero, zero, one[None], 2))  # fmt: skip  # noqa: E501
    point = torch.randn(1, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    job.set_cost(one)
    value, gradient = job.evaluate(point, zero)
    moved = []
    move = job._move
    job._move = lambda *a: moved.append(1) or move(*a)
    job.set_cost(one / 2)
    again, steeper = job.evaluate(point, zero)
    penalty = float(point[0, :-1].square().sum()) / 300 / 2
    assert not moved and float(again - value) == pytest.approx(penalty)
    torch.testing.assert_close((steeper - gradient)[0, :-1], point[0, :-1] / 300)
    job.evaluate(point + 1, zero)
    assert moved == [1]


@pytest.mark.parametrize("folds", [2, 5])
def test_folds_are_scikit_learns(folds):
    y_N = np.random.default_rng(3).integers(0, 4, 97)
    want = np.empty(len(y_N), int)
    for i, (_, out) in enumerate(StratifiedKFold(folds).split(y_N, y_N)):
        want[out] = i
    assert np.array_equal(stratified_folds(y_N, folds), want)


def test_the_smallest_of_equal_costs_is_chosen():
    x_ND, y_N = rows(2)
    x_ND[:, 0] = 1000 * (y_N - 0.5)  # every cost separates
    found = cross_validate(torch.from_numpy(x_ND), y_N, 2, (1.0, 0.1, 10.0), stratified_folds(y_N, 3))
    assert found.cost == 0.1 and (found.predict(torch.from_numpy(x_ND)) == y_N).all()


def test_bad_input_is_named():
    with pytest.raises(DataError, match="4 rows cannot make 5 folds"):
        stratified_folds(np.array([0, 1, 0, 1]), 5)
    x_ND, y_N = rows(2)
    x_ND[0, 0] = np.nan
    with pytest.raises(DataError, match="no finite number"):
        cross_validate(torch.from_numpy(x_ND), y_N, 2, (1.0,), stratified_folds(y_N, 2))

"""Batched L-BFGS over streamed blocks against scikit-learn on the whole array."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from budwood.linalg import softmax
from budwood.linalg.streamed import Regressions, decide, solve

ROWS, DIMS = 300, 40


def made(classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(classes)
    feature = draw.standard_normal((ROWS, DIMS)) * np.geomspace(1, 1e-3, DIMS)
    label = (feature @ draw.standard_normal((DIMS, classes)) + 0.3 * draw.standard_normal((ROWS, classes))).argmax(1)
    return torch.from_numpy(feature), torch.from_numpy(label)


def objective(feature: np.ndarray, label: np.ndarray, model: LogisticRegression, strength: float) -> float:
    p = model.predict_proba(feature)[np.arange(len(label)), label]
    return float((-np.log(p).sum() + (model.coef_**2).sum() / 2 / strength) / len(label))


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("block", [300, 64])
def test_never_above_scikit_learn(classes: int, block: int) -> None:
    feature, label = made(classes)
    draw = torch.Generator().manual_seed(3)
    use = torch.rand(ROWS, 4, generator=draw) < 0.8
    strength = torch.tensor([1e-2, 1.0, 1e2, 1e3], dtype=torch.float64)

    def blocks() -> Iterator[tuple[slice, torch.Tensor]]:
        for i in range(0, ROWS, block):
            yield slice(i, min(i + block, ROWS)), feature[i : i + block]

    found = solve(blocks, DIMS, Regressions(label, classes, use, strength), tolerance=1e-10, passes=3000)
    assert found.converged_P.all()
    logits = decide(blocks, found.weight_PDK, ROWS)
    for j in range(4):
        rows = use[:, j].numpy()
        x, y = feature.numpy()[rows], label.numpy()[rows]
        peer = LogisticRegression(C=float(strength[j]), max_iter=20000, tol=1e-10).fit(x, y)
        assert float(found.value_P[j]) <= objective(x, y, peer, float(strength[j])) + 1e-6
        ours = logits[:, j].numpy()
        guess = (ours[:, 0] > 0).astype(int) if classes == 2 else ours.argmax(1)
        assert np.mean(guess == peer.predict(feature.numpy())) >= 0.99


@pytest.mark.parametrize("classes", [2, 3])
def test_a_penalised_intercept_is_that_of_the_dense_solver(classes: int) -> None:
    feature, label = made(classes)
    feature = feature + 0.5
    strength = torch.tensor([0.05, 1.0], dtype=torch.float64)
    whole = torch.ones(ROWS, 2, dtype=torch.bool)
    blocks = lambda: iter([(slice(0, ROWS), feature)])
    given = Regressions(label, classes, whole, strength, penalise_intercept=True)
    found = solve(blocks, DIMS, given, 1e-12, 3000)
    zero = torch.zeros(1, dtype=torch.long)
    one = torch.ones(1, ROWS)
    dense = softmax.solve(feature, softmax.Problems(label[None], one, zero, zero, strength[:, None], classes, True))
    torch.testing.assert_close(found.value_P, dense.objective_SP[:, 0], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.weight_PDK[:, -1], dense.bias_SPK[:, 0], rtol=1e-2, atol=1e-3)


def test_a_problem_does_not_depend_on_its_neighbours() -> None:
    feature, label = made(2)
    whole = torch.ones(ROWS, 2, dtype=torch.bool)
    blocks = lambda: iter([(slice(0, ROWS), feature)])
    both = solve(
        blocks, DIMS, Regressions(label, 2, whole, torch.tensor([1.0, 100.0], dtype=torch.float64)), 1e-12, 3000
    )
    alone = solve(
        blocks, DIMS, Regressions(label, 2, whole[:, :1], torch.tensor([1.0], dtype=torch.float64)), 1e-12, 3000
    )
    torch.testing.assert_close(both.weight_PDK[0], alone.weight_PDK[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("classes", [2, 4])
def test_both_solvers_end_at_the_same_optimum(classes: int) -> None:
    feature, label = made(classes)
    strength = torch.tensor([0.05, 1.0, 100.0], dtype=torch.float64)
    blocks = lambda: iter([(slice(0, ROWS), feature)])
    whole = torch.ones(ROWS, 3, dtype=torch.bool)
    found = solve(blocks, DIMS, Regressions(label, classes, whole, strength), 1e-12, 3000)
    zero = torch.zeros(1, dtype=torch.long)
    newton = softmax.solve(
        feature, softmax.Problems(label[None], torch.ones(1, ROWS), zero, zero, strength[:, None], classes)
    )
    torch.testing.assert_close(found.value_P, newton.objective_SP[:, 0], rtol=1e-6, atol=1e-8)
    ours = newton.logits(feature, [(s, 0) for s in range(3)]).argmax(2)
    theirs = decide(blocks, found.weight_PDK, ROWS)
    told = (theirs[..., 0] > 0).long() if classes == 2 else theirs.argmax(2)
    assert float((ours == told.T).double().mean()) >= 0.999

"""Start and end probes: gradients against autograd, and a converged fit against any other head on the same states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from budwood.linalg import choice
from budwood.linalg.choice import Choices, _Windows, solve_choices
from budwood.linalg.newton import minimise
from budwood.linalg.softmax import Problems, _Regression


def windows(count: int = 50, width: int = 6) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """States, starts of windows, and a start and an end in each that the first features hint at."""
    rng = np.random.default_rng(0)
    size_W = rng.integers(2, 9, count)
    starts_W = np.cumsum(size_W) - size_W
    gold_2W = starts_W + rng.integers(0, size_W, (2, count))
    x_MD = rng.normal(size=(int(size_W.sum()), width))
    for k in (0, 1):
        x_MD[gold_2W[k], k] += 1.5
    return torch.from_numpy(x_MD).float(), starts_W, gold_2W


def mean_loss(weight_2D: torch.Tensor, x_MD: torch.Tensor, starts_W: np.ndarray, gold_2W: np.ndarray) -> torch.Tensor:
    """Window by window."""
    edges = [*starts_W.tolist(), len(x_MD)]
    score_2M = weight_2D @ x_MD.double().T
    terms = [
        -score_2M[k, a:b].log_softmax(0)[gold_2W[k, w] - a]
        for k in (0, 1)
        for w, (a, b) in enumerate(zip(edges, edges[1:]))
    ]
    return torch.stack(terms).mean()


def test_the_gradient_of_windows_is_that_of_autograd() -> None:
    x_MD, starts_W, gold_2W = windows()
    both = np.array([0, 1])
    job = _Windows(x_MD, Choices(starts_W, gold_2W, np.ones((1, 50)), both, np.zeros(2, int), np.ones((1, 2))))
    job.decay_P = torch.tensor([0.3, 0.02], dtype=torch.float64)
    point_2D = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    value = 2 * mean_loss(point_2D, x_MD, starts_W, gold_2W) + (job.decay_P[:, None] * point_2D.square()).sum() / 2
    (slope_2D,) = torch.autograd.grad(value, point_2D)
    value_P, found_2D = job.evaluate(point_2D.detach(), torch.arange(2))
    assert float(value_P.sum()) == pytest.approx(value.item(), abs=1e-9)
    assert float((found_2D - slope_2D).abs().max()) <= 1e-6


def many(monkeypatch: pytest.MonkeyPatch, tokens: int) -> tuple[_Windows, torch.Tensor]:
    """Four problems on 300 windows, read in blocks of some tokens, evaluated at a random point."""
    x_MD, starts_W, gold_2W = windows(count=300)
    weight_2W = np.random.default_rng(1).integers(0, 3, (2, 300))
    monkeypatch.setattr(choice, "CACHE", 8 * 6 * tokens)
    given = Choices(starts_W, gold_2W, weight_2W, np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1]), np.ones((1, 4)))
    job = _Windows(x_MD, given)
    return job, torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def test_the_curvature_of_windows_is_that_of_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    job, point_4D = many(monkeypatch, 40)
    some = torch.tensor([1, 2, 3])
    draw = torch.Generator().manual_seed(3)
    way_3D = torch.randn(3, 6, dtype=torch.float64, generator=draw)
    ahead, behind = (job.evaluate(point_4D[some] + side * 1e-5 * way_3D, some)[1] for side in (1, -1))
    job.evaluate(point_4D, torch.arange(4))
    bent_3D = job.curved(way_3D.float(), some)
    torch.testing.assert_close(bent_3D.double(), (ahead - behind) / 2e-5, rtol=1e-4, atol=1e-5)


def test_blocks_of_windows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    every = torch.arange(4)
    found = []
    for tokens in (1, 37, 10**6):
        job, point_4D = many(monkeypatch, tokens)
        value_4, slope_4D = job.evaluate(point_4D, every)
        found.append((len(job.blocks), value_4, slope_4D, job.curved(point_4D.float(), every)))
    assert [n for n, *_ in found][::2] == [300, 1] and 1 < found[1][0] < 300
    for _, *parts in found[1:]:
        torch.testing.assert_close(parts, list(found[0][1:]), rtol=1e-5, atol=1e-6)


def test_a_preconditioner_nearly_undoes_the_curvature_of_the_fullest_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    job, point_4D = many(monkeypatch, 10**6)
    job.evaluate(point_4D, torch.arange(4))
    job.prepare(torch.arange(4), own=False)
    way_1D = torch.eye(6)[:1]
    assert job.total_P[0] > job.total_P[2]
    for p in (0, 1):  # the fuller ones, whose Hessian it is but for the tokens nearly never chosen
        back_1D = job.precondition(job.curved(way_1D, torch.tensor([p])), torch.tensor([p]))
        torch.testing.assert_close(back_1D, way_1D, rtol=0, atol=0.05)


def test_a_fit_begun_elsewhere_ends_at_the_same_place() -> None:
    x_MD, starts_W, gold_2W = windows(count=300)
    cost_SP = np.array([[0.1, 0.1]])
    given = Choices(starts_W, gold_2W, np.ones((1, 300)), np.array([0, 1]), np.zeros(2, int), cost_SP)
    begun = 2 * torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    cold, warm = solve_choices(x_MD, given, 1e-12), solve_choices(x_MD, given, 1e-12, begun)
    torch.testing.assert_close(warm.weight_SPD, cold.weight_SPD, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("classes", [2, 4])
def test_the_gradient_of_labels_is_that_of_autograd(classes: int) -> None:
    draw = torch.Generator().manual_seed(2)
    x_ND, y_N = torch.randn(70, 5, generator=draw), torch.randint(0, classes, (70,), generator=draw)
    zero = torch.zeros(1, dtype=torch.long)
    cost = torch.full((1, 1), 0.7, dtype=torch.float64)
    job = _Regression(x_ND, Problems(y_N[None], torch.ones(1, 70), zero, zero, cost, classes))
    job.set_cost(cost[0])
    vectors = 1 if classes == 2 else classes
    point = torch.randn(1, vectors * 6, dtype=torch.float64, generator=draw).requires_grad_()
    weight_KE = point.view(vectors, 6)
    score_NK = (x_ND.double() - x_ND.double().mean(0)) @ weight_KE[:, :-1].T + weight_KE[:, -1]
    if classes == 2:
        score_NK = torch.cat([torch.zeros_like(score_NK), score_NK], 1)
    value = torch.nn.functional.cross_entropy(score_NK, y_N) + weight_KE[:, :-1].square().sum() / (2 * 0.7 * 70)
    (slope,) = torch.autograd.grad(value, point)
    found, gradient = job.evaluate(point.detach(), torch.arange(1))
    assert found.item() == pytest.approx(value.item(), abs=1e-9)
    assert float((gradient - slope).abs().max()) <= 1e-6


def test_a_converged_probe_fits_the_training_windows_no_worse_than_a_trained_head() -> None:
    x_MD, starts_W, gold_2W = windows()
    both = np.array([0, 1])
    problem = Choices(starts_W, gold_2W, np.ones((1, 50)), both, np.zeros(2, int), np.array([[1.0, 1.0], [1e6, 1e6]]))
    found = solve_choices(x_MD, problem)
    assert bool(found.converged_SP.all())
    head_2D = torch.zeros(2, 6, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([head_2D], 0.2)
    for _ in range(50):
        adam.zero_grad()
        mean_loss(head_2D, x_MD, starts_W, gold_2W).backward()
        adam.step()
    head, probe = (float(mean_loss(w.detach(), x_MD, starts_W, gold_2W)) for w in (head_2D, found.weight_SPD[-1]))
    assert probe <= head + 1e-9 and head < 1.0


def long_windows(count: int = 60, width: int = 6) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Windows of so many tokens that a draw of them is enough for a Hessian; half have their answer at the first."""
    rng = np.random.default_rng(1)
    size_W = rng.integers(80, 150, count)
    starts_W = np.cumsum(size_W) - size_W
    gold_2W = starts_W + np.where(rng.random((2, count)) < 0.5, 0, rng.integers(0, size_W, (2, count)))
    x_MD = rng.normal(size=(int(size_W.sum()), width)) * np.linspace(0.3, 2, width)
    x_MD[gold_2W[0], 0] += 2
    x_MD[gold_2W[1], 1] += 2
    x_MD[starts_W, 2] += 4
    return torch.from_numpy(x_MD).float(), starts_W, gold_2W


def plain_newton(x_MD: torch.Tensor, starts_W: np.ndarray, gold_W: np.ndarray, cost: float) -> tuple[float, np.ndarray]:
    """The least objective and where it is: whole float64 Hessians, window by window, steps halved until they help."""
    parts = np.split(x_MD.double().numpy(), starts_W[1:])
    at_W, decay = gold_W - starts_W, 1 / (cost * len(starts_W))
    weight_D = np.zeros(x_MD.shape[1])

    def objective(w_D: np.ndarray) -> float:
        loss = [np.logaddexp.reduce(x @ w_D) - x[g] @ w_D for x, g in zip(parts, at_W)]
        return float(np.mean(loss) + decay * w_D @ w_D / 2)

    for _ in range(30):
        slope_D, bend_DD = decay * weight_D, decay * np.eye(len(weight_D))
        for x_TD, g in zip(parts, at_W):
            chance_T = np.exp(x_TD @ weight_D - np.logaddexp.reduce(x_TD @ weight_D))
            mean_D = chance_T @ x_TD
            slope_D = slope_D + (mean_D - x_TD[g]) / len(parts)
            bend_DD = bend_DD + ((x_TD * chance_T[:, None]).T @ x_TD - np.outer(mean_D, mean_D)) / len(parts)
        step_D = np.linalg.solve(bend_DD, slope_D)
        while objective(weight_D - step_D) > objective(weight_D) + 1e-14:
            step_D = step_D / 2
        weight_D = weight_D - step_D
    return objective(weight_D), weight_D


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize(("tolerance", "gap"), [(1e-9, 1e-9), (1e-5, 1e-5)])
def test_fits_by_drawn_tokens_end_where_plain_newton_ends(tolerance: float, gap: float, together: int) -> None:
    x_MD, starts_W, gold_2W = long_windows()
    costs = (1e-2, 1.0, 100.0)
    given = Choices(starts_W, gold_2W, np.ones((1, 60)), np.arange(2), np.zeros(2, int), np.array([costs, costs]).T)
    found = solve_choices(x_MD, given, tolerance, together=together)
    assert bool(found.converged_SP.all())
    for s, cost in enumerate(costs):
        for k in (0, 1):
            least, weight_D = plain_newton(x_MD, starts_W, gold_2W[k], cost)
            score_M = (x_MD.double() @ found.weight_SPD[s, k]).numpy()
            parts = np.split(score_M, starts_W[1:])
            loss = np.mean([np.logaddexp.reduce(p) for p in parts]) - score_M[gold_2W[k]].mean()
            value = loss + float(found.weight_SPD[s, k].square().sum()) / (2 * cost * 60)
            assert -1e-12 <= value - least <= gap
            assert float(found.objective_SP[s, k]) == pytest.approx(value, abs=5e-6 if tolerance > 1e-6 else 1e-12)
            if tolerance < 1e-6:
                np.testing.assert_allclose(found.weight_SPD[s, k].numpy(), weight_D, rtol=1e-3, atol=1e-4)


def test_drawn_tokens_stand_for_all() -> None:
    x_MD, starts_W, gold_2W = long_windows()
    weight_2W = np.random.default_rng(2).integers(0, 3, (2, 60))
    both, draw = torch.arange(2), torch.Generator().manual_seed(7)
    job = _Windows(x_MD, Choices(starts_W, gold_2W, weight_2W, np.arange(2), np.arange(2), np.ones((1, 2))))
    job.decay_P = torch.full((2,), 1e-3, dtype=torch.float64)
    point_2D = 0.5 * torch.randn(2, 6, dtype=torch.float64, generator=draw)
    exact, slope_2D = job.evaluate(point_2D, both)
    whole = torch.stack([job.curved(torch.eye(6)[[i, i]], both) for i in range(6)], 1)
    job.exact = False
    near, near_2D = job.evaluate(point_2D, both)
    torch.testing.assert_close(near, exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(near_2D, slope_2D, rtol=0, atol=5e-6)
    drawn = torch.stack([job.curved(torch.eye(6)[[i, i]], both) for i in range(6)], 1)
    assert job.drawn is not None and len(job.drawn[0]) < len(x_MD) / 3
    kept_PW = np.concatenate([np.add.reduceat(job.drawn[1][:, b.tokens], b.starts_B, axis=1) for b in job.drawn[2]], 1)
    np.testing.assert_allclose(kept_PW, job.share_PW, atol=1e-6)
    for k in (0, 1):  # as a quadratic form, within a quarter of the whole one
        ratio = torch.linalg.eigvals(torch.linalg.solve(whole[k], drawn[k])).real
        assert float(ratio.min()) > 0.75 and float(ratio.max()) < 1.25


def test_a_path_ends_where_enough_is_known() -> None:
    x_MD, starts_W, gold_2W = windows()
    cost_SP = np.logspace(-3, 1, 5)[:, None].repeat(2, 1)
    given = Choices(starts_W, gold_2W, np.ones((1, 50)), np.arange(2), np.zeros(2, int), cost_SP)
    seen: list[int] = []
    found = solve_choices(x_MD, given, enough=lambda w: bool(seen.append(len(w)) or sum(seen) > 3), together=2)
    assert seen == [2, 2] and len(found.weight_SPD) == len(found.objective_SP) == 4


def test_a_constant_for_all_tokens_has_no_gradient_and_gets_no_weight() -> None:
    x_MD, starts_W, gold_2W = windows()
    wide_ME = torch.cat([x_MD, torch.ones(len(x_MD), 1)], 1)
    given = Choices(starts_W, gold_2W, np.ones((1, 50)), np.array([0, 1]), np.zeros(2, int), np.ones((1, 2)))
    job = _Windows(wide_ME, given)
    job.decay_P = torch.zeros(2, dtype=torch.float64)
    point_2E = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    gradient_2E = job.evaluate(point_2E, torch.arange(2))[1]
    assert float(gradient_2E[:, -1].abs().max()) < 1e-6 < 1e-3 < float(gradient_2E[:, :-1].abs().max())
    wide, plain = solve_choices(wide_ME, given), solve_choices(x_MD, given)
    assert float(wide.weight_SPD[..., -1].abs().max()) < 1e-5  # steps are found in float32
    torch.testing.assert_close(wide.weight_SPD[..., :-1], plain.weight_SPD, rtol=1e-4, atol=1e-5)


def two_ends(
    job: _Windows | _Regression, count: int, unknowns: int, vectors: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Points that two searches from far apart end at; their losses are the same.

    What all `vectors` have in common is no part of a beginning: it changes no chance and is never searched along.
    """
    ends = []
    for seed in (4, 5):
        draw = torch.Generator().manual_seed(seed)
        start = 3 * torch.randn(count, vectors, unknowns, dtype=torch.float64, generator=draw)
        ends.append(minimise(job, (start - start.mean(1, keepdim=True) if vectors > 1 else start).flatten(1)))
    one, other = ends
    assert bool(one.converged_P.all()) and bool(other.converged_P.all())
    torch.testing.assert_close(one.value_P, other.value_P, rtol=1e-6, atol=0)
    return one.point_PD, other.point_PD


def test_two_random_beginnings_end_at_the_same_spans() -> None:
    x_MD, starts_W, gold_2W = windows(count=2000)
    both = np.array([0, 1])
    job = _Windows(x_MD, Choices(starts_W, gold_2W, np.ones((1, 2000)), both, np.zeros(2, int), np.ones((1, 2))))
    job.decay_P = torch.full((2,), 1e-4, dtype=torch.float64)
    told = []
    for point_2D in two_ends(job, 2, 6):
        score_2M = point_2D @ x_MD.double().T
        told += [torch.stack([p.argmax() for p in s.tensor_split(torch.from_numpy(starts_W[1:]))]) for s in score_2M]
    same = (torch.stack(told[:2]) == torch.stack(told[2:])).double().mean()
    assert float(same) >= 0.999


@pytest.mark.parametrize("classes", [2, 4])
def test_two_random_beginnings_end_at_the_same_labels(classes: int) -> None:
    draw = torch.Generator().manual_seed(6)
    x_ND = torch.randn(2000, 5, generator=draw)
    y_N = (x_ND @ torch.randn(5, classes, generator=draw) + torch.randn(2000, classes, generator=draw)).argmax(1)
    zero = torch.zeros(1, dtype=torch.long)
    cost = torch.full((1, 1), 10.0, dtype=torch.float64)
    job = _Regression(x_ND, Problems(y_N[None], torch.ones(1, 2000), zero, zero, cost, classes))
    job.set_cost(cost[0])
    vectors = 1 if classes == 2 else classes
    told = []
    for point_1D in two_ends(job, 1, 6, vectors):
        weight_KE = point_1D.view(vectors, 6)
        score_NK = (x_ND.double() - x_ND.double().mean(0)) @ weight_KE[:, :-1].T + weight_KE[:, -1]
        told.append(score_NK[:, 0] > 0 if classes == 2 else score_NK.argmax(1))
    assert float((told[0] == told[1]).double().mean()) >= 0.999

"""The linear datamodelling score: worlds in which the answer is known, and the published formula."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from budwood.errors import ConfigError, StoreError
from budwood.evaluation import lds
from budwood.evaluation.datamodel import subset
from budwood.evaluation.truth import Truth, read_truth, write_truth


def half_masks(rng: np.random.Generator, subsets: int, rows: int) -> np.ndarray:
    return np.stack([rng.permutation(rows) < rows // 2 for _ in range(subsets)])


def world(noise: float = 0.0, subsets: int = 60, repeats: int = 3, seed: int = 0) -> tuple[Truth, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask_SN, effect_QN = half_masks(rng, subsets, 80), rng.normal(size=(24, 80))
    clean_SQ = mask_SN @ effect_QN.T
    return Truth(mask_SN, clean_SQ[:, None] + noise * rng.normal(size=(subsets, repeats, 24))), effect_QN


def test_a_linear_world_scores_one() -> None:
    truth, effect_QN = world()
    assert lds.lds_by_query(truth, effect_QN) == pytest.approx(1.0, abs=1e-12)
    found = lds.lds(truth, 7 * effect_QN + 3)
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0), abs=1e-9)
    assert lds.ceiling(truth) == pytest.approx(1.0, abs=1e-12) and lds.noise(truth) == pytest.approx(0, abs=1e-12)


def test_shuffled_scores_score_nothing() -> None:
    truth, effect_QN = world(noise=2.0, subsets=100)
    mean, spread = lds.random_line(truth, effect_QN)
    assert abs(mean) <= 0.03 and 0 < spread < 0.1


def test_equal_to_the_published_formula() -> None:
    truth, effect_QN = world(noise=5.0)
    scores = (effect_QN + np.random.default_rng(1).normal(size=effect_QN.shape)).round(1)  # ties as well
    margins = truth.margin_SRQ.mean(1)
    prediction = truth.mask_SN.astype(np.float64) @ scores.T
    expected = np.mean([spearmanr(prediction[:, j], margins[:, j]).statistic for j in range(len(scores))])
    assert lds.lds_by_query(truth, scores).mean() == pytest.approx(expected, abs=1e-12)


def test_draws_agree_with_resampling_by_hand() -> None:
    truth, effect_QN = world(noise=6.0, subsets=40)
    fast = lds.lds(truth, effect_QN)
    rng, slow = np.random.default_rng(5), []
    for _ in range(300):
        part = truth.take(rng.integers(0, 40, 40)).queries(queries := rng.integers(0, 24, 24).tolist())
        slow.append(lds.lds_by_query(part, effect_QN[queries]).mean())
    assert fast.se == pytest.approx(np.std(slow), rel=0.2)
    assert fast.low < fast.value < fast.high < 1


def test_the_ceiling_bounds_the_true_scores() -> None:
    truth, effect_QN = world(noise=8.0, subsets=400)
    top = lds.ceiling(truth)
    assert top is not None and lds.lds(truth, effect_QN).value == pytest.approx(top, abs=0.03)
    assert lds.noise(truth) == pytest.approx(8.0, rel=0.05)
    assert lds.ceiling(world(repeats=1)[0]) is None


def test_what_a_seed_does_to_all_subsets_alike_is_no_noise() -> None:
    truth, _ = world(noise=2.0, subsets=6, repeats=40)
    shift_RQ = np.random.default_rng(6).normal(scale=50, size=truth.margin_SRQ.shape[1:])
    shifted = Truth(truth.mask_SN, truth.margin_SRQ + shift_RQ)
    assert lds.noise(shifted) == pytest.approx(lds.noise(truth), rel=1e-9)
    assert lds.noise(shifted) == pytest.approx(2.0, rel=0.05)


def test_paired_difference_is_sharper_than_the_two_intervals() -> None:
    truth, effect_QN = world(noise=4.0)
    near = effect_QN + 0.1 * np.random.default_rng(2).normal(size=effect_QN.shape)
    both = lds.difference(truth, effect_QN, near)
    assert both.se < lds.lds(truth, effect_QN).se and both.low <= both.value <= both.high


def test_a_diverged_retrain_is_not_averaged_in() -> None:
    truth, effect_QN = world()
    margin_SRQ = truth.margin_SRQ.copy()
    margin_SRQ[3, 1] = np.nan
    margin_SRQ[5] = np.nan
    broken = Truth(truth.mask_SN, margin_SRQ)
    assert broken.diverged == [(3, 1), (5, 0), (5, 1), (5, 2)]
    assert len(broken.sound().mask_SN) == 59
    assert lds.lds_by_query(broken.sound(), effect_QN).mean() == pytest.approx(1.0, abs=1e-12)


def test_tuning_reports_on_unseen_subsets() -> None:
    truth, effect_QN = world(noise=2.0, subsets=100)
    rng = np.random.default_rng(3)
    others = {f"noise-{i}": rng.normal(size=effect_QN.shape) for i in range(30)}
    found = lds.tune(truth, {"true": effect_QN, **others})
    assert found.chosen == "true" and set(found.by_fold) == {"true"}
    assert found.unseen.value == pytest.approx(lds.lds(truth, effect_QN).value, abs=0.05)
    lucky = lds.tune(truth, others)  # nothing to find: the choice must not look good on what it did not see
    assert abs(lucky.unseen.value) < 0.1


def test_tuning_knows_that_its_parts_share_their_queries() -> None:
    """Queries that differ in how well they are foreseen make most of the error, and no part escapes it."""
    truth, effect_QN = world(noise=1.0, subsets=200)
    noise_QN = np.random.default_rng(4).normal(size=effect_QN.shape)
    share_Q1 = np.linspace(0, 1, len(effect_QN))[:, None]
    uneven = {"uneven": share_Q1 * effect_QN + (1 - share_Q1) * noise_QN}
    assert lds.tune(truth, uneven).unseen.se == pytest.approx(lds.lds(truth, uneven["uneven"]).se, rel=0.15)


def test_too_few_subsets_are_refused() -> None:
    truth, effect_QN = world(subsets=1)
    with pytest.raises(ConfigError, match="1 subset says nothing"):
        lds.lds(truth, effect_QN)


def test_truth_round_trip_and_published_form(tmp_path: Path) -> None:
    truth, effect_QN = world(noise=1.0)
    named = Truth(truth.mask_SN, truth.margin_SRQ, tuple(f"t{i}" for i in range(80)), tuple(f"q{i}" for i in range(24)))
    write_truth(tmp_path / "run" / "truth", named)
    back = read_truth(tmp_path / "run")
    assert back.train_ids == named.train_ids and back.query_ids == named.query_ids
    assert np.array_equal(back.mask_SN, truth.mask_SN) and np.allclose(back.margin_SRQ, truth.margin_SRQ, atol=1e-4)
    place = tmp_path / "files"
    place.mkdir()
    torch.save(torch.tensor(truth.mask_SN, dtype=torch.int8), place / "masks.pt")
    torch.save(torch.tensor(truth.margin_SRQ.mean(1)), place / "margins.pt")
    published = read_truth(tmp_path)
    assert published.train_ids == () and published.margin_SRQ.shape == (60, 1, 24)
    assert lds.lds_by_query(published, effect_QN) == pytest.approx(lds.lds_by_query(truth, effect_QN), abs=1e-12)


def test_half_of_the_published_rows_is_1216_and_the_formula_is_the_published_one(tmp_path: Path) -> None:
    """Masks [100, 2432] at a half, margins [100, 277] in float32, as they lie in the files of the field's example."""
    mask_SN = np.stack([subset(2432, 0.5, 0, number) for number in range(100)])
    assert mask_SN.dtype == bool and mask_SN.shape == (100, 2432)
    assert mask_SN.sum(1).tolist() == [1216] * 100 and len(np.unique(mask_SN, axis=0)) == 100
    assert mask_SN.sum(0).min() > 20 and mask_SN.sum(0).max() < 80  # rows are in some subsets each
    rng = np.random.default_rng(7)
    scores_QN = rng.normal(size=(277, 2432)).astype(np.float32)
    clean_SQ = mask_SN @ scores_QN.T.astype(np.float64)
    margins = torch.tensor(clean_SQ + 40 * rng.normal(size=clean_SQ.shape), dtype=torch.float32)
    torch.save(torch.tensor(mask_SN, dtype=torch.int8), tmp_path / "masks.pt")
    torch.save(margins, tmp_path / "margins.pt")
    truth = read_truth(tmp_path)
    assert np.array_equal(truth.mask_SN, mask_SN) and truth.margin_SRQ.shape == (100, 1, 277)
    prediction = truth.mask_SN.astype(np.float64) @ scores_QN.astype(np.float64).T
    want = [spearmanr(prediction[:, j], margins[:, j]).statistic for j in range(277)]
    assert 0.3 < np.mean(want) < 0.8
    np.testing.assert_allclose(lds.lds_by_query(truth, scores_QN), want, rtol=0, atol=1e-12)


def test_a_folder_without_truth_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no ground truth"):
        read_truth(tmp_path)
    np.save(tmp_path / "masks.npy", np.ones((3, 4)))
    with pytest.raises(StoreError, match="no margins"):
        read_truth(tmp_path)
    np.save(tmp_path / "margins.npy", np.ones((2, 4)))
    with pytest.raises(StoreError, match="expected"):
        read_truth(tmp_path)


def test_leave_one_out_of_logistic_regression() -> None:
    """Influence of an L2-regularised logistic regression, by its Hessian, against retraining without each row."""
    rng = np.random.default_rng(0)
    x_ND, query_QD = rng.normal(size=(100, 5)), rng.normal(size=(30, 5))
    y_N = (rng.random(100) < 1 / (1 + np.exp(-x_ND @ rng.normal(size=5)))).astype(float)

    def solve(keep_N: np.ndarray) -> np.ndarray:
        w_D = np.zeros(5)
        for _ in range(30):
            p_N = 1 / (1 + np.exp(-x_ND @ w_D))
            hessian = (x_ND * (keep_N * p_N * (1 - p_N))[:, None]).T @ x_ND + np.eye(5)
            w_D -= np.linalg.solve(hessian, x_ND.T @ (keep_N * (p_N - y_N)) + w_D)
        return w_D

    w_D = solve(np.ones(100))
    p_N = 1 / (1 + np.exp(-x_ND @ w_D))
    hessian = (x_ND * (p_N * (1 - p_N))[:, None]).T @ x_ND + np.eye(5)
    score_QN = -query_QD @ np.linalg.solve(hessian, (x_ND * (p_N - y_N)[:, None]).T)
    mask_SN = 1 - np.eye(100)
    truth = Truth(mask_SN, np.stack([query_QD @ solve(m) for m in mask_SN])[:, None])
    assert lds.lds_by_query(truth, score_QN).mean() >= 0.99

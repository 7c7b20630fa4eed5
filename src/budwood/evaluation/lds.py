"""Linear datamodelling score: do summed scores of a subset's rows rank what retraining on that subset gives?

For each query, Spearman over subsets between the sum of its scores inside the subset and the mean margin of models
retrained on it; the score is the mean over queries.
Shapes: S subsets, R retrains of each, N training rows, Q queries, D bootstrap draws, C candidate matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from budwood.data.batch import seed_of
from budwood.errors import ConfigError
from budwood.evaluation.truth import Truth
from budwood.linalg.ranking import ranks_by_row, spearman_by_row

SHUFFLES, DRAWS, FOLDS = 20, 1000, 5


def predicted(mask_SN: np.ndarray, score_QN: np.ndarray) -> np.ndarray:
    """pred_QS: the summed scores of the rows of each subset."""
    return score_QN.astype(np.float64) @ mask_SN.T.astype(np.float64)


def lds_by_query(truth: Truth, score_QN: np.ndarray) -> np.ndarray:
    """rho_Q: one rank correlation over subsets per query.

    >>> mask = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 1]])
    >>> score = np.array([[3.0, 1.0, 2.0]])
    >>> float(lds_by_query(Truth(mask, (mask @ score.T)[:, None, :]), score).round(12)[0])
    1.0
    """
    return spearman_by_row(predicted(truth.mask_SN, score_QN), truth.mean_SQ().T)


@dataclass(frozen=True)
class Draws:
    """How often each subset and each query is drawn: the same draws for every matrix, so differences are paired."""

    subset_DS: np.ndarray
    query_DQ: np.ndarray

    @classmethod
    def make(cls, subsets: int, queries: int, seed: int, draws: int = DRAWS) -> Draws:
        """Resamples of subsets and of queries."""
        rng = np.random.default_rng(seed_of(seed, "lds draws"))
        even = lambda n: rng.multinomial(n, np.full(n, 1 / n), size=draws).astype(np.float64)  # noqa: E731
        return cls(even(subsets), even(queries))


def lds_draws(truth: Truth, score_QN: np.ndarray, draws: Draws) -> np.ndarray:
    """lds_D: the score in each resample, by weighted correlation of the whole sample's ranks."""
    a_SQ = ranks_by_row(predicted(truth.mask_SN, score_QN)).T
    b_SQ = ranks_by_row(truth.mean_SQ().T).T
    middle = (len(a_SQ) + 1) / 2
    a_SQ, b_SQ = a_SQ - middle, b_SQ - middle
    weight_DS = draws.subset_DS / len(a_SQ)
    mean = lambda x_SQ: weight_DS @ x_SQ  # noqa: E731
    a_DQ, b_DQ = mean(a_SQ), mean(b_SQ)
    both_DQ = mean(a_SQ * b_SQ) - a_DQ * b_DQ
    spread_DQ = np.sqrt(np.maximum((mean(a_SQ**2) - a_DQ**2) * (mean(b_SQ**2) - b_DQ**2), 0))
    rho_DQ = np.where(spread_DQ > 1e-12, both_DQ / np.maximum(spread_DQ, 1e-12), 0.0)
    found: np.ndarray = (rho_DQ * draws.query_DQ).sum(1) / draws.query_DQ.shape[1]
    return found


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error and 95 % interval."""

    value: float
    se: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, draw_D: np.ndarray) -> Estimate:
        """From bootstrap draws."""
        low, high = np.quantile(draw_D, [0.025, 0.975])
        return cls(float(value), float(draw_D.std(ddof=1)), float(low), float(high))


def lds(truth: Truth, score_QN: np.ndarray, seed: int = 0) -> Estimate:
    """Linear datamodelling score of one matrix, with a bootstrap over subsets and queries."""
    check_subsets(len(truth.mask_SN))
    draws = Draws.make(len(truth.mask_SN), len(score_QN), seed)
    return Estimate.of(float(lds_by_query(truth, score_QN).mean()), lds_draws(truth, score_QN, draws))


def difference(truth: Truth, first_QN: np.ndarray, second_QN: np.ndarray, seed: int = 0) -> Estimate:
    """How much higher the first matrix scores than the second, on the same draws."""
    draws = Draws.make(len(truth.mask_SN), len(first_QN), seed)
    value = float(lds_by_query(truth, first_QN).mean() - lds_by_query(truth, second_QN).mean())
    return Estimate.of(value, lds_draws(truth, first_QN, draws) - lds_draws(truth, second_QN, draws))


def shuffled(score_QN: np.ndarray, seed: int) -> np.ndarray:
    """Every row in an order of its own: scores that know nothing."""
    rng = np.random.default_rng(seed_of(seed, "shuffled"))
    return rng.permuted(score_QN, axis=1)


def random_line(truth: Truth, score_QN: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Mean and spread of the score of 20 shuffled matrices."""
    found = [float(lds_by_query(truth, shuffled(score_QN, seed_of(seed, i))).mean()) for i in range(SHUFFLES)]
    return float(np.mean(found)), float(np.std(found, ddof=1))


def reliability(truth: Truth) -> float | None:
    """How well the averaged ground truth would agree with a repetition of itself; None with one retrain per subset.

    Mean rank correlation between single retrains of the same subsets, raised to the average of R by Spearman-Brown.
    """
    held = truth.take(np.flatnonzero(~np.isnan(truth.margin_SRQ).any((1, 2))))
    repeats = held.margin_SRQ.shape[1]
    if repeats < 2 or len(held.mask_SN) < 3:
        return None
    pairs = [
        spearman_by_row(held.margin_SRQ[:, a].T, held.margin_SRQ[:, b].T) for a, b in combinations(range(repeats), 2)
    ]
    single = max(float(np.mean(pairs)), 0.0)
    return repeats * single / (1 + (repeats - 1) * single)


def ceiling(truth: Truth) -> float | None:
    """The most any scores can reach against this ground truth: the root of its reliability."""
    found = reliability(truth)
    return None if found is None else found**0.5


def noise(truth: Truth) -> float | None:
    """Standard deviation of a margin over retrains on the same subset, averaged over subsets and queries.

    The r-th retrains of all subsets share a seed; what that seed does to all of them alike changes no ranking and is
    taken out first.
    """
    subsets, repeats, _ = truth.margin_SRQ.shape
    if repeats < 2 or subsets < 2:
        return None
    with np.errstate(all="ignore"):
        own_SRQ = truth.margin_SRQ - np.nanmean(truth.margin_SRQ, axis=0)
        return float(np.sqrt(np.nanmean(np.nanvar(own_SRQ, axis=1, ddof=1)) * subsets / (subsets - 1)))


@dataclass(frozen=True)
class Choice:
    """What was chosen on some subsets and how it did on the others."""

    chosen: str
    by_fold: tuple[str, ...]
    unseen: Estimate


def tune(truth: Truth, candidates: Mapping[str, np.ndarray], seed: int = 0) -> Choice:
    """Choose among matrices by their score; the figure reported comes from subsets that the choice did not see.

    Subsets are cut into five parts; on each, the matrix is scored that did best on the other four. `chosen` is the best
    on all subsets: what to use from now on.
    """
    check_subsets(len(truth.mask_SN), 2 * FOLDS)
    order = np.random.default_rng(seed_of(seed, "folds")).permutation(len(truth.mask_SN))
    folds = np.array_split(order, FOLDS)
    names, matrices = list(candidates), list(candidates.values())
    best = lambda part: int(np.argmax([lds_by_query(part, m).mean() for m in matrices]))  # noqa: E731
    picks, values, draws = [], [], []
    # every part is asked the same queries, so a draw of queries is one for all parts: their errors do not average out
    query_DQ = Draws.make(1, len(matrices[0]), seed).query_DQ
    for i, fold in enumerate(folds):
        pick = best(truth.take(np.concatenate([f for j, f in enumerate(folds) if j != i])))
        held = truth.take(fold)
        picks.append(names[pick])
        values.append(float(lds_by_query(held, matrices[pick]).mean()))
        subset_DS = Draws.make(len(fold), 1, seed_of(seed, i)).subset_DS
        draws.append(lds_draws(held, matrices[pick], Draws(subset_DS, query_DQ)))
    return Choice(names[best(truth)], tuple(picks), Estimate.of(float(np.mean(values)), np.mean(draws, axis=0)))


def check_subsets(found: int, least: int = 2) -> None:
    """Refuse a rank correlation over too few subsets."""
    if found < least:
        raise ConfigError(
            f"A rank correlation over {found} subset{'s' * (found != 1)} says nothing; at least {least} are needed. "
            "Set --subsets higher, or wait for more retrains."
        )

"""Scores of predictions in plain numpy; every one is defined for degenerate input and never NaN.

Shapes: N examples, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

from budwood.linalg.ranking import pearson_by_row, spearman_by_row

HEATS = (0.05, 20.0)  # temperatures that are looked at


def accuracy(predicted_N: np.ndarray, gold_N: np.ndarray) -> float:
    """Share of equal entries; 0 for no examples.

    >>> accuracy(np.array([0, 1, 1, 1]), np.array([0, 1, 0, 1]))
    0.75
    """
    return float(np.mean(np.asarray(predicted_N) == np.asarray(gold_N))) if len(gold_N) else 0.0


def confusion(predicted_N: np.ndarray, gold_N: np.ndarray, classes: int) -> np.ndarray:
    """Counts [gold, predicted]."""
    flat = np.asarray(gold_N, dtype=np.int64) * classes + np.asarray(predicted_N, dtype=np.int64)
    return np.bincount(flat, minlength=classes * classes).reshape(classes, classes)


def f1(predicted_N: np.ndarray, gold_N: np.ndarray, classes: int = 2) -> float:
    """F1 of class 1 for two classes, else the mean over the classes that are given or predicted.

    >>> f1(np.array([1, 1, 0]), np.array([1, 0, 0]))
    0.6666666666666666
    """
    count_KK = confusion(predicted_N, gold_N, classes)
    hits_K = np.diag(count_KK).astype(np.float64)
    both_K = count_KK.sum(axis=0) + count_KK.sum(axis=1)
    f1_K = np.divide(2 * hits_K, both_K, out=np.zeros(classes), where=both_K > 0)
    return float(f1_K[1] if classes == 2 else f1_K[both_K > 0].mean() if both_K.any() else 0.0)


def mcc(predicted_N: np.ndarray, gold_N: np.ndarray) -> float:
    """Matthews correlation, for any number of classes; 0 where predictions or answers are all the same.

    >>> mcc(np.array([1, 1, 0, 0]), np.array([1, 1, 0, 0])), mcc(np.array([1, 1]), np.array([0, 1]))
    (1.0, 0.0)
    """
    if not len(gold_N):
        return 0.0
    classes = int(max(np.max(predicted_N), np.max(gold_N))) + 1
    count_KK = confusion(predicted_N, gold_N, classes).astype(np.float64)
    gold_K, given_K, total = count_KK.sum(axis=1), count_KK.sum(axis=0), count_KK.sum()
    covariance = np.trace(count_KK) * total - gold_K @ given_K
    spread = (total**2 - given_K @ given_K) * (total**2 - gold_K @ gold_K)
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def pearson(predicted_N: np.ndarray, gold_N: np.ndarray) -> float:
    """Linear correlation; 0 where one side does not vary."""
    return float(pearson_by_row(np.asarray(predicted_N)[None], np.asarray(gold_N)[None])[0]) if len(gold_N) else 0.0


def spearman(predicted_N: np.ndarray, gold_N: np.ndarray) -> float:
    """Rank correlation with shared ranks for ties; 0 where one side does not vary."""
    return float(spearman_by_row(np.asarray(predicted_N)[None], np.asarray(gold_N)[None])[0]) if len(gold_N) else 0.0


def ece(prob_NK: np.ndarray, gold_N: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error: |accuracy - confidence| over equal-width bins of the highest probability.

    A bin holds confidences above its lower and up to its upper edge.

    >>> round(ece(np.array([[0.1, 0.9], [0.1, 0.9]]), np.array([1, 0])), 6)
    0.4
    """
    prob_NK = np.asarray(prob_NK, dtype=np.float64)
    if not len(prob_NK):
        return 0.0
    confidence_N = prob_NK.max(axis=1)
    right_N = prob_NK.argmax(axis=1) == np.asarray(gold_N)
    edges = np.linspace(0.0, 1.0, bins + 1)
    bin_N = np.clip(np.searchsorted(edges, confidence_N, side="left") - 1, 0, bins - 1)
    gap_B = np.bincount(bin_N, weights=right_N - confidence_N, minlength=bins)
    return float(np.abs(gap_B).sum() / len(prob_NK))


def temperature(logits_NK: np.ndarray, gold_N: np.ndarray) -> float:
    """The number by which logits are divided so that their mean log-probability of the right class is highest.

    Within HEATS, by golden-section search over its logarithm; 1 for no examples. An end of HEATS means that there is
    no best one: where every row is answered right, the colder the better without end.

    >>> round(temperature(np.array([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]]), np.array([0, 0, 0, 1])), 2)
    3.64
    """
    logits_NK = np.asarray(logits_NK, dtype=np.float64)
    if not len(logits_NK):
        return 1.0
    gold_N = np.asarray(gold_N, dtype=np.int64)

    def cost(log_heat: float) -> float:
        scaled_NK = logits_NK / np.exp(log_heat)
        scaled_NK = scaled_NK - scaled_NK.max(axis=1, keepdims=True)
        right_N = scaled_NK[np.arange(len(gold_N)), gold_N]
        return float((np.log(np.exp(scaled_NK).sum(axis=1)) - right_N).mean())

    low, high, ratio = float(np.log(HEATS[0])), float(np.log(HEATS[1])), (5**0.5 - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    for _ in range(60):
        if cost(a) <= cost(b):
            high, b = b, a
            a = high - ratio * (high - low)
        else:
            low, a = a, b
            b = low + ratio * (high - low)
    return float(np.exp((low + high) / 2))


def nll(prob_NK: np.ndarray, gold_N: np.ndarray) -> float:
    """Mean negative log-probability of the right class, finite even where that probability is 0."""
    if not len(prob_NK):
        return 0.0
    prob_N = np.asarray(prob_NK, dtype=np.float64)[np.arange(len(gold_N)), np.asarray(gold_N, dtype=np.int64)]
    return float(-np.log(np.maximum(prob_N, np.finfo(np.float64).tiny)).mean())


def brier(prob_NK: np.ndarray, gold_N: np.ndarray) -> float:
    """Mean squared distance between the probabilities and the right class, summed over classes (0 to 2)."""
    prob_NK = np.asarray(prob_NK, dtype=np.float64)
    if not len(prob_NK):
        return 0.0
    return float(((prob_NK - np.eye(prob_NK.shape[1])[np.asarray(gold_N, dtype=np.int64)]) ** 2).sum(axis=1).mean())


def accuracy_interval(right: int, total: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson interval of a share; (0, 1) for no examples.

    >>> [round(x, 4) for x in accuracy_interval(8, 10)]
    [0.4902, 0.9433]
    """
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = right / total
    middle = share + z * z / (2 * total)
    half = z * float(np.sqrt(share * (1 - share) / total + z * z / (4 * total * total)))
    scale = 1 + z * z / total
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def bootstrap_interval(
    metric: Callable[[np.ndarray, np.ndarray], float],
    predicted_N: np.ndarray,
    gold_N: np.ndarray,
    seed: int,
    draws: int = 1000,
    level: float = 0.95,
) -> tuple[float, float]:
    """Percentile interval of any metric over resampled examples; a pure function of its arguments."""
    predicted_N, gold_N = np.asarray(predicted_N), np.asarray(gold_N)
    if not len(gold_N):
        return 0.0, 0.0
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(0, len(gold_N), size=len(gold_N)) for _ in range(draws)]
    low, high = np.quantile([metric(predicted_N[i], gold_N[i]) for i in drawn], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """(first, behind last, type) of every entity in a sentence of B-/I-/O tags; an I- after another type begins one.

    >>> sorted(entities(["B-PER", "I-PER", "O", "I-LOC"]))
    [(0, 2, 'PER'), (3, 4, 'LOC')]
    """
    found: set[tuple[int, int, str]] = set()
    start, kind = 0, ""
    for i, tag in enumerate([*tags, "O"]):
        mark, _, name = tag.partition("-")
        if kind and not (mark == "I" and name == kind):
            found.add((start, i, kind))
            kind = ""
        if mark in ("B", "I") and name and not kind:
            start, kind = i, name
    return found


def entity_f1(predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> float:
    """F1 over whole entities, exact in extent and type, all sentences together.

    >>> entity_f1([["B-PER", "O"], ["O"]], [["B-PER", "I-PER"], ["O"]])
    0.0
    """
    pairs = [(entities(p), entities(g)) for p, g in zip(predicted, gold, strict=True)]
    hits = sum(len(p & g) for p, g in pairs)
    total = sum(len(p) + len(g) for p, g in pairs)
    return 2 * hits / total if total else 0.0

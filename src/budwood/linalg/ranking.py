"""Ranks, rank correlation by row, the best few of a row, and bootstrap intervals of a mean.

Shapes: Q rows (queries), N columns (training examples), D bootstrap draws.
"""

from __future__ import annotations

import numpy as np


def ranks_by_row(value_QN: np.ndarray) -> np.ndarray:
    """Ranks 1..N within each row; equal values share the mean of their ranks.

    >>> ranks_by_row(np.array([[10.0, 5.0, 10.0, 7.0]])).tolist()
    [[3.5, 1.0, 3.5, 2.0]]
    """
    value_QN = np.atleast_2d(np.asarray(value_QN))
    rows, columns = value_QN.shape
    if columns == 0:
        return np.empty((rows, 0))
    order_QN = np.argsort(value_QN, axis=1, kind="stable")
    sorted_QN = np.take_along_axis(value_QN, order_QN, axis=1)
    opens_QN = np.ones((rows, columns), dtype=bool)
    opens_QN[:, 1:] = sorted_QN[:, 1:] != sorted_QN[:, :-1]
    first = np.flatnonzero(opens_QN)  # rows open a group of their own, so groups never cross rows
    size = np.diff(np.append(first, rows * columns))
    mean = first % columns + (size + 1) / 2
    rank_QN = np.empty((rows, columns))
    np.put_along_axis(rank_QN, order_QN, np.repeat(mean, size).reshape(rows, columns), axis=1)
    return rank_QN


def pearson_by_row(a_QN: np.ndarray, b_QN: np.ndarray) -> np.ndarray:
    """Pearson correlation of each pair of rows [Q]; 0 where a row does not vary.

    >>> pearson_by_row(np.array([[1, 2, 3], [1, 1, 1]]), np.array([[2, 4, 6], [1, 2, 3]])).round(12).tolist()
    [1.0, 0.0]
    """
    a_QN, b_QN = (np.atleast_2d(np.asarray(x, dtype=np.float64)) for x in (a_QN, b_QN))
    if a_QN.shape[1] < 2:
        return np.zeros(len(a_QN))
    a_QN, b_QN = _unit(a_QN), _unit(b_QN)
    return np.clip(np.einsum("qn,qn->q", a_QN, b_QN), -1.0, 1.0)


def _unit(x_QN: np.ndarray) -> np.ndarray:
    """Rows centred and scaled to length 1; rows that do not vary become 0."""
    largest_Q1 = np.abs(x_QN).max(axis=1, keepdims=True)
    x_QN = x_QN / np.where(
        largest_Q1 > 0, largest_Q1, 1.0
    )  # squares neither overflow nor vanish, equal values become 1
    x_QN = x_QN - x_QN.mean(axis=1, keepdims=True)
    norm_Q = np.linalg.norm(x_QN, axis=1)
    dead_Q = norm_Q == 0
    return np.where(dead_Q[:, None], 0.0, x_QN / np.where(dead_Q, 1.0, norm_Q)[:, None])


def spearman_by_row(a_QN: np.ndarray, b_QN: np.ndarray) -> np.ndarray:
    """Spearman correlation of each pair of rows [Q], with shared ranks for ties; 0 where a row does not vary."""
    return pearson_by_row(ranks_by_row(a_QN), ranks_by_row(b_QN))


def top_k(value_QN: np.ndarray, k: int) -> np.ndarray:
    """Columns of the k largest values of each row, largest first; equal values by column [Q, k].

    >>> top_k(np.array([[1.0, 3.0, 2.0, 3.0]]), 3).tolist()
    [[1, 3, 2]]
    """
    value_QN = np.atleast_2d(np.asarray(value_QN))
    columns = value_QN.shape[1]
    k = max(0, min(k, columns))
    if k == 0:
        return np.empty((len(value_QN), 0), dtype=np.int64)
    # everything at least as large as the k-th value could be chosen; ties at the border go to the lower column
    border_Q1 = np.partition(value_QN, columns - k, axis=1)[:, [columns - k]]
    above_QN, equal_QN = value_QN > border_Q1, value_QN == border_Q1
    room_Q1 = k - above_QN.sum(axis=1, keepdims=True)
    chosen_QN = above_QN | (equal_QN & (np.cumsum(equal_QN, axis=1) <= room_Q1))
    index_QK = np.nonzero(chosen_QN)[1].reshape(len(value_QN), k)
    picked_QK = np.take_along_axis(value_QN, index_QK, axis=1)
    order_QK = k - 1 - np.argsort(picked_QK[:, ::-1], axis=1, kind="stable")[:, ::-1]
    return np.take_along_axis(index_QK, order_QK, axis=1)


def bootstrap_mean(value_Q: np.ndarray, seed: int, draws: int = 2000, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of the mean over resampled rows; a pure function of its arguments.

    >>> bootstrap_mean(np.array([2.0, 2.0]), seed=0)
    (2.0, 2.0)
    """
    value_Q = np.asarray(value_Q, dtype=np.float64)
    if value_Q.size == 0:
        return 0.0, 0.0
    rng = np.random.default_rng(seed)
    count_DQ = rng.multinomial(len(value_Q), np.full(len(value_Q), 1 / len(value_Q)), size=draws)
    low, high = np.quantile(count_DQ @ value_Q / len(value_Q), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def bootstrap_ratio(
    top_Q: np.ndarray, bottom_Q: np.ndarray, seed: int, draws: int = 1000, level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of sum(top) / sum(bottom) over resampled rows: a mean where rows weigh unequally.

    >>> bootstrap_ratio(np.array([2.0, 4.0]), np.array([1.0, 2.0]), seed=0)
    (2.0, 2.0)
    """
    rng = np.random.default_rng(seed)
    size = len(top_Q)
    count_DQ = rng.multinomial(size, np.full(size, 1 / size), size=draws)
    low, high = np.quantile(count_DQ @ top_Q / (count_DQ @ bottom_Q), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)

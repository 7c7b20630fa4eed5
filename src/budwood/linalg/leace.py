"""LEACE: the least change of features after which no linear map tells the labels better than a constant.

r(x) = x - W^+ P W (x - mean), with W = Cov(x)^(-1/2) and P the projection on the columns of W Cov(x, z).
Shapes: N rows, D features, K classes.
"""

from __future__ import annotations

import numpy as np

SAME = 1e-9  # directions of labels weaker than this share of the strongest are rounding


def eraser(x_ND: np.ndarray, label_N: np.ndarray, classes: int) -> tuple[np.ndarray, ...]:
    """(mean_D, map_DD): erased = x - (x - mean) @ map; the map has rank at most K - 1.

    The map is found for features of equal spread and carried over, which the formula allows: otherwise a feature of
    small spread beside one of large spread would be taken for rounding and kept.

    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(0, 2, 200); x = rng.normal(size=(200, 3)) + 2 * y[:, None]
    >>> mean, erase = eraser(x, y, 2)
    >>> clean = x - (x - mean) @ erase
    >>> bool(np.allclose(clean[y == 0].mean(0), clean[y == 1].mean(0)))
    True
    """
    x_ND = x_ND.astype(np.float64)
    mean_D, spread_D = x_ND.mean(0), x_ND.std(0)
    # a mean over N rows is off by some units in the last place: a feature that never moves may seem to move as much
    spread_D = np.where(spread_D > 16 * np.finfo(np.float64).eps * np.abs(mean_D), spread_D, 1.0)
    centred_ND = (x_ND - mean_D) / spread_D
    truth_NK = np.eye(classes)[label_N]
    cross_DK = centred_ND.T @ (truth_NK - truth_NK.mean(0)) / len(x_ND)
    value_D, vector_DD = np.linalg.eigh(centred_ND.T @ centred_ND / len(x_ND))
    usable_D = value_D > len(value_D) * np.finfo(np.float64).eps * value_D.max()
    root_D = np.sqrt(np.where(usable_D, value_D, 1.0))
    whiten_DD = vector_DD @ np.diag(np.where(usable_D, 1 / root_D, 0.0)) @ vector_DD.T
    colour_DD = vector_DD @ np.diag(np.where(usable_D, root_D, 0.0)) @ vector_DD.T
    left_DK, size_K, _ = np.linalg.svd(whiten_DD @ cross_DK, full_matrices=False)
    kept = left_DK[:, size_K > SAME * max(float(size_K.max()), 1e-300)][:, : classes - 1]
    return mean_D, (colour_DD @ kept @ kept.T @ whiten_DD).T / spread_D[:, None] * spread_D

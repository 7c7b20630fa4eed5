"""Trade-offs between two costs: which points no other point beats, and how much they cover.

Shapes: N points, two costs each, lower is better.
"""

from __future__ import annotations

import numpy as np


def front(cost_N2: np.ndarray) -> np.ndarray:
    """Indices of points that no other beats in both costs, by rising first cost; equal points count once.

    >>> front(np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 4.0], [3.0, 1.0]])).tolist()
    [0, 1, 3]
    """
    cost_N2 = np.asarray(cost_N2, dtype=np.float64).reshape(-1, 2)
    kept, best = [], float("inf")
    for i in np.lexsort((cost_N2[:, 1], cost_N2[:, 0])):
        if cost_N2[i, 1] < best and np.isfinite(cost_N2[i]).all():
            kept.append(int(i))
            best = cost_N2[i, 1]
    return np.array(kept, dtype=np.int64)


def hypervolume(cost_N2: np.ndarray, reference: tuple[float, float]) -> float:
    """The area between the points and a reference that all should beat; points beyond it add nothing.

    >>> hypervolume(np.array([[1.0, 3.0], [2.0, 2.0], [9.0, 0.0]]), (4.0, 4.0))
    5.0
    """
    cost_N2 = np.asarray(cost_N2, dtype=np.float64).reshape(-1, 2)
    area, ceiling = 0.0, float(reference[1])
    for i in front(cost_N2):
        x, y = cost_N2[i]
        if x < reference[0] and y < ceiling:
            area += (reference[0] - x) * (ceiling - y)
            ceiling = y
    return float(area)

"""How well a suspicion finds what was planted, and confident learning's own suspicion.

Shapes: N rows, K classes.
"""

from __future__ import annotations

import numpy as np

from budwood.linalg.ranking import ranks_by_row


def leading(suspicion_N: np.ndarray, wrong_N: np.ndarray) -> np.ndarray:
    """found_N: share of the wrong rows among the 1, 2, ... N most suspicious.

    >>> leading(np.array([0.1, 0.9, 0.5]), np.array([False, True, False])).tolist()
    [1.0, 1.0, 1.0]
    """
    order = np.argsort(-suspicion_N, kind="stable")
    found: np.ndarray = np.cumsum(wrong_N[order]) / max(1, int(wrong_N.sum()))
    return found


def detection(suspicion_N: np.ndarray, wrong_N: np.ndarray) -> dict[str, float]:
    """ROC AUC, shares found in the top 10 and 20 %, and the area under the curve of what is found."""
    suspicion_N = np.where(np.isfinite(suspicion_N), suspicion_N, -np.inf)
    wrong = int(wrong_N.sum())
    rank_N = ranks_by_row(suspicion_N[None])[0]
    auc = (rank_N[wrong_N].sum() - wrong * (wrong + 1) / 2) / (wrong * (len(wrong_N) - wrong))
    found_N = leading(suspicion_N, wrong_N)
    among = lambda share: float(found_N[max(1, round(share * len(wrong_N))) - 1])  # noqa: E731
    return {
        "auc": float(auc),
        "found_in_top_20": among(0.2),
        "found_in_top_10": among(0.1),
        "detection_area": float(np.trapezoid(found_N) / len(found_N)),
    }


def confident(chance_NK: np.ndarray, label_N: np.ndarray) -> np.ndarray:
    """Suspicion of each row by confident learning: off the diagonal of the confident joint first, then by its gap.

    A class is confidently present where its out-of-sample probability reaches the mean that rows labelled with it get.
    Rows whose most probable confident class is not their label come first; within both groups, the gap between the
    best other class and the given one decides.
    """
    classes = chance_NK.shape[1]
    bar_K = np.array([chance_NK[label_N == k, k].mean() if (label_N == k).any() else 1.0 for k in range(classes)])
    sure_NK = np.where(chance_NK >= bar_K, chance_NK, -1.0)
    off_N = (sure_NK.max(1) > 0) & (sure_NK.argmax(1) != label_N)
    own_N = chance_NK[np.arange(len(label_N)), label_N]
    others_NK = chance_NK.copy()
    others_NK[np.arange(len(label_N)), label_N] = -1.0
    found: np.ndarray = others_NK.max(1) - own_N + 2.0 * off_N
    return found

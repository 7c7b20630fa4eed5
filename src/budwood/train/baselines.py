"""What a task gives away without a model: its commonest label, and its words counted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from budwood.data.task import Row


def majority(train_N: np.ndarray, test_N: np.ndarray) -> float:
    """Accuracy of always saying the commonest training label.

    >>> majority(np.array([1, 1, 0]), np.array([1, 0]))
    0.5
    """
    return float(np.mean(test_N == np.bincount(train_N).argmax()))


def bag_of_words(train: Sequence[Row], test: Sequence[Row], costs: Sequence[float] = (0.1, 1.0, 10.0)) -> float:
    """Test accuracy of a logistic regression on word counts, its strength chosen on a tenth of the training rows."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    texts = [[" ".join(filter(None, [r.text, r.pair])) for r in rows] for rows in (train, test)]
    label_N = np.array([r.label for r in train])
    count = CountVectorizer(token_pattern=r"(?u)\b\w+\b|[^\w\s]+")
    train_NV, test_NV = count.fit_transform(texts[0]), count.transform(texts[1])
    held_N = np.arange(len(label_N)) % 10 == 9
    best = costs[len(costs) // 2]
    if held_N.any() and len(np.unique(label_N[~held_N])) > 1:
        fits = [LogisticRegression(C=c, max_iter=500).fit(train_NV[~held_N], label_N[~held_N]) for c in costs]
        best = costs[int(np.argmax([f.score(train_NV[held_N], label_N[held_N]) for f in fits]))]
    model = LogisticRegression(C=best, max_iter=1000).fit(train_NV, label_N)
    return float(model.score(test_NV, [r.label for r in test]))

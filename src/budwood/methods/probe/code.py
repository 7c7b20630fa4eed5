"""Description length of labels given features: the online code, and how folds and resamples go by document.

Shapes: N states or windows, F folds, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from budwood.data.batch import seed_of
from budwood.errors import DataError
from budwood.linalg.softmax import stratified_folds

PORTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
FIRST = 8  # rows that go before anything is learned: a smaller start only adds noise


def portions(count: int) -> list[int]:
    """Rows known at every step of the online code, the last one being all.

    >>> portions(1000)
    [8, 16, 32, 62, 125, 250, 500, 1000]
    """
    return sorted({n for n in (int(p * count) for p in PORTIONS) if n >= FIRST} | {count})


def shuffled(document_N: np.ndarray, seed: int) -> np.ndarray:
    """All rows, documents in a seeded order and each document's rows together."""
    rank = np.random.default_rng(seed_of(seed, "code")).permutation(int(document_N.max()) + 1)
    return np.argsort(rank[document_N], kind="stable")


def online_code(uniform_N: np.ndarray, learn: Callable[[int, int], np.ndarray]) -> float:
    """Bits of all labels: the first portion at `uniform_N` bits each, every next one by what was learned before.

    `learn(n, m)` fits on the first n rows and returns the bits of rows n .. m - 1 at every cost [S, m - n]; the code
    names the cost it uses first.
    """
    steps = portions(len(uniform_N))
    bits_S = np.zeros(1)
    for known, following in zip(steps, steps[1:]):
        bits_S = bits_S + learn(known, following).sum(1)
    return float(uniform_N[: steps[0]].sum() + bits_S.min() + np.log2(len(bits_S)))


def folds_by_document(label_N: np.ndarray, document_N: np.ndarray, folds: int) -> np.ndarray:
    """fold_N in which no document is cut; stratified by label where every row is its own document."""
    documents = int(document_N.max()) + 1
    if documents < folds:
        raise DataError(f"{documents} documents cannot make {folds} folds. Give more rows, or fewer with --folds.")
    if documents == len(label_N):
        return stratified_folds(label_N, folds)
    order = np.random.default_rng(0).permutation(documents)
    return (np.argsort(order) % folds)[document_N]


def resamples(document_N: np.ndarray, count: int, seed: int) -> np.ndarray:
    """weight_RN: how often each row counts when documents are drawn with replacement."""
    documents = int(document_N.max()) + 1
    rng = np.random.default_rng(seed_of(seed, "resample"))
    return rng.multinomial(documents, np.full(documents, 1 / documents), size=count)[:, document_N]

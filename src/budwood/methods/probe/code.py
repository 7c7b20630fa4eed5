"""Description length of labels given features: the online code, and how folds and resamples go by document.

Shapes: N states or windows, F folds, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from budwood.data.batch import seed_of
from budwood.errors import DataError
from budwood.linalg.folds import stratified_folds

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


def online_codes(
    uniform_N: np.ndarray, learn: Callable[[int, int, int], np.ndarray], costs: int, codes: int = 1
) -> np.ndarray:
    """bits_C of all labels in each code: the first portion at `uniform_N` bits each, the next ones by what was learned.

    `learn(n, m, s)` fits on the first n rows and returns the bits of rows n .. m - 1 at each of the s smallest costs
    [s, C, m - n]; a code names the cost it uses first. Large costs are left away once they have taken more bits than
    another would with all that is left at `uniform_N`; should that one do worse in the end, nothing is left away.
    """
    steps = portions(len(uniform_N))
    first = uniform_N[: steps[0]].sum() + np.log2(costs)
    for least in (1, costs):
        bits_SC, kept = np.zeros((costs, codes)), costs
        for known, following in zip(steps, steps[1:]):
            more_SC = learn(known, following, kept).sum(2)
            bits_SC = bits_SC + np.pad(more_SC, ((0, costs - kept), (0, 0)))
            enough_C = bits_SC[:kept].min(0) + uniform_N[following:].sum()
            while kept > least and (bits_SC[kept - 1] > enough_C).all():
                kept -= 1
        if (bits_SC[:kept].min(0) <= bits_SC.min(0)).all():  # what was left away is too long already, though a part
            break
    return np.asarray(first + bits_SC.min(0))


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

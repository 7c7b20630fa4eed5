"""Likeness of texts by the words they share: BM25 and TF-IDF.

Shapes: Q queries, N documents, W words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

WORD = re.compile(r"\w+|[^\w\s]")


def word_counts(documents: Sequence[str], queries: Sequence[str]) -> tuple[Any, Any]:
    """(count_NW, count_QW) as sparse matrices over the words of the documents; other words of queries are dropped."""
    from scipy.sparse import csr_array

    vocabulary: dict[str, int] = {}
    made = []
    for texts, grow in ((documents, True), (queries, False)):
        row, word = [], []
        for i, text in enumerate(texts):
            for w in WORD.findall(text.lower()):
                place = vocabulary.setdefault(w, len(vocabulary)) if grow else vocabulary.get(w)
                if place is not None:
                    row.append(i)
                    word.append(place)
        made.append((np.ones(len(row)), (row, word), len(texts)))
    width = max(1, len(vocabulary))
    count_NW, count_QW = (csr_array((one, at), shape=(size, width)) for one, at, size in made)
    return count_NW, count_QW


def bm25(count_NW: Any, count_QW: Any, k1: float = 1.5, b: float = 0.75) -> np.ndarray:
    """Okapi BM25 of every document for every query [Q, N], with idf = ln(1 + (N - n + 1/2) / (n + 1/2)).

    >>> n, q = word_counts(["a cat", "a dog"], ["dog"])
    >>> bm25(n, q).astype(float).round(3).tolist()
    [[0.0, 0.693]]
    """
    documents = count_NW.shape[0]
    held_W = np.asarray((count_NW > 0).sum(axis=0)).ravel()
    idf_W = np.log1p((documents - held_W + 0.5) / (held_W + 0.5))
    length_N = np.asarray(count_NW.sum(axis=1)).ravel()
    norm_N = k1 * (1 - b + b * length_N / max(length_N.mean(), 1e-12))
    weight = count_NW.tocoo()
    weight.data = idf_W[weight.coords[1]] * weight.data * (k1 + 1) / (weight.data + norm_N[weight.coords[0]])
    return np.asarray((count_QW @ weight.tocsr().T).todense(), dtype=np.float32)


def tfidf(count_NW: Any, count_QW: Any) -> np.ndarray:
    """Cosine of TF-IDF vectors [Q, N], with smoothed idf = 1 + ln((1 + N) / (1 + n)).

    >>> n, q = word_counts(["a cat", "b dog"], ["a cat"])
    >>> tfidf(n, q).astype(float).round(3).tolist()
    [[1.0, 0.0]]
    """
    held_W = np.asarray((count_NW > 0).sum(axis=0)).ravel()
    idf_W = 1 + np.log((1 + count_NW.shape[0]) / (1 + held_W))
    sides = []
    for count in (count_QW, count_NW):
        weighted = count.multiply(idf_W[None, :]).tocsr()
        length = np.sqrt(np.asarray(weighted.multiply(weighted).sum(axis=1)).ravel())
        sides.append((weighted, np.where(length > 0, length, 1.0)))
    (q, length_Q), (n, length_N) = sides
    return np.asarray((q @ n.T).todense() / length_Q[:, None] / length_N[None, :], dtype=np.float32)

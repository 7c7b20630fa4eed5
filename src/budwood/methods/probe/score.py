"""Scores of probes with intervals over documents, and the baselines that stand beside them.

Shapes: M states of the reported split, U documents.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from budwood.data.squad import question_scores, squad_scores
from budwood.data.task import Row, Task
from budwood.linalg import metrics as measure
from budwood.linalg.ranking import bootstrap_mean
from budwood.methods.probe.side import Side
from budwood.train.baselines import word_answers

DRAWS = 1000


class Truth(Protocol):
    """What should have been said, in which row and document; a `Side` is one."""

    @property
    def label_M(self) -> np.ndarray:
        """Classes."""

    @property
    def document_M(self) -> np.ndarray:
        """Documents, as numbers from 0."""

    @property
    def row_M(self) -> np.ndarray:
        """Rows; those of one row lie together."""


def score(task: Task, side: Truth, guess_M: np.ndarray, seed: int | None = None) -> tuple[float, float, float]:
    """The task's metric with its interval (equal to it where no seed is given)."""
    right_M = guess_M == side.label_M
    if task.kind == "tokens" and task.metric == "f1" and any(n.startswith("B-") for n in task.labels):
        return _ratio(*_entities(task, side, guess_M), seed)
    if task.metric in ("f1", "macro_f1", "mcc"):
        how = measure.mcc if task.metric == "mcc" else lambda a, b: measure.f1(a, b, len(task.labels))
        value = how(guess_M, side.label_M)
        if seed is None:
            return value, value, value
        return value, *measure.bootstrap_interval(how, guess_M, side.label_M, seed, 300)
    hits_U = np.bincount(side.document_M, weights=right_M)
    return _ratio(hits_U, np.bincount(side.document_M), seed)


def _ratio(part_U: np.ndarray, whole_U: np.ndarray, seed: int | None) -> tuple[float, float, float]:
    """Sum over sum, with a percentile interval over resampled documents."""
    value = float(part_U.sum() / max(whole_U.sum(), 1))
    if seed is None:
        return value, value, value
    rng = np.random.default_rng(seed)
    count_DU = rng.multinomial(len(part_U), np.full(len(part_U), 1 / len(part_U)), size=DRAWS)
    low, high = np.quantile((count_DU @ part_U) / np.maximum(count_DU @ whole_U, 1), [0.025, 0.975])
    return value, float(low), float(high)


def _entities(task: Task, side: Truth, guess_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Twice the shared entities and all entities of every document, whose ratio is F1."""
    edge = np.flatnonzero(np.diff(side.row_M)) + 1
    names = np.array(task.labels, dtype=object)
    shared, total = np.zeros((2, int(side.document_M.max()) + 1))
    for where in np.split(np.arange(len(guess_M)), edge):
        given, gold = (measure.entities(list(names[x[where]])) for x in (guess_M, side.label_M))
        shared[side.document_M[where[0]]] += 2 * len(given & gold)
        total[side.document_M[where[0]]] += len(given) + len(gold)
    return shared, total


def span_fields(rows: tuple[Row, ...], answers: dict[str, str], seed: int) -> dict[str, float]:
    """Percentages of exact match and F1, with the interval of F1."""
    fields = squad_scores(rows, answers)
    low, high = bootstrap_mean(100 * question_scores(rows, answers)[1], seed)
    kept = ("exact", "f1", "HasAns_f1", "NoAns_f1", "HasAns_exact")
    return {"low": low, "high": high, **{k: float(fields[k]) for k in kept}}


def majority(task: Task, train: Side, test: Side) -> float:
    """The score of always giving the most frequent training label, or of never answering."""
    if task.kind == "span":
        return 100.0 * sum(not r.answers for r in test.rows) / len(test.rows)
    most = int(np.bincount(train.label_M).argmax())
    return score(task, test, np.full(len(test.label_M), most))[0]


def bag_of_words(task: Task, train: Side, test: Side) -> float:
    """Logistic regression on word counts; for tokens the most frequent label of the word piece."""
    if task.kind == "tokens":
        return score(task, test, _by_type(train, test, len(task.labels)))[0]
    return score(task, test, word_answers(train.rows, test.rows))[0]


def _by_type(train: Side, test: Side, classes: int) -> np.ndarray:
    kinds = [s.stored.encoded.ragged["input_ids"][s.stored.encoded.ragged["target"] != -100] for s in (train, test)]
    size = int(max(k.max() for k in kinds)) + 1
    count_VK = np.zeros((size, classes))
    np.add.at(count_VK, (kinds[0], train.label_M), 1)
    count_VK += 1e-3 * np.bincount(train.label_M, minlength=classes) / len(train.label_M)  # unseen: the majority
    return count_VK.argmax(1)[kinds[1]]


def information(logits_NK: np.ndarray, train_N: np.ndarray, label_N: np.ndarray) -> np.ndarray:
    """Bits that the states add, for every row, to what the shares of the labels tell already."""
    log_NK = logits_NK - np.logaddexp.reduce(logits_NK.astype(np.float64), axis=1, keepdims=True)
    share_K = np.bincount(train_N, minlength=logits_NK.shape[1]) / len(train_N)
    prior_N = np.log(np.maximum(share_K[label_N], 1e-12))
    return (log_NK[np.arange(len(label_N)), label_N] - prior_N) / np.log(2)

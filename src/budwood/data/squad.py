"""Exact match and F1 of answers to SQuAD 2.0 questions, in percent, overall and by answerability.

Shapes: N questions.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from budwood.data.task import Row
from budwood.errors import DataError

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    r"""Lower case, without punctuation and articles, single spaces.

    >>> normalise("The  Duke, of\tNormandy!")
    'duke of normandy'
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def token_f1(gold: Sequence[str], given: Sequence[str]) -> float:
    """F1 of two bags of words; where one is empty, 1 if both are.

    >>> token_f1(["in", "france"], ["france"])
    0.6666666666666666
    """
    if not gold or not given:
        return float(not gold and not given)
    shared = sum((Counter(gold) & Counter(given)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(given), shared / len(gold)
    return 2 * precision * recall / (precision + recall)


def question_scores(rows: Sequence[Row], predictions: Mapping[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Exact match and F1 of every question, 0 to 1, the best over its gold answers [N], [N].

    A prediction that is nothing but an article reads as no answer, as the official rules have it.
    """
    lacking = [r.id for r in rows if r.id not in predictions]
    if lacking:
        raise DataError(
            f"{len(lacking):,} of {len(rows):,} questions have no prediction, the first is '{lacking[0]}'. Give one "
            'answer per question, "" where there is none.'
        )
    exact_N, f1_N = np.zeros(len(rows)), np.zeros(len(rows))
    for n, r in enumerate(rows):
        given = normalise(predictions[r.id])
        words = given.split()
        golds = {g for g in (normalise(text) for text, _ in _answers(r)) if g} or {""}
        exact_N[n] = given in golds
        f1_N[n] = max(token_f1(g.split(), words) for g in golds)
    return exact_N, f1_N


def _answers(row: Row) -> tuple[tuple[str, int], ...]:
    if row.answers is None:
        raise DataError(
            f"Question '{row.id}' comes without answers (a released test file?), so it cannot be scored. "
            "Use a labelled split."
        )
    return row.answers


def best_threshold(score_N: np.ndarray, none_N: np.ndarray, odds_N: np.ndarray) -> tuple[float, float]:
    """The highest mean score that a threshold on the null odds can reach, and the lowest such threshold.

    `score_N` is what a question earns when its prediction is given, `none_N` what it earns when nothing is answered; a
    question is answered where its odds are at most the threshold. One sort; ties are answered together.

    >>> best_threshold(np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.array([-2.0, 3.0]))
    (1.0, -2.0)
    """
    order_N = np.argsort(odds_N, kind="stable")
    sorted_N = odds_N[order_N]
    total_N = none_N.sum() + np.cumsum((score_N - none_N)[order_N])
    last = np.append(sorted_N[1:] != sorted_N[:-1], True)  # only whole groups of equal odds can be answered
    totals = np.concatenate([[none_N.sum()], total_N[last]])
    thresholds = np.concatenate([[sorted_N[0] - 1.0], sorted_N[last]])
    best = int(np.argmax(totals))
    return float(totals[best] / len(score_N)), float(thresholds[best])


def squad_scores(
    rows: Sequence[Row],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    candidates: Mapping[str, str] | None = None,
) -> dict[str, float | int]:
    """The thirteen SQuAD 2.0 fields.

    `null_odds` is the score of "no answer" minus that of the best answer. `best_*` is what the best threshold on the
    odds would give; it is tried on `candidates`, the best answers before any threshold (default: the predictions).
    Without odds there is nothing to tune: answering all or nothing remains.

    >>> r = (Row("q1", "Where?", "In France.", answers=(("France", 3),)), Row("q2", "Who?", "In France.", answers=()))
    >>> squad_scores(r, {"q1": "in France", "q2": ""})["f1"]
    83.33333333333333
    """
    if not rows:
        raise DataError("There is no question to score. Give a split with at least one row.")
    exact_N, f1_N = question_scores(rows, predictions)
    has_N = np.array([bool(r.answers) for r in rows])
    out: dict[str, float | int] = {"exact": _percent(exact_N), "f1": _percent(f1_N), "total": len(rows)}
    for name, chosen in (("HasAns", has_N), ("NoAns", ~has_N)):
        out[f"{name}_exact"] = _percent(exact_N[chosen])
        out[f"{name}_f1"] = _percent(f1_N[chosen])
        out[f"{name}_total"] = int(chosen.sum())
    if candidates is not None:
        exact_N, f1_N = question_scores(rows, candidates)
    odds_N = np.array([0.0 if null_odds is None else _odds(null_odds, r.id) for r in rows])
    for name, score_N in (("exact", exact_N), ("f1", f1_N)):
        best, threshold = best_threshold(score_N, (~has_N).astype(np.float64), odds_N)
        out[f"best_{name}"], out[f"best_{name}_thresh"] = 100 * best, threshold
    return out


def _odds(null_odds: Mapping[str, float], question: str) -> float:
    if question not in null_odds:
        raise DataError(f"Question '{question}' has no null odds. Give one number per question, or none at all.")
    return float(null_odds[question])


def _percent(score_K: np.ndarray) -> float:
    return float(100.0 * score_K.sum() / len(score_K)) if len(score_K) else 0.0

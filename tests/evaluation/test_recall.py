"""Recall of known sources, and habits of scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from budwood.data.task import Row
from budwood.evaluation.recall import found, habits
from budwood.methods.influence.scores import Matrix, writing_scores
from tests.evaluation.conftest import Place


def copies(tuned: Place, path: Path, quality: float) -> Path:
    """Scores of the first 12 training rows as queries: best on itself, `quality` two rows on, noise elsewhere."""
    score_QN = np.random.default_rng(0).normal(size=(12, len(tuned.train_ids)))
    score_QN[np.arange(12), np.arange(12)] += 100
    score_QN[np.arange(12), np.arange(12) + 2] += quality
    with writing_scores(path / "scores", tuned.train_ids[:12], tuned.train_ids) as desk:
        desk.put(Matrix("ekfac", main=True), slice(None), slice(None), score_QN.astype(np.float32))
    return path


def test_sources_are_found(tuned: Place, tmp_path: Path, budwood: Callable[..., Any]) -> None:
    good, bad = copies(tuned, tmp_path / "good", 50.0), copies(tuned, tmp_path / "bad", -50.0)
    sources = tmp_path / "sources.json"
    sources.write_text(json.dumps({tuned.train_ids[i]: [tuned.train_ids[i + 2]] for i in range(12)}))
    words = ["validate", "recall", *tuned.words, "--scores", f"{good},{bad}", "--randomised", bad, "--sources", sources]
    code, out, err = budwood(*words, "--json")
    assert code == 0, err
    first, second = json.loads(out)["results"]
    assert first["recall_at_1"] == first["mrr"] == 1 and second["recall_at_10"] == 0
    assert first["same_class"] < 1  # the row itself, of the same class for sure, does not count
    assert second["randomised"] == 1 and first["randomised"] < 1
    code, out, _ = budwood(*words)
    assert code == 0 and all(column in out for column in ("recall_at_1 ", "recall_at_10", "mrr", "randomised"))


def test_a_query_is_not_its_own_source(tuned: Place, tmp_path: Path, budwood: Callable[..., Any]) -> None:
    scores = copies(tuned, tmp_path / "s", 0.0)
    code, _, err = budwood("validate", "recall", *tuned.words, "--scores", scores)
    assert code == 2 and "No query has a known source" in err


def test_scores_that_are_all_equal_find_nothing() -> None:
    ids = [str(i) for i in range(99)]
    equal = found(np.zeros((2, 99)), [{"0"}, {"98"}], ids, (1, 10))
    assert equal == {"recall_at_1": 0.0, "recall_at_10": 0.0, "mrr": 1 / 50}
    every_copy = np.zeros((1, 99))
    every_copy[0, :3] = 1  # three copies share the first place: one of them is first in any order
    assert found(every_copy, [{"0", "1", "2"}], ids, (1,)) == {"recall_at_1": 1.0, "mrr": 1.0}


def test_sources_can_be_given_and_are_checked(tuned: Place, tmp_path: Path, budwood: Callable[..., Any]) -> None:
    scores = tuned.scores(tmp_path / "s")
    sources = tmp_path / "sources.json"
    sources.write_text(json.dumps({tuned.query_ids[0]: [tuned.train_ids[0]]}))
    words = ["validate", "recall", *tuned.words, "--scores", scores, "--sources", sources]
    code, out, err = budwood(*words, "--json")
    assert code == 0 and json.loads(out)["with_sources"] == 1, err
    sources.write_text(json.dumps({tuned.query_ids[0]: ["stranger"]}))
    code, _, err = budwood(*words)
    assert code == 2 and "no training row" in err
    code, _, err = budwood("validate", "recall", *tuned.words, "--scores", scores)
    assert code == 2 and "No query has a known source" in err


def test_the_same_rows_for_every_query_are_a_bad_sign() -> None:
    train = [Row(str(i), label=i % 2) for i in range(100)]
    queries = [Row("q", label=1)] * 5
    same = habits(np.tile(np.arange(100.0), (5, 1)), queries, train)
    assert same == {"same_class": 1.0, "distinct_in_top": 10 / 50}

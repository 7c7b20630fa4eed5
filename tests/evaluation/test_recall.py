"""Recall of known sources, and habits of scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from budwood.data.task import Row
from budwood.evaluation.recall import habits
from budwood.methods.influence.scores import Matrix, writing_scores
from tests.evaluation.conftest import Place


def copies(tuned: Place, path: Path, quality: float) -> Path:
    """Scores of the first 12 training rows as queries: `quality` on the row itself, noise elsewhere."""
    noise_QN = np.random.default_rng(0).normal(size=(12, len(tuned.train_ids)))
    noise_QN[np.arange(12), np.arange(12)] += quality
    with writing_scores(path / "scores", tuned.train_ids[:12], tuned.train_ids) as desk:
        desk.put(Matrix("ekfac", main=True), slice(None), slice(None), noise_QN.astype(np.float32))
    return path


def test_copies_are_found(tuned: Place, tmp_path: Path, budwood: Callable[..., Any]) -> None:
    good, bad = copies(tuned, tmp_path / "good", 50.0), copies(tuned, tmp_path / "bad", -50.0)
    words = ["validate", "recall", *tuned.words, "--scores", f"{good},{bad}", "--randomised", bad, "--json"]
    code, out, err = budwood(*words)
    assert code == 0, err
    first, second = json.loads(out)["results"]
    assert first["recall_at_1"] == first["mrr"] == 1 and second["recall_at_10"] == 0
    assert first["same_class"] == 1 and second["randomised"] == 1 and first["randomised"] < 1


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

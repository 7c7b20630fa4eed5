"""Scores of other tools in `validate`: imported, they are checked as our own are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.evaluation.conftest import Place


def imported(budwood: Callable[..., Any], tuned: Place, score_QN: np.ndarray, name: str, *more: object) -> Path:
    """A run of `influence import` of a matrix whose rows are the task's queries and training rows in their order."""
    np.save(f"{name}.npy", score_QN)
    data = ["--task", tuned.task, "--text", "body", "--label", "stars", "--data-seed", 7, "--threads", 1]
    words = ["influence", "import", f"{name}.npy", *data, "--name", name, "--progress", "none", "--out", name]
    code, _, err = budwood(*words, *more)
    assert code == 0, err
    return Path(name)


@pytest.fixture
def effects(tuned: Place, tmp_path: Path) -> np.ndarray:
    """effect_QN of a world in which margins are sums over the rows of a subset, written there as its ground truth."""
    rng = np.random.default_rng(0)
    effect_QN = rng.normal(size=(len(tuned.query_ids), len(tuned.train_ids)))
    mask_SN = rng.random((30, effect_QN.shape[1])) < 0.5
    np.save(tmp_path / "masks.npy", mask_SN)
    np.save(tmp_path / "margins.npy", mask_SN @ effect_QN.T)
    return effect_QN


def test_perfect_scores_foresee_everything_and_their_negative_the_opposite(
    tuned: Place, effects: np.ndarray, budwood: Callable[..., Any]
) -> None:
    runs = [
        imported(budwood, tuned, effects, "perfect"),
        imported(budwood, tuned, -effects, "harm"),
        imported(budwood, tuned, -effects, "turned", "--negate"),
        imported(budwood, tuned, np.random.default_rng(1).normal(size=effects.shape), "noise"),
    ]
    words = ["validate", "lds", *tuned.words, "--truth", ".", "--scores", ",".join(map(str, runs))]
    code, out, err = budwood(*words, "--json")
    assert code == 0, err
    found = {r["scores"]: r["lds"] for r in json.loads(out)["results"]}
    assert list(found) == ["perfect", "harm", "turned", "noise"]
    assert found["perfect"] == pytest.approx(1) == found["turned"] and found["harm"] == pytest.approx(-1)
    assert abs(found["noise"]) < 0.3


def test_imported_rows_are_laid_on_a_truth_by_their_ids(
    tuned: Place, effects: np.ndarray, budwood: Callable[..., Any]
) -> None:
    """A truth that lists its rows backwards, as one of `validate lds` may: places alone would match other rows."""
    ids = {"train_ids": tuned.train_ids[::-1], "query_ids": tuned.query_ids[::-1]}
    Path("index.json").write_text(json.dumps(ids))
    for name, flipped in (("masks", np.load("masks.npy")[:, ::-1]), ("margins", np.load("margins.npy")[:, ::-1])):
        np.save(f"{name}.npy", flipped)
    few = imported(budwood, tuned, effects[:5], "few")  # the first queries alone
    code, out, err = budwood("validate", "lds", *tuned.words, "--truth", ".", "--scores", few, "--json")
    assert code == 0, err
    (row,) = json.loads(out)["results"]
    assert row["lds"] == pytest.approx(1)


def test_sources_are_found_by_imported_scores(tuned: Place, tmp_path: Path, budwood: Callable[..., Any]) -> None:
    score_QN = np.random.default_rng(0).normal(size=(6, len(tuned.train_ids)))
    score_QN[np.arange(6), np.arange(6) + 2] = 50
    good = imported(budwood, tuned, score_QN, "good")
    bad = imported(budwood, tuned, score_QN, "bad", "--negate")
    sources = tmp_path / "sources.json"
    sources.write_text(json.dumps({tuned.query_ids[i]: [tuned.train_ids[i + 2]] for i in range(6)}))
    words = ["validate", "recall", *tuned.words, "--scores", f"{good},{bad}", "--sources", sources, "--json"]
    code, out, err = budwood(*words)
    assert code == 0, err
    first, second = json.loads(out)["results"]
    assert (first["scores"], first["recall_at_1"], first["mrr"]) == ("good", 1, 1)
    assert (second["scores"], second["recall_at_10"]) == ("bad", 0)
    assert second["mrr"] == pytest.approx(1 / len(tuned.train_ids))

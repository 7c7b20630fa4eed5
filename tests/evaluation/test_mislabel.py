"""Planted labels, detection figures against known libraries, confident learning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from budwood.config.data import DataConfig
from budwood.config.validate import MislabelConfig
from budwood.data.source import load_task
from budwood.evaluation.detection import confident, detection, leading
from budwood.evaluation.mislabel import plant


def test_auc_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    wrong_N, suspicion_N = rng.random(200) < 0.1, rng.normal(size=200).round(1)
    found = detection(suspicion_N, wrong_N)
    assert found["auc"] == pytest.approx(roc_auc_score(wrong_N, suspicion_N), abs=1e-12)


def test_perfect_and_blind_suspicion() -> None:
    wrong_N = np.arange(100) < 10
    perfect = detection(-np.arange(100.0), wrong_N)
    assert perfect["auc"] == 1 and perfect["found_in_top_10"] == 1 and perfect["found_in_top_20"] == 1
    assert perfect["detection_area"] == pytest.approx(np.trapezoid(leading(-np.arange(100.0), wrong_N)) / 100)
    assert detection(np.zeros(100), wrong_N)["auc"] == 0.5
    assert detection(np.full(100, np.nan), wrong_N)["auc"] == 0.5


def test_confident_learning_finds_confident_contradictions() -> None:
    chance_NK = np.array([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.2, 0.8], [0.05, 0.95], [0.45, 0.55]])
    label_N = np.array([0, 0, 1, 1, 0, 0])
    assert np.argsort(-confident(chance_NK, label_N))[0] == 4
    assert confident(chance_NK, label_N)[4] > 2 > confident(chance_NK, label_N)[5]  # not confident enough to be first


def test_planted_labels_are_as_many_as_asked_and_all_else_stays(tmp_path: Path) -> None:
    task = load_task(DataConfig(task="tiny-topic", limit=60, limit_eval=20))
    sheet, wrong_N = plant(task, MislabelConfig(task="tiny-topic", flip=0.1), tmp_path / "noisy")
    noisy = load_task(DataConfig(task=str(sheet)))
    assert wrong_N.sum() == 6 and noisy.labels == task.labels
    before, after = task.rows("train"), noisy.rows("train")
    assert all(b.id.endswith(a.id) for a, b in zip(before, after, strict=True)) and [r.text for r in before] == [
        r.text for r in after
    ]
    assert [a.label != b.label for a, b in zip(before, after)] == wrong_N.tolist()
    assert [(r.text, r.label) for r in noisy.rows("test")] == [(r.text, r.label) for r in task.rows("test")]
    assert json.loads((tmp_path / "noisy" / "planted.json").read_text()) == [r.id for r, w in zip(before, wrong_N) if w]


def test_mislabel_end_to_end(model: Path, reviews: Path, budwood: Callable[..., Any]) -> None:
    pytest.importorskip("budwood.methods.influence.itself", reason="self-influence is not there")
    words = "--text body --label stars --epochs 2 --batch-size 8 --lr 3e-3 --threads 1 --progress none --folds 2"
    code, out, err = budwood("validate", "mislabel", model, "--task", reviews, *words.split(), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [r["scores"] for r in found["results"]] == ["self:ekfac", "self:identity", "loss", "margin", "confident"]
    assert all(0 <= r["auc"] <= 1 and 0 <= r["found_in_top_20"] <= 1 for r in found["results"])
    assert found["planted"] == round(0.1 * found["n"])
    assert (Path(found["run"]) / "figures" / "detection.png").exists()


@pytest.mark.parametrize(
    ("words", "says"), [(["--flip", "0.7"], "flip"), (["--by", "magic"], "no strategy of self-influence")]
)
def test_bad_input(reviews: Path, budwood: Callable[..., Any], words: list[str], says: str) -> None:
    code, _, err = budwood("validate", "mislabel", "tiny-bert", "--task", reviews, *words)
    assert code == 2 and says in err


def test_tasks_without_labels_are_refused(budwood: Callable[..., Any]) -> None:
    code, _, err = budwood(
        "validate", "mislabel", "tiny-bert", "--task", "tiny-text", "--limit", 20, "--progress", "none"
    )
    assert code == 2 and "tasks with labels" in err

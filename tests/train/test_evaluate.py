"""Evaluation of every kind of task on tiny models: hand-counted metrics, invariance to batch size, records, modes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from budwood.config.finetune import ReadConfig
from budwood.data.task import Row, Task, Template
from budwood.models.load import HeadSpec, load
from budwood.models.reading import Reading, reading
from budwood.models.reference import resolve
from budwood.train.evaluate import evaluate, goodness, softmax
from tests.cases import write_model


def words(rng: np.random.Generator, low: int = 3, high: int = 9) -> str:
    return " ".join(f"w{i}" for i in rng.integers(5, 40, rng.integers(low, high)))


def make_task(kind: str) -> Task:
    rng = np.random.default_rng(1)
    rows = []
    for n in range(13):
        text = words(rng)
        given: dict[str, Any] = {"text": text}
        if kind == "label":
            given["label"] = int(rng.integers(3))
        elif kind == "regression":
            given["label"] = float(rng.normal())
        elif kind == "tokens":
            given = {
                "words": tuple(text.split()),
                "label": tuple(int(x) for x in rng.integers(0, 3, len(text.split()))),
            }
        elif kind == "span":
            context = words(rng, 6, 12)
            first = context.split()[2]
            given["pair"] = context
            given["answers"] = ((first, context.index(first)),) if n % 3 else ()
        rows.append(Row(f"t/{n}", **given))
    template = Template("{text} w5 {mask}", ("w6", "w7", "w8"))
    labels = ("a", "b", "c") if kind in ("label", "tokens") else ()
    metric = {"regression": "pearson", "span": "f1", "text": "lm_loss"}.get(kind, "accuracy")
    return Task(kind, kind, {"train": tuple(rows), "validation": tuple(rows)}, labels, metric, template)  # type: ignore[arg-type]


MODES = [
    ("label", "head"),
    ("label", "prompt"),
    ("regression", "head"),
    ("tokens", "head"),
    ("span", "span"),
    ("text", "mlm"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "bert", "bert", "lm")


def read_as(directory: Path, kind: str, mode: str) -> Reading:
    task = make_task(kind)
    loaded = load(resolve(str(directory)), mode, HeadSpec(kind, task.labels), seed=0)  # type: ignore[arg-type]
    return reading(loaded, task, ReadConfig(), mode, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_batch_size_and_order_do_not_matter(directory: Path, kind: str, mode: str) -> None:
    read = read_as(directory, kind, mode)
    rows = read.task.rows("train")
    whole = evaluate(read, rows, ReadConfig())
    single = evaluate(read, rows, ReadConfig(), most=1)
    assert whole.metrics["n"] == 13 and whole.metrics["metric"] == read.task.metric
    for name, value in whole.metrics.items():
        if isinstance(value, float):
            assert single.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert whole.records["id"] == [r.id for r in rows] == single.records["id"]
    assert all(len(column) == 13 for column in whole.records.values())
    if mode != "mlm":  # masks belong to a row's place, so only there order may matter
        turned = evaluate(read, rows[::-1], ReadConfig())
        np.testing.assert_allclose(
            turned.records["loss" if "loss" in turned.records else "f1"][::-1],
            whole.records["loss" if "loss" in whole.records else "f1"],
            rtol=1e-4,
            atol=1e-5,
        )


def test_label_metrics_are_those_of_the_records(directory: Path) -> None:
    read = read_as(directory, "label", "head")
    found = evaluate(read, read.task.rows("train"), ReadConfig())
    right = [a == b for a, b in zip(found.records["label"], found.records["predicted"])]
    assert found.metrics["accuracy"] == pytest.approx(np.mean(right)) and found.records["correct"] == right
    assert found.metrics["loss"] == pytest.approx(np.mean(found.records["loss"]), rel=1e-6)
    p = np.array([found.records[f"p_{k}"] for k in "abc"]).T
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-9)
    truth = [p[i]["abc".index(label)] for i, label in enumerate(found.records["label"])]
    np.testing.assert_allclose(-np.log(truth), found.records["loss"], rtol=1e-4)
    assert found.metrics["accuracy_low"] < found.metrics["accuracy"] < found.metrics["accuracy_high"]


def test_gradients_modes_and_weights_are_left_alone(directory: Path) -> None:
    read = read_as(directory, "label", "head")
    read.loaded.model.train()
    before = {n: p.clone() for n, p in read.loaded.model.named_parameters()}
    evaluate(read, read.task.rows("train"), ReadConfig())
    assert read.loaded.model.training and torch.is_grad_enabled()
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in read.loaded.model.named_parameters())


def test_lost_words_count_as_wrong(directory: Path) -> None:
    read = read_as(directory, "tokens", "head")
    rows = read.task.rows("train")
    short = replace(read, encoding=replace(read.encoding, max_length=5))
    found = evaluate(short, rows, ReadConfig())
    total = sum(len(r.words or ()) for r in rows)
    assert found.metrics["words"] == total and found.metrics["words_lost"] == total - sum(
        min(3, len(r.words or ())) for r in rows
    )
    assert found.metrics["accuracy"] == pytest.approx(sum(found.records["right"]) / total)


def test_goodness_turns_losses_round() -> None:
    assert (
        goodness({"metric": "lm_loss", "score": 2.0}) == -2.0 and goodness({"metric": "accuracy", "score": 0.5}) == 0.5
    )
    np.testing.assert_allclose(softmax(np.array([[1000.0, 1000.0]])), [[0.5, 0.5]])

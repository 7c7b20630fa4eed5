"""A PEFT adapter scored by its own matrices, or by those it is merged into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from budwood.config.influence import FitConfig
from budwood.data.task import Row, Task
from budwood.errors import ConfigError, ModelError
from budwood.methods.influence.factors import Factors, Setting
from budwood.methods.influence.scores import Scores
from budwood.methods.influence.workshop import open_shop, settings_for
from budwood.store.files import read_json
from budwood.studies.api import run
from tests.cases import Case, write_model
from tests.methods.influence.toys import dense_scores, gradients

peft = pytest.importorskip("peft")
OWN = ("query.lora_A", "query.lora_B", "classifier.modules_to_save")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Task]:
    """An adapter of rank 2 with a head of its own, as peft writes it, on a small classifier; all its numbers drawn."""
    place = tmp_path_factory.mktemp("adapter")
    base = write_model(place / "base", "bert", "head")
    model = AutoModelForSequenceClassification.from_pretrained(base)
    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"], task_type="SEQ_CLS")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for p in adapted.parameters():
            if p.requires_grad:
                p.normal_(std=0.5)
    adapted.save_pretrained(place / "lora")
    settings = place / "lora" / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "base_model_name_or_path": str(base)}))
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in rng.integers(3, 30, rng.integers(3, 8))) for _ in range(12)]
    rows = tuple(Row(f"r{i}", text, None, i % 3) for i, text in enumerate(texts))
    labels = tuple(str(v) for v in model.config.id2label.values())
    return str(place / "lora"), Task("toy", "label", {"train": rows[:8], "validation": rows[8:]}, labels)


def test_an_adapters_own_matrices_are_scored(adapter: Any, tmp_path: Path) -> None:
    model, task = adapter
    wish = {"threads": 1, "damping": ("0.1mean",), "strategy": ("ekfac", "identity"), "fisher": "empirical"}
    wish |= {"query_split": "train", "queries": ("3",)}
    own = run("influence score", model, task, {**wish, "adapter": "own", "out": tmp_path / "own"})
    modules = read_json(own.run / "factors" / "factors.json")["modules"]
    assert len(modules) == 7 and all(any(part in m for part in OWN) for m in modules)  # three layers, and a head
    shop = open_shop(settings_for(FitConfig(task="toy", adapter="own"), model), task)
    objective = shop.read.objective
    case = Case(shop.model, objective, shop.train)
    train = gradients(case, shop)
    asked = {k: v[:3] for k, v in gradients(case, shop, lambda z, t: -objective.margin(z, t)).items()}
    factors, found = Factors.open(own.run), Scores.open(own.run)
    for setting in (Setting("ekfac", "0.1mean"), Setting("identity")):
        want = dense_scores(asked, train, factors, setting) / len(shop.train)
        got = found.whole(found.find(setting.strategy))
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())
    merged = run("influence score", model, task, {**wish, "out": tmp_path / "merged"})
    assert not any("lora" in m for m in read_json(merged.run / "factors" / "factors.json")["modules"])


def test_baselines_count_the_adapters_own_matrices_too(adapter: Any, tmp_path: Path) -> None:
    model, task = adapter
    wish = {
        "threads": 1,
        "strategy": ("identity", "tracin"),
        "query_split": "train",
        "queries": ("3",),
        "adapter": "own",
    }
    found = Scores.open(run("influence score", model, task, {**wish, "out": tmp_path / "own"}).run)
    want, got = (found.whole(found.find(s)) for s in ("identity", "tracin"))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())  # one checkpoint: the same sums


def test_an_adapter_of_prompts_is_refused(adapter: Any, tmp_path: Path) -> None:
    model, task = adapter
    base = AutoModelForSequenceClassification.from_pretrained(_base(model))
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "prompts")
    with pytest.raises(ModelError, match="adapter of learned prompts"):
        run("influence fit", str(tmp_path / "prompts"), task, {"threads": 1, "out": tmp_path / "x"})


def _base(model: str) -> str:
    return str(json.loads((Path(model) / "adapter_config.json").read_text())["base_model_name_or_path"])


def test_factors_of_the_merged_model_are_not_those_of_the_adapter(adapter: Any, tmp_path: Path) -> None:
    model, task = adapter
    fitted = run("influence fit", model, task, {"threads": 1, "out": tmp_path / "fit"})
    wish = {"threads": 1, "adapter": "own", "factors": fitted.run, "out": tmp_path / "scores"}
    with pytest.raises(ConfigError, match="model_hash"):
        run("influence score", model, task, wish)


def test_a_whole_model_has_no_adapter(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    with pytest.raises(ConfigError, match="is a whole model, not a PEFT adapter"):
        run("influence fit", model, task, {"threads": 1, "adapter": "own", "out": tmp_path / "x"})

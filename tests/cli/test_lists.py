"""Lists of what is at hand, the doctor, and the Python door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import budwood as bw
from budwood.errors import ConfigError, ModelError


def test_tasks_and_their_rows(budwood: Any, tmp_path: Path) -> None:
    (tmp_path / "data" / "glue" / "SST-2").mkdir(parents=True)
    code, out, _ = budwood("tasks", "--data-dir", "data", "--json")
    rows = {r["task"]: r for r in json.loads(out)}
    assert code == 0 and rows["tiny-qa"]["where"] == "shipped" and rows["sst2"]["where"] == "data/glue/SST-2"
    assert rows["rte"]["where"] == "hub nyu-mll/glue"
    code, out, _ = budwood("tasks", "tiny-sentiment")
    assert code == 0 and "negative" in out and "[MASK]" in out
    assert budwood("tasks", "tiny-sentment")[0] == 2


def test_models_lists_shipped_ones_and_runs(budwood: Any, settings: list[str]) -> None:
    budwood(*settings, "--max-steps", "1")
    code, out, _ = budwood("models", "--json")
    rows = {r["model"]: r for r in json.loads(out)}
    assert code == 0 and rows["tiny-bert"]["type"] == "bert" and rows["tiny-gpt"]["type"] == "gpt2"
    assert [r["where"] for m, r in rows.items() if m.startswith("runs/")] == ["run"]


@pytest.mark.parametrize("family", ["tiny-bert", "tiny-gpt"])
def test_doctor_finds_nothing(budwood: Any, family: str) -> None:
    code, out, _ = budwood("doctor", family, "--json")
    rows = {r["check"]: r["result"] for r in json.loads(out)}
    assert code == 0 and set(rows.values()) == {"ok"} and {"padding", "deterministic", "gradients"} <= set(rows)


def test_doctor_tells_a_model_that_reads_padding(budwood: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import budwood.models.objective as objective

    honest = objective.model_inputs
    monkeypatch.setattr(
        objective, "model_inputs", lambda m, i: {k: v for k, v in honest(m, i).items() if k != "attention_mask"}
    )
    code, out, _ = budwood("doctor", model, "--json")
    rows = {r["check"]: r["result"] for r in json.loads(out)}
    assert code == 2 and rows["padding"] == "FAILED" and rows["deterministic"] == "ok"


def test_python_functions_take_names_results_and_models(
    model: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForMaskedLM

    monkeypatch.chdir(tmp_path)
    task = bw.task(str(reviews), text="body", label="stars")
    loaded = AutoModelForMaskedLM.from_pretrained(model)
    by_name = bw.finetune(str(model), task, max_steps=3, lr=1e-3, threads=1)
    by_object = bw.finetune(loaded, task, max_steps=3, lr=1e-3, threads=1)
    assert by_name.metrics["loss"] == by_object.metrics["loss"] and by_name.fresh
    scored = bw.evaluate(by_name, task, threads=1)
    assert scored.metrics["accuracy"] == by_name.metrics["accuracy"] and len(scored.table) == scored.metrics["n"]
    assert not bw.finetune(str(model), task, max_steps=3, lr=1e-3, threads=1).fresh
    with pytest.raises(ConfigError, match="Did you mean 'epochs'"):
        bw.finetune(str(model), task, epoch=1)
    with pytest.raises(ConfigError, match="max_steps"):
        bw.finetune(str(model), task, max_steps=0)
    with pytest.raises(ModelError, match="is no model"):
        bw.finetune(3, task)

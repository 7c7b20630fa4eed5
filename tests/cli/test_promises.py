"""Settings have an effect or are refused; what a run knows is used by the next verb; broken places only cost time."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import budwood as bw
from budwood.errors import ConfigError, StoreError
from tests.cases import write_model
from tests.cli.conftest import parsed


def test_shots_and_limits_apply_to_a_task_object(model: Path, reviews: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    task = bw.task(str(reviews), text="body", label="stars")
    tuned = bw.finetune(str(model), task, shots=4, limit_eval=5, max_steps=2, threads=1)
    assert tuned.metrics["train_rows"] == 8 and tuned.metrics["n"] == 5 and tuned.metrics["limited"]
    with pytest.raises(ConfigError, match="'label' has no effect"):
        bw.finetune(str(model), task, label="stars")
    with pytest.raises(ConfigError, match="command line only"):
        bw.finetune(str(model), task, dry_run=True)
    with pytest.raises(ConfigError, match="--momentum belongs to --optimizer sgd"):
        bw.finetune(str(model), task, momentum=0.9)
    assert bw.finetune(str(model), task, freeze="embeddings", max_steps=1, threads=1).metrics["trained"] > 0
    with pytest.raises(StoreError, match="no figure 'nothing'"):
        tuned.plot("nothing")


def test_changed_rows_are_noticed_with_seeds(budwood: Any, settings: list[str], reviews: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    shutil.copy(reviews, own)
    words = [w if w != str(reviews) else str(own) for w in settings]
    assert budwood(*words, "--seeds", "1,2", "--out", "s")[0] == 0
    rows = list(csv.reader(own.open()))
    with own.open("w", newline="") as f:
        csv.writer(f).writerows(rows[:-30])
    code, _, err = budwood(*words, "--seeds", "1,2", "--out", "s")
    assert code == 2 and "rows:" in err


@pytest.mark.parametrize(
    "options",
    [
        ["--mode", "prompt", "--template", "{text} w9 {mask}", "--label-words", "w5,w6"],
        ["--pool", "mask", "--template", "{text} {mask}"],
        ["--pool", "mean"],
    ],
)
def test_evaluate_reads_a_run_as_it_was_trained(
    budwood: Any, settings: list[str], reviews: Path, options: list[str]
) -> None:
    code, out, err = budwood(*settings, *options, "--out", "r", "--json")
    assert code == 0, err
    task = [
        "--task",
        str(reviews),
        "--text",
        "body",
        "--label",
        "stars",
        "--threads",
        "1",
        "--progress",
        "none",
        "--json",
    ]
    code, scored, err = budwood("evaluate", "r", *task)
    assert code == 0, err
    assert parsed(scored)["loss"] == pytest.approx(parsed(out)["loss"], abs=1e-6)


def test_a_file_that_lacks_a_class_is_scored_with_the_models_labels(
    budwood: Any, settings: list[str], tmp_path: Path
) -> None:
    assert budwood(*settings, "--out", "r")[0] == 0
    (tmp_path / "good.csv").write_text("body,stars\n" + "w7 w8,good\n" * 5)
    words = ["--task", "x", "--test-file", "good.csv", "--text", "body", "--label", "stars", "--threads", "1", "--json"]
    code, out, err = budwood("evaluate", "r", *words)
    assert code == 0, err
    assert parsed(out)["n"] == 5
    (tmp_path / "odd.csv").write_text("body,stars\nw7 w8,odd\nw7,even\n")
    code, _, err = budwood("evaluate", "r", *[w.replace("good.csv", "odd.csv") for w in words])
    assert code == 2 and "even, odd" in err and "bad, good" in err


def test_runs_of_recipes_are_listed_and_can_be_named(budwood: Any, settings: list[str], reviews: Path) -> None:
    Path("r.yaml").write_text(
        f"defaults: {{task: '{reviews}', text: body, label: stars, threads: 1, progress: none}}\n"
        f"steps: [{{id: tuned, verb: finetune, model: '{settings[1]}', steps: 2}}]\n".replace(
            "steps: 2", "max_steps: 2"
        )
    )
    assert budwood("recipe", "r.yaml")[0] == 0
    rows = json.loads(budwood("runs", "--json")[1])
    assert [r["run"] for r in rows] == ["runs/recipe-r/tuned"]
    task = ["--task", str(reviews), "--text", "body", "--label", "stars", "--threads", "1"]
    assert budwood("evaluate", "run:recipe-r/tuned", *task)[0] == 0
    Path("r.yaml").write_text(Path("r.yaml").read_text().replace("max_steps: 2", "max_steps: 3"))
    assert budwood("recipe", "r.yaml")[0] == 2 and budwood("recipe", "r.yaml", "--overwrite")[0] == 0
    Path("r.yaml").write_text("defaults: {lerning_rate: 1}\n" + Path("r.yaml").read_text().split("\n", 1)[1])
    assert "no step has the setting 'lerning_rate'" in budwood("recipe", "r.yaml")[2]


def test_a_cache_that_cannot_be_used_only_costs_time(
    budwood: Any, settings: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("BUDWOOD_CACHE", str(cache))
    assert budwood(*settings, "--out", "a")[0] == 0
    for file in cache.rglob("*.safetensors"):
        file.write_bytes(b"garbage")
    assert budwood(*settings, "--out", "b")[0] == 0
    shutil.rmtree(cache)
    cache.write_text("a file where the cache should be")
    assert budwood(*settings, "--out", "c")[0] == 0
    files = [Path(x, "metrics.json").read_bytes() for x in "abc"]
    assert files[0] == files[1] == files[2]


def test_disk_full_while_weights_are_written(budwood: Any, settings: list[str], monkeypatch: Any) -> None:
    from safetensors import SafetensorError

    def full(*given: Any, **also: Any) -> None:
        raise SafetensorError(
            "Error while serializing: IoError(Os { code: 28 }): No space left on device (os error 28)"
        )

    monkeypatch.setattr("transformers.BertForSequenceClassification.save_pretrained", full)
    code, _, err = budwood(*settings, "--out", "r")
    assert code == 2 and "No space left while writing r/model" in err
    monkeypatch.undo()


def test_settings_without_effect_are_refused(budwood: Any, settings: list[str]) -> None:
    for extra, word in (
        (["--momentum", "0.9"], "belongs to --optimizer sgd"),
        (["--eval-steps", "3"], "--checkpoint best"),
        (["--template", "{text} {mask}"], "no effect with --mode head"),
    ):
        code, _, err = budwood(*settings, *extra)
        assert code == 2 and word in err
    code, _, err = budwood("evaluate", settings[1], "--task", "tiny-topic", "--limit", "5")
    assert code == 2 and "--limit-eval" in err


def test_notes_of_the_reader_reach_the_results(budwood: Any, settings: list[str]) -> None:
    result = parsed(budwood(*settings, "--json")[1])
    assert "80" in json.dumps(result["notes"])


def test_a_model_whose_padding_differs_from_its_tokenizers(tmp_path: Path) -> None:
    """Causal classifiers look for the last token by the configuration's padding id."""
    import numpy as np
    import torch

    from budwood.config.finetune import ReadConfig
    from budwood.data.task import Row, Task
    from budwood.models.load import HeadSpec, load
    from budwood.models.reading import reading
    from budwood.models.reference import resolve

    directory = write_model(tmp_path / "llama", "llama", "lm")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "pad_token_id": 9}))
    loaded = load(resolve(str(directory)), "head", HeadSpec("label", ("a", "b")))
    rows = (Row("0", "w7 w8", label=0), Row("1", "w7 w8 w10 w11 w12", label=1))
    read = reading(loaded, Task("t", "label", {"train": rows}, ("a", "b")), ReadConfig(), "head", 0)
    features = read.encode(rows)
    with torch.no_grad():
        both = read.objective.logits(loaded.model, read.feed(features)(np.array([0, 1])))
        alone = read.objective.logits(loaded.model, read.feed(features)(np.array([0])))
    torch.testing.assert_close(both[:1], alone, rtol=1e-4, atol=1e-5)


def test_models_are_readable_by_others(budwood: Any, settings: list[str]) -> None:
    assert budwood(*settings, "--out", "r", "--max-steps", "1")[0] == 0
    mask = os.umask(0)
    os.umask(mask)
    assert Path("r/model/model.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask

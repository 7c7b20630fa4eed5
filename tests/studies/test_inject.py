"""A whole study in small: every way, carried on after a stop, the same bytes; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import budwood as bw
from budwood.cli.inject import told
from budwood.config.inject import InjectConfig
from budwood.data.task import Row, Task
from budwood.errors import ConfigError, ModelError
from budwood.studies import inject as study
from tests.cases import write_model
from tests.interrupt import interrupted

STEPS: dict[str, Any] = {
    "max_steps": 3,
    "threads": 1,
    "keep_steps": 2,
    "limit_eval": 12,
    "keep_rows": 24,
    "batch_size": 4,
}


def texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in rng.integers(5, 40, 7)) for _ in range(count)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny masked LM, running text, and two labelled files of made-up words."""
    root = tmp_path_factory.mktemp("inject")
    write_model(root / "m", "bert", "lm")
    for name, seed in (("new", 1), ("old", 2)):
        lines = [f"{t},{['no', 'yes'][i % 2]}" for i, t in enumerate(texts(60, seed))]
        (root / f"{name}.csv").write_text("text,label\n" + "\n".join(lines) + "\n")
    (root / "plain.txt").write_text("\n".join(texts(60, 3)) + "\n")
    return root


@pytest.fixture
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def run(new: str | Task, keep: str, out: str, **more: Any) -> Any:
    return bw.inject("m", new, keep=keep, out=out, **{**STEPS, **more})


def test_a_head_task_with_a_kept_head_task(there: Path) -> None:
    result = run("new.csv", "old.csv", "heads", strengths=(10.0,), retain="none,ewc", seeds=(0, 1))
    m = result.metrics
    assert len(m["cells"]) == 2 * 2 and len(m["groups"]) == 2 and m["seeds"] == [0, 1]
    assert set(m["hypervolume"]) == {"none", "ewc"} and set(m["hypervolume"]["ewc"]) == {"0", "1"}
    assert m["front"] and m["knee"]["reason"] and m["reference"]["is"] == "the commonest label"
    ewc = [c for c in m["cells"] if c["retain"] == "ewc"]
    assert all(c["new"]["ewc_effective"] > 0 for c in ewc) and m["base"]["new"] is None
    assert (result.run / "figures" / "front.svg").exists()
    assert (result.run / "cells" / "ewc-10-seed1" / "new" / "model" / "model.safetensors").exists()
    words = told(m, result.cost)
    assert "new error" in words and "old.csv error" in words  # ranges over seeds
    assert "Hypervolume by seed" in words and ("Knee (" in words or "No knee: " in words)


def test_text_is_kept_by_its_loss_and_a_stopped_study_carries_on(there: Path) -> None:
    rows = tuple(Row(f"t{i}", t, label=i % 2) for i, t in enumerate(texts(40, 5)))
    from budwood.data.task import Template

    words = Template(masked="{text} {mask}", words=("w7", "w8"))
    task = Task("asked", "label", {"train": rows[:28], "validation": rows[28:]}, ("no", "yes"), template=words)
    more: dict[str, Any] = {"mode": "prompt", "strengths": (5.0,), "retain": "none,ewc,recadam,replay"}
    whole = run(task, "plain.txt", "whole", **more)
    assert {c["retain"] for c in whole.metrics["cells"]} == {"none", "ewc", "recadam", "replay"}
    assert whole.metrics["base"]["kept"]["plain.txt"]["metric"] == "lm_loss"
    with interrupted(study, "run_verb", 5):
        run(task, "plain.txt", "stopped", **more)
    again = run(task, "plain.txt", "stopped", **more)
    clean = lambda m: json.dumps(m).replace("stopped", "whole")
    assert clean(again.metrics) == clean(whole.metrics)
    assert not run(task, "plain.txt", "stopped", **more).fresh


def test_what_cannot_be_is_refused(there: Path) -> None:
    with pytest.raises(ConfigError, match="language-model loss"):
        run("new.csv", "plain.txt", "r1")
    with pytest.raises(ConfigError, match="--mode span does not fit a task of kind 'label'. Modes that do: head"):
        run("new.csv", "old.csv", "r0", mode="span")
    assert not (there / "r0").exists() and not (there / "r1").exists()  # refused before anything was made
    with pytest.raises(ConfigError, match="the new skill itself"):
        run("new.csv", "new.csv", "r2")
    for strength in (-1.0, float("nan"), float("inf"), 0.0):
        with pytest.raises(ConfigError, match="strengths must be above 0 and finite"):
            run("new.csv", "old.csv", "r3", strengths=(strength,))
    with pytest.raises(ConfigError, match="use --retain and --strengths"):
        run("new.csv", "old.csv", "r4", l2_to_base=1.0)
    with pytest.raises(ConfigError, match="Nothing is left to compare"):
        run("new.csv", "old.csv", "r5", retain="replay")
    write_model(there / "bare", "bert", "backbone")
    with pytest.raises(ModelError, match="no language-model head"):
        bw.inject("bare", "arithmetic", keep="plain.txt", out="r6", **STEPS)


def test_shared_rows_are_counted(there: Path) -> None:
    lines = (there / "new.csv").read_text().splitlines()
    (there / "twin.csv").write_text(
        "\n".join([lines[0], *lines[1:30], *(there / "old.csv").read_text().splitlines()[1:]])
    )
    result = run("new.csv", "twin.csv", "shared", retain="none", keep_rows=8)  # counted whether in use or not
    assert "29 rows of 'twin.csv' are also in 'new'" in " ".join(result.metrics["warnings"].values())
    words = told(result.metrics, result.cost)
    assert "Hypervolume" not in words and "twin.csv error  " not in words  # plain training alone, one seed: no ranges


def test_every_way_trains_with_its_own_hold_alone() -> None:
    told = {"task": "arithmetic", "keep": ("tiny-text",), "anneal": 0.2, "anneal_at": 0.5}
    cfg = InjectConfig(**told, retain=("none", "ewc", "l2", "recadam", "replay"))
    order = {"kinds": {"tiny-text": "text", "other": "text", "grammar": "label"}, "fishers": ["f"]}
    made = {w: study._training(cfg, study.Cell(w, 0.1, 0), order) for w in cfg.retain}
    holds = ("ewc", "ewc_strength", "l2_to_base", "anneal", "anneal_at", "replay")
    assert {w: {k: v for k, v in s.items() if k in holds} for w, s in made.items()} == {
        "none": {},
        "ewc": {"ewc": (Path("f"),), "ewc_strength": 0.1},
        "l2": {"l2_to_base": 0.1},
        "recadam": {"l2_to_base": 0.1, "anneal": 0.2, "anneal_at": 0.5},
        "replay": {"replay": "tiny-text,other"},
    }
    with pytest.raises(ValueError, match="--anneal belongs to --retain recadam"):
        InjectConfig(task="arithmetic", keep=("tiny-text",), anneal=0.2)


def test_a_correlation_of_nothing_is_the_trivial_answer_and_has_an_interval(tmp_path: Path) -> None:
    table = pandas.DataFrame({"label": ["a", "b"] * 50, "predicted": ["a", "b"] * 40 + ["b", "a"] * 10})
    table.to_parquet(tmp_path / "records.parquet")
    low, high = study._interval({"metric": "mcc"}, tmp_path)
    assert low < 0.6 < high

"""Studies of grafts run from end to end on the shipped model, with next to no training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import budwood as bw
from budwood.config.data import DataConfig
from budwood.config.finetune import FinetuneConfig
from budwood.config.graft import GraftStudyConfig
from budwood.data.source import load_task
from budwood.errors import ConfigError
from budwood.methods.finetune import _replays
from budwood.models.load import load
from budwood.models.reference import resolve
from budwood.params.graft import Graft
from budwood.params.tree import named
from budwood.store.files import read_json
from budwood.studies import grafting
from budwood.studies.api import run
from budwood.studies.recipe import Wishes, commands, read_recipe

SMALL = {"shots": 4, "limit_eval": 12, "max_steps": 2, "threads": 1, "tasks": "tiny-sentiment,tiny-topic"}


def test_continual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("graft continual", "tiny-bert", "", {**SMALL, "select": "movement"})
    m = result.metrics
    assert m["forgotten_known"] == 0.0  # stored grafts do not change
    assert [len(row) for row in m["sequential"]] == [2, 2]
    assert m["known"][1][0] == m["known"][0][0] and (result.run / "figures" / "forgetting-sequential.png").exists()
    assert not run("graft continual", "tiny-bert", "", {**SMALL, "select": "movement"}).fresh
    other = run("graft continual", "tiny-bert", "", {**SMALL, "select": "movement", "learning_rate": 0.01})
    assert other.metrics["sequential"] != m["sequential"]
    tuned = read_json(other.run / "steps" / "on-1" / "metrics.json")
    assert tuned["learning_rate"] == 0.01


def test_multitask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    m = run("graft multitask", "tiny-bert", "", {**SMALL, "select": "first-order"}).metrics
    assert [m["overlap"][i][i] for i in range(2)] == [1.0, 1.0] and len(m["gain"]) == 2
    with pytest.raises(ConfigError, match="heads of their own"):
        run("graft multitask", "tiny-bert", "", {**SMALL, "mode": "head"})


def test_tasks_with_heads_of_their_own_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grafting, "step", lambda *a, **k: pytest.fail("something was trained"))
    with pytest.raises(ConfigError, match="heads of their own"):
        run("graft continual", "tiny-bert", "", {**SMALL, "mode": "head"})


def test_tasks_that_ride_along_are_as_small_as_the_first() -> None:
    loaded = load(resolve("tiny-bert"), "prompt")
    cfg = FinetuneConfig(task="tiny-sentiment", mode="prompt", shots=4, replay="tiny-topic,tiny-text", data_seed=0)
    topic, text = _replays(cfg, loaded)
    assert len(topic.feed.lengths_N) == 4 * len(load_task(DataConfig(task="tiny-topic")).labels)
    assert len(text.feed.lengths_N) > 100  # text has no classes to draw shots from


def test_localise_trains_inside_the_graft_of_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, dict[str, Any]] = {}

    def step(session: Any, name: str, verb: str, models: Any, **settings: Any) -> Any:
        made[name] = settings
        score = {"score": 0.5}
        curve = [{"select": "movement", "fraction": 0.01, "recovered": 0.5}]
        metrics = {
            "file": f"{name}.graft",
            "curve": curve,
            "score": 0.5,
            **dict.fromkeys(("base", "tuned", "graft"), score),
        }
        return SimpleNamespace(metrics=metrics, run=Path(name))

    monkeypatch.setattr(grafting, "step", step)
    cfg = GraftStudyConfig(tasks=("toy",))
    found = grafting.localise(SimpleNamespace(cfg=cfg, models=[SimpleNamespace(text="m")]))  # type: ignore[arg-type]
    inside = {k: v["inside"] for k, v in made.items() if "inside" in v}
    assert inside == {f"toy-{v}-inside": Path(f"toy-{v}-graft.graft") for v in grafting.VARIANTS}
    named_rows = [r["tuning"] for r in found["results"]]
    assert named_rows == [*grafting.VARIANTS, "bitfit", *(f"inside the graft of {v}" for v in grafting.VARIANTS)]


def test_training_inside_a_graft_moves_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "encoder.layer.1.output.dense.weight"
    Graft.cut({name: torch.tensor([3, 500])}, {name: torch.ones(128, 512)}, manifest={"task": "t"}).save("x.graft")
    common = {"mode": "prompt", "shots": 4, "max_steps": 2, "limit_eval": 4, "threads": 1, "inside": "x.graft"}
    with pytest.raises(ConfigError, match="--weight-decay 0"):
        bw.finetune("tiny-bert", "tiny-sentiment", **common)
    tuned = bw.finetune("tiny-bert", "tiny-sentiment", weight_decay=0, out="t", **common)
    before, after = (named(load(resolve(x), "mlm").model) for x in ("tiny-bert", str(tuned.run)))
    changed = {n: (before[n] != after[n]).reshape(-1).nonzero()[:, 0].tolist() for n in before}
    assert {n: i for n, i in changed.items() if i} == {name: [3, 500]}


@pytest.mark.parametrize("small", [False, True])
def test_the_recipe_asks_for_what_the_verbs_know(small: bool) -> None:
    script = read_recipe("grafting", Wishes(small=small))
    steps = {s.id: s for s in script.steps}
    assert list(steps) == ["tuned", "adamw", "bitfit", "graft", "graft-adamw", "published"]
    assert steps["published"].settings["parity"] is True and steps["graft"].settings["curve"] is True
    lines = commands(script)
    assert all(line.startswith(("budwood finetune ", "budwood graft learn ")) for line in lines)
    assert ("--optimizer sgd" in lines[0]) and ("--parity" in lines[-1])

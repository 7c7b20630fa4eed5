"""Verbs ask for the engine of one's choice: `--engine ray` reaches the Ray engine from every one that has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import budwood as bw
from budwood.capture.features import Ask, store
from budwood.config.run import JobsConfig, resources_of
from budwood.engine import local, ray
from budwood.engine.jobs import Job, JobError
from budwood.engine.run import Where, run_all
from tests.cases import write_model


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Functions of the jobs that the Ray engine was given; they run here."""
    seen: list[str] = []

    def pretended(jobs: Sequence[Job], workers: int, retries: int, finished: Any, resources: Any) -> None:
        seen.extend(sorted({job.function for job in jobs}))
        local.run_jobs(jobs, 1, retries, finished)

    monkeypatch.setattr(ray, "run_jobs", pretended)
    monkeypatch.setattr(ray, "answering", lambda: None)  # Ray itself may not be installed
    monkeypatch.setenv("BUDWOOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return seen


def test_linear(asked: list[str]) -> None:
    few: dict[str, Any] = {"limit": 20, "limit_eval": 10, "k_fold": 2, "costs": (1.0,), "threads": 1}
    bw.linear("tiny-gpt", "tiny-sentiment", features=("f",), engine="ray", out="linear", **few)
    assert set(asked) == {"budwood.methods.linear.states:shard"}


def test_features(asked: list[str]) -> None:
    store(Ask("tiny-bert", {"task": "tiny-topic", "limit": 10}, "train", "cls"), where=Where("ray"))
    assert asked == ["budwood.capture.features:shard"]


def test_inject(asked: list[str], tmp_path: Path) -> None:
    write_model(tmp_path / "m", "bert", "lm")
    for name in ("new", "old"):
        lines = [f"{name} w{i} w{i + 7},{['no', 'yes'][i % 2]}" for i in range(5, 35)]
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "\n".join(lines) + "\n")
    few: dict[str, Any] = {"max_steps": 1, "keep_steps": 1, "limit_eval": 8, "keep_rows": 8, "batch_size": 4}
    bw.inject("m", "new.csv", keep="old.csv", retain="none", engine="ray", threads=1, out="kept", **few)
    assert set(asked) == {"budwood.studies.inject:work"}


@pytest.mark.parametrize("wish", ["gpus", "gpus=no", "memory=much", "=2", "gpus=0", "gpus=1.5", "CPU=1", "cpus=1e-5"])
def test_odd_resources_are_refused(wish: str) -> None:
    with pytest.raises(ValidationError, match="NAME=AMOUNT"):
        JobsConfig(engine="ray", resources=(wish,))


def test_resources_are_rays() -> None:
    assert resources_of(JobsConfig(engine="ray", resources=("cpus=2,memory=1MB",)).resources) == {
        "cpus": 2,
        "memory": 1e6,
    }
    with pytest.raises(ValidationError, match="--resources is for --engine ray"):
        JobsConfig(resources=("gpus=1",))


def test_lost_workers_are_replaced_as_often_as_allowed(tmp_path: Path) -> None:
    deadly = Job("tests.engine.test_local:always_die", {}, tmp_path / "doomed.txt")
    with pytest.raises(JobError, match=r"died 1 time\."):
        run_all([deadly], Where(workers=2, retries=0))

"""Grafts that bring heads: each task keeps its own, and none is taken for another's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import budwood as bw
from budwood.config.graft import GraftLearnConfig
from budwood.errors import ModelError
from budwood.methods.graft.pair import open_pair
from budwood.models.reference import resolve
from budwood.params import mask as masks
from budwood.params.graft import Graft
from budwood.studies.api import run
from tests.methods.graft_for_tests import toy_task


def files(place: Path, other: dict[str, torch.Tensor] | None = None) -> list[str]:
    """Two grafts with heads: of `toy`, and of a task `turned`, whose head is the other way round unless it is given."""
    cfg = GraftLearnConfig(task="toy", data_seed=0, model_seed=0)
    pair = open_pair(cfg, resolve(str(place / "base")), resolve(str(place / "head")), toy_task())
    one = pair.graft(masks.everything(pair.sizes))
    turned = {n: v.flip(0) if n.startswith("head.") else v for n, v in one.head.items()} if other is None else one.head
    two = Graft(one.index, one.delta, one.shape, turned, {**one.manifest, "task": "turned"})
    one.save("toy.graft")
    two.save("turned.graft")
    return ["toy.graft", "turned.graft"]


def score(model: str, task: str = "toy") -> float:
    return float(bw.evaluate(model, replace(toy_task(), name=task), threads=1).metrics["accuracy"])


def test_every_task_finds_its_own_head(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = score(str(place / "head"))
    assert good > 0.8
    both = "+".join([str(place / "base"), *files(place)])
    assert score(both) == good and score(both, "turned") == pytest.approx(1 - good)


def test_heads_that_differ_are_written_beside_the_model(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = run("graft stitch", [str(place / "base"), *files(place)], "", {"threads": 1, "out": "s"})
    good = score(str(place / "head"))
    with pytest.raises(ModelError, match="no trained head"):
        score("s/model")
    assert list(made.metrics["heads"]) == ["toy", "turned"]
    found = [score(f"s/model+{made.metrics['heads'][n]}", n) for n in ("toy", "turned")]
    assert found == pytest.approx([good, 1 - good])


def test_a_head_that_all_share_goes_into_the_model(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = run("graft stitch", [str(place / "base"), *files(place, {})], "", {"threads": 1, "out": "s"})
    assert "heads" not in made.metrics and score("s/model") == score(str(place / "head"))

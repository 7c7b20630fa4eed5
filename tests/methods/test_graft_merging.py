"""Grafts merged and compared: DARE and Fisher by hand, and what each graft does for each task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import budwood as bw
from budwood.config.graft import GraftStitchConfig
from budwood.methods.graft import compare
from budwood.methods.graft.merging import merged
from budwood.params import tree
from budwood.params.graft import Graft
from budwood.studies.api import run
from tests.methods.graft_for_tests import learn, toy_task

MODEL = torch.nn.Linear(4, 1)


def graft(**changes: float) -> Graft:
    """A graft of single weights of a layer with four, named p0 to p3."""
    index = torch.tensor(sorted(int(k[1]) for k in changes))
    values = torch.tensor([changes[f"p{int(i)}"] for i in index])
    return Graft({"weight": index}, {"weight": values}, {"weight": (1, 4)})


def dense(found: Graft) -> torch.Tensor:
    whole = torch.zeros(4)
    for name, index in found.index.items():
        whole[index] = found.delta[name]
    return whole


def test_dare_drops_a_share_and_scales_the_rest() -> None:
    wide = Graft({"w": torch.arange(4000)}, {"w": torch.full((4000,), 2.0)}, {"w": (4000,)})
    other = Graft({"w": torch.arange(4000)}, {"w": torch.full((4000,), 16.0)}, {"w": (4000,)})
    cfg = GraftStitchConfig(method="dare", weight=1.0, keep=0.25)
    one, again, both = (merged(list(x), cfg, MODEL) for x in ((wide,), (wide,), (wide, other)))
    assert 900 < one.size < 1100 and set(one.delta["w"].tolist()) == {8.0}
    assert torch.equal(one.index["w"], again.index["w"])
    values = both.delta["w"].tolist()
    assert set(values) == {8.0, 64.0, 72.0} and values.count(72.0) < 350  # the draws are independent


def test_fisher_merging_is_the_mean_weighted_by_information(tmp_path: Path) -> None:
    for name, mass in (("a", [1.0, 3.0, 1.0, 1.0]), ("b", [1.0, 1.0, 5.0, 1.0])):
        values = {"weight": torch.tensor([mass]), "bias": torch.ones(1)}
        tree.save(tmp_path / f"{name}.safetensors", values, {"artefact": "fisher"})
    cfg = GraftStitchConfig(method="fisher", fisher=(tmp_path / "a.safetensors", tmp_path / "b.safetensors"))
    found = merged([graft(p0=1.0, p1=4.0), graft(p1=8.0, p2=-2.0)], cfg, MODEL)
    torch.testing.assert_close(dense(found), torch.tensor([1.0, (3 * 4 + 1 * 8) / 4, -2.0, 0.0]))


def test_gains_are_differences_of_scores(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = [
        learn(place, "prompt", size=s, select="movement", name=n).metrics["file"]
        for n, s in (("a", "3%"), ("b", "90%"))
    ]
    monkeypatch.setattr(compare, "_task_of", lambda cfg, graft: toy_task())
    base = str(place / "base")
    m = run("graft overlap", files, "", {"threads": 1, "base": base}).metrics
    score: Any = lambda model: bw.evaluate(model, toy_task(), mode="prompt", threads=1).metrics["accuracy"]  # noqa: E731
    wanted = [score(f"{base}+{f}") - score(base) for f in files]
    assert m["gain"] == [[pytest.approx(w)] * 2 for w in wanted] and wanted[1] > 0.1 and "skipped" not in m

"""A base and its tuned copy: what is compared, what goes along, and by which hash the base is known again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import budwood as bw
from budwood.config.finetune import Mode
from budwood.config.graft import GraftLearnConfig
from budwood.data.task import Template
from budwood.errors import ConfigError, DataError, TreeError
from budwood.methods.graft import measure
from budwood.methods.graft.pair import open_pair
from budwood.models.grafted import remembered_hash
from budwood.models.load import HeadSpec, load, save
from budwood.models.reference import resolve
from budwood.params import mask as masks
from budwood.params.graft import Graft, backbone_hash
from budwood.params.tree import named
from budwood.studies.api import run
from tests.cases import write_model
from tests.methods.graft_for_tests import learn, toy_task

CFG = GraftLearnConfig(task="toy", data_seed=0, model_seed=0)


@pytest.mark.parametrize("force", [False, True])
def test_a_base_with_grafts_on_it_has_a_hash_of_its_own(
    place: Path, force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUDWOOD_CACHE", str(tmp_path / "cache"))
    plain = resolve(str(place / "base"))
    pair = open_pair(CFG, plain, resolve(str(place / "prompt")), toy_task())
    pair.graft(masks.random(pair.sizes, 50, 0)).save(tmp_path / "a.graft")
    monkeypatch.setenv("BUDWOOD_CACHE", str(tmp_path / f"cache {force}"))
    ref = resolve(f"{place / 'base'}+{tmp_path / 'a.graft'}", force=force)
    found = open_pair(CFG, ref, resolve(str(place / "prompt")), toy_task())
    assert found.base_hash == backbone_hash(load(ref, "prompt").model) != pair.base_hash
    assert remembered_hash(plain, load(plain, "prompt").model) == pair.base_hash  # the plain base is still known


def shifted_copy(place: Path, path: Path, mode: Mode, name: str) -> str:
    """The tuned model with one more tensor moved far."""
    skilled = load(resolve(str(place / mode)), mode, HeadSpec(labels=("no", "yes"), task="toy"))
    with torch.no_grad():
        named(skilled.model)[name].add_(torch.randn_like(named(skilled.model)[name]), alpha=2.0)
    save(skilled, path)
    return str(path)


def test_tuned_is_the_tuned_model_whatever_of_it_moved(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "embeddings.word_embeddings.weight"
    tuned = shifted_copy(place, tmp_path / "moved", "prompt", words)
    m = learn(place, tuned, mode="prompt", size="100%", select="movement", off_task=("tiny-text",)).metrics
    own = bw.evaluate(tuned, toy_task(), mode="prompt", threads=1).metrics
    assert m["moved_outside"] > 0 and m["tuned"]["score"] == own["accuracy"] and m["tuned"]["loss"] == own["loss"]
    assert m["all_graftable"]["loss"] == pytest.approx(m["graft"]["loss"]) != pytest.approx(m["tuned"]["loss"])
    assert {"all_graftable_harm", "graft_harm"} <= m["off_task"]["tiny-text"].keys()


def test_a_pooler_that_the_base_has_goes_along_with_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base whose checkpoint keeps a pooler, and a copy tuned with a head, pooler and all."""
    monkeypatch.chdir(tmp_path)
    base = write_model(tmp_path / "base", "bert", "head")
    first = load(resolve(str(base)), "head", HeadSpec(labels=("no", "yes")))
    assert not any(n.startswith("pooler.") for n in first.fresh)
    bw.finetune(str(base), toy_task(), mode="head", out="tuned", freeze="embeddings", threads=1, max_steps=30, lr=3e-3)
    m = learn(tmp_path, "tuned", size="100%", select="movement").metrics
    assert m["moved_outside"] == 0 and m["agreement"] == 1
    assert "pooler.dense.weight" in Graft.load(m["file"]).head
    here = bw.evaluate(f"base+{m['file']}", toy_task(), threads=1).metrics
    assert here["loss"] == pytest.approx(bw.evaluate("tuned", toy_task(), threads=1).metrics["loss"], abs=1e-5)


def test_a_shifted_set_is_matched_by_the_names_of_its_labels(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows under turned labels score the same; other names are refused, however many there are."""
    task = toy_task()
    rows = {k: tuple(replace(r, label=1 - int(r.label)) for r in v) for k, v in task.splits.items()}  # type: ignore[arg-type]
    turned = replace(task, splits=rows, labels=("yes", "no"), template=Template("{text} {mask}", ("w6", "w5")))
    for mode in ("head", "prompt"):
        pair = open_pair(CFG, resolve(str(place / "base")), resolve(str(place / mode)), task)
        monkeypatch.setattr(measure, "other_task", lambda cfg, name: turned)
        scores, tuned = measure.shifted(pair, "turned")
        own = bw.evaluate(str(place / mode), task, threads=1, out=place / f"own-{mode}").metrics
        assert tuned.metrics["accuracy"] == own["accuracy"] > 0.6 and len(scores.rows) == own["n"]
    monkeypatch.setattr(measure, "other_task", lambda cfg, name: replace(task, labels=("a", "b")))
    with pytest.raises(DataError, match="needs the same labels"):
        measure.shifted(pair, "other")


def test_subtracting_from_another_tuned_model_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = learn(place, "prompt", size="20", select="random").metrics["file"]
    other = shifted_copy(place, tmp_path / "other", "prompt", "encoder.layer.0.output.dense.weight")
    models = [str(place / "base"), other, file]
    with pytest.raises(TreeError, match="was not cut out of"):
        run("graft subtract", models, toy_task(), {"threads": 1, "mode": "prompt"})
    forced = run("graft subtract", models, toy_task(), {"threads": 1, "mode": "prompt", "force": True})
    assert forced.metrics["size"] == 20
    with pytest.raises(ConfigError, match="embeddings"):
        run("graft subtract", models, toy_task(), {"embeddings": True})

"""What a run is told to use: checkpoints and factors that change on disk, factors of other models and settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from budwood.config.influence import FitConfig, IndexConfig, ScoreConfig
from budwood.data.task import Row, Task
from budwood.engine.local import run_jobs
from budwood.errors import ConfigError, ModelError, StoreError
from budwood.methods.influence import fit as fitting
from budwood.methods.influence import index as indexing
from budwood.methods.influence import itself, workshop
from budwood.methods.influence import score as method
from budwood.methods.influence.factors import Factors, differing
from budwood.methods.influence.fit import identity
from budwood.methods.influence.index import Index
from budwood.methods.influence.masked import graft_scores
from budwood.methods.influence.scores import Scores
from budwood.methods.influence.workshop import open_shop, settings_for
from budwood.params.graft import Graft
from budwood.params.tree import named
from budwood.studies.api import run
from tests.cases import write_model
from tests.interrupt import interrupted

COMMON = {"threads": 1, "damping": ("0.1mean",), "queries": ("3",)}


def refit(model: Any, task: Any, out: Path, **settings: Any) -> Path:
    """Factors at a place where there may have been others."""
    shutil.rmtree(out, ignore_errors=True)
    return run("influence fit", model, task, {"threads": 1, "out": out, **settings}).run


def test_a_retrained_checkpoint_is_scored_again(tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, task = tuned
    train = {"max_steps": 2, "threads": 1, "out": tmp_path / "other", "overwrite": True}
    run("finetune", str(model.run), task, {**train, "seed": 5})
    settings = {**COMMON, "checkpoints": (str(tmp_path / "other"),)}
    first = run("influence score", model, task, settings)
    assert not run("influence score", model, task, settings).fresh
    run("finetune", str(model.run), task, {**train, "seed": 6, "lr": 1e-2})
    again = run("influence score", model, task, settings)
    assert again.fresh and not np.array_equal(Scores.open(first.run).whole(), Scores.open(again.run).whole())
    with pytest.raises(StoreError, match="checkpoints: .* there, .* now"):
        run("influence score", model, task, {**settings, "overwrite": False, "out": first.run})


@pytest.mark.parametrize("verb", ["score", "self", "index"])
def test_refitted_factors_are_used(verb: str, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, task = tuned
    place = refit(model, task, tmp_path / "fit")
    settings = {**COMMON, "factors": place} if verb == "score" else {"threads": 1, "factors": place}
    assert run(f"influence {verb}", model, task, settings).fresh
    shutil.copytree(place, tmp_path / "moved")
    assert not run(f"influence {verb}", model, task, {**settings, "factors": tmp_path / "moved"}).fresh
    file = place / "factors" / "factors.json"
    file.write_text(file.read_text().replace('"best": ', '"best": 3'))  # another damping for auto
    assert run(f"influence {verb}", model, task, settings).fresh


def test_factors_of_one_model_are_not_taken_for_several(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    given = {**COMMON, "factors": tmp_path, "checkpoints": (str(model.run),), "out": tmp_path / "x"}
    with pytest.raises(ConfigError, match="--factors are of one model, and --checkpoints name several"):
        run("influence score", model, task, given)


@pytest.mark.parametrize("began", [False, True])
def test_a_run_carried_on_elsewhere_multiplies_as_it_began(
    began: bool, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    wish = {**COMMON, "dtype": "bf16", "shard_rows": 9, "out": tmp_path / "x"}
    monkeypatch.setattr(method, "multiplies_bf16", lambda: began)
    real = method.score_shard

    def killed(arguments: dict[str, Any], part: Path) -> None:
        if arguments["shard"] == 1:
            raise KeyboardInterrupt
        real(arguments, part)

    monkeypatch.setattr(method, "score_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        run("influence score", model, task, wish)
    monkeypatch.setattr(method, "score_shard", real)
    monkeypatch.setattr(method, "multiplies_bf16", lambda: not began)
    carried = run("influence score", model, task, wish)
    monkeypatch.setattr(method, "multiplies_bf16", lambda: began)
    whole = run("influence score", model, task, {**wish, "out": tmp_path / "whole"})
    assert np.array_equal(*(Scores.open(r.run).whole() for r in (carried, whole)))


def test_a_killed_run_never_mixes_shards_of_two_factors(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    place = refit(model, task, tmp_path / "fit")
    settings = {**COMMON, "factors": place, "shard_rows": 7, "out": tmp_path / "score"}
    with interrupted(method, "score_shard", 2):
        run("influence score", model, task, settings)
    file = place / "factors" / "moments.safetensors"
    _doubled(file)
    with pytest.raises(StoreError, match="factors: .* there, .* now"):
        run("influence score", model, task, settings)
    mended = run("influence score", model, task, {**settings, "overwrite": True})
    whole = run("influence score", model, task, {**settings, "out": tmp_path / "whole"})
    assert np.array_equal(Scores.open(mended.run).whole(), Scores.open(whole.run).whole())


def _doubled(file: Path) -> None:
    """The same moments, twice as large."""
    from budwood.params import tree

    tensors, facts = tree.load(file)
    tree.save(file, {k: 2 * v for k, v in tensors.items()}, facts)
    assert Factors.open(file.parent).facts


def test_factors_of_other_settings_or_another_model_are_refused(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    short = refit(model, task, tmp_path / "short", max_length=8)
    for verb in ("score", "self", "index"):
        with pytest.raises(ConfigError, match=r"another model or other settings(.|\n)*max_length: 8 there, \d+ now"):
            run(f"influence {verb}", model, task, {"threads": 1, "factors": short, "out": tmp_path / verb})
    other = run("finetune", str(model.run), task, {"max_steps": 1, "threads": 1, "out": tmp_path / "other"})
    strange = refit(other, task, tmp_path / "strange")
    with pytest.raises(ConfigError, match=r"another model or other settings(.|\n)*model_hash: '\w+' there, '\w+' now"):
        run("influence score", model, task, {**COMMON, "factors": strange, "out": tmp_path / "x"})
    for verb in ("score", "self", "index"):
        with pytest.raises(ConfigError, match="--fit-rows has no effect with --factors"):
            run(f"influence {verb}", model, task, {"threads": 1, "factors": short, "fit_rows": "8"})


@pytest.mark.parametrize("verb", ["fit", "score", "self", "index"])
def test_a_model_tuned_with_another_loss_is_refused(verb: str, quad: Any, tmp_path: Path) -> None:
    model, task = quad
    with pytest.raises(ModelError, match="was tuned with --objective quad, and influence traces cross-entropy"):
        run(f"influence {verb}", model, task, {"threads": 1, "out": tmp_path / "x"})
    assert not list((tmp_path / "x").rglob("*.safetensors"))


@pytest.fixture(scope="module")
def quad(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Task]:
    """A causal language model tuned with the quadratic rival of cross-entropy."""
    place = tmp_path_factory.mktemp("quad")
    rows = tuple(Row(f"t{i}", " ".join(f"w{10 + (i * 7 + j) % 20}" for j in range(6))) for i in range(6))
    task = Task("toy-text", "text", {"train": rows[:4], "validation": rows[4:]}, metric="lm_loss")
    write_model(place / "m", "gpt2", "lm")
    recipe = {"mode": "clm", "objective": "quad", "max_steps": 1, "threads": 1, "out": place / "ft"}
    return run("finetune", str(place / "m"), task, recipe).run, task


def test_scores_of_a_graft_refuse_factors_of_another_model(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    scored = run("influence score", model, task, {**COMMON, "out": tmp_path / "score"})
    file = scored.run / "factors" / "factors.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_hash": "another"}))
    given = json.loads((scored.run / "run.json").read_text())["given"]
    shop = open_shop(settings_for(ScoreConfig(**given), str(model.run)), task)
    name = shop.parameters[0]
    delta = named(shop.model)[name].detach()
    graft = Graft.cut({name: torch.tensor([0])}, {name: delta}, manifest={"task": "toy"})
    graft.save(tmp_path / "x.graft")
    found = Scores.open(scored.run)
    with pytest.raises(ConfigError, match="model_hash: 'another' there"):
        graft_scores(scored.run, found, 0, found.find("ekfac"), tmp_path / "x.graft")


@pytest.mark.parametrize(
    "mode,change",
    [
        ("head", {"max_length": 8}),
        ("head", {"truncate": "head"}),
        ("prompt", {"template": "{text} so {mask}"}),
        ("prompt", {"label_words": ("w9", "w7")}),
        ("mlm", {"mlm_probability": 0.3}),
        ("mlm", {"seed": 1}),
        ("mlm", {"max_length": 8}),
    ],
)
def test_what_changes_how_rows_are_read_changes_whose_factors_they_are(
    mode: str,
    change: dict[str, Any],
    tuned: Any,
) -> None:
    model, task = tuned
    words = {"template": "{text} is {mask}", "label_words": ("w5", "w7")} if mode == "prompt" else {}
    text = Task("text", "text", {"train": task.splits["train"]})
    name = str(model.run if mode == "head" else model.run.parent / "m")
    one, other = (
        identity(open_shop(settings_for(FitConfig(**{"task": "toy", "mode": mode, **words, **c}), name), t))
        for c in ({}, change)
        for t in (text if mode == "mlm" else task,)
    )
    lines = differing(json.loads(json.dumps(one)), other)
    (key,) = change
    expected = ["chunk", "max_length"] if (mode, key) == ("mlm", "max_length") else [key]
    assert sorted(line.split(":")[0].strip() for line in lines) == expected
    assert not differing(json.loads(json.dumps(one)), one)


@pytest.mark.parametrize("verb", ["fit", "self", "index"])
def test_shards_of_one_process_share_what_they_read(
    verb: str, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    given = {} if verb == "fit" else {"factors": refit(model, task, tmp_path / "f")}
    real, reads = Factors.tensor, []
    monkeypatch.setattr(Factors, "tensor", lambda self, key: reads.append(key) or real(self, key))
    counts = []
    for size in (24, 6):
        reads.clear()
        run(f"influence {verb}", model, task, {**given, "threads": 1, "shard_rows": size, "out": tmp_path / f"{size}"})
        counts.append(len(reads))
    assert counts[0] == counts[1] > 0


def test_an_index_of_refitted_factors_is_refused(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    place = refit(model, task, tmp_path / "f")
    made = run("influence index", model, task, {"threads": 1, "factors": place, "out": tmp_path / "i"})
    given = json.loads((made.run / "run.json").read_text())["given"]
    shop = open_shop(settings_for(IndexConfig(**given), str(model.run)), task)
    assert Index.open(made.run, shop).factors.facts
    _doubled(place / "factors" / "moments.safetensors")
    with pytest.raises(StoreError, match="have changed since the index"):
        Index.open(made.run, shop).ask(shop.read.encode(task.rows("validation")[:1]))


FILES = {"fit": "factors/factors.json", "self": "self/ekfac@0.1mean.npy", "index": "index/rows.npy"}


@pytest.mark.parametrize("verb", ["fit", "self", "index"])
def test_workers_find_the_rows_of_a_task_in_memory(
    verb: str, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    settings = {"threads": 1, "shard_rows": 8, **({} if verb == "fit" else {"damping": ("0.1mean",)})}
    alone = run(f"influence {verb}", model, task, {**settings, "out": tmp_path / "alone"}).run

    def elsewhere(jobs: Any, wish: Any, finished: Any) -> None:
        assert wish.workers == 2
        workshop._open.cache_clear()  # as in a process of their own, which has nothing but the arguments
        run_jobs(jobs, 1, finished=finished)

    for part in (fitting, itself, indexing):
        monkeypatch.setattr(part, "run_all", elsewhere)
    shared = run(f"influence {verb}", model, task, {**settings, "workers": 2, "out": tmp_path / "shared"}).run
    for file in (FILES[verb], "factors/moments.safetensors"):
        assert (alone / file).read_bytes() == (shared / file).read_bytes(), file
    assert not list(shared.rglob("parts")) and not list(alone.rglob("parts"))

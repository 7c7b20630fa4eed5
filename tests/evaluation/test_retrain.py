"""Retrains: the run's own recipe, on some rows; diverged ones say so."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
from safetensors.numpy import load_file, save_file

from budwood.engine.jobs import Job
from budwood.engine.local import run_jobs
from budwood.errors import ConfigError, DataError, ModelError
from budwood.evaluation.retrain import Recipe, find_rows, job, outcome
from tests.evaluation.conftest import Place


def recipe_of(tuned: Place) -> Recipe:
    return Recipe.of_run(tuned.run, "tuned").asking(tuned.query_ids)


def done(recipe: Recipe, kept_N: np.ndarray, seed: int, place: Path) -> Job:
    one = job(recipe, kept_N, seed, place)
    run_jobs([one])
    return one


def test_all_rows_and_the_runs_own_seed_give_the_runs_own_margins(tuned: Place, tmp_path: Path) -> None:
    found = outcome(done(recipe_of(tuned), np.ones(len(tuned.train_ids), dtype=bool), 7, tmp_path))
    records = pandas.read_parquet(tuned.run / "records.parquet").set_index("id").loc[list(tuned.query_ids)]
    assert np.array_equal(found.margin_Q, records["margin"].to_numpy(np.float32))
    assert np.array_equal(found.correct_Q.astype(bool), records["correct"].to_numpy())


def test_the_same_retrain_gives_the_same_bytes_whatever_came_before(tuned: Place, tmp_path: Path) -> None:
    recipe, kept_N = recipe_of(tuned), np.arange(len(tuned.train_ids)) % 2 == 0
    first = done(recipe, kept_N, 1, tmp_path / "a")
    done(recipe, ~kept_N, 2, tmp_path / "a")
    again = done(recipe, kept_N, 1, tmp_path / "b")
    assert first.output.read_bytes() == again.output.read_bytes() and first.output.name == again.output.name
    other = done(recipe, kept_N, 2, tmp_path / "b")
    assert not np.array_equal(outcome(first).margin_Q, outcome(other).margin_Q)


def test_rows_left_out_do_not_matter(tuned: Place, tmp_path: Path) -> None:
    """Training on a subset equals fine-tuning on a task that has only those rows."""
    from budwood.evaluation import retrain as module

    recipe, kept_N = recipe_of(tuned), np.arange(len(tuned.train_ids)) < 40
    few = outcome(done(recipe, kept_N, 1, tmp_path))
    shop = module.open_shop(recipe)
    small = replace(shop, rows=shop.rows[:40], features=shop.features.take(np.arange(40)), row_F=np.arange(40))
    small.train(np.ones(40, dtype=bool), 1)
    assert np.array_equal(small.measure()["margin"], few.margin_Q)


def test_a_diverging_recipe_is_said_so(tuned: Place, tmp_path: Path) -> None:
    recipe = recipe_of(tuned)
    wild = Recipe(
        recipe.base,
        {**recipe.settings, "learning_rate": 1e30, "max_grad_norm": 0.0, "optimizer": "sgd", "warmup_steps": 0},
        recipe.rows,
        recipe.queries,
    )
    assert outcome(done(wild, np.ones(len(tuned.train_ids), dtype=bool), 1, tmp_path)).diverged


def test_what_cannot_be_retrained_is_refused(tuned: Place, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no run"):
        Recipe.of_run(None, "tiny-bert")
    recipe = recipe_of(tuned)
    with pytest.raises(DataError, match="not those the run was trained on"):
        Recipe(recipe.base, recipe.settings, "0" * 32, ()).task()
    with pytest.raises(ConfigError, match="no rows at all"):
        job(recipe, np.zeros(4, dtype=bool), 0, tmp_path)
    with pytest.raises(DataError, match="no rows of task"):
        find_rows(recipe.task(), ["nobody"])


def test_a_run_of_another_objective_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"verb": "finetune", "given": {"objective": "quad"}}))
    with pytest.raises(ModelError, match="--objective quad"):
        Recipe.of_run(tmp_path, "tuned")


def test_a_base_that_changed_is_refused(tuned: Place, tmp_path: Path) -> None:
    manifest = json.loads((tuned.run / "run.json").read_text())
    base = tmp_path / "base"
    shutil.copytree(manifest["models"][0], base)
    (tmp_path / "run.json").write_text(json.dumps({**manifest, "models": [str(base)]}))
    recipe = Recipe.of_run(tmp_path, "tuned")
    assert recipe.model().path == base  # the same files elsewhere are the same base
    weights = load_file(base / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + 1}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="not the one the run was trained from"):
        recipe.model()
    kept_N = np.ones(len(tuned.train_ids), dtype=bool)
    other = Recipe.of_run(tuned.run, "tuned")
    assert job(other, kept_N, 0, tmp_path).key != job(replace(other, weights="other"), kept_N, 0, tmp_path).key


def test_the_base_is_opened_as_the_run_opened_it(tuned: Place) -> None:
    recipe = recipe_of(tuned)
    trusted = replace(recipe, settings={**recipe.settings, "trust_remote_code": True, "force": True}).model()
    assert trusted.trust_remote_code and trusted.force and not recipe.model().force


@pytest.mark.parametrize("freeze", [("embeddings", "layers:2"), ("embeddings", "layers:3")])
def test_frozen_layers_are_run_once_and_give_the_same(tuned: Place, tmp_path: Path, freeze: tuple[str, ...]) -> None:
    from budwood.evaluation import retrain as module

    recipe = recipe_of(tuned)
    settings = {**recipe.settings, "freeze": freeze}
    shop = module.open_shop(Recipe(recipe.base, settings, recipe.rows, recipe.queries))
    assert shop.states is not None and shop.states.depth == int(freeze[1][-1])
    kept_N = np.arange(len(tuned.train_ids)) % 3 > 0
    shop.train(kept_N, 1)
    fast = shop.measure()["margin"]
    slow = replace(shop, states=None)
    slow.train(kept_N, 1)
    assert np.allclose(slow.measure()["margin"], fast, atol=1e-4)
    slow.train(~kept_N, 1)
    assert not np.allclose(slow.measure()["margin"], fast, atol=1e-3)


def test_nothing_is_reused_where_something_below_changes(tuned: Place) -> None:
    from budwood.evaluation import retrain as module

    recipe = recipe_of(tuned)
    for changed in ({"freeze": ("layers:2",)}, {"freeze": ("embeddings", "layers:2"), "dropout": 0.1}, {}):
        shop = module.open_shop(Recipe(recipe.base, {**recipe.settings, **changed}, recipe.rows, recipe.queries))
        assert shop.states is None, changed

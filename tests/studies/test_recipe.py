"""A recipe's steps: written out, checked as a whole, each one a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from budwood.errors import ConfigError
from budwood.studies.recipe import Wishes, commands, known_recipes, read_recipe

SWEEP = """
defaults: {model: tiny-bert, task: tiny-sentiment}
steps:
  - {id: tuned, verb: finetune, matrix: {max_steps: [1, 2], learning_rate: [0.1, 0.01]}, small: {matrix: {seed: [7]}}}
  - {id: told, verb: probe, models: [tiny-bert, "{tuned-*}"]}
  - {id: one, verb: evaluate, model: "{tuned-1-0.1}", small: {model: "{tuned-7}"}}
"""


def recipe(tmp_path: Path, text: str) -> str:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return str(path)


def test_a_matrix_stands_for_every_combination(tmp_path: Path) -> None:
    script = read_recipe(recipe(tmp_path, SWEEP))
    names = ["tuned-1-0.1", "tuned-1-0.01", "tuned-2-0.1", "tuned-2-0.01"]
    assert [s.id for s in script.steps] == [*names, "told", "one"]
    assert [(s.settings["max_steps"], s.settings["learning_rate"]) for s in script.steps[:4]] == [
        *((1, 0.1), (1, 0.01)),
        *((2, 0.1), (2, 0.01)),
    ]
    assert script.steps[4].models == ("tiny-bert", *(f"{{{n}}}" for n in names))
    assert "--max-steps 2" in commands(script)[2] and commands(script)[5].split()[2].endswith("tuned-1-0.1")


def test_a_small_matrix_replaces_the_full_one(tmp_path: Path) -> None:
    script = read_recipe(recipe(tmp_path, SWEEP), Wishes(small=True))
    assert [s.id for s in script.steps] == ["tuned-7", "told", "one"]
    assert script.steps[0].settings["seed"] == 7 and script.steps[1].models == ("tiny-bert", "{tuned-7}")


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("{id: a, verb: finetune, matrix: {seed: 3}}", "a list for every setting"),
        ("{id: a, verb: finetune, matrix: {seed: []}}", "a list for every setting"),
        ("{verb: finetune, matrix: {seed: [1]}}", "needs an id"),
        ("{id: a, verb: finetune, matrix: {sede: [1]}}", "seed"),
        ("{id: a, verb: finetune, matrix: {seed: [1, 1]}}", "two steps are called 'a-1'"),
    ],
)
def test_a_bad_matrix_is_named(tmp_path: Path, step: str, told: str) -> None:
    text = f"defaults: {{model: tiny-bert, task: tiny-sentiment}}\nsteps:\n  - {step}\n"
    with pytest.raises(ConfigError, match=told):
        read_recipe(recipe(tmp_path, text))


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", known_recipes())
def test_every_shipped_recipe_can_be_read(name: str, small: bool) -> None:
    """Verbs, settings and names of earlier steps are checked as a whole."""
    script = read_recipe(name, Wishes(small=small))
    assert len(commands(script)) == len(script.steps) > 1 and script.steps[-1].verb


def test_influence_glue_trains_traces_and_halves() -> None:
    script = read_recipe("influence-glue", Wishes(small=True))
    traced = [s for s in script.steps if s.verb == "influence score"]
    assert [s.verb for s in script.steps if s not in traced] == ["finetune", "influence fit", "influence self"]
    asked = [x for s in traced for x in str(s.settings["strategy"]).split(",")]
    assert asked == ["ekfac", "kfac", "identity", "bm25", "diagonal", "ekfac"]
    assert script.steps[-2].settings["dtype"] == "bf16"
    assert not any("None" in line for line in commands(script))  # as they are typed

"""What a run is told to use: checkpoints and factors that change on disk, factors of other models and settings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from budwood.errors import StoreError
from budwood.methods.influence import score as method
from budwood.methods.influence.factors import Factors
from budwood.methods.influence.scores import Scores
from budwood.studies.api import run
from tests.methods.influence.test_runs import tuned  # noqa: F401

COMMON = {"threads": 1, "damping": ("0.1mean",), "queries": ("3",)}


def refit(model: Any, task: Any, out: Path, **settings: Any) -> Path:
    """Factors at a place where there may have been others."""
    shutil.rmtree(out, ignore_errors=True)
    return run("influence fit", model, task, {"threads": 1, "out": out, **settings}).run


def test_a_retrained_checkpoint_is_scored_again(
    tuned: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
def test_refitted_factors_are_used(
    verb: str,
    tuned: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_a_killed_run_never_mixes_shards_of_two_factors(
    tuned: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, task = tuned
    place = refit(model, task, tmp_path / "fit")
    settings = {**COMMON, "factors": place, "shard_rows": 7, "out": tmp_path / "score"}
    real, calls = method.score_shard, []

    def dies(arguments: dict[str, Any], part: Path) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(arguments, part)

    monkeypatch.setattr(method, "score_shard", dies)
    with pytest.raises(KeyboardInterrupt):
        run("influence score", model, task, settings)
    monkeypatch.setattr(method, "score_shard", real)
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

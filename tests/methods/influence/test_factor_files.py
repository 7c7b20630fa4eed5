"""Factors of kronfluence, given to verbs and written by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from budwood.errors import ConfigError, StoreError
from budwood.methods.influence.factors import Factors
from budwood.methods.influence.foreign import COUNTS, FILES, export
from budwood.methods.influence.scores import Scores
from budwood.studies.api import run
from tests.cli.conftest import budwood, model, reviews  # noqa: F401

FIT = {"threads": 1, "fisher": "empirical", "strategy": ("ekfac", "kfac")}
SCORE = {**FIT, "damping": ("0.1mean",), "queries": ("3",)}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str], Path]:
    """A tuned model, what names its task, and a run of `influence fit` on it."""
    place = tmp_path_factory.mktemp("files")
    lines = [f"w{3 + i % 5} w{9 + i % 7} w{20 + i % 3},{'yes' if i % 5 == 1 else 'no'}" for i in range(30)]
    for name, part in (("train", lines[:24]), ("validation", lines[24:])):
        (place / f"{name}.csv").write_text("\n".join(["text,label", *part]) + "\n")
    from tests.cases import write_model

    files = {f"{n}_file": str(place / f"{n}.csv") for n in ("train", "validation")}
    base = write_model(place / "m", "bert", "lm")
    tuned = run("finetune", str(base), "own", {**files, "max_steps": 3, "threads": 1, "out": place / "ft"}).run
    done = run("influence fit", str(tuned), "own", {**files, **FIT, "out": place / "fit"})
    return str(tuned), files, done.run  # type: ignore[return-value]


def scored(given: Any, out: Path, **more: Any) -> Scores:
    tuned, files, _ = given
    return Scores.open(run("influence score", tuned, "own", {**files, **SCORE, **more, "out": out}).run)


def test_exported_factors_are_scored_with_as_our_own(fitted: Any, tmp_path: Path) -> None:
    theirs = export(fitted[2], tmp_path / "factors_ours")
    own, back = (scored(fitted, tmp_path / n, factors=f) for n, f in (("own", fitted[2]), ("back", theirs)))
    for strategy in ("ekfac", "kfac"):
        assert np.array_equal(own.whole(own.find(strategy)), back.whole(back.find(strategy)))
    told = run("influence self", fitted[0], "own", {**fitted[1], **FIT, "factors": theirs, "out": tmp_path / "self"})
    assert told.metrics["strategies"] == ["ekfac", "kfac"]


def test_a_kfac_directory_has_no_lambda(fitted: Any, tmp_path: Path) -> None:
    theirs = export(fitted[2], tmp_path / "theirs")
    for name in ("lambda_matrix", COUNTS["lambda_matrix"]):
        (theirs / f"{name}.safetensors").unlink()
    own = scored(fitted, tmp_path / "own", factors=fitted[2], strategy=("kfac",))
    back = scored(fitted, tmp_path / "back", factors=theirs, strategy=("kfac",))
    assert np.array_equal(own.whole(), back.whole())
    with pytest.raises(StoreError, match="Factors of strategy 'ekfac' were not fitted"):
        scored(fitted, tmp_path / "no", factors=theirs, strategy=("ekfac",))


def test_a_diagonal_directory_has_nothing_else(fitted: Any, tmp_path: Path) -> None:
    theirs = export(fitted[2], tmp_path / "theirs")
    kept = {"lambda_matrix", COUNTS["lambda_matrix"], "factor_arguments"}
    for file in [f for f in theirs.iterdir() if f.stem not in kept]:
        file.unlink()
    scored(fitted, tmp_path / "back", factors=theirs, strategy=("diagonal",))
    assert Factors.open(tmp_path / "back").facts["strategies"] == ["diagonal"]


def test_what_does_not_fit_is_told(fitted: Any, tmp_path: Path) -> None:
    theirs = export(fitted[2], tmp_path / "theirs")
    with pytest.raises(ConfigError, match="are of empirical labels, not exact. Give --fisher empirical"):
        scored(fitted, tmp_path / "labels", factors=theirs, fisher="exact")
    with pytest.raises(StoreError, match="is there already"):
        export(fitted[2], theirs)
    file = theirs / "gradient_eigenvalues.safetensors"
    assert file.stem in FILES
    save_file({k: v[:-1].clone() for k, v in load_file(file).items()}, file)
    with pytest.raises(StoreError, match="of another model"):
        scored(fitted, tmp_path / "other", factors=theirs)


def test_export_is_a_command(fitted: Any, tmp_path: Path, budwood: Callable[..., Any]) -> None:  # noqa: F811
    code, _, err = budwood("influence", "export", fitted[2], tmp_path / "a" / "factors_x")
    assert code == 0 and "factors_x" in err
    assert json.loads((tmp_path / "a" / "factors_x" / "factor_arguments.json").read_text())["use_empirical_fisher"]
    code, _, err = budwood("influence", "export", tmp_path / "nothing", tmp_path / "b")
    assert code == 2 and "nothing" in err

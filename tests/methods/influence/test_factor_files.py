"""Factors of kronfluence, given to verbs and written by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
    back = scored(fitted, tmp_path / "back", factors=theirs, strategy=("diagonal", "identity"))
    assert Factors.open(tmp_path / "back").facts["strategies"] == ["diagonal"]
    fit = run("influence fit", fitted[0], "own", {**fitted[1], **FIT, "strategy": ("diagonal",), "out": tmp_path / "f"})
    moments = load_file(fit.run / "factors" / "moments.safetensors")
    save_file(
        {k: moments[f"diagonal/{name}"] for k, name in by_their_name(fitted[0], theirs).items()},
        theirs / "lambda_matrix.safetensors",
    )
    again = scored(fitted, tmp_path / "again", factors=theirs, strategy=("diagonal",))
    own = scored(fitted, tmp_path / "own", factors=fit.run, strategy=("diagonal",))
    assert np.array_equal(again.whole(), own.whole())
    assert not np.array_equal(back.whole(back.find("diagonal")), own.whole())  # what was in the file before was used


def by_their_name(tuned: str, theirs: Path) -> dict[str, str]:
    """kronfluence's names of modules, and ours: those of the model without its prefix."""
    names = load_file(theirs / "lambda_matrix.safetensors")
    return {k: ("head.classifier" if k == "classifier" else k.removeprefix("bert.")) for k in names}


def test_exact_factors_come_back_as_exact_and_of_this_model_only(fitted: Any, tmp_path: Path) -> None:
    tuned, files, _ = fitted
    wish = {**FIT, "fisher": "exact", "fit_rows": "18"}
    fit = run("influence fit", tuned, "own", {**files, **wish, "out": tmp_path / "fit"}).run
    theirs = export(fit, tmp_path / "theirs")
    back = scored(fitted, tmp_path / "back", factors=theirs, fisher="exact")
    own = scored(fitted, tmp_path / "own", factors=fit, fisher="exact")
    assert np.array_equal(back.whole(), own.whole())
    assert back.facts["fit_rows"] == own.facts["fit_rows"] == 18
    note = theirs / "budwood.json"
    told = json.loads(note.read_text())
    note.write_text(json.dumps({**told, "facts": {**told["facts"], "model_hash": "other"}}))
    with pytest.raises(ConfigError, match="another model or other settings:\n  model_hash"):
        scored(fitted, tmp_path / "no", factors=theirs, fisher="exact")
    file = theirs / "lambda_matrix.safetensors"
    save_file({k: 2 * v for k, v in load_file(file).items()}, file)  # fitted anew since: the note is of others
    with pytest.raises(ConfigError, match="are of sampled labels, not exact"):
        scored(fitted, tmp_path / "anew", factors=theirs, fisher="exact")


def test_sums_of_many_rows_in_sixteen_bits_are_divided_in_full(fitted: Any, tmp_path: Path) -> None:
    theirs = export(fitted[2], tmp_path / "theirs")
    (theirs / "budwood.json").unlink()
    many = 70_000  # no number of sixteen bits
    for file, counts in (("lambda_matrix", COUNTS["lambda_matrix"]),):
        sums = {k: (v * many).clamp_max(6e4) for k, v in load_file(theirs / f"{file}.safetensors").items()}
        scale = 4e4 / max(float(v.max()) for v in sums.values())
        save_file({k: (v * scale).half() for k, v in sums.items()}, theirs / f"{file}.safetensors")
        save_file({k: torch.tensor([many]) for k in sums}, theirs / f"{counts}.safetensors")
    scored(fitted, tmp_path / "back", factors=theirs, strategy=("ekfac",))
    factors = Factors.open(tmp_path / "back")
    assert factors.facts["fit_rows"] == many
    largest = max(float(factors.tensor(f"ekfac/{m.name}").max()) for m in factors.maps)
    assert largest == pytest.approx(4e4 / many, rel=1e-3)
    broken = {k: v * float("inf") for k, v in load_file(theirs / "lambda_matrix.safetensors").items()}
    save_file(broken, theirs / "lambda_matrix.safetensors")
    with pytest.raises(StoreError, match="lambda_matrix of '.*' has numbers that are not finite"):
        scored(fitted, tmp_path / "broken", factors=theirs, strategy=("ekfac",))


def test_what_does_not_fit_is_told(fitted: Any, tmp_path: Path) -> None:
    theirs = export(fitted[2], tmp_path / "theirs")
    with pytest.raises(ConfigError, match="another model or other settings:\n  fisher: 'empirical' there, 'exact' now"):
        scored(fitted, tmp_path / "labels", factors=theirs, fisher="exact")
    (theirs / "budwood.json").rename(tmp_path / "note")
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
    code, _, err = budwood("influence", "export", fitted[0], tmp_path / "b")
    assert code == 2 and "holds no factors" in err

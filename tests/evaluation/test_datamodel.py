"""`validate lds` from the command line: resume, workers, ground truth reused, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from budwood.evaluation.combined import across_models, candidates, ensembles
from budwood.evaluation.matrices import open_scores
from budwood.evaluation.truth import read_truth
from budwood.methods.influence.scores import Matrix, writing_scores
from tests.evaluation.conftest import Place

FEW = ("--subsets", 6, "--repeats", 2)


def test_lds_end_to_end(tuned: Place, tmp_path: Path, budwood: Callable[..., Any]) -> None:
    a, b = tuned.scores(tmp_path / "a", 0), tuned.scores(tmp_path / "b", 1)
    words = ["validate", "lds", *tuned.words, *FEW, "--scores", f"{a},{b}", "--ensemble", "--out", "one"]
    code, out, err = budwood(*words, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [r["scores"] for r in found["results"]] == ["a:ekfac", "b:ekfac", "ensemble of 2: ekfac"]
    assert all(r["low"] <= r["lds"] <= r["high"] for r in found["results"])
    assert found["subsets"] == 6 and found["seeds"] == 2 and found["diverged"] == 0 and found["random"] is not None
    assert found["base_seeds"][0]["runs"] == 2 and 0 <= found["ceiling"] <= 1 and found["retrain_sd"] > 0
    truth = read_truth(Path("one"))
    assert truth.mask_SN.sum(1).tolist() == [len(tuned.train_ids) // 2] * 6 and not list(
        Path("one").glob("retrains/*.s*")
    )
    assert {p.name for p in Path("one/figures").glob("*.png")} == {"lds.png", "predicted.png"}
    code, out, _ = budwood("validate", "lds", *tuned.words, "--truth", "one", "--scores", a, "--out", "two")
    assert code == 0 and "ekfac" in out and "above_random" in out
    two = json.loads(Path("two/metrics.json").read_text())["results"][0]
    assert two["lds"] == pytest.approx(found["results"][0]["lds"], abs=1e-12)


def test_two_workers_and_a_resume_write_the_same_truth(
    tuned: Place, tmp_path: Path, budwood: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["validate", "lds", *tuned.words, "--subsets", 2, "--repeats", 1]
    assert budwood(*words, "--out", "plain")[0] == 0
    from budwood.evaluation import datamodel

    real, calls = datamodel.Fleet.run, []

    def stopped(self: Any, jobs: Any, finished: Any = lambda job: None) -> None:
        calls.append(len(jobs))
        real(self, jobs[:1], finished)
        raise KeyboardInterrupt

    monkeypatch.setattr(datamodel.Fleet, "run", stopped)
    assert budwood(*words, "--out", "two", "--workers", 2)[0] == 130
    left = {p.name: p.stat().st_mtime_ns for p in Path("two/retrains").glob("*.safetensors")}
    assert len(left) == 1
    monkeypatch.setattr(datamodel.Fleet, "run", real)
    assert budwood(*words, "--out", "two", "--workers", 2)[0] == 0
    for name in ("masks.npy", "margins.npy", "index.json"):
        assert Path("plain/truth", name).read_bytes() == Path("two/truth", name).read_bytes()


def test_until_se_stops_early_and_alike(tuned: Place, tmp_path: Path, budwood: Callable[..., Any]) -> None:
    a = tuned.scores(tmp_path / "a")
    words = ["validate", "lds", *tuned.words, "--subsets", 30, "--repeats", 1, "--until-se", 0.9, "--scores", a]
    code, out, err = budwood(*words, "--json")
    assert code == 0 and json.loads(out)["subsets"] == 10, err


def test_half_precision_is_a_row_of_its_own(tuned: Place, tmp_path: Path, budwood: Callable[..., Any]) -> None:
    full, half = tuned.scores(tmp_path / "full"), tuned.scores(tmp_path / "half", dtype="bfloat16")
    words = ["validate", "lds", *tuned.words, *FEW, "--scores", f"{full},{half}"]
    code, out, err = budwood(*words, "--json")
    assert code == 0, err
    assert [r["scores"] for r in json.loads(out)["results"]] == ["ekfac", "ekfac (bfloat16)"]


def test_runs_of_one_name_are_told_apart(tuned: Place, tmp_path: Path, budwood: Callable[..., Any]) -> None:
    paths = [tuned.scores(tmp_path / d / "s", i) for i, d in enumerate("xy")]
    words = ["validate", "lds", *tuned.words, *FEW, "--ensemble", "--scores", ",".join(map(str, paths))]
    code, out, err = budwood(*words, "--json")
    assert code == 0, err
    found = json.loads(out)
    x, y, both = found["results"]
    assert [x["scores"], y["scores"], both["scores"]] == ["x/s:ekfac", "y/s:ekfac", "ensemble of 2: ekfac"]
    assert x["lds"] != y["lds"] != both["lds"] and found["base_seeds"][0]["sd"] > 0


def test_copies_of_one_model_are_no_ensemble(tuned: Place, tmp_path: Path) -> None:
    hashes = {"a": "1", "copy": "1", "half": "1", "b": "2"}
    for seed, (name, known) in enumerate(hashes.items()):
        tuned.scores(tmp_path / name, seed, "bfloat16" if name == "half" else "float32", facts={"model_hash": known})
    matrices = open_scores([tmp_path / name for name in hashes])
    laid = {m.name: m.scores.whole(m.matrix) for m in matrices}
    own = across_models(matrices)
    assert {label: [m.name for m in ms] for label, ms in own.items()} == {"ekfac": ["a:ekfac", "b:ekfac"]}
    scaled = [laid[n] / laid[n].std(1, keepdims=True) for n in ("a:ekfac", "b:ekfac")]
    assert np.allclose(ensembles(matrices, laid)["ensemble of 2: ekfac"], np.mean(scaled, axis=0))
    louder = {**laid, "b:ekfac": laid["b:ekfac"] * np.linspace(1, 900, len(laid["b:ekfac"]))[:, None]}
    heard = ensembles(matrices, louder)["ensemble of 2: ekfac"]
    assert np.allclose(heard, np.mean(scaled, axis=0), atol=1e-5)  # numbers of about 1 in float32


def test_tuning_may_choose_fewer_runs_and_sums_of_layers(tuned: Place, tmp_path: Path) -> None:
    paths = [tuned.scores(tmp_path / name, seed) for seed, name in enumerate("abc")]
    rng, shape = np.random.default_rng(9), (len(tuned.query_ids), len(tuned.train_ids))
    with writing_scores(tmp_path / "layers" / "scores", tuned.query_ids, tuned.train_ids) as desk:
        for module in ("layer.0", "layer.1"):
            desk.put(Matrix("kfac", "auto", module), slice(None), slice(None), rng.normal(size=shape))
    matrices = open_scores([*paths, tmp_path / "layers"], ["ekfac", "kfac@auto.layer.0", "kfac@auto.layer.1"])
    laid = {m.name: m.scores.whole(m.matrix) for m in matrices}
    found = candidates(matrices, laid)
    total = "kfac@auto.layer.0 + kfac@auto.layer.1"
    assert set(found) - set(laid) == {"ensemble of 2: ekfac", "ensemble of 3: ekfac", total}
    assert np.allclose(found[total], laid["kfac@auto.layer.0"] + laid["kfac@auto.layer.1"])
    assert np.array_equal(found["ensemble of 3: ekfac"], ensembles(matrices, laid)["ensemble of 3: ekfac"])


def test_tune_chooses_among_dampings(tuned: Place, tmp_path: Path, budwood: Callable[..., Any]) -> None:
    truth = tmp_path / "files"
    truth.mkdir()
    rng = np.random.default_rng(0)
    shape = len(tuned.query_ids), len(tuned.train_ids)
    effect_QN = rng.normal(size=shape).astype(np.float32)
    mask_SN = rng.random((40, shape[1])) < 0.5
    np.save(truth / "masks.npy", mask_SN)
    np.save(truth / "margins.npy", mask_SN @ effect_QN.T)
    with writing_scores(tmp_path / "s" / "scores", tuned.query_ids, tuned.train_ids) as desk:
        for damping, values in (("1e-08", rng.normal(size=shape)), ("0.1", effect_QN)):
            matrix = Matrix("ekfac", damping, main=damping == "1e-08")
            desk.put(matrix, slice(None), slice(None), values.astype(np.float32))
    words = ["validate", "lds", *tuned.words, "--truth", tmp_path, "--scores", tmp_path / "s", "--tune"]
    code, out, err = budwood(*words)
    assert code == 0, err
    assert "chosen: ekfac@0.1; on subsets the choice did not see 1.000" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--subsets", "1"], "subsets"),
        (["--until-se", "0.1"], "no --scores are given"),
        (["--scores", "nowhere"], "No run 'nowhere'"),
        (["--truth", "."], "no ground truth"),
    ],
)
def test_bad_input(tuned: Place, budwood: Callable[..., Any], words: list[str], says: str) -> None:
    code, _, err = budwood("validate", "lds", *tuned.words, *words)
    assert code == 2 and says in err


def test_scores_of_other_rows_are_refused_before_anything_is_trained(
    tuned: Place, tmp_path: Path, budwood: Callable[..., Any]
) -> None:
    other = tuned.scores(tmp_path / "other", train=(*tuned.train_ids[1:], "stranger"))
    code, _, err = budwood("validate", "lds", *tuned.words, "--scores", other, "--out", "x")
    assert code == 2 and "other training rows" in err and not list(Path("x").glob("retrains/*"))


def test_a_fleet_that_diverges_is_named(tuned: Place, tmp_path: Path, budwood: Callable[..., Any]) -> None:
    run = json.loads((tuned.run / "run.json").read_text())
    run["given"] |= {"learning_rate": 1e30, "max_grad_norm": 0.0, "optimizer": "sgd", "warmup_steps": 0}
    wild = tmp_path / "wild"
    wild.mkdir()
    (wild / "run.json").write_text(json.dumps(run))
    (wild / "model").symlink_to(tuned.run / "model")
    code, _, err = budwood("validate", "lds", wild, *tuned.words[1:], *FEW)
    assert code == 2 and "All 12 retrains diverged" in err


def test_dry_run_tells_the_time(tuned: Place, budwood: Callable[..., Any]) -> None:
    code, out, err = budwood("validate", "lds", *tuned.words, "--dry-run", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["retrains"] == 500 and found["seconds"] == pytest.approx(500 * found["seconds_each"] + 2, rel=0.05)

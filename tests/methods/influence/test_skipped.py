"""Rows whose loss is not finite, left out on demand: by every part, and told wherever the work was done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from budwood.config.influence import FitConfig, IndexConfig, ScoreConfig, SelfConfig
from budwood.errors import ConfigError, ModelError
from budwood.methods.influence import evidence, growth, workshop
from budwood.methods.influence import fit as fitting
from budwood.methods.influence import index as indexing
from budwood.methods.influence import itself as selves
from budwood.methods.influence import score as scoring
from budwood.methods.influence.factors import Factors, Setting
from budwood.methods.influence.index import Index
from budwood.methods.influence.masked import mask_of, masked_scores, query_weights
from budwood.methods.influence.moments import covariances, second_moments
from budwood.methods.influence.scores import Scores
from budwood.params import tree
from budwood.params.tree import named
from budwood.store.files import read_json
from budwood.studies.api import run
from budwood.studies.verbs import run_verb
from tests.cases import case
from tests.interrupt import interrupted
from tests.methods.influence.toys import fit, reading_of, scores

BROKEN = "w20"


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], set[str]]:
    """A model for which one word is not a number, a task in a file, and the training rows that hold the word."""
    from tests.cases import tiny_tokenizer, write_model

    place = tmp_path_factory.mktemp("broken")
    rng = np.random.default_rng(0)
    words = ("w7", "w9", "w11", "w13", "w15")
    texts = [" ".join(rng.choice(words, size=rng.integers(2, 7))) for _ in range(40)]
    for i in (3, 11, 12):
        texts[i] += f" {BROKEN}"
    for name, part in (("train", slice(0, 30)), ("validation", slice(30, 40))):
        lines = [f"{text},{'yes' if 'w7' in text else 'no'}" for text in texts[part]]
        (place / f"{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    files = {f"{n}_file": str(place / f"{n}.csv") for n in ("train", "validation")}
    common = {"task": "own", **files, "threads": 1, "progress": "none"}
    write_model(place / "m", "bert", "lm")
    tuned = run("finetune", str(place / "m"), "own", {**files, "max_steps": 3, "threads": 1, "out": place / "ft"}).run
    file = tuned / "model" / "model.safetensors"
    tensors = load_file(file)
    (key,) = [k for k in tensors if k.endswith("word_embeddings.weight")]
    tensors[key][tiny_tokenizer().convert_tokens_to_ids(BROKEN)] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    from budwood.data.source import load_task

    rows = load_task(FitConfig(**common)).rows("train")
    return tuned, {**common, "skip_nan": True}, {r.id for r in rows if BROKEN in r.text.split()}


def done(verb: str, cfg: Any, model: Path) -> Any:
    return run_verb(f"influence {verb}", cfg, [str(model)])


@pytest.fixture(scope="module")
def scored(broken: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, common, ids = broken
    place = tmp_path_factory.mktemp("skipped")
    found = done("score", ScoreConfig(**common, out=place / "score", damping=("0.1mean",)), model)
    assert len(ids) == 3 and found.metrics["skipped"] == sorted(ids)
    return place


def test_an_index_leaves_them_out(broken: Any, scored: Path) -> None:
    model, common, ids = broken
    settings = {"coordinates": "100%", "bits": 16, "calibration": 5, "shard_rows": 8, "damping": ("0.1mean",)}
    made = done("index", IndexConfig(**common, **settings, out=scored / "index"), model)
    assert made.metrics["skipped"] == sorted(ids)
    index = Index.open(
        made.run, workshop.open_shop(workshop.settings_for(IndexConfig(**common, **settings), str(model)))
    )
    full = Scores.open(scored / "score")
    want = full.whole()
    gone = [n for n, i in enumerate(full.train_ids) if i in ids]
    assert not want[:, gone].any()
    rows = index.shop.read.task.rows("validation")
    ours = np.stack([index.ask(index.shop.read.encode([r])) for r in rows])
    assert not ours[:, gone].any() and np.isfinite(ours).all()
    np.testing.assert_allclose(ours, want, atol=2e-3 * np.abs(want).max())
    query = index.shop.read.encode([rows[1]])
    wanted = np.array([gone[0], 3, 17, gone[1], 5])
    np.testing.assert_allclose(index.exact(query, wanted), want[1, wanted], atol=2e-5 * np.abs(want[1]).max())
    asked = index.shop.read.encode([replace(rows[1], text=f"w7 {BROKEN}")])
    for ask in (index.ask, lambda f: index.exact(f, wanted)):
        with pytest.raises(ConfigError, match="no finite loss"):
            ask(asked)


@pytest.mark.parametrize("name", ["tracin", "datainf", "trak"])
def test_gradient_baselines_leave_them_out(broken: Any, tmp_path: Path, name: str) -> None:
    """As if the rows had never been there; without the flag they are named."""
    model, common, ids = broken
    wish = {"strategy": (name,), "scale": "sum", "projection": 64}
    with pytest.raises(ModelError, match="--skip-nan"):
        done("score", ScoreConfig(**{**common, "skip_nan": False}, **wish, out=tmp_path / "refused"), model)
    found = done("score", ScoreConfig(**common, **wish, out=tmp_path / "kept"), model)
    assert found.metrics["skipped"] == sorted(ids)
    scores = Scores.open(found.run)
    gone = np.array([i in ids for i in scores.train_ids])
    lines = Path(common["train_file"]).read_text().splitlines()
    few = tmp_path / "few.csv"
    few.write_text("\n".join(line for line in lines if BROKEN not in line) + "\n")
    clean = {**common, "train_file": str(few)}
    want = Scores.open(done("score", ScoreConfig(**clean, **wish, out=tmp_path / "clean"), model).run).whole()
    got = scores.whole()
    assert gone.sum() == 3 and not got[:, gone].any()
    np.testing.assert_allclose(got[:, ~gone], want, rtol=1e-4, atol=1e-6 * np.abs(want).max())


def test_a_growing_sample_leaves_them_out(broken: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they would be the queries that say when the sample is large enough."""
    model, common, ids = broken
    monkeypatch.setattr(evidence, "ROWS", 10)
    monkeypatch.setattr(growth, "AGREE", 2.0)
    monkeypatch.setattr(growth, "QUERIES", 28)
    found = done("fit", FitConfig(**common, fit_rows="auto", out=tmp_path / "fit"), model)
    assert found.metrics["skipped"] == sorted(ids) and found.metrics["growth"][-1]["rows"] == 30
    assert np.isfinite([g["spearman"] for g in found.metrics["growth"][1:]]).all()


def test_scores_within_a_graft_leave_them_out(broken: Any, scored: Path) -> None:
    model, common, ids = broken
    cfg = ScoreConfig(**common, damping=("0.1mean",))
    shop = workshop.open_shop(workshop.settings_for(cfg, str(model)))
    parameters = named(shop.model)
    mask = mask_of(shop.maps, {n: torch.arange(parameters[n].numel()) for n in shop.parameters})
    query = shop.read.encode([shop.read.task.rows("validation")[2]])
    asked = query_weights(shop, Factors.open(scored / "score"), Setting("ekfac", "0.1mean"), query, mask, cfg)
    want = Scores.open(scored / "score").whole()[2]
    got = masked_scores(shop, asked, mask) / len(want)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def test_they_are_told_wherever_the_work_was_done(broken: Any, scored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, common, ids = broken
    for part in (fitting, selves, indexing, scoring):
        real = part.run_all

        def elsewhere(*given: Any, real: Any = real) -> None:
            workshop._open.cache_clear()  # as another process, or the same command after a kill: a shop of its own
            real(*given)

        monkeypatch.setattr(part, "run_all", elsewhere)
    for strategy in ("kfac", "ekfac"):
        out = scored / f"fit {strategy}"
        found = done("fit", FitConfig(**common, strategy=(strategy,), shard_rows=8, out=out), model)
        assert found.metrics["skipped"] == sorted(ids), strategy
        assert read_json(out / "factors" / "factors.json")["skipped"] == sorted(ids)
    given = {**common, "factors": scored / "fit ekfac", "shard_rows": 8}
    own = done("self", SelfConfig(**given, out=scored / "self"), model)
    assert own.metrics["skipped"] == sorted(ids)
    assert not own.table.set_index("id").loc[sorted(ids)].to_numpy().any()
    made = done("index", IndexConfig(**given, calibration=5, out=scored / "index with factors"), model)
    assert made.metrics["skipped"] == sorted(ids)


def test_a_killed_fit_tells_them_too(broken: Any, scored: Path) -> None:
    model, common, ids = broken
    cfg = FitConfig(**common, strategy=("kfac",), shard_rows=8, out=scored / "killed")
    with interrupted(fitting, "_eigen", 1):
        done("fit", cfg, model)
    workshop._open.cache_clear()
    assert done("fit", cfg, model).metrics["skipped"] == sorted(ids)


@pytest.fixture
def cut() -> tuple[Any, Any]:
    """A classifier, and rows of which two were cut: one piece of "long" holds a word that is not a number."""
    c = case("bert", "head", rows=8)
    ids = c.features.ragged["input_ids"].copy()
    broken = next(t for t in range(5, 40) if t not in ids)
    ids[c.features.offsets_N1[6] + 1] = broken
    with torch.no_grad():
        c.model.get_input_embeddings().weight[broken] = float("nan")
    names = ("a", "fine", "fine", "b", "long", "c", "long", "long")
    return c, replace(c.features, ids=names, ragged={**c.features.ragged, "input_ids": ids})


def shop_around(cut: Any, **more: Any) -> workshop.Shop:
    c, features = cut
    cfg = FitConfig(task="toy", fisher="empirical", strategy=("ekfac", "kfac"), **more)
    return workshop.shop_of(reading_of(c.model, c.objective, ("a", "b", "c")), features, cfg)


def test_a_cut_text_is_left_out_whole(cut: Any, tmp_path: Path) -> None:
    shop = shop_around(cut, skip_nan=True)
    there, gone = np.array([0, 1, 2, 3, 5]), np.array([4, 6, 7])
    # whatever shard a sound piece of it is in, and whether or not the broken one was met
    for order in (np.arange(8), np.arange(6), np.array([7, 4, 0, 1, 2, 3, 5])):
        for got, want in (
            (covariances(shop, order), covariances(shop, there)),
            (second_moments(shop, order, None, True), second_moments(shop, there, None, True)),
        ):
            for key in want:
                torch.testing.assert_close(got[key], want[key])
    fitting._save(tmp_path / "part", {}, shop, np.array([4, 5, 3, 7]))
    assert tree.manifest(tmp_path / "part")["rows"] == 2
    factors = fit(shop, tmp_path, there)
    score_N = scores(shop, factors, [Setting("ekfac", "0.1mean")], np.array([0, 3]))[0]
    assert not score_N[:, gone].any() and score_N[:, there].all() and shop.skipped == {"long"}


def test_a_cut_text_stops_the_run_by_its_name(cut: Any) -> None:
    with pytest.raises(ModelError, match="loss of at least 1 row is not finite: 'long'.*--skip-nan"):
        covariances(shop_around(cut), np.arange(8))

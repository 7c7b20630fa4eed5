"""`influence fit`, `score`, `self` as runs: files, sums of parts, resuming, refusals; leave-one-out retraining."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from budwood.config.influence import FitConfig
from budwood.data.batch import Features
from budwood.data.task import Task
from budwood.errors import ConfigError, DataError
from budwood.linalg.ranking import spearman_by_row
from budwood.methods.influence import evidence, growth, workshop
from budwood.methods.influence import fit as fitting
from budwood.methods.influence import score as method
from budwood.methods.influence.factors import Factors, Setting
from budwood.methods.influence.scores import STORED, Scores, sum_of
from budwood.methods.influence.workshop import open_shop, settings_for, shop_of
from budwood.models.objective import Head
from budwood.studies.api import run
from tests.cases import Case
from tests.interrupt import interrupted
from tests.methods.influence.toys import ALL, fit, gradients, positions, reading_of, scores


def test_parts_add_up_and_runs_repeat(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    settings = {"strategy": ("ekfac", "identity"), "damping": ("0.1mean", "1e-4"), "threads": 1, "shard_rows": 7}
    more = {"per_module": True, "per_layer": True, "per_token": True, "queries": ("4",)}
    first = run("influence score", model, task, {**settings, **more, "out": tmp_path / "one"})
    found = Scores.open(first.run)
    assert first.metrics["queries"] == 4 and first.metrics["train"] == 24 and not list(first.run.rglob("parts"))
    for strategy in ("ekfac", "identity"):
        main = found.find(strategy)
        whole = found.whole(main)
        listed = [m.module for m in found.matrices if (m.strategy, m.damping) == (strategy, main.damping)]
        layers = [m for m in listed if m.startswith("layer.") or m == "head"]
        modules = [m for m in listed if m not in ("", "tokens", *layers)]
        for names in (modules, layers):
            total = sum_of([found.whole(found.find(strategy, main.damping, n)) for n in names])
            np.testing.assert_allclose(total, whole, rtol=1e-4, atol=1e-5 * np.abs(whole).max())
        by_token = np.array([[found.token_row(q, n, main)[1].sum() for n in range(24)] for q in range(4)])
        np.testing.assert_allclose(by_token, whole, rtol=1e-3, atol=1e-4 * np.abs(whole).max())

    again = {**settings, **more, "out": tmp_path / "two"}
    with interrupted(method, "score_shard", 2):
        run("influence score", model, task, again)
    assert list((tmp_path / "two" / "parts").iterdir())
    run("influence score", model, task, again)
    for file in sorted((first.run / "scores").iterdir()):
        assert file.read_bytes() == (tmp_path / "two" / "scores" / file.name).read_bytes(), file.name


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs compute and store in float64, so that sums in another order differ by nothing else."""
    real = workshop.load

    def load(*given: Any, **settings: Any) -> Any:
        loaded = real(*given, **settings)
        loaded.model.double()
        return loaded

    monkeypatch.setattr(workshop, "load", load)
    monkeypatch.setitem(STORED, "float32", "float64")
    workshop._open.cache_clear()
    yield
    workshop._open.cache_clear()


def test_parts_and_sums_equal_the_whole_in_float64(in_float64: None, tuned: Any, tmp_path: Path) -> None:
    """Scores by module, layer and token add up to the scores; one row, or one column, is the sum of all."""
    model, task = tuned
    common = {"strategy": ALL, "damping": ("0.1mean", "1e-4"), "threads": 1, "shard_rows": 7, "queries": ("5",)}
    split = {"per_module": True, "per_layer": True, "per_token": True}
    first = run("influence score", model, task, {**common, **split, "out": tmp_path / "parts"})
    given = {**common, "factors": first.run}
    sums = {
        name: Scores.open(run("influence score", model, task, {**given, **more, "out": tmp_path / name}).run)
        for name, more in {
            "plain": {},
            "query": {"aggregate": ("query",), "per_module": True},
            "train": {"aggregate": ("train",)},
            "both": {"aggregate": ("query", "train")},
        }.items()
    }
    found = Scores.open(first.run)
    main = [m for m in found.matrices if not m.module]
    assert sorted((m.strategy, m.damping) for m in main) == sorted(
        [("identity", ""), *((s, d) for s in ALL[1:] for d in ("0.1mean", "0.0001"))]
    )
    maps = {m.name for m in Factors.open(first.run).maps}
    for matrix in main:
        whole = found.whole(matrix)
        assert matrix.dtype == "float64" and whole.dtype == np.float64 and whole.shape == (5, 24)

        def close(got: np.ndarray, want: np.ndarray, whole: np.ndarray = whole, matrix: Any = matrix) -> None:
            assert got.shape == want.shape, matrix.name
            assert np.abs(got - want).max() <= 1e-9 * np.abs(whole).max(), matrix.name

        mine = {m.module: m for m in found.matrices if (m.strategy, m.damping) == (matrix.strategy, matrix.damping)}
        layers = {"layer.0", "layer.1", "layer.2", "head"}
        assert mine.keys() == {"", "tokens"} | layers | maps
        by_part = {k: found.whole(m) for k, m in mine.items()}
        assert all(np.abs(by_part[k]).max() > 0 for k in maps | layers)
        close(sum(by_part[k] for k in maps), whole)
        close(sum(by_part[k] for k in layers), whole)
        for layer in layers - {"head"}:
            close(sum(by_part[k] for k in maps if f".{layer}." in k), by_part[layer])
        close(sum(by_part[k] for k in maps if ".layer." not in k), by_part["head"])
        close(np.array([[found.token_row(q, n, matrix)[1].sum() for n in range(24)] for q in range(5)]), whole)
        other = {k: s.whole(s.find(matrix.strategy, matrix.damping)) for k, s in sums.items()}
        close(other["plain"], whole)
        close(other["query"], whole.sum(0, keepdims=True))
        close(other["train"], whole.sum(1, keepdims=True))
        close(other["both"], whole.sum(keepdims=True))
        for k in maps:
            one = sums["query"]
            close(one.whole(one.find(matrix.strategy, matrix.damping, k)), by_part[k].sum(0, keepdims=True))


def test_tokens_of_a_run_stand_beside_their_words(in_float64: None, tuned: Any, tmp_path: Path) -> None:
    """Against g_t' V a_t by plain hooks, row by row: shards are cut by length, and come back in the order of rows."""
    model, task = tuned
    wish = {"strategy": ("identity",), "query_split": "train", "queries": ("3",), "scale": "sum", "per_token": True}
    made = run("influence score", model, task, {**wish, "threads": 1, "shard_rows": 7, "out": tmp_path / "run"})
    found = Scores.open(made.run)
    shop = open_shop(settings_for(FitConfig(task="toy", threads=1, strategy=("identity",)), str(model.run)), task)
    c = Case(shop.model, shop.read.objective, shop.train)
    measured = gradients(c, shop, lambda z, t: -c.objective.margin(z, t))
    most = float(np.abs(found.whole()).max())
    for n, row in enumerate(task.rows("train")):
        words = ("", "[CLS]", *row.text.replace("w3", "[UNK]").split(), "[SEP]")
        want = np.zeros((3, len(words)))
        for name, uses in positions(c, shop, n).items():
            for a_TI, g_TO in uses:
                at = slice(0, 1) if name in ("pooler.dense", "head.classifier") else slice(1, None)
                want[:, at] += torch.einsum("qoi,ti,to->qt", measured[name][:3], a_TI, g_TO).numpy()
        for q in range(3):
            spelled, values = found.token_row(q, n)
            assert spelled == words
            assert np.abs(values - want[q]).max() <= 1e-9 * most


def test_factors_are_reused_and_refused(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    fitted = run("influence fit", model, task, {"strategy": ("ekfac",), "threads": 1, "out": tmp_path / "fit"})
    assert fitted.metrics["modules"] and "embeddings.word_embeddings.weight" in fitted.metrics["not_covered"]
    common = {"threads": 1, "damping": ("0.1mean",), "queries": ("3",)}
    own = run("influence score", model, task, {**common, "out": tmp_path / "own"})
    given = run("influence score", model, task, {**common, "factors": fitted.run, "out": tmp_path / "given"})
    assert np.array_equal(Scores.open(own.run).whole(), Scores.open(given.run).whole())
    with pytest.raises(ConfigError, match="fisher: 'exact' there, 'empirical' now"):
        run(
            "influence score",
            model,
            task,
            {**common, "fisher": "empirical", "factors": fitted.run, "out": tmp_path / "x"},
        )
    with pytest.raises(ConfigError, match="at least"):
        run("influence score", model, task, {**common, "max_memory": "1KB", "out": tmp_path / "y"})


def test_self_and_sums_over_queries(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    common = {"threads": 1, "damping": ("0.1mean",)}
    every = run(
        "influence score",
        model,
        task,
        {**common, "query_split": "train", "measurement": "loss", "scale": "sum", "out": tmp_path / "a"},
    )
    both = Scores.open(every.run).whole()
    alone = run("influence self", model, task, {**common, "out": tmp_path / "b"})
    got = alone.table["self:ekfac@0.1mean"].to_numpy()
    np.testing.assert_allclose(got, np.diagonal(both), rtol=1e-3, atol=1e-4 * np.abs(both).max())
    summed = run(
        "influence score",
        model,
        task,
        {
            **common,
            "query_split": "train",
            "measurement": "loss",
            "scale": "sum",
            "aggregate": ("query",),
            "out": tmp_path / "c",
        },
    )
    np.testing.assert_allclose(
        Scores.open(summed.run).row(0), both.sum(0), rtol=1e-3, atol=1e-4 * np.abs(both.sum(0)).max()
    )


def test_queries_that_are_training_rows_are_named(
    tuned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By both ids, whatever they are called there: on the screen the first five, in the run's log all of them."""
    model, task = tuned
    train = task.splits["train"]
    texts = dict.fromkeys(r.text for r in train)
    last = {r.text: r.id for r in train}
    copies = tuple(replace(train[0], id=f"q{i}", text=text) for i, text in enumerate(texts))[:7]
    new = tuple(replace(train[0], id=f"new{i}", text="w9 " * (i + 20)) for i in range(2))
    task = Task("toy", "label", {"train": train, "validation": (*new, *copies)}, task.labels)
    both = [[r.id, last[r.text]] for r in copies]
    wish = {"threads": 1, "strategy": ("identity",), "progress": "plain"}
    for count, told in ((2, 0), (3, 1), (9, 7)):
        capsys.readouterr()
        made = run("influence score", model, task, {**wish, "queries": (str(count),), "out": tmp_path / str(count)})
        shown = ", ".join(f"{q} = {n}" for q, n in both[: min(told, 5)]) + (" ..." if told > 5 else "")
        line = f"{told} of {count} queries are training rows too ({shown}): they will look like their own best helpers."
        lines = capsys.readouterr().err.splitlines()
        assert [x for x in lines if "training rows too" in x] == ([line] if told else [])
        events = [json.loads(x) for x in (made.run / "progress.jsonl").read_text().splitlines()]
        assert [e["overlap"] for e in events if "overlap" in e] == ([both[:told]] if told else [])


def test_a_query_that_is_not_there_is_named(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    with pytest.raises(DataError, match="no row 'r3x'.*Did you mean 'r3"):
        run("influence score", model, task, {"threads": 1, "queries": ("r30", "r3x"), "out": tmp_path / "x"})


@pytest.mark.parametrize("agree,sizes,bases", [(-2.0, [6, 12], 24), (2.0, [6, 12, 24], 24), (2.0, [6, 12, 24], 6)])
def test_fit_rows_grow_until_ranks_agree(
    agree: float, sizes: list[int], bases: int, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    monkeypatch.setattr(evidence, "ROWS", 6)
    monkeypatch.setattr(growth, "BASES", bases)
    monkeypatch.setattr(growth, "AGREE", agree)
    grown = run("influence fit", model, task, {"threads": 1, "fit_rows": "auto", "out": tmp_path / "grown"})
    assert [g["rows"] for g in grown.metrics["growth"]] == sizes and grown.metrics["fit_rows"] == sizes[-1]
    plain = run("influence fit", model, task, {"threads": 1, "fit_rows": str(sizes[-1]), "out": tmp_path / "plain"})
    ours, want = (Factors.open(r.run) for r in (grown, plain))
    for m in want.maps:  # rows were summed in other pieces, so bases turn by rounding; what does not depend on them
        assert float(ours.tensor(f"ekfac/{m.name}").sum()) == pytest.approx(
            float(want.tensor(f"ekfac/{m.name}").sum()), rel=1e-4
        )
    few = run(
        "influence fit", model, task, {"threads": 1, "fit_rows": str(min(bases, sizes[-1])), "out": tmp_path / "few"}
    )
    first = Factors.open(few.run)
    for m in want.maps:  # bases are those of the first rows, second moments those of all of them in these bases
        assert torch.allclose(ours.tensor(f"G/{m.name}"), first.tensor(f"G/{m.name}"), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("damping,sizes", [("1e9", [6, 12]), ("1e-8", [6, 12, 24])])
def test_a_sample_grows_until_ranks_agree_to_99_hundredths(
    damping: str, sizes: list[int], tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so much damping that factors hardly matter the first two samples agree; with hardly any they do not."""
    model, task = tuned
    monkeypatch.setattr(evidence, "ROWS", 6)
    wish = {"threads": 1, "fit_rows": "auto", "damping": (damping,), "queries": ("2",), "out": tmp_path / "run"}
    grown = Factors.open(run("influence score", model, task, wish).run).facts
    assert growth.AGREE == 0.99
    assert [g["rows"] for g in grown["growth"]] == sizes and grown["fit_rows"] == sizes[-1]
    assert grown["growth"][0]["spearman"] is None
    assert (grown["growth"][1]["spearman"] >= 0.99) == (len(sizes) == 2)


@pytest.mark.parametrize("agreed,sizes", [(0.9899, [6, 12, 24]), (0.9901, [6, 12])])
def test_a_sample_stops_growing_just_above_99_hundredths(
    agreed: float, sizes: list[int], tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    monkeypatch.setattr(evidence, "ROWS", 6)
    monkeypatch.setattr(growth, "spearman_by_row", lambda a, b: np.full(len(a), agreed))
    grown = run("influence fit", model, task, {"threads": 1, "fit_rows": "auto", "out": tmp_path / "run"})
    assert [g["rows"] for g in grown.metrics["growth"]] == sizes


def test_covariances_of_kfac_grow_with_the_sample(tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, task = tuned
    monkeypatch.setattr(evidence, "ROWS", 6)
    for name, value in (("BASES", 6), ("AGREE", 2.0)):
        monkeypatch.setattr(growth, name, value)
    wish = {"threads": 1, "strategy": ("kfac",)}
    grown = run("influence fit", model, task, {**wish, "fit_rows": "auto", "out": tmp_path / "grown"})
    plain = run("influence fit", model, task, {**wish, "out": tmp_path / "plain"})
    assert [g["rows"] for g in grown.metrics["growth"]] == [6, 12, 24] and grown.metrics["growth"][1]["spearman"] < 1
    ours, want = (Factors.open(r.run) for r in (grown, plain))
    for m in want.maps:
        assert torch.allclose(ours.tensor(f"G/{m.name}"), want.tensor(f"G/{m.name}"), rtol=1e-4, atol=1e-12)


def test_second_moments_grow_in_bases_that_stay(tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row goes through the model once for second moments, and they are those of one pass in the same bases."""
    model, task = tuned
    monkeypatch.setattr(evidence, "ROWS", 6)
    for name, value in (("BASES", 6), ("AGREE", 2.0)):
        monkeypatch.setattr(growth, name, value)
    seen: list[int] = []
    plain = fitting.second_moments
    monkeypatch.setattr(
        fitting, "second_moments", lambda shop, order, *rest: seen.append(len(order)) or plain(shop, order, *rest)
    )
    grown = run("influence fit", model, task, {"threads": 1, "fit_rows": "auto", "out": tmp_path / "grown"})
    factors = Factors.open(grown.run)
    assert grown.metrics["fit_rows"] == 24 and sum(seen) == 24
    shop = open_shop(settings_for(FitConfig(task="toy", threads=1), str(model.run)), task)
    want = plain(shop, np.arange(len(shop.train)), factors.bases, False)
    for m in factors.maps:
        got = factors.tensor(f"ekfac/{m.name}")
        assert torch.allclose(got, want[f"ekfac/{m.name}"] / 24, rtol=1e-4, atol=1e-5 * float(got.max())), m.name


def test_an_ensemble_is_the_mean_over_checkpoints(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    common = {"threads": 1, "damping": ("0.1mean",), "queries": ("3",)}
    other = run("finetune", str(model.run), task, {"max_steps": 2, "seed": 5, "threads": 1, "out": tmp_path / "other"})
    alone = [
        run("influence score", m, task, {**common, "out": tmp_path / f"{i}"}) for i, m in enumerate((model, other))
    ]
    both = run("influence score", model, task, {**common, "checkpoints": (str(other.run),), "out": tmp_path / "both"})
    want = np.mean([Scores.open(r.run).whole() for r in alone], axis=0)
    np.testing.assert_allclose(Scores.open(both.run).whole(), want, rtol=1e-4, atol=1e-6 * np.abs(want).max())


class Logistic(nn.Module):
    """Logistic regression on fixed features of the first token."""

    def __init__(self, features: torch.Tensor) -> None:
        super().__init__()
        self.features = nn.Embedding.from_pretrained(features, freeze=True)
        self.classifier = nn.Linear(features.shape[1], 2)

    def forward(self, input_ids: torch.Tensor) -> Any:
        return type("Out", (), {"logits": self.classifier(self.features(input_ids[:, 0]))})()


def _train(model: Logistic, ids: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, decay: float) -> None:
    parameters = list(model.classifier.parameters())
    step = torch.optim.LBFGS(
        parameters, max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        step.zero_grad()
        each = nn.functional.cross_entropy(model(ids).logits, labels, reduction="none")
        value = (each * weight).sum() / len(ids) + decay / 2 * sum(p.square().sum() for p in parameters)
        value.backward()
        return value

    step.step(loss)


@pytest.fixture(scope="module")
def left_out(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Agreement of EKFAC with leaving every row out of an L2 logistic regression in turn."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(110, 5, generator=generator, dtype=torch.float64)
    labels = (x[:, 0] + 0.7 * torch.randn(110, generator=generator, dtype=torch.float64) > 0).long()
    ids = torch.arange(110)[:, None]
    model, decay, rows = Logistic(x), 0.1, 100
    model.double()
    _train(model, ids[:rows], labels[:rows], torch.ones(rows, dtype=torch.float64), decay)
    texts = [[i] for i in range(110)]
    every = Features.from_lists([str(i) for i in range(110)], {"input_ids": texts}, {"label": labels.tolist()})
    read = reading_of(model, Head(), ("a", "b"))
    shop = shop_of(
        read, every, FitConfig(task="toy", fisher="exact", strategy=("ekfac", "kfac", "diagonal", "identity"))
    )
    factors = fit(shop, tmp_path_factory.mktemp("left-out"), np.arange(rows))
    assert [m.name for m in factors.maps] == ["classifier"]
    queries = np.arange(rows, 110)
    got = scores(shop, factors, [Setting("ekfac", f"{decay}"), Setting("kfac", f"{decay}")], queries)[:, :, :rows]
    start = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        before = Head().margin(model(ids[rows:]).logits, type("T", (), {"label_M": labels[rows:], "row_M": None})())
    want = np.zeros((10, rows))
    for n in range(rows):
        model.load_state_dict(start)
        weight = torch.ones(rows, dtype=torch.float64)
        weight[n] = 0
        _train(model, ids[:rows], labels[:rows], weight, decay)
        with torch.no_grad():
            after = Head().margin(model(ids[rows:]).logits, type("T", (), {"label_M": labels[rows:], "row_M": None})())
        want[:, n] = (before - after).numpy()  # what the row was worth to the query
    return float(spearman_by_row(got[0], want).mean())


def test_leave_one_out_retraining_of_logistic_regression(left_out: float) -> None:
    assert left_out >= 0.999

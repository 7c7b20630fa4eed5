"""`influence fit`, `score`, `self` as runs: files, sums of parts, resuming, refusals; leave-one-out retraining."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from budwood.config.influence import FitConfig
from budwood.data.batch import Features
from budwood.errors import ConfigError, DataError
from budwood.linalg.ranking import spearman_by_row
from budwood.methods.influence import evidence, growth
from budwood.methods.influence import fit as fitting
from budwood.methods.influence import score as method
from budwood.methods.influence.factors import Factors, Setting
from budwood.methods.influence.scores import Scores, sum_of
from budwood.methods.influence.workshop import open_shop, settings_for, shop_of
from budwood.models.objective import Head
from budwood.studies.api import run
from tests.interrupt import interrupted
from tests.methods.influence.toys import fit, reading_of, scores


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
    overlap = [json.loads(line) for line in (every.run / "progress.jsonl").read_text().splitlines()]
    assert any("overlap" in line for line in overlap)
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

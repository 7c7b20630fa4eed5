"""Baselines against the slow obvious version: one backward pass per row, dense inverses, a loop over words."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from budwood.data.batch import Features
from budwood.data.encoding import Encoding
from budwood.data.task import Row, Task
from budwood.errors import ConfigError
from budwood.linalg.ranking import spearman_by_row
from budwood.linalg.retrieval import bm25, tfidf, word_counts
from budwood.methods.influence import gradients
from budwood.methods.influence.baselines import baseline, label_signs
from budwood.methods.influence.gradients import Pairing, linear_names, projected
from budwood.methods.influence.scores import Scores
from budwood.models.load import Loaded
from budwood.models.reading import Reading, RowFeed
from budwood.params.tree import named
from budwood.studies.api import run
from tests.cases import PAD, case, toy_features, write_model

N, Q = 7, 3


class Toy(Reading):
    def feed(self, features: Any) -> RowFeed:
        return RowFeed(features, PAD)


class ToyPairing(Pairing):
    @cached_property
    def train(self) -> Features:
        return toy_features(self.read.mode, 0, N, with_types=True)

    @cached_property
    def queries(self) -> Features:
        return toy_features(self.read.mode, 1, Q, with_types=True)


def own_measure(logits_MC: torch.Tensor, targets: Any) -> torch.Tensor:
    """Neither loss nor margin: the true logit alone."""
    return logits_MC.gather(1, targets.label_M[:, None])[:, 0].tanh()


OWN = "tests.methods.influence.test_baselines:own_measure"


def toy(seed: int = 0, objective: str = "head", measurement: str = "margin") -> ToyPairing:
    made = case("bert", objective, seed)
    task = Task("toy", "label", {"train": (Row("r"),)}, ("a", "b", "c"))
    read = Toy(Loaded(made.model, None, None, 32, ()), task, objective, made.objective, Encoding(), None, None)  # type: ignore[arg-type]
    rows = lambda n, features: tuple(
        Row(f"row/{i}", f"w{i} w", label=int(features.fixed["label"][i])) for i in range(n)
    )  # noqa: E501
    pairing = ToyPairing(read, (), (), measurement)
    return ToyPairing(read, rows(N, pairing.train), rows(Q, pairing.queries), measurement)


def one_by_one(pairing: Pairing, features: Features, value: Any) -> list[dict[str, torch.Tensor]]:
    model, objective = pairing.read.loaded.model, pairing.read.objective
    chosen = {n: p for n, p in named(model).items() if n in linear_names(model)}
    found = []
    for i in range(len(features)):
        batch = pairing.read.feed(features)(np.array([i]), 0)
        one = value(objective.logits(model, batch), objective.targets(batch)).sum()
        found.append(dict(zip(chosen, torch.autograd.grad(one, list(chosen.values())))))
    return found


def dots(pairing: Pairing) -> np.ndarray:
    objective = pairing.read.objective
    sign = 1 if pairing.measurement == "loss" else -1
    value = {"margin": objective.margin, "loss": objective.loss, OWN: own_measure}[pairing.measurement]
    g_Q, g_N = one_by_one(pairing, pairing.queries, value), one_by_one(pairing, pairing.train, objective.loss)
    return np.array([[sign * sum(float((q[k] * n[k]).sum()) for k in q) for n in g_N] for q in g_Q])


@pytest.mark.parametrize("measurement", ["margin", "loss", OWN])
def test_tracin_sums_over_checkpoints(measurement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [toy(0, measurement=measurement), toy(5, measurement=measurement)]
    expected = 0.1 * dots(both[0]) + 0.02 * dots(both[1])
    np.testing.assert_allclose(baseline("tracin", both, (0.1, 0.02)), expected, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(gradients, "NUMBERS", 1)  # one row and one query at a time
    np.testing.assert_allclose(
        baseline("tracin", [toy(0, measurement=measurement)]), dots(both[0]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("measurement", ["margin", OWN])
def test_datainf_is_the_mean_of_damped_rank_one_inverses(measurement: str) -> None:
    pairing = toy(measurement=measurement)
    objective = pairing.read.objective
    value = objective.margin if measurement == "margin" else own_measure
    g_Q = one_by_one(pairing, pairing.queries, lambda z, t: -value(z, t))
    g_N = one_by_one(pairing, pairing.train, objective.loss)
    total = torch.zeros(Q, N, dtype=torch.float64)
    for k in g_N[0]:
        train = torch.stack([g[k].flatten() for g in g_N])
        query = torch.stack([g[k].flatten() for g in g_Q])
        damping = 0.1 * train.square().mean()
        if damping < 1e-25:  # the bias of attention keys has no gradient but rounding
            continue
        eye = torch.eye(train.shape[1], dtype=torch.float64)
        inverse = torch.stack([torch.linalg.inv(torch.outer(g, g) + damping * eye) for g in train]).mean(0)
        total += query @ inverse @ train.T
    np.testing.assert_allclose(baseline("datainf", [pairing]), total, rtol=1e-6, atol=1e-6)


def test_trak_with_a_wide_projection_is_the_dense_formula() -> None:
    pairing = toy()
    objective = pairing.read.objective
    g_Q, g_N = (
        one_by_one(pairing, pairing.queries, objective.margin),
        one_by_one(pairing, pairing.train, objective.margin),
    )
    flat = lambda gs: torch.stack([torch.cat([g[k].flatten() for k in g]) for g in gs])  # noqa: E731
    q, n = flat(g_Q), flat(g_N)
    kernel = n @ n.T
    width = 1 << 15
    batch = pairing.read.feed(pairing.train)(np.arange(N), 0)
    with torch.no_grad():
        p = torch.exp(-objective.loss(objective.logits(pairing.read.loaded.model, batch), objective.targets(batch)))
    # with fewer rows than numbers, Phi (Phi^T Phi + e)^-1 Phi^T = K (K + e)^-1
    dense = q @ n.T @ torch.linalg.inv(kernel + 1e-3 * kernel.trace() / width * torch.eye(N)) * (1 - p)
    ours = baseline("trak", [pairing], projection=width)
    assert spearman_by_row(ours, dense.numpy()).min() > 0.85
    narrow = baseline("trak", [pairing], projection=N - 1)  # the other of the two systems
    phi_N = projected(pairing, pairing.train, gradients.Question(objective.margin), N - 1).double()
    phi_Q = projected(pairing, pairing.queries, gradients.Question(objective.margin), N - 1).double()
    gram = phi_N.T @ phi_N
    other = phi_Q @ torch.linalg.inv(gram + 1e-3 * gram.trace() / (N - 1) * torch.eye(N - 1)) @ phi_N.T * (1 - p)
    np.testing.assert_allclose(narrow, other, rtol=1e-4, atol=1e-6)
    exact = projected(pairing, pairing.train, gradients.Question(objective.margin), width)
    np.testing.assert_allclose(exact @ exact.T, kernel, atol=0.1 * float(kernel.diagonal().max()))


@pytest.mark.parametrize("measurement,value", [(OWN, own_measure), ("loss", None)])
def test_trak_explains_what_is_measured(measurement: str, value: Any) -> None:
    pairing, size = toy(measurement=measurement), N - 1
    objective = pairing.read.objective
    value = value or (lambda z, t: -objective.loss(z, t))
    phi_N = projected(pairing, pairing.train, gradients.Question(objective.margin), size).double()
    phi_Q = projected(pairing, pairing.queries, gradients.Question(value), size).double()
    gram = phi_N.T @ phi_N
    p = torch.exp(-torch.from_numpy(gradients.losses(pairing.read, pairing.train)))
    want = phi_Q @ torch.linalg.inv(gram + 1e-3 * gram.trace() / size * torch.eye(size)) @ phi_N.T * (1 - p)
    np.testing.assert_allclose(baseline("trak", [pairing], projection=size), want, rtol=1e-4, atol=1e-6)


def test_only_the_modules_asked_for_count(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    wish = {"strategy": ("identity", "tracin", "datainf", "trak"), "queries": ("3",), "threads": 1}
    found = {}
    for name, modules in (("all", ()), ("some", ("*layer.1.*",))):
        made = run("influence score", model, task, {**wish, "modules": modules, "out": tmp_path / name})
        scores = Scores.open(made.run)
        found[name] = {s: scores.whole(scores.find(s)) for s in wish["strategy"]}
    for got in found.values():  # TracIn of one checkpoint is the inner product of gradients
        np.testing.assert_allclose(got["tracin"], got["identity"], rtol=1e-3, atol=1e-5 * np.abs(got["identity"]).max())
    for strategy in wish["strategy"]:
        assert not np.allclose(found["all"][strategy], found["some"][strategy], rtol=1e-2)


def test_a_row_without_text_has_no_column(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "bert", "lm")
    rows = [Row(f"t{i}", t) for i, t in enumerate(("w10 w11 w12", "", "w13 w14"))]
    task = Task("toy-text", "text", {"train": tuple(rows), "validation": (Row("v", "w10 w20"),)})
    for i, strategies in enumerate((("bm25",), ("identity", "bm25", "tracin"))):
        made = run(
            "influence score",
            str(tmp_path / "m"),
            task,
            {"strategy": strategies, "threads": 1, "out": tmp_path / str(i)},
        )
        scores = Scores.open(made.run)
        assert scores.train_ids == ("t0", "t2") and made.metrics["without_text"] == ["t1"]
        assert all(scores.whole(scores.find(s)).shape == (1, 2) for s in strategies)


def test_words_are_weighed_as_in_the_textbook() -> None:
    documents, queries = ["the cat sat", "the dog sat on the mat", "a bird"], ["cat the the", "zebra"]
    counts = word_counts(documents, queries)
    split = [d.split() for d in documents]
    mean = sum(map(len, split)) / 3
    expected = np.zeros((2, 3))
    for i, q in enumerate(queries):
        for j, d in enumerate(split):
            for w in q.split():
                n, f = sum(w in e for e in split), d.count(w)
                if n:
                    idf = math.log(1 + (3 - n + 0.5) / (n + 0.5))
                    expected[i, j] += idf * f * 2.5 / (f + 1.5 * (0.25 + 0.75 * len(d) / mean))
    np.testing.assert_allclose(bm25(*counts), expected, rtol=1e-6)
    from sklearn.feature_extraction.text import TfidfVectorizer

    made = TfidfVectorizer(token_pattern=r"\w+|[^\w\s]")
    theirs = made.fit_transform(documents)
    np.testing.assert_allclose(tfidf(*counts), (made.transform(queries) @ theirs.T).toarray(), atol=1e-6)


def test_likeness_is_signed_by_label() -> None:
    pairing = toy()
    signs = label_signs(pairing)
    assert set(signs.ravel()) == {-1.0, 1.0}
    for name in ("bm25", "representation"):
        found = baseline(name, [pairing])
        assert found.shape == (Q, N) and (np.sign(found) == signs)[found != 0].all()


def test_rates_must_fit_the_checkpoints() -> None:
    with pytest.raises(ConfigError, match="2 numbers for 1 checkpoints"):
        baseline("tracin", [toy()], (0.1, 0.2))

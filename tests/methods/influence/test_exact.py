"""Scores against the whole Gauss-Newton matrix, and against inner products that never make a gradient; in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from budwood.capture.stream import Map, Sides
from budwood.config.influence import FitConfig
from budwood.data.batch import Features
from budwood.data.task import Row, Task
from budwood.linalg.ranking import spearman_by_row
from budwood.methods.influence.factors import Setting
from budwood.methods.influence.precondition import measurement
from budwood.methods.influence.workshop import Shop, shop_of, sweep
from budwood.models.objective import Head
from tests.cases import Case
from tests.methods.influence.toys import ALL, fit, gradients, reading_of, scores, toy

ROWS, QUERIES = 60, np.arange(60, 72)


def sides_of(shop: Shop, question: str) -> list[dict[str, Sides]]:
    """What every map saw of every row, one row at a time."""
    found: list[dict[str, Sides]] = [{} for _ in range(len(shop.train))]
    asked = measurement(shop.read.objective, question)
    for n, mine in enumerate(found):

        def use(_: int, m: Map, s: Sides, mine: dict[str, Sides] = mine) -> None:
            mine[m.name] = s

        sweep(shop, shop.train, np.array([n]), lambda batch: (asked,), use)
    return found


@pytest.mark.parametrize("family", ["bert", "albert", "gpt2"])
def test_scores_equal_products_of_inner_products(family: str, tmp_path: Path) -> None:
    """<g_q a_q', g_n a_n'> is the sum over both rows' positions of (g_q . g_n) (a_q . a_n): no gradient is made."""
    _, shop = toy(family)
    asked, trained = sides_of(shop, "margin"), sides_of(shop, "loss")
    want = np.zeros((len(shop.train), len(shop.train)))
    for m in shop.maps:
        for q, one in enumerate(asked):
            for n, other in enumerate(trained):
                (u, a), (v, b) = ((s[m.name].g_BTO[0], s[m.name].a_BTI[0]) for s in (one, other))
                want[q, n] += float(((u @ v.T) * (a @ b.T + float(m.bias is not None))).sum())
    got = scores(shop, fit(shop, tmp_path), [Setting("identity")], np.arange(len(shop.train)))[0]
    assert np.abs(got - want).max() <= 1e-9 * np.abs(want).max()


class Net(nn.Module):
    """Layers on fixed features of one word; no `hidden` layer where it is 0."""

    def __init__(self, inputs: int, hidden: int, out: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.features = nn.Embedding.from_pretrained(torch.randn(len(QUERIES) + ROWS, inputs), freeze=True)
        self.inner = nn.Linear(inputs, hidden) if hidden else None
        self.classifier = nn.Linear(hidden or inputs, out)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.features(input_ids[:, 0])
        return type("Out", (), {"logits": self.classifier(x if self.inner is None else torch.tanh(self.inner(x)))})()


def around(model: nn.Module, regression: bool, classes: int = 3) -> tuple[Case, Shop]:
    """A case and a shop of rows of one word; labels follow a rule with noise."""
    rng = np.random.default_rng(0)
    x = model.features.weight.numpy()  # type: ignore[union-attr,operator]
    noisy = x[:, :classes] + 0.7 * rng.normal(size=(len(x), classes))
    labels = noisy[:, 0].tolist() if regression else noisy.argmax(1).tolist()
    every = Features.from_lists(
        [str(i) for i in range(len(x))], {"input_ids": [[i] for i in range(len(x))]}, {"label": labels}
    )
    objective = Head(regression=regression)
    read = reading_of(model.double(), objective, () if regression else ("a", "b", "c")[:classes])
    if regression:
        read = replace(read, task=Task("toy", "regression", {"train": (Row("r"),)}))
    shop = shop_of(read, every, FitConfig(task="toy", fisher="exact", strategy=ALL))
    return Case(model, objective, every), shop


def flat(grads: dict[str, Tensor], shop: Shop) -> Tensor:
    """All maps' gradients of a row behind one another [N, P]."""
    return torch.cat([grads[m.name].flatten(1) for m in shop.maps], 1)


def gauss_newton(c: Case, shop: Shop) -> Tensor:
    """The mean over training rows of J' H J, H being the loss's second derivative in the logits [P, P]."""
    with torch.no_grad():
        logits = c.objective.logits(c.model, c.batch())[:ROWS]
    classes = logits.shape[1]
    rows = [flat(gradients(c, shop, lambda z, t, k=k: z[:, k]), shop)[:ROWS] for k in range(classes)]
    jacobian_NCP = torch.stack(rows, 1)
    if classes == 1:
        second_NCC = torch.full((ROWS, 1, 1), 2.0, dtype=torch.float64)
    else:
        chance = logits.softmax(1)
        second_NCC = torch.diag_embed(chance) - chance[:, :, None] * chance[:, None, :]
    return torch.einsum("ncp,ncd,ndq->pq", jacobian_NCP, second_NCC, jacobian_NCP) / ROWS


def exact_scores(c: Case, shop: Shop, damping: float) -> np.ndarray:
    """score_QN by one solve with the damped matrix."""
    asked = flat(gradients(c, shop, lambda z, t: -c.objective.margin(z, t)), shop)[QUERIES]
    train = flat(gradients(c, shop), shop)[:ROWS]
    whole = gauss_newton(c, shop)
    return (asked @ torch.linalg.solve(whole + damping * torch.eye(len(whole)).double(), train.T)).numpy()


@pytest.mark.parametrize("kind", ["regression", "even chances", "two classes"])
@pytest.mark.parametrize("damping", [1e-4, 1e-2, 1.0])
def test_one_layer_at_one_position_is_exact(kind: str, damping: float, tmp_path: Path) -> None:
    """Where the loss bends alike for every row, or along one direction, a layer's curvature is a Kronecker product."""
    model = Net(5, 0, {"regression": 1, "even chances": 3, "two classes": 2}[kind])
    if kind == "even chances":
        for p in model.classifier.parameters():
            nn.init.zeros_(p)
    c, shop = around(model, kind == "regression", 2 if kind == "two classes" else 3)
    settings = [Setting("kfac", f"{damping:g}"), Setting("ekfac", f"{damping:g}")]
    got = scores(shop, fit(shop, tmp_path, np.arange(ROWS)), settings, QUERIES)[:, :, :ROWS]
    want = exact_scores(c, shop, damping)
    for mine in got:
        np.testing.assert_allclose(mine, want, rtol=1e-8, atol=1e-10 * np.abs(want).max())


@pytest.mark.parametrize("classes", [2, 3])
def test_loss_and_margin_rank_alike(classes: int, tmp_path: Path) -> None:
    """A row's loss is log(1 + exp(-margin)): its gradient is the margin's times one positive number of the query."""
    c, shop = around(Net(5, 16, classes), False, classes)
    settings = [Setting("identity"), *(Setting(s, d) for s in ALL[1:] for d in ("1e-08", "0.0001", "0.1mean"))]
    factors = fit(shop, tmp_path, np.arange(ROWS))
    loss, margin = (
        scores(shop, factors, settings, QUERIES, question=question)[:, :, :ROWS] for question in ("loss", "margin")
    )
    with torch.no_grad():
        wrong_Q = 1 - (-c.objective.loss(c.objective.logits(c.model, c.batch()), c.objective.targets(c.batch()))).exp()
    for setting, by_loss, by_margin in zip(settings, loss, margin):
        assert spearman_by_row(by_loss, by_margin).min() >= 1 - 1e-12, setting
        want = wrong_Q[QUERIES, None].numpy() * by_margin
        assert np.abs(by_loss - want).max() <= 1e-9 * np.abs(want).max(), setting


def trained() -> Net:
    """Two layers, tuned until most rows are known."""
    model = Net(6, 16, 3).double()
    c, _ = around(model, False)
    batch = c.batch(list(range(ROWS)))
    step = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for _ in range(100):
        step.zero_grad()
        c.objective.loss(c.objective.logits(model, batch), c.objective.targets(batch)).mean().backward()
        step.step()
    return model


def test_two_layers_are_nearer_to_the_whole_matrix_than_plain_gradients(tmp_path: Path, record_property: Any) -> None:
    c, shop = around(trained(), False)
    assert sum(m.out * m.columns for m in shop.maps) == 163
    factors = fit(shop, tmp_path, np.arange(ROWS))
    for damping in (1e-3, 1e-2, 1e-1):  # not exact: the blocks between layers are missing
        settings = [Setting("identity"), *(Setting(s, f"{damping:g}") for s in ("kfac", "ekfac"))]
        want = exact_scores(c, shop, damping)
        got = scores(shop, factors, settings, QUERIES)[:, :, :ROWS]
        found = {s.strategy: float(spearman_by_row(mine, want).mean()) for s, mine in zip(settings, got)}
        record_property(f"spearman at damping {damping:g}", found)
        assert min(found["kfac"], found["ekfac"]) > found["identity"] > 0, (damping, found)


def test_drawn_labels_come_nearer_to_the_exact_ones_the_more_runs_are_averaged(tmp_path: Path) -> None:
    _, exact = around(trained(), False)
    settings = [Setting(s, "0.1mean") for s in ALL[1:]]

    def scored(shop: Shop, name: str) -> np.ndarray:
        return scores(shop, fit(shop, tmp_path / name, np.arange(ROWS)), settings, QUERIES)[:, :, :ROWS]

    want = scored(exact, "exact")
    drawing = [replace(exact, labels="sampled", cfg=exact.cfg.model_copy(update={"seed": seed})) for seed in range(16)]
    runs = np.stack([scored(shop, str(seed)) for seed, shop in enumerate(drawing)])
    for i, setting in enumerate(settings):
        found = []
        for many in (1, 4, 16):  # all 16 runs count every time, in groups that are averaged
            means = runs[:, i].reshape(-1, many, *want[i].shape).mean(1)
            found.append(float(np.mean([spearman_by_row(mean, want[i]).mean() for mean in means])))
        assert found[0] < found[1] < found[2], (setting, found)

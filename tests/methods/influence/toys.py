"""Toy shops in float64, factors written to disk, and slow oracles of scores: dense gradients, dense inverses, hooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from budwood.capture.stream import Map
from budwood.config.influence import FitConfig
from budwood.data.batch import Features
from budwood.data.encoding import Encoding
from budwood.data.task import Row, Task
from budwood.methods.influence import factors as made
from budwood.methods.influence.factors import Factors, Setting
from budwood.methods.influence.fit import identity
from budwood.methods.influence.moments import Basis, covariances, second_moments
from budwood.methods.influence.pairs import Blocks, Meeting, Resident
from budwood.methods.influence.precondition import Work, measurement, precondition, query_blocks
from budwood.methods.influence.sided import Sided
from budwood.methods.influence.workshop import Shop, shop_of
from budwood.models.load import Loaded
from budwood.models.objective import Head
from budwood.models.reading import Reading, RowFeed
from budwood.params import tree
from budwood.params.tree import named
from budwood.store.files import write_text
from tests.cases import CLASSES, PAD, VOCABULARY, Case, build, case
from tests.oracles import grads_by_loop

ALL = ("identity", "diagonal", "kfac", "ekfac")


class Toy(Reading):
    def feed(self, features: Features) -> Any:
        return RowFeed(features, PAD)


def reading_of(model: Any, objective: Any, labels: tuple[str, ...]) -> Toy:
    kind = "label" if labels else "text"
    task = Task("toy", kind, {"train": (Row("r"),)}, labels)
    loaded = Loaded(model, None, None, 32, ())  # type: ignore[arg-type]
    return Toy(loaded, task, "head", objective, Encoding(), None, None)


def toy(family: str = "bert", objective: str = "head", rows: int = 6, **settings: Any) -> tuple[Case, Shop]:
    """A toy case and its shop."""
    c = case(family, objective, rows=rows)
    labels = ("a", "b", "c") if objective == "head" else ()
    settings = {"fisher": "empirical", "strategy": ALL, **settings}
    return c, shop_of(reading_of(c.model, c.objective, labels), c.features, FitConfig(task="toy", **settings))


def wide(lengths: Sequence[int], hidden: int, inner: int) -> tuple[Case, Shop]:
    """A classifier of two layers of such widths, and rows of such lengths."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, VOCABULARY, n).tolist() for n in lengths]
    labels = rng.integers(CLASSES, size=len(ids)).tolist()
    features = Features.from_lists([f"row/{n}" for n in range(len(ids))], {"input_ids": ids}, {"label": labels})
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "max_position_embeddings": max(lengths)}
    c = Case(build("bert", "head", num_hidden_layers=2, **sizes), Head(), features)
    cfg = FitConfig(task="toy", fisher="empirical", strategy=ALL)
    return c, shop_of(reading_of(c.model, c.objective, ("a", "b", "c")), features, cfg)


def fit(shop: Shop, path: Path, order: np.ndarray | None = None) -> Factors:
    """Factors of all strategies, as `fitted_on` would write them."""
    order = np.arange(len(shop.train)) if order is None else order
    covariance = made.means(made.merged([covariances(shop, order)]), shop.like.dtype)
    tree.save(path / "covariance.safetensors", covariance, {})
    tree.save(path / "eigen.safetensors", made.decompose(covariance), {})
    bases = Factors(path, shop.maps, {}).bases
    sums = second_moments(shop, order, bases, True)
    tree.save(path / "moments.safetensors", {k: v / len(order) for k, v in sums.items()}, {})
    facts = {"rows": len(order), "fit_rows": len(order), "evidence": {}, **identity(shop)}
    write_text(path / "factors.json", made.facts_json(shop.maps, facts))
    return Factors.open(path)


def scores(
    shop: Shop,
    factors: Factors,
    settings: list[Setting],
    queries: np.ndarray,
    way: str | None = None,
    question: str = "margin",
    most: int = 256,
    blocks: Blocks | None = None,
) -> np.ndarray:
    """score_SQN of all training rows by the fast path."""
    work = Work(len(queries), len(shop.train), 8.0)
    ready = precondition(factors, settings, work, way)
    blocks = blocks or Resident(len(queries), shop.like)
    put_sides = blocks.put_sides if isinstance(blocks, Sided) else None
    asked = measurement(shop.read.objective, question)
    query_blocks(shop, ready, shop.train, queries, asked, blocks.put, put_sides=put_sides)
    out = np.zeros((len(settings), len(queries), len(shop.train)))

    def add(setting: int, m: Any, took: np.ndarray, score_BQ: Tensor) -> None:
        out[setting][:, took] += score_BQ.T.numpy()

    Meeting(shop, ready, blocks, len(queries), add)(shop.train, np.arange(len(shop.train)), most)
    return out


def gradients(c: Case, shop: Shop, value: Any = None) -> dict[str, Tensor]:
    """grad_NOI of every map by one backward pass per row."""
    found = grads_by_loop(c, range(len(shop.train)), value)
    out = {}
    for m in shop.maps:
        if m.diagonal:
            parts = [found[n] for n in (m.weight, m.bias) if n]
            out[m.name] = parts[0] if m.kind == "embedding" else torch.stack(parts, 1)
            continue
        weight = found[m.weight].transpose(1, 2) if m.kind == "conv1d" else found[m.weight].flatten(2)
        out[m.name] = torch.cat([weight, found[m.bias][:, :, None]], 2) if m.bias else weight
    return out


def positions(c: Case, shop: Shop, n: int, value: Any = None) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """(a_TI with the bias's 1, g_TO) of every use of every map in one row by itself, seen by plain hooks."""
    by_weight = {id(named(c.model)[m.weight]): m for m in shop.maps}
    uses: list[tuple[Map, Tensor, Tensor]] = []

    def note(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        uses.append((by_weight[id(module.weight)], args[0].detach(), output))

    users = [m for m in c.model.modules() if id(getattr(m, "weight", None)) in by_weight]
    handles = [m.register_forward_hook(note) for m in users]
    batch = c.batch([n])
    loss = (value or c.objective.loss)(c.objective.logits(c.model, batch), c.objective.targets(batch)).sum()
    for handle in handles:
        handle.remove()
    assert {m.name for m, _, _ in uses} == {m.name for m in shop.maps}
    grads = torch.autograd.grad(loss, [output for _, _, output in uses], allow_unused=True)
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for (m, a, output), grad in zip(uses, grads):
        a_TI = a.reshape(-1, m.into)
        g_TO = torch.zeros_like(output) if grad is None else grad
        a_TI = torch.cat([a_TI, a_TI.new_ones(len(a_TI), 1)], 1) if m.bias else a_TI
        found.setdefault(m.name, []).append((a_TI, g_TO.reshape(-1, m.out)))
    return found


def dense_scores(query: dict[str, Tensor], train: dict[str, Tensor], factors: Factors, setting: Setting) -> np.ndarray:
    """score_QN with every block of the curvature written out as a matrix and inverted."""
    solved = dense_queries(query, train, factors, setting)
    return np.asarray(sum(v.flatten(1) @ train[name].flatten(1).T for name, v in solved.items()))


def dense_queries(
    query: dict[str, Tensor], train: dict[str, Tensor], factors: Factors, setting: Setting
) -> dict[str, Tensor]:
    """v_QOI: every map's part of the queries times the inverse of its curvature."""
    found = {}
    for name, u in query.items():
        if setting.strategy == "identity":
            found[name] = u
            continue
        v, damping = train[name], factors.damping(setting, name)
        if factors.map(name).diagonal:  # a vocabulary is too large to be written out
            found[name] = u / (v.square().mean(0) + damping)
            continue
        curvature = _dense(factors, setting, name, v, damping)
        found[name] = torch.linalg.solve(curvature, u.flatten(1).T).T.view_as(u)
    return found


def _dense(factors: Factors, setting: Setting, name: str, v_NOI: Tensor, damping: float) -> Tensor:
    size = v_NOI[0].numel()
    if setting.strategy == "diagonal":
        curvature = torch.diag(v_NOI.square().mean(0).flatten())
    elif setting.strategy == "kfac":
        m = factors.map(name)
        curvature = torch.kron(factors.tensor(f"G/{name}"), factors.tensor(f"A/{m.source}"))
    else:
        b: Basis = factors.basis(name)
        q = torch.kron(b.q_OO, b.q_II)
        moments = (v_NOI.flatten(1) @ q).square().mean(0)
        curvature = q @ torch.diag(moments) @ q.T
    return curvature + damping * torch.eye(size, dtype=curvature.dtype)

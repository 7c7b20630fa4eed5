"""Scores that count only some weights: which training rows wrote a graft.

Shapes: B rows, K weights of a map that count, O out, I in (with the bias's 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from budwood.capture.gradients import Question
from budwood.capture.stream import Map
from budwood.config.influence import STRATEGIES, ScoreConfig
from budwood.data.batch import Features
from budwood.data.task import Row, Task
from budwood.errors import StoreError
from budwood.linalg.kron import turned_back_
from budwood.methods.influence.factors import Factors, Setting
from budwood.methods.influence.fit import identity
from budwood.methods.influence.precondition import all_there, gradients, measurement
from budwood.methods.influence.scores import Matrix, Scores
from budwood.methods.influence.workshop import Shop, open_shop, settings_for
from budwood.params.graft import Graft, backbone_hash
from budwood.params.tree import named
from budwood.store.files import read_json

ROWS = 32


def graft_scores(
    run: Path, scores: Scores, query: int, matrix: Matrix, graft: Path, task: Task | None = None
) -> tuple[np.ndarray, str]:
    """One query's scores of all training rows, summed over the graft's weights alone: one more pass over the rows
    (of `task`, where they are in memory alone).

    Beside them a warning where the scored model is not the one that the graft was cut from, else "".
    """
    if matrix.strategy not in STRATEGIES:
        raise StoreError(f"--graft needs scores by weights; '{matrix.strategy}' has none. Use {', '.join(STRATEGIES)}.")
    found = read_json(run / "run.json")
    cfg = ScoreConfig(**found["given"])
    _refuse_mixed(cfg)
    shop = open_shop(settings_for(cfg, found["models"][0]), task)
    loaded = Graft.load(graft)
    warning = belongs(loaded, graft, shop.model, found["models"][0])
    mask = mask_of(shop.maps, {n: loaded.index[n] for n in loaded.index})
    if not mask:
        raise StoreError(f"{graft} changes no weight of the {len(shop.maps)} modules that are scored.")
    own = (run / "factors" / "factors.json").exists()  # fitted there, or read from another tool's files
    factors = Factors.open(run if own or not cfg.factors else cfg.factors)
    factors.check(identity(shop))
    row = _query(shop.read.task, scores.query_ids[query])
    asked = query_weights(shop, factors, Setting(matrix.strategy, matrix.damping), shop.read.encode([row]), mask, cfg)
    score_F = masked_scores(shop, asked, mask)
    place = {i: n for n, i in enumerate(scores.train_ids)}
    total = np.zeros(len(place))
    np.add.at(total, [place[i] for i in shop.train.ids], score_F)
    return total / (len(place) if cfg.scale == "mean" else 1), warning


def _query(task: Task, own: str) -> Row:
    """The row behind a query of these scores."""
    for rows in task.splits.values():
        for row in rows:
            if row.id == own:
                return row
    raise StoreError(f"Query '{own}' is no row of '{task.name}' any more: its rows have changed. Score them again.")


def _refuse_mixed(cfg: ScoreConfig) -> None:
    """Refuse scores that are not of one query, one row and one model: a graft's weights are."""
    if cfg.checkpoints or cfg.aggregate:
        what = f"averaged over {1 + len(cfg.checkpoints)} checkpoints" if cfg.checkpoints else "sums over rows"
        option = "--checkpoints" if cfg.checkpoints else f"--aggregate {','.join(cfg.aggregate)}"
        raise StoreError(
            f"--graft counts weights of one model for one query and each training row, and these scores are {what}. "
            f"Score without {option}."
        )


def belongs(graft: Graft, file: Path, model: nn.Module, name: str) -> str:
    """A warning where a graft was not cut from this model, else nothing; tensors that do not fit are refused."""
    parameters = named(model)
    tuned = graft.manifest.get("tuned", f"a tuned {graft.manifest.get('base', 'model')}")
    for tensor, shape in graft.shape.items():
        here = parameters.get(tensor)
        if here is None or tuple(here.shape) != tuple(shape):
            has = "lacks it" if here is None else f"has it in shape {tuple(here.shape)}"
            raise StoreError(
                f"{file.name} was cut from {tuned} and changes '{tensor}' of shape {tuple(shape)}; the scored model "
                f"{name} {has}, so these weights cannot be counted in it. Score the model that the graft was cut "
                f"from: budwood influence score {tuned} --task {graft.task}."
            )
    wanted = graft.manifest.get("tuned_hash")
    if wanted is None or wanted == backbone_hash(model):
        return ""
    return (
        f"{file.name} was cut from {tuned}, and these scores are of {name}, whose weights are others: the rows say "
        f"what wrote {name} at the graft's places, not what wrote the graft."
    )


def mask_of(maps: Sequence[Map], index: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Flat places in [O, I] of every map from flat places in its weight and bias as they are stored.

    >>> m = Map("l", "l.weight", "l.bias", 2, 3, "l")
    >>> mask_of([m], {"l.weight": torch.tensor([0, 4]), "l.bias": torch.tensor([1])})["l"].tolist()
    [0, 5, 7]
    """
    found: dict[str, Tensor] = {}
    for m in maps:
        parts = []
        if m.weight in index:
            at = index[m.weight].long()
            out, into = (at % m.out, at // m.out) if m.kind == "conv1d" else (at // m.into, at % m.into)
            parts.append(out * m.columns + into)
        if m.bias is not None and m.bias in index:
            at = index[m.bias].long()
            parts.append(m.columns + at if m.diagonal else at * m.columns + m.into)
        if parts:
            found[m.name] = torch.cat(parts)
    return found


def query_weights(
    shop: Shop, factors: Factors, setting: Setting, features: Features, mask: Mapping[str, Tensor], cfg: Any
) -> dict[str, Tensor]:
    """The query's preconditioned gradient at the weights that count."""
    found: dict[str, Tensor] = {}
    rotated = setting.strategy in ("kfac", "ekfac")

    def take(m: Map, grad_BOI: Tensor) -> None:
        if m.name not in mask:
            return
        inverse = factors.inverse(setting, m.name)
        one_OI = grad_BOI.sum(0) if inverse is None else grad_BOI.sum(0) * inverse
        if rotated and not m.diagonal:
            basis = factors.bases[m.name]
            one_OI = turned_back_(one_OI, torch.empty_like(one_OI), basis.q_OO, basis.q_II)
        found[m.name] = one_OI.flatten()[mask[m.name]]

    question = measurement(shop.read.objective, cfg.measurement)
    every = np.arange(len(features))
    all_there(features, every, gradients(shop, features, every, question, take, factors.bases if rotated else None))
    return found


def masked_scores(shop: Shop, asked: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> np.ndarray:
    """Scores of all training features over the weights that count."""
    score_F = np.zeros(len(shop.train))
    for index in shop.batches(shop.train, np.arange(len(shop.train)), most=ROWS):
        part = torch.zeros(len(index), dtype=torch.float64)

        def take(m: Map, grad_BOI: Tensor, part: Tensor = part) -> None:
            if m.name in mask and m.name in asked:  # a query's gradient need not reach every map
                part[: len(grad_BOI)] += (grad_BOI.flatten(1)[:, mask[m.name]] @ asked[m.name]).double()

        took = gradients(shop, shop.train, index, Question(), take)
        score_F[took] = part[: len(took)].numpy()
    return score_F

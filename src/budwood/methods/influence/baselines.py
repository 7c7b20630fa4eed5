"""Baselines: cheap ways to guess which training rows made a prediction, in the same form as the real thing.

No score by gradients should be shown without BM25 beside it. All are signed like the strategies: positive = helps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from budwood.capture.activations import collect
from budwood.config.influence import ScoreConfig
from budwood.data.batch import Features, budget_batches
from budwood.data.task import Row
from budwood.errors import ConfigError
from budwood.linalg.retrieval import bm25, tfidf, word_counts
from budwood.methods.influence.gradients import (
    TOKENS,
    Pairing,
    by_row,
    datainf_scores,
    dot_scores,
    losses,
    trak_scores,
)
from budwood.methods.influence.precondition import all_there
from budwood.methods.influence.queries import encoded
from budwood.methods.influence.scores import STORED, Desk, Matrix, unit_for
from budwood.methods.influence.workshop import leave_out, open_shop, settings_for
from budwood.methods.session import Session

__all__ = ["Pairing", "baseline", "label_signs", "write_baselines"]


def baseline(
    name: str, checkpoints: Sequence[Pairing], rates: Sequence[float] = (), projection: int = 1024
) -> np.ndarray:
    """Scores [queries, training rows] of one baseline; the first checkpoint is the model itself.

    `rates`: TracIn's learning rate at each checkpoint (none: 1 each). Text and representation baselines look at the
    model alone; DataInf and TRAK average over the checkpoints.
    """
    if rates and len(rates) != len(checkpoints):
        raise ConfigError(
            f"--checkpoint-rates has {len(rates)} numbers for {len(checkpoints)} checkpoints (the model and "
            f"--checkpoints). Give one each."
        )
    if name in TEXTUAL:
        return TEXTUAL[name](checkpoints[0])
    if name == "tracin":
        weights = list(rates) or [1.0] * len(checkpoints)
        parts = [w * by_row(dot_scores(s), s) for w, s in zip(weights, checkpoints)]
        return np.asarray(np.sum(parts, axis=0, dtype=np.float32))
    make: dict[str, Callable[[Pairing], np.ndarray]] = {
        "datainf": datainf_scores,
        "trak": lambda s: trak_scores(s, projection),
    }
    parts = [by_row(make[name](s), s) for s in checkpoints]
    return np.asarray(np.mean(parts, axis=0, dtype=np.float32))


def write_baselines(session: Session, desk: Desk, queries: Sequence[Row], wanted: Sequence[str]) -> set[str]:
    """Put the matrices of these baselines beside the others, scaled and summed as they are.

    Returns the training rows that were left out.
    """
    cfg: ScoreConfig = session.cfg
    sides = [_pairing(session, m, queries, wanted) for m in [session.models[0].text, *cfg.checkpoints]]
    stored = STORED[cfg.dtype]
    for name in wanted:
        with session.progress.stage(name):
            value_QN = baseline(name, sides, cfg.checkpoint_rates, cfg.projection)
        if cfg.scale == "mean":
            value_QN = value_QN / len(sides[0].train_rows)
        for axis, side in enumerate(("query", "train")):
            value_QN = value_QN.sum(axis, keepdims=True) if side in cfg.aggregate else value_QN
        matrix = Matrix(name, main=True, dtype=stored, unit=unit_for(value_QN, stored))
        desk.put(matrix, slice(None), slice(None), value_QN)
    return {i for side in sides for i in side.left_out}


def _pairing(session: Session, model: str, queries: Sequence[Row], wanted: Sequence[str]) -> Pairing:
    """Both sides as one model reads them; training rows in which it finds nothing have no column anywhere.

    Where gradients are asked for, rows without a finite loss are refused by name, or left out on demand.
    """
    cfg: ScoreConfig = session.cfg
    shop = open_shop(settings_for(cfg, model), session.task)
    encoded(shop.read, queries)
    there = set(shop.train.ids)
    train = [r for r in session.task.rows(cfg.train_split) if r.id in there]
    among = frozenset(shop.parameters) if cfg.modules or cfg.adapter == "own" else None
    pairing = Pairing(shop.read, train, queries, cfg.measurement, cfg.seed, among)
    if set(wanted) <= set(TEXTUAL):
        return pairing
    asked = np.arange(len(pairing.queries))
    all_there(pairing.queries, asked, asked[np.isfinite(losses(shop.read, pairing.queries))])
    loss_N = losses(shop.read, pairing.train)
    if lost := list(dict.fromkeys(pairing.train.ids[n] for n in np.flatnonzero(~np.isfinite(loss_N)))):
        leave_out(shop, lost)
    return replace(pairing, left_out=frozenset(lost))


def _lexical(kind: Callable[..., np.ndarray]) -> Callable[[Pairing], np.ndarray]:
    def score(pairing: Pairing) -> np.ndarray:
        counts = word_counts([spelled(r) for r in pairing.train_rows], [spelled(r) for r in pairing.query_rows])
        return kind(*counts) * label_signs(pairing)

    return score


def spelled(row: Row) -> str:
    """All words of a row.

    >>> spelled(Row("r", "a b", "c"))
    'a b c'
    """
    return " ".join([row.text or " ".join(row.words or ()), row.pair or ""]).strip()


def label_signs(pairing: Pairing) -> np.ndarray:
    """+1 where a training row has the query's label and -1 where it has another [Q, N]; 1 without labels.

    Likeness alone cannot say whether a row helps: a similar text with the other label pulls the other way.
    """
    if pairing.read.task.kind != "label":
        return np.ones((len(pairing.query_rows), len(pairing.train_rows)), np.float32)
    label_Q, label_N = (np.array([r.label for r in rows]) for rows in (pairing.query_rows, pairing.train_rows))
    return np.where(label_Q[:, None] == label_N[None, :], 1.0, -1.0).astype(np.float32)


def _representation(pairing: Pairing) -> np.ndarray:
    """Cosine of the mean hidden state of the last layer, signed by label."""
    query_QD, train_ND = (_states(pairing, f) for f in (pairing.queries, pairing.train))
    return by_row(query_QD @ train_ND.T, pairing) * label_signs(pairing)


def _states(pairing: Pairing, features: Features) -> np.ndarray:
    """Unit vectors [., D]: last hidden states averaged over real tokens."""
    model, feed = pairing.read.loaded.model, pairing.read.feed(features)
    out: np.ndarray | None = None
    for index in budget_batches(features.lengths_N, TOKENS):
        batch = feed(index, 0)
        last_BTD = collect(model, batch.inputs)[-1]
        mask_BT = batch.inputs.get("attention_mask", torch.ones(last_BTD.shape[:2])).to(last_BTD)
        mean_BD = (last_BTD * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True)
        out = np.zeros((len(features), mean_BD.shape[1]), np.float32) if out is None else out
        out[index] = torch.nn.functional.normalize(mean_BD, dim=1).cpu().numpy()
    assert out is not None
    return out


TEXTUAL: dict[str, Callable[[Pairing], np.ndarray]] = {
    "bm25": _lexical(bm25),
    "tfidf": _lexical(tfidf),
    "representation": _representation,
}

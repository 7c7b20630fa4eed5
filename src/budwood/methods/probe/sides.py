"""The splits of one model, as probes use them: trained on, tuned on (spans only), reported.

Shapes: M states, D features, W windows of a part among those of its whole split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from budwood.capture.supply import Fresh, Kept, Supply, states_at
from budwood.config.probe import ProbeConfig
from budwood.data.batch import seed_of
from budwood.errors import ConfigError
from budwood.methods.probe.side import Side, side
from budwood.methods.session import Session
from budwood.models.reference import ModelRef


@dataclass(frozen=True)
class Sides:
    """The three splits. Where two of them are parts of one stored split, `train_W` and `tune_W` are their windows."""

    train: Side
    tune: Side | None
    test: Side
    whole: Side  # of which `train` is all or a part
    train_W: np.ndarray | None = None
    tune_W: np.ndarray | None = None

    def states(self, number: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Layer `number` of the three."""
        whole = self.whole.stored.layer(number)
        test = self.test.stored.layer(number)
        if self.tune is None:
            return whole, None, test
        if self.train_W is None or self.tune_W is None:
            return whole, self.tune.stored.layer(number), test
        offsets_N1 = self.whole.stored.offsets_N1
        mine, tuned = (torch.from_numpy(states_at(offsets_N1, x)) for x in (self.train_W, self.tune_W))
        return whole[mine], whole[tuned], test

    def supplies(self, session: Session, numbers: list[int]) -> tuple[Supply, Supply | None, Supply]:
        """Rows of the three by their place in each, all layers at once; run anew with --online."""

        def of(given: Side) -> Supply:
            if session.cfg.online:
                return Fresh(given.stored, numbers, session.task)
            return Kept(given.stored, numbers)

        whole, test = of(self.whole), of(self.test)
        if self.tune is None:
            return whole, None, test
        if self.train_W is None or self.tune_W is None:
            return whole, of(self.tune), test
        train_W, tune_W = self.train_W, self.tune_W
        return lambda index_B: whole(train_W[index_B]), lambda index_B: whole(tune_W[index_B]), test


def layer_numbers(cfg: ProbeConfig, sides: Sides) -> list[int]:
    """The layers asked for, all without --layers."""
    layers = sides.train.stored.layers
    wrong = [n for n in cfg.layers if not 0 <= n < layers]
    if wrong:
        raise ConfigError(
            f"--layers asks for layer {wrong[0]}, and this model has layers 0 (embeddings) to {layers - 1}. "
            "Leave --layers away for all of them."
        )
    return sorted(set(cfg.layers)) or list(range(layers))


def sides_of(session: Session, ref: ModelRef, random: int | None = None) -> Sides:
    """The splits of a model, or of its architecture with fresh weights drawn from the seed `random`."""
    task = session.task
    train, test = (side(session, ref, s, random) for s in ("train", task.reported))
    if task.kind != "span":
        return Sides(train, None, test, train)
    if task.reported != "validation":
        return Sides(train, side(session, ref, "validation", random), test, train)
    # the only other split is reported, so a tenth of the training documents chooses cost and threshold
    documents = np.array([r.group or r.id for r in train.rows], dtype=object)
    rank_N = np.unique(documents, return_inverse=True)[1]
    drawn = np.random.default_rng(seed_of(session.cfg.seed, "tune")).permutation(int(rank_N.max()) + 1)
    out_N = drawn[rank_N] < max(1, len(drawn) // 10)
    (kept, kept_W), (tune, tune_W) = (_part(train, np.flatnonzero(x)) for x in (~out_N, out_N))
    return Sides(kept, tune, test, train, kept_W, tune_W)


def _part(whole: Side, rows_N: np.ndarray) -> tuple[Side, np.ndarray]:
    """The windows of some questions, and which windows of the whole they are."""
    encoded, offsets_N1 = whole.stored.encoded, whole.stored.offsets_N1
    keep_W = np.flatnonzero(np.isin(encoded.fixed["row"], rows_N))
    at_M = states_at(offsets_N1, keep_W)
    taken = encoded.take(keep_W)
    taken = replace(taken, fixed={**taken.fixed, "row": np.searchsorted(rows_N, taken.fixed["row"])})
    offsets = np.concatenate([[0], np.cumsum(np.diff(offsets_N1)[keep_W])]).astype(np.int64)
    stored = replace(whole.stored, encoded=taken, offsets_N1=offsets)
    document_M = np.unique(whole.document_M[at_M], return_inverse=True)[1]
    rows = tuple(whole.rows[i] for i in rows_N)
    return replace(whole, stored=stored, rows=rows, document_M=document_M, row_M=whole.row_M[at_M]), keep_W

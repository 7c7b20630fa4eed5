"""Objectives: what a model is asked, as logits, targets, a loss and a margin for every example.

Shapes: B examples, M readouts (one row of logits each), C classes or words or positions, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from budwood.data.batch import IGNORE, Batch, seed_of
from budwood.data.mask import GOLDEN, uniform
from budwood.errors import ConfigError
from budwood.models.number import number_distance
from budwood.models.sites import lm_logits, model_inputs, run

Reduce = Literal["mean", "sum"]


@dataclass(frozen=True)
class Targets:
    """What the readouts should say.

    `label_M`: class index, or a float for regression and soft two-way targets. `row_M`: the example of the batch that
    a readout belongs to; None means readout m is example m. `count` is B.
    """

    label_M: Tensor
    row_M: Tensor | None
    count: int


class Objective(Protocol):
    """The same questions for every mode; nothing is ever reduced over examples."""

    @property
    def name(self) -> str:
        """The mode in one word."""

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """logits_MC, differentiable."""

    def targets(self, batch: Batch) -> Targets:
        """The true targets of the batch."""

    def loss(self, logits_MC: Tensor, targets: Targets) -> Tensor:
        """loss_B."""

    def margin(self, logits_MC: Tensor, targets: Targets) -> Tensor:
        """margin_B: mean over readouts of the true logit minus the logsumexp of the others."""


def per_row(value_M: Tensor, targets: Targets, reduce: Reduce = "mean") -> Tensor:
    """value_B: mean (or sum) of the readouts of each example; 0 where an example has none.

    >>> per_row(torch.tensor([1.0, 3.0, 5.0]), Targets(torch.zeros(3), torch.tensor([0, 0, 1]), 2))
    tensor([2., 5.])
    """
    if targets.row_M is None:
        return value_M
    row_M = targets.row_M.to(value_M.device)
    sum_B = value_M.new_zeros(targets.count).index_add(0, row_M, value_M)
    if reduce == "sum":
        return sum_B
    count_B = torch.bincount(row_M, minlength=targets.count).clamp_min(1)
    return sum_B / count_B.to(value_M.dtype)


def _cross_entropy(logits_MC: Tensor, targets: Targets, reduce: Reduce = "mean") -> Tensor:
    label_M = targets.label_M.to(logits_MC.device)
    return per_row(F.cross_entropy(logits_MC, label_M, reduction="none"), targets, reduce)


def _margin(logits_MC: Tensor, targets: Targets) -> Tensor:
    """Mean over readouts of logit_y - logsumexp(others)."""
    label_M1 = targets.label_M.to(logits_MC.device)[:, None]
    others_M = logits_MC.scatter(1, label_M1, float("-inf")).logsumexp(1)
    return per_row(logits_MC.gather(1, label_M1)[:, 0] - others_M, targets)


@dataclass(frozen=True)
class Head:
    """A classification head (logits [B, K]) or a regression head ([B, 1], squared error)."""

    regression: bool = False
    name: str = "head"

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """logits_BK of the head."""
        return run(model, model_inputs(model, batch.inputs)).logits

    def targets(self, batch: Batch) -> Targets:
        """The label of every example."""
        return Targets(batch.targets["label"], None, len(batch))

    def loss(self, logits_MC: Tensor, targets: Targets) -> Tensor:
        """Cross-entropy, or the squared error."""
        if self.regression:
            return (logits_MC[:, 0] - targets.label_M.to(logits_MC)).square()
        return _cross_entropy(logits_MC, targets)

    def margin(self, logits_MC: Tensor, targets: Targets) -> Tensor:
        """logit_y - logsumexp(others), or minus the squared error."""
        return -self.loss(logits_MC, targets) if self.regression else _margin(logits_MC, targets)


@dataclass(frozen=True)
class Words:
    """Logits [B, K] of the label words at the place where the model answers.

    With `bounds` there are two words (low, high) and the label is a number between the bounds: the target is soft, the
    second word's share being how far up the label lies.
    """

    word_ids: tuple[int, ...]
    bounds: tuple[float, float] | None = None
    name: str = "words"

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """logits_BK: the language model's logits at `read_at`, label words only."""
        rows_B = torch.arange(len(batch))
        return lm_logits(model, batch.inputs, rows_B, batch.targets["read_at"])[:, list(self.word_ids)]

    def targets(self, batch: Batch) -> Targets:
        """The label, or with `bounds` its place between them (0 to 1)."""
        label_B = batch.targets["label"]
        if self.bounds is not None:
            low, high = self.bounds
            label_B = ((label_B.float() - low) / (high - low)).clamp(0, 1)
        return Targets(label_B, None, len(batch))

    def loss(self, logits_MC: Tensor, targets: Targets) -> Tensor:
        """Cross-entropy against the label, or against the soft two-way target."""
        if self.bounds is None:
            return _cross_entropy(logits_MC, targets)
        share_M = targets.label_M.to(logits_MC)
        return -(torch.stack([1 - share_M, share_M], 1) * logits_MC.log_softmax(1)).sum(1)

    def margin(self, logits_MC: Tensor, targets: Targets) -> Tensor:
        """logit_y - logsumexp(others); soft: minus the squared error of the second word's share."""
        if self.bounds is None:
            return _margin(logits_MC, targets)
        return -(logits_MC.softmax(1)[:, 1] - targets.label_M.to(logits_MC)).square()


@dataclass(frozen=True)
class Span:
    """Start and end of an answer: logits [2B, T], all starts before all ends, -inf where no answer may lie."""

    name: str = "span"

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """logits_MC: B rows of start logits, then B rows of end logits."""
        out = run(model, model_inputs(model, batch.inputs))
        both_MT = torch.cat([out.start_logits, out.end_logits])
        allowed_BT = batch.targets["allowed"].to(both_MT.device).bool()
        return both_MT.masked_fill(~torch.cat([allowed_BT, allowed_BT]), float("-inf"))

    def targets(self, batch: Batch) -> Targets:
        """The first and the last token of the answer."""
        row_B = torch.arange(len(batch))
        return Targets(torch.cat([batch.targets["start"], batch.targets["end"]]).long(), row_B.repeat(2), len(batch))

    def loss(self, logits_MC: Tensor, targets: Targets) -> Tensor:
        """Mean cross-entropy of start and end."""
        return _cross_entropy(logits_MC, targets)

    def margin(self, logits_MC: Tensor, targets: Targets) -> Tensor:
        """Mean margin of start and end."""
        return _margin(logits_MC, targets)


@dataclass(frozen=True)
class Tokens:
    """Every position with a target is a readout [M, C]: a token label, or a word (`lm`: LM head applied only there)."""

    lm: bool
    reduce: Reduce = "mean"
    name: str = "tokens"
    values_V: Tensor | None = None  # of tokens that are numbers; see models/number.py
    number_loss: float = 0.0

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """logits_MC at the positions with a target, row by row."""
        rows_M, positions_M = (batch.targets["target"] != IGNORE).nonzero(as_tuple=True)
        if self.lm:
            return lm_logits(model, batch.inputs, rows_M, positions_M)
        logits_BTC = run(model, model_inputs(model, batch.inputs)).logits
        return logits_BTC[rows_M.to(logits_BTC.device), positions_M.to(logits_BTC.device)]

    def targets(self, batch: Batch) -> Targets:
        """The targets other than IGNORE, row by row."""
        target_BT = batch.targets["target"]
        real_BT = target_BT != IGNORE
        return Targets(target_BT[real_BT], real_BT.nonzero()[:, 0], len(batch))

    def loss(self, logits_MC: Tensor, targets: Targets) -> Tensor:
        """Cross-entropy (and the distance between numbers), mean (or sum) over the readouts of each example."""
        plain_B = _cross_entropy(logits_MC, targets, self.reduce)
        if self.values_V is None or not self.number_loss:
            return plain_B
        gap_M = number_distance(logits_MC, targets.label_M.to(logits_MC.device), self.values_V)
        return plain_B + self.number_loss * per_row(gap_M, targets, self.reduce)

    def margin(self, logits_MC: Tensor, targets: Targets) -> Tensor:
        """Mean margin over the readouts of each example."""
        return _margin(logits_MC, targets)


@dataclass(frozen=True, kw_only=True)
class Wording:
    """What an objective needs to know beyond mode and kind."""

    word_ids: tuple[int, ...] = ()
    bounds: tuple[float, float] | None = None
    reduce: Reduce = "mean"
    values_V: Tensor | None = None
    number_loss: float = 0.0


def _numbers(w: Wording) -> Objective:
    return Tokens(lm=True, reduce=w.reduce, values_V=w.values_V, number_loss=w.number_loss)


MAKERS: dict[tuple[str, str], Callable[[Wording], Objective]] = {
    ("head", "label"): lambda w: Head(),
    ("head", "regression"): lambda w: Head(regression=True),
    ("head", "tokens"): lambda w: Tokens(lm=False, reduce=w.reduce),
    ("prompt", "label"): lambda w: Words(w.word_ids),
    ("prompt", "regression"): lambda w: Words(w.word_ids, w.bounds),
    ("prompt", "number"): _numbers,
    ("causal", "label"): lambda w: Words(w.word_ids),
    ("causal", "regression"): lambda w: Words(w.word_ids, w.bounds),
    ("causal", "number"): _numbers,
    ("span", "span"): lambda w: Span(),
    ("mlm", "text"): lambda w: Tokens(lm=True, reduce=w.reduce, name="mlm"),
    ("clm", "text"): lambda w: Tokens(lm=True, reduce=w.reduce, name="clm"),
}


def check_mode(mode: str, task_kind: str) -> None:
    """Refuse a mode that does not fit a kind of task, naming those that do."""
    if (mode, task_kind) not in MAKERS:
        modes = ", ".join(m for m, k in MAKERS if k == task_kind)
        raise ConfigError(f"--mode {mode} does not fit a task of kind '{task_kind}'. Modes that do: {modes or 'none'}.")


def make_objective(mode: str, task_kind: str, wording: Wording | None = None) -> Objective:
    """The objective of a mode on a kind of task; a pair that does not fit is an error that lists what does.

    >>> make_objective("head", "regression")
    Head(regression=True, name='head')
    """
    wording = wording or Wording()
    check_mode(mode, task_kind)
    if (
        mode in ("prompt", "causal")
        and task_kind == "regression"
        and (len(wording.word_ids), wording.bounds is None) != (2, False)
    ):
        raise ConfigError(
            f"--mode {mode} on a task with numbers as labels needs exactly two label words (low, high) and the bounds "
            f"of the label; given: {len(wording.word_ids)} words, bounds {wording.bounds}. Use --mode head otherwise."
        )
    return MAKERS[mode, task_kind](wording)


def sample_labels(logits_MC: Tensor, targets: Targets, keys: Sequence[object], seed: int) -> Tensor:
    """label_M drawn from softmax(logits), one per readout.

    The draw of a readout depends on the seed, on its example's key (`keys[b]`: the row id, or the feature index where
    ids repeat) and on its rank within the example, never on the batch around it.
    """
    row_M = np.arange(len(logits_MC)) if targets.row_M is None else targets.row_M.cpu().numpy()
    start_B = np.array([seed_of(seed, "label", key) for key in keys], dtype=np.uint64)
    uniform_M = torch.from_numpy(uniform(start_B[row_M] + _rank(row_M).astype(np.uint64) * GOLDEN, 1))
    cumulative_MC = logits_MC.detach().double().cpu().softmax(1).cumsum(1)
    label_M = (cumulative_MC < uniform_M[:, None] * cumulative_MC[:, -1:]).sum(1)
    return label_M.to(logits_MC.device)


def _rank(row_M: np.ndarray) -> np.ndarray:
    """How many earlier readouts belong to the same example."""
    order_M = np.argsort(row_M, kind="stable")
    sorted_M = row_M[order_M]
    first_M = np.searchsorted(sorted_M, sorted_M, side="left")
    rank_M = np.empty(len(row_M), dtype=np.int64)
    rank_M[order_M] = np.arange(len(row_M)) - first_M
    return rank_M

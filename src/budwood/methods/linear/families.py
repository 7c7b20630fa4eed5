"""Feature families made from the states f and the output embedding, each as something that can be classified.

Shapes: N rows, M rows of a basis, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from budwood.config.linear import Family, LinearConfig
from budwood.data.words import WordList
from budwood.linalg import vocabulary as words
from budwood.linalg.vocabulary import Vocabulary
from budwood.methods.linear.classify import Dense, Solver, Stream

KERNEL_ROWS = 8192  # more rows than this would need a kernel matrix beyond half a gigabyte
MOMENT_WORDS = 4096  # the same for second moments of p over a small vocabulary
BLOCK = 1 << 23  # numbers of p in one block of a stream


@dataclass(frozen=True)
class States:
    """States of all rows, the rows a basis may be made of, and how they are put into words."""

    state_ND: Tensor
    basis_M: Tensor
    vocabulary: Vocabulary | None
    seed: int

    @property
    def words(self) -> Vocabulary:
        """The vocabulary, which a model without one cannot be asked for (checked when features are chosen)."""
        assert self.vocabulary is not None
        return self.vocabulary

    @cached_property
    def mean_and_logz(self) -> tuple[Tensor, Tensor]:
        """phi-p and log Z from one pass."""
        return words.conditional_mean(self.words, self.state_ND)

    @cached_property
    def logz_N(self) -> Tensor:
        """The log partition of every row."""
        return self.mean_and_logz[1]

    @cached_property
    def short_NR(self) -> Tensor:
        """Features whose inner products are those of p: from products of rows, or of words where these are fewer."""
        if len(self.basis_M) >= len(self.words):
            return words.moment_features(self.words, self.state_ND, self.logz_N, self.basis_M)
        inner_NM = words.inner(self.words, self.state_ND, self.logz_N, self.basis_M)
        return words.kernel_features(inner_NM, self.basis_M).float()


def solver_of(family: Family, states: States, lists: dict[str, WordList], cfg: LinearConfig) -> Solver:
    """The family as a solver, scaled by one number where the settings ask for it."""
    if family == "p":
        return solver_of_p(states, cfg.scale == "unit", cfg.penalise_intercept)
    feature_ND = dense_features(family, states, lists, cfg)
    if cfg.scale == "unit":
        feature_ND = feature_ND * unit(feature_ND[states.basis_M], states.state_ND.shape[1])
    return Dense(feature_ND, feature_ND.shape[1], cfg.penalise_intercept)


def dense_features(family: Family, states: States, lists: dict[str, WordList], cfg: LinearConfig) -> Tensor:
    """Features that are small enough to hold."""
    if family == "f":
        return states.state_ND
    if family == "phi-p":
        return states.mean_and_logz[0]
    if family == "p-projected":
        width = cfg.project_to or states.state_ND.shape[1]
        return words.projected(states.words, states.state_ND, states.logz_N, width, states.seed)
    logits_NT = states.words.logits(states.state_ND, torch.tensor(lists[family].ids))
    if cfg.word_kind == "logit":
        return logits_NT
    logprob_NT = logits_NT - states.logz_N[:, None]
    return logprob_NT if cfg.word_kind == "logprob" else logprob_NT.exp()


def unit(feature_MD: Tensor, width: int) -> float:
    """The factor by which the variances of all features add up to their number, or to the width of f if that is less.

    >>> round(unit(torch.tensor([[0.0, 0.0], [4.0, 0.0]]), 8), 4)
    0.7071
    """
    total = float(feature_MD.double().var(0, correction=0).sum())
    return (min(feature_MD.shape[1], width) / total) ** 0.5 if total > 0 else 1.0


def solver_of_p(states: States, scaled: bool, penalise_intercept: bool) -> Solver:
    """All of p, exactly: through its inner products where those of rows or of words fit, otherwise as a stream."""
    size = len(states.words)
    rows = len(states.basis_M)
    if rows <= KERNEL_ROWS if rows < size else size <= MOMENT_WORDS:
        feature_NR = states.short_NR
        factor = unit(feature_NR[states.basis_M], states.state_ND.shape[1]) if scaled else 1.0
        return Dense(feature_NR * factor, size, penalise_intercept, tolerance=1e-12)
    factor = _unit_of_p(states) if scaled else 1.0
    most = max(1, BLOCK // size)

    def blocks() -> Iterator[tuple[slice, Tensor]]:
        for where in words.slices(len(states.state_ND), most):
            yield where, states.words.prob(states.state_ND[where], states.logz_N[where]).mul_(factor)

    return Stream(blocks, size, penalise_intercept)


def _unit_of_p(states: States) -> float:
    """The factor of `unit` for p, from one pass."""
    state_MD, logz_M = states.state_ND[states.basis_M], states.logz_N[states.basis_M]
    total, size = 0.0, len(states.words)
    for part in words.slices(size, max(1, BLOCK // max(1, len(state_MD)))):
        total += float(states.words.prob(state_MD, logz_M, part).double().var(0, correction=0).sum())
    return float((min(size, state_MD.shape[1]) / total) ** 0.5) if total > 0 else 1.0

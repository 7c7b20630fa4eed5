"""Probabilities over a whole vocabulary, met block by block: p = softmax(phi f + bias) is never held for all rows.

Shapes: N rows, M other rows, B rows of a block, V words, W words of a block, D width of a state, R projected width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NUMBERS = 1 << 22  # most numbers of a block of p where rows can be cut as well
WIDE = 1 << 24  # the same where all rows are needed at once
DRAWN = 1024  # words whose random projection is drawn together; part of what a seed means


@dataclass(frozen=True)
class Vocabulary:
    """The output embedding of a language model: the logits of a state f are `weight_VD @ f + bias_V`."""

    weight_VD: Tensor
    bias_V: Tensor | None = None

    def __len__(self) -> int:
        return len(self.weight_VD)

    def logits(self, state_BD: Tensor, words: slice | Tensor = slice(None)) -> Tensor:
        """logits_BW of some words."""
        logits_BW = state_BD @ self.weight_VD[words].T
        return logits_BW if self.bias_V is None else logits_BW.add_(self.bias_V[words])

    def prob(self, state_BD: Tensor, logz_B: Tensor, words: slice | Tensor = slice(None)) -> Tensor:
        """p_BW of some words, given log Z of every row."""
        return self.logits(state_BD, words).sub_(logz_B[:, None]).exp_()


def slices(count: int, size: int) -> Iterator[slice]:
    """0..count cut into pieces of `size`.

    >>> [(s.start, s.stop) for s in slices(5, 2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    return (slice(i, min(i + size, count)) for i in range(0, count, size))


def log_partition(vocabulary: Vocabulary, state_ND: Tensor) -> Tensor:
    """logz_N = log sum over words of exp(logit)."""
    return torch.cat([_stream(vocabulary, state_ND[b], mean=False)[0] for b in slices(len(state_ND), 512)])


def conditional_mean(vocabulary: Vocabulary, state_ND: Tensor) -> tuple[Tensor, Tensor]:
    """mean_ND = sum over words of p(w) phi_w, and logz_N: one pass over the vocabulary with a running maximum."""
    mean_ND, logz_N = torch.empty_like(state_ND), state_ND.new_empty(len(state_ND))
    for rows in slices(len(state_ND), 512):
        logz_N[rows], mean_ND[rows] = _stream(vocabulary, state_ND[rows], mean=True)
    return mean_ND, logz_N


def _stream(vocabulary: Vocabulary, state_BD: Tensor, mean: bool) -> tuple[Tensor, Tensor]:
    """logz_B and (if asked) mean_BD of a block of rows."""
    top_B = state_BD.new_full((len(state_BD),), float("-inf"))
    sum_B, sum_BD = torch.zeros_like(top_B), torch.zeros_like(state_BD)
    for words in slices(len(vocabulary), max(1, NUMBERS // max(1, len(state_BD)))):
        logits_BW = vocabulary.logits(state_BD, words)
        new_B = torch.maximum(top_B, logits_BW.amax(1))
        shrink_B = (top_B - new_B).exp()
        part_BW = logits_BW.sub_(new_B[:, None]).exp_()
        sum_B = sum_B * shrink_B + part_BW.sum(1)
        if mean:
            sum_BD.mul_(shrink_B[:, None]).addmm_(part_BW, vocabulary.weight_VD[words])
        top_B = new_B
    return top_B + sum_B.log(), sum_BD / sum_B[:, None]


def inner(vocabulary: Vocabulary, state_ND: Tensor, logz_N: Tensor, basis_M: Tensor) -> Tensor:
    """inner_NM = p_n . p_m for every row n and every row m of `basis_M` (indices of rows), float64.

    Blocks of p of all rows are made from the states and forgotten; where the basis is all rows, half is computed.
    """
    count, whole = len(state_ND), len(basis_M) == len(state_ND)
    total_NM = torch.zeros(count, len(basis_M), dtype=torch.float64, device=state_ND.device)
    for words in slices(len(vocabulary), max(64, WIDE // max(1, count))):
        p_NW = vocabulary.prob(state_ND, logz_N, words)
        p_MW = p_NW[basis_M]
        for rows in slices(count, 1024):
            upto = rows.stop if whole else len(basis_M)
            total_NM[rows, :upto] += p_NW[rows] @ p_MW[:upto].T
    if whole:
        total_NM = total_NM.tril_()
        total_NM += total_NM.tril(-1).T.clone()
    return total_NM


def kernel_features(inner_NM: Tensor, basis_M: Tensor, cut: float = 1e-9) -> Tensor:
    """feature_NR whose inner products are those of p, so that an L2-regularised linear model on them is one on p.

    The best weights on p lie in the span of the rows it was fitted on; in a basis of that span (R <= M) the same
    problem has R unknowns instead of V. Directions below `cut` of the largest eigenvalue are rounding and left out.
    """
    value_M, vector_MM = torch.linalg.eigh(inner_NM[basis_M].double())
    kept = value_M > cut * value_M[-1]
    return inner_NM @ (vector_MM[:, kept] / value_M[kept].sqrt())


def moment_features(
    vocabulary: Vocabulary, state_ND: Tensor, logz_N: Tensor, basis_M: Tensor, cut: float = 1e-9
) -> Tensor:
    """The mirror image of `kernel_features` for rows that outnumber words: p in the eigenvectors of its V x V moments.

    Directions below `cut` of the largest eigenvalue are rounding and left out, so that R is far below V as a rule.
    """
    moment_VV = torch.zeros(len(vocabulary), len(vocabulary), dtype=torch.float64)
    rows = max(1, WIDE // len(vocabulary))
    for part in slices(len(basis_M), rows):
        p_BV = vocabulary.prob(state_ND[basis_M[part]], logz_N[basis_M[part]])
        moment_VV += p_BV.T @ p_BV
    value_V, vector_VV = torch.linalg.eigh(moment_VV)
    kept_VR = vector_VV[:, value_V > cut * value_V[-1]].to(state_ND)
    return torch.cat([vocabulary.prob(state_ND[b], logz_N[b]) @ kept_VR for b in slices(len(state_ND), rows)])


def projected(vocabulary: Vocabulary, state_ND: Tensor, logz_N: Tensor, width: int, seed: int) -> Tensor:
    """projected_NR = A p with A [R, V] of orthonormal rows spanning a Gaussian draw of `seed`.

    The draw is made anew for every block of words: A = (G G^T)^-1/2 G needs only G p and G G^T, never G.
    """
    sum_NR = state_ND.new_zeros(len(state_ND), width)
    square_RR = torch.zeros(width, width, dtype=torch.float64)
    for number, words in enumerate(slices(len(vocabulary), DRAWN)):
        drawn_RW = _gaussian(width, words.stop - words.start, seed, number)
        square_RR += drawn_RW @ drawn_RW.T
        part = drawn_RW.T.to(state_ND)
        for rows in slices(len(state_ND), 4096):
            sum_NR[rows] += vocabulary.prob(state_ND[rows], logz_N[rows], words) @ part
    value_R, vector_RR = torch.linalg.eigh(square_RR)
    whiten_RR = (vector_RR / value_R.sqrt()) @ vector_RR.T
    return sum_NR @ whiten_RR.to(state_ND)


def _gaussian(width: int, words: int, seed: int, number: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, number]).standard_normal((width, words)))


def top(vocabulary: Vocabulary, state_BD: Tensor, logz_B: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k likeliest words of every row (ids_BK, p_BK, falling) and the probability of all others together."""
    best_BK = state_BD.new_zeros(len(state_BD), 0)
    ids_BK = torch.zeros(len(state_BD), 0, dtype=torch.long)
    for words in slices(len(vocabulary), max(k, NUMBERS // max(1, len(state_BD)))):
        p_BW = vocabulary.prob(state_BD, logz_B, words)
        here = torch.arange(words.start, words.stop).expand(len(state_BD), -1)
        both, both_ids = torch.cat([best_BK, p_BW], 1), torch.cat([ids_BK, here], 1)
        best_BK, place = both.topk(min(k, both.shape[1]), 1)
        ids_BK = both_ids.gather(1, place)
    return ids_BK, best_BK, (1 - best_BK.sum(1)).clamp_min(0)

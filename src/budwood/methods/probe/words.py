"""Answers from words alone: a span probe whose features are word pieces and what they share with the question.

Every token that may be part of an answer is told by: itself and its neighbours among the commonest pieces, whether it
and how many tokens around it stand in the question too, how rare it is, each also beside the question's first piece;
"no answer" by how much of the context the question shares. No model is read.
Shapes: W windows, M tokens where an answer may lie, D features, P pieces, Q first pieces of questions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from budwood.capture.features import kept_counts
from budwood.config.probe import ProbeConfig
from budwood.data.batch import Features
from budwood.linalg.choice import Choices, log_chances, solve_choices
from budwood.methods.probe import score, spans
from budwood.methods.probe.side import Side

PIECES, OPENINGS = 100, 8  # commonest context pieces and first question pieces with features of their own
REACH = (3, 8)  # tokens to either side that count as around
COSTS = (0.01, 0.1, 1.0)
MOST = 1 << 26  # numbers of training features; windows beyond are left out evenly
BLOCK = 256  # windows that are scored at a time


@dataclass(frozen=True)
class Words:
    """What is learned by counting: commonest pieces of contexts and first pieces of questions, rarity of pieces."""

    pieces_P: np.ndarray
    openings_Q: np.ndarray
    rarity_V: np.ndarray

    @classmethod
    def of(cls, encoded: Features) -> Words:
        """Counts over training windows; ties go to the smaller id."""
        ids, allowed = encoded.ragged["input_ids"], encoded.ragged["allowed"] != 0
        count_V = np.bincount(ids[allowed], minlength=int(ids.max()) + 1)
        count_V[ids[encoded.offsets_N1[:-1]]] = 0  # the place of "no answer" is no word
        opening_V = np.bincount(ids[encoded.offsets_N1[:-1] + 1])
        common = [np.argsort(-c, kind="stable")[:most] for c, most in ((count_V, PIECES), (opening_V, OPENINGS))]
        return cls(common[0], common[1], -np.log((count_V + 1) / (count_V.sum() + 1)))

    @property
    def width(self) -> int:
        """Number of features."""
        plain = 2 + len(REACH)
        return 3 * len(self.pieces_P) + plain + len(self.openings_Q) * (plain + 1) + 2


def features(words: Words, encoded: Features) -> np.ndarray:
    """x_MD of all tokens where an answer may lie."""
    allowed = encoded.ragged["allowed"] != 0
    ids = encoded.ragged["input_ids"].astype(np.int64)
    size_W = kept_counts(encoded, "allowed")
    window = np.repeat(np.arange(len(encoded)), encoded.lengths_N)
    key = window * (int(ids.max()) + 1) + ids
    id_M, window_M = ids[allowed], window[allowed]
    null_M = np.zeros(len(id_M), dtype=bool)
    null_M[np.cumsum(size_W) - size_W] = True
    shared_M = np.isin(key[allowed], key[~allowed]) & ~null_M
    x_MD = np.zeros((len(id_M), words.width), dtype=np.float32)
    place_V = np.full(max(int(ids.max()), int(words.pieces_P.max())) + 1, -1)
    place_V[words.pieces_P] = np.arange(len(words.pieces_P))
    for i, step in enumerate((0, -1, 1)):
        at_M = _beside(place_V[id_M], null_M, step)
        known = (at_M >= 0) & ~null_M
        x_MD[known, i * len(words.pieces_P) + at_M[known]] = 1
    rare_M = words.rarity_V[np.minimum(id_M, len(words.rarity_V) - 1)]
    around = [_around(shared_M, window_M, size_W, reach) / reach for reach in REACH]
    plain_MF = np.stack([shared_M, np.where(null_M, 0, rare_M), *(np.where(null_M, 0, a) for a in around)], axis=1)
    at = 3 * len(words.pieces_P)
    x_MD[:, at : at + plain_MF.shape[1]] = plain_MF
    at += plain_MF.shape[1]
    both_MF = np.concatenate([plain_MF, null_M[:, None]], axis=1)
    opening_M = ids[encoded.offsets_N1[:-1] + 1][window_M]
    for piece in words.openings_Q:
        x_MD[:, at : at + both_MF.shape[1]] = both_MF * (opening_M == piece)[:, None]
        at += both_MF.shape[1]
    share_W = np.bincount(window_M, weights=shared_M, minlength=len(encoded)) / size_W
    x_MD[:, at], x_MD[:, at + 1] = null_M, null_M * share_W[window_M]
    return x_MD


def _beside(place_M: np.ndarray, null_M: np.ndarray, step: int) -> np.ndarray:
    """The value `step` tokens on within the same context, -1 outside it."""
    if step == 0:
        return place_M
    out_M = np.full_like(place_M, -1)
    edge_M = np.cumsum(null_M)
    source, target = (slice(None, -1), slice(1, None)) if step < 0 else (slice(1, None), slice(None, -1))
    inside = (edge_M[1:] == edge_M[:-1]) & ~null_M[source]
    out_M[target] = np.where(inside, place_M[source], -1)
    return out_M


def _around(shared_M: np.ndarray, window_M: np.ndarray, size_W: np.ndarray, reach: int) -> np.ndarray:
    """How many of the tokens at most `reach` away in the same window stand in the question, the token itself aside."""
    total_M1 = np.concatenate([[0], np.cumsum(shared_M)])
    at_M = np.arange(len(shared_M))
    end_M = np.cumsum(size_W)[window_M]
    low_M, high_M = np.maximum(at_M - reach, end_M - size_W[window_M]), np.minimum(at_M + reach + 1, end_M)
    found: np.ndarray = total_M1[high_M] - total_M1[low_M] - shared_M
    return found


def baseline(train: Side, tune: Side, test: Side, cfg: ProbeConfig) -> float:
    """F1 on the reported rows in percent; cost and threshold are tuned as those of other span probes."""
    words = Words.of(train.stored.encoded)
    weight_S2D = _solved(words, _sample(words, train.stored.encoded))
    sampled = _sample(words, tune.stored.encoded)
    starts_W = np.cumsum(kept_counts(sampled, "allowed")) - kept_counts(sampled, "allowed")
    x_MD, gold_2W = features(words, sampled), spans.gold(sampled)
    loss_S = [-np.take_along_axis(log_chances(w @ x_MD.T, starts_W), gold_2W, 1).mean() for w in weight_S2D]
    weight_2D = weight_S2D[int(np.argmin(loss_S))]
    found = [spans.answers(_scores(words, s.stored.encoded, weight_2D), s, cfg) for s in (tune, test)]
    given = spans.thresholded(found[1], spans.tuned_threshold(found[0], tune.rows))
    return score.span_fields(test.rows, given, cfg.seed)["f1"]


def _solved(words: Words, encoded: Features) -> np.ndarray:
    """weight_S2D at every cost, in the space of the features as they are."""
    size_W = kept_counts(encoded, "allowed")
    x_MD = features(words, encoded)
    spread_D = x_MD.std(0)
    spread_D[spread_D < 1e-6] = 1.0
    paths = np.array(COSTS)[:, None].repeat(2, 1)
    one = np.ones((1, len(size_W)))
    starts_W = np.cumsum(size_W) - size_W
    problem = Choices(starts_W, spans.gold(encoded), one, np.array([0, 1]), np.zeros(2, int), paths)
    weight = solve_choices(torch.from_numpy(x_MD / spread_D), problem, 1e-6, together=2).weight_SPD.numpy()
    return np.asarray(weight / spread_D, dtype=np.float32)


def _sample(words: Words, encoded: Features) -> Features:
    """Windows, evenly spaced, whose features fit."""
    total = int(kept_counts(encoded, "allowed").sum()) * words.width
    return encoded if total <= MOST else encoded.take(np.arange(0, len(encoded), -(-total // MOST)))


def _scores(words: Words, encoded: Features, weight_2D: np.ndarray) -> np.ndarray:
    blocks = [np.arange(i, min(i + BLOCK, len(encoded))) for i in range(0, len(encoded), BLOCK)]
    return np.concatenate([weight_2D @ features(words, encoded.take(b)).T for b in blocks], axis=1)

"""Span probes of one layer: start and end of an answer by a softmax over the tokens of each window.

The cost is chosen by the loss and the null threshold by F1 on rows that are neither trained on nor reported.
Shapes: M allowed tokens of all windows, W windows, D features, N questions, S costs, R resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from budwood.config.probe import ProbeConfig
from budwood.data.batch import Features, seed_of
from budwood.data.span_decode import ORIGINAL, SpanPredictions, SpanRule, decode_hf, decode_original
from budwood.data.squad import best_threshold, question_scores
from budwood.data.task import Row
from budwood.linalg.choice import Choices, log_chances, solve_choices
from budwood.methods.probe.code import online_codes, resamples, shuffled
from budwood.methods.probe.labels import Scale
from budwood.methods.probe.side import Side

ENDS = ("start", "end")
NEAR = 1e-5  # tolerance of fits that are compared, not kept
TOGETHER = 4  # costs that are tried at once: small ones are near one another
CODE = 1e-4  # of those of which only the length of a code is read
NEVER = -1e9  # a threshold under which nothing is answered


@dataclass(frozen=True)
class SpanFit:
    """A layer's start and end vectors in the space of raw states, its threshold, and the fits beside it."""

    weight_2D: Tensor
    cost: float
    threshold: float
    tune_f1: float  # at that threshold, on the rows that chose it
    train_loss: float
    repeats: tuple[Tensor, ...]  # fitted on resampled documents
    control_2D: Tensor | None  # fitted on random tokens
    control_cost: float | None  # its own C, by the same tuning rows
    bits: float | None
    control_bits: float | None
    uniform_bits: float
    unconverged: int  # fits (two ends x costs) that ended before their tolerance


def gold(encoded: Features) -> np.ndarray:
    """gold_2W: flat index, among allowed tokens, of every window's start and end."""
    place_M = np.cumsum(encoded.ragged["allowed"] != 0) - 1
    return np.stack([place_M[encoded.offsets_N1[:-1] + encoded.fixed[e]] for e in ENDS])


def control_gold(side: Side, seed: int) -> np.ndarray:
    """A fixed random allowed token of every window, for start and for end."""
    starts_W, size_W = side.stored.offsets_N1[:-1], np.diff(side.stored.offsets_N1)
    ids = side.stored.encoded.ids
    draw_2W = np.array([[seed_of(seed, "control", e, i) / 2**63 for i in ids] for e in ENDS])
    return starts_W + np.minimum((draw_2W * size_W).astype(np.int64), size_W - 1)


def fit(x_MD: Tensor, train: Side, tune: Side, tune_MD: Tensor, cfg: ProbeConfig, controls: bool) -> SpanFit:
    """The probe of one layer; cost and threshold come from `tune`."""
    scale = Scale.of(x_MD)
    x_MD, tuned_MD = scale(x_MD), scale(tune_MD)
    starts_W, gold_2W = train.stored.offsets_N1[:-1], gold(train.stored.encoded)
    seen = Seen(x_MD, starts_W, tuned_MD, tune.stored.offsets_N1[:-1])
    costs = np.array(sorted(cfg.costs))
    chosen = search(seen, gold_2W, gold(tune.stored.encoded), costs)
    cost = float(costs[chosen.number])
    solved = solve_choices(x_MD, _all(starts_W, gold_2W, costs[[chosen.number]]), 1e-9, chosen.weight_2D)
    pair_2D = solved.weight_SPD[0]
    raw = lambda w: (w / scale.spread_D.double()).float()  # noqa: E731
    said = decode(raw(pair_2D), tune_MD, tune, cfg)
    threshold = tuned_threshold(said, tune.rows)
    repeats: tuple[Tensor, ...] = ()
    control_2D = control_cost = bits = control_bits = None
    if controls:
        weight_RW = resamples(train.document_M[starts_W], cfg.repeats, cfg.seed)
        repeats = tuple(raw(w) for w in _resampled(x_MD, starts_W, gold_2W, weight_RW, cost, pair_2D))
        random_2W = control_gold(train, cfg.seed)
        random = search(seen, random_2W, control_gold(tune, cfg.seed), costs)
        control_2D, control_cost = raw(random.weight_2D), float(costs[random.number])
        bits, control_bits = code_lengths(x_MD, train, [gold_2W, random_2W], costs, cfg)
    uniform = float(2 * np.log2(np.diff(train.stored.offsets_N1)).sum())
    return SpanFit(
        raw(pair_2D),
        cost,
        threshold,
        mean_f1(thresholded(said, threshold), tune.rows),
        float(_losses(pair_2D[None], x_MD, starts_W, gold_2W)[0]),
        repeats,
        control_2D,
        control_cost,
        bits,
        control_bits,
        uniform,
        chosen.unconverged + int((~solved.converged_SP).sum()),
    )


@dataclass(frozen=True)
class Seen:
    """Standardised states that are learned from, those that choose the cost, and where the windows of each begin."""

    x_MD: Tensor
    starts_W: np.ndarray
    tuned_MD: Tensor
    tune_starts_W: np.ndarray


@dataclass(frozen=True)
class Chosen:
    """Start and end vectors at the cost of that number, and how many fits on the way there have not converged."""

    weight_2D: Tensor
    number: int
    unconverged: int


def search(seen: Seen, gold_2W: np.ndarray, asked_2W: np.ndarray, costs: np.ndarray) -> Chosen:
    """The cost with the lowest loss on the tuning rows, where `asked_2W` is to be found.

    Costs rise, some at a time, until the loss has risen twice in a row: what follows overfits more and more, and takes
    longest.
    """
    losses: list[float] = []

    def enough(weight_S2D: Tensor) -> bool:
        losses.extend(_losses(weight_S2D, seen.tuned_MD, seen.tune_starts_W, asked_2W).tolist())
        return _risen(losses) is not None

    solved = solve_choices(seen.x_MD, _all(seen.starts_W, gold_2W, costs), NEAR, None, enough, TOGETHER)
    best = int(np.argmin(losses[: _risen(losses)]))
    return Chosen(solved.weight_SPD[best], best, int((~solved.converged_SP).sum()))


def _risen(losses: list[float]) -> int | None:
    """How many losses there are up to a second rise in a row; none without one.

    >>> _risen([3.0, 2.0, 2.5, 2.7, 1.0]), _risen([3.0, 2.0, 2.5])
    (4, None)
    """
    return next((n + 3 for n, (a, b, c) in enumerate(zip(losses, losses[1:], losses[2:])) if a < b < c), None)


def _all(starts_W: np.ndarray, gold_YW: np.ndarray, costs: np.ndarray) -> Choices:
    """Every target in all windows at the same costs."""
    count = len(gold_YW)
    one_W, cost_SP = np.ones((1, len(starts_W))), costs[:, None].repeat(count, 1)
    return Choices(starts_W, gold_YW, one_W, np.arange(count), np.zeros(count, int), cost_SP)


def _resampled(
    x_MD: Tensor, starts_W: np.ndarray, gold_2W: np.ndarray, weight_RW: np.ndarray, cost: float, pair_2D: Tensor
) -> tuple[Tensor, ...]:
    """Start and end vectors for each row of window counts, begun at the fit of all windows."""
    count = len(weight_RW)
    rows_P, gold_P = np.repeat(np.arange(count), 2), np.tile([0, 1], count)
    many = Choices(starts_W, gold_2W, weight_RW, gold_P, rows_P, np.full((1, 2 * count), cost))
    return solve_choices(x_MD, many, NEAR, pair_2D.repeat(count, 1)).weight_SPD[0].split(2)


def _losses(weight_S2D: Tensor, x_MD: Tensor, starts_W: np.ndarray, gold_2W: np.ndarray) -> np.ndarray:
    """Mean loss of start and end at every cost."""
    count = len(weight_S2D)
    log_PM = log_chances((weight_S2D.float().flatten(0, 1) @ x_MD.T).double().numpy(), starts_W)
    loss_PW = -np.take_along_axis(log_PM, np.tile(gold_2W, (count, 1)), axis=1)
    return np.asarray(loss_PW.reshape(count, -1).mean(1))


def right_share(weight_2D: Tensor, x_MD: Tensor, side: Side, gold_2W: np.ndarray) -> float:
    """Share of windows whose start and end score highest, the mean of both."""
    return share_found((weight_2D @ x_MD.T).numpy(), side, gold_2W)


def share_found(score_2M: np.ndarray, side: Side, gold_2W: np.ndarray) -> float:
    """The same, from scores."""
    starts_W = side.stored.offsets_N1[:-1]
    peak_2W = np.maximum.reduceat(score_2M, starts_W, axis=1)
    return float((np.take_along_axis(score_2M, gold_2W, axis=1) >= peak_2W).mean())


def decode(weight_2D: Tensor, x_MD: Tensor, side: Side, cfg: ProbeConfig) -> SpanPredictions:
    """Answers of a probe by the rule asked for."""
    return answers((weight_2D.float() @ x_MD.T).numpy(), side, cfg)


def answers(score_2M: np.ndarray, side: Side, cfg: ProbeConfig) -> SpanPredictions:
    """Answers by the rule asked for, from scores of all tokens or of the allowed ones."""
    return decoded(side.stored.encoded, side.rows, score_2M, cfg)


def decoded(encoded: Features, rows: tuple[Row, ...], score_2M: np.ndarray, cfg: ProbeConfig) -> SpanPredictions:
    """The same, for windows that need not be those of a probe."""
    allowed = encoded.ragged["allowed"] != 0
    full = np.full((2, len(allowed)), -np.inf, dtype=np.float32)
    full[:, allowed] = score_2M[:, allowed] if score_2M.shape[1] == len(allowed) else score_2M
    if cfg.rule == "original":
        return decode_original(encoded, rows, full[0], full[1], ORIGINAL)
    return decode_hf(encoded, rows, full[0], full[1], SpanRule(cfg.max_answer_length, cfg.n_best_size, 0.0))


def thresholded(found: SpanPredictions, threshold: float) -> dict[str, str]:
    """Answers where the null odds do not exceed the threshold."""
    return {i: "" if found.null_odds[i] > threshold else text for i, text in found.best.items()}


def mean_f1(given: dict[str, str], rows: tuple[Row, ...]) -> float:
    """F1 of answers, in percent."""
    return float(100.0 * question_scores(rows, given)[1].mean())


def tuned_threshold(found: SpanPredictions, rows: tuple[Row, ...]) -> float:
    """The threshold with the best F1 on these rows, by one sort.

    Where that is not two standard errors above never answering, nothing is answered: noise must not cost F1 elsewhere.
    (One is not enough: a single right answer is one standard error above none, whatever the number of rows.)
    """
    score_N = question_scores(rows, found.best)[1]
    none_N = np.array([float(not r.answers) for r in rows])
    odds_N = np.array([found.null_odds[r.id] for r in rows])
    threshold = best_threshold(score_N, none_N, odds_N)[1]
    gain_N = np.where(odds_N <= threshold, score_N - none_N, 0.0)
    return threshold if gain_N.mean() > 2 * gain_N.std() / np.sqrt(len(gain_N)) else NEVER


def code_lengths(
    x_MD: Tensor, train: Side, golds: list[np.ndarray], costs: np.ndarray, cfg: ProbeConfig
) -> tuple[float, ...]:
    """Bits of starts and ends in the online code over windows, for each of several `gold_2W`."""
    offsets_N1 = train.stored.offsets_N1
    order_W = shuffled(train.document_M[offsets_N1[:-1]], cfg.seed)
    size_W = np.diff(offsets_N1)[order_W]
    starts_W = np.cumsum(size_W) - size_W
    at_M = np.arange(int(size_W.sum())) + np.repeat(offsets_N1[:-1][order_W] - starts_W, size_W)
    x_MD = x_MD[torch.from_numpy(at_M)]
    gold_YW = np.concatenate(golds)[:, order_W] - offsets_N1[:-1][order_W] + starts_W

    def learn(known: int, following: int, count: int) -> np.ndarray:
        edge = int(starts_W[known])
        last = int(starts_W[following]) if following < len(starts_W) else len(x_MD)
        problem = _all(starts_W[:known], gold_YW[:, :known], costs[:count])
        weight_SYD = solve_choices(x_MD[:edge], problem, CODE).weight_SPD
        score = (weight_SYD.float().flatten(0, 1) @ x_MD[edge:last].T).double().numpy()
        log_PM = log_chances(score, starts_W[known:following] - edge)
        asked_PW = np.tile(gold_YW[:, known:following] - edge, (count, 1))
        bits_PW = -np.take_along_axis(log_PM, asked_PW, axis=1) / np.log(2)
        return bits_PW.reshape(count, len(golds), 2, -1).sum(2)

    return tuple(online_codes(2 * np.log2(size_W), learn, len(costs), len(golds)).tolist())


def no_answer(rows: tuple[Row, ...]) -> float:
    """F1 of never answering, in percent."""
    return 100.0 * sum(not r.answers for r in rows) / len(rows)

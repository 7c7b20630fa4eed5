"""From start and end scores of windows to one answer per question, by two published rules.

`decode_hf` pairs the best starts with the best ends over all windows and weighs them against the lowest null score;
`decode_original` takes the best span of each window, decides there between it and the window's own null, and keeps the
window that scores highest. Scores are flat arrays, cut like the features by `offsets_N1`. The order of the windows
never matters.

Shapes: N questions, W windows, B windows of a block, T longest window of a block, K best starts or ends, S spans.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from budwood.data.batch import Features
from budwood.data.task import Row
from budwood.errors import DataError

BLOCK = 512  # windows decoded at a time
NO_SPAN = 1e9  # null odds of a question whose windows hold no span at all


@dataclass(frozen=True, slots=True)
class SpanRule:
    """How spans are chosen; `max_answer` counts tokens, null wins above `threshold`."""

    max_answer: int = 30
    n_best: int = 20
    threshold: float = 0.0


ORIGINAL = SpanRule(max_answer=18)  # an end lies at most 17 tokens behind its start


@dataclass(frozen=True)
class SpanPredictions:
    """By question id: the answer ("" = none), the best answer before the null rule, the null odds, and more.

    `spans` are the characters of `best` in the context (None where there is no span). `nbest` lists answers by falling
    score, the null answer among them, with probabilities over the list.
    """

    answers: dict[str, str] = field(default_factory=dict)
    best: dict[str, str] = field(default_factory=dict)
    null_odds: dict[str, float] = field(default_factory=dict)
    spans: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    nbest: dict[str, list[dict[str, float | str]]] = field(default_factory=dict)

    def files(self) -> dict[str, str]:
        """The three JSON files that question-answering tools write, by name."""
        named: dict[str, Mapping[str, object]] = {
            "predictions.json": self.answers,
            "nbest_predictions.json": self.nbest,
            "null_odds.json": self.null_odds,
        }
        return {name: json.dumps(values, indent=2, ensure_ascii=False) + "\n" for name, values in named.items()}


@dataclass(frozen=True)
class _Spans:
    """Candidate spans: question, window, positions of first and last token in the window, scores."""

    row_S: np.ndarray
    window_S: np.ndarray
    first_S: np.ndarray
    last_S: np.ndarray
    start_S: np.ndarray
    end_S: np.ndarray

    def take(self, index: np.ndarray) -> _Spans:
        return _Spans(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    @classmethod
    def joined(cls, many: Sequence[_Spans]) -> _Spans:
        return cls(*(np.concatenate([getattr(m, name) for m in many]) for name in cls.__dataclass_fields__))


def fill(flat: np.ndarray, features: Features, index_B: np.ndarray, value_BT: np.ndarray) -> None:
    """Write a padded batch of scores to its places in a flat array that is cut like the features."""
    at_BT = features.offsets_N1[index_B][:, None] + np.arange(value_BT.shape[1])
    real_BT = at_BT < features.offsets_N1[np.asarray(index_B) + 1][:, None]
    flat[at_BT[real_BT]] = value_BT[real_BT]


def decode_hf(
    features: Features, rows: Sequence[Row], start: np.ndarray, end: np.ndarray, rule: SpanRule | None = None
) -> SpanPredictions:
    """Best of the top starts x top ends of all windows; "" where the lowest null score beats it by the threshold.

    A span lies in the context, is at most `max_answer` tokens long, and begins at a token in the window that shows most
    of that token's surroundings. Equal scores: the span that begins, then ends, earlier in the context.
    """
    rule = rule or SpanRule()
    _check(features, rows, start, end)
    null_W = _null_scores(features, start, end)
    null_N = np.full(len(rows), np.inf)
    np.minimum.at(null_N, features.fixed["row"], null_W)
    lead_W = _leads(features)
    usable = _widest_view(features, lead_W)
    spans = _Spans.joined([_top_pairs(features, w, start, end, usable, rule) for w in _blocks(len(features))])
    at_S = spans.first_S - lead_W[spans.window_S] + features.fixed["first"][spans.window_S]
    total_S = spans.start_S + spans.end_S
    spans = spans.take(np.lexsort((spans.last_S - spans.first_S, at_S, -total_S, spans.row_S)))
    bounds_N1 = np.searchsorted(spans.row_S, np.arange(len(rows) + 1))
    out = SpanPredictions()
    for n, row in enumerate(rows):
        mine = slice(int(bounds_N1[n]), int(bounds_N1[n + 1]))
        _answer_hf(out, features, row, spans, mine, float(null_N[n]), rule)
    return out


def _answer_hf(
    out: SpanPredictions, features: Features, row: Row, spans: _Spans, mine: slice, null: float, rule: SpanRule
) -> None:
    """Add one question's answer: walk its spans by falling score until enough different texts are found."""
    found: dict[str, tuple[float, float, tuple[int, int]]] = {}
    for s in range(mine.start, mine.stop):
        if len(found) == rule.n_best:
            break
        chars = _characters(features, int(spans.window_S[s]), int(spans.first_S[s]), int(spans.last_S[s]))
        text = (row.pair or "")[slice(*chars)].strip()
        if text and text not in found:
            found[text] = (float(spans.start_S[s]), float(spans.end_S[s]), chars)
    best = next(iter(found), "")
    odds = null - found[best][0] - found[best][1] if best else NO_SPAN
    out.best[row.id] = best
    out.answers[row.id] = "" if odds > rule.threshold else best
    out.null_odds[row.id] = odds
    out.spans[row.id] = found[best][2] if best else None
    listed = sorted([*((t, s + e) for t, (s, e, _) in found.items()), ("", null)], key=lambda x: -x[1])
    weight = np.exp(np.array([score for _, score in listed]) - listed[0][1])
    chance = weight / weight.sum()
    out.nbest[row.id] = [
        {"text": t, "probability": float(p), "score": s} for (t, s), p in zip(listed, chance, strict=True)
    ]


def decode_original(
    features: Features,
    rows: Sequence[Row],
    start: np.ndarray,
    end: np.ndarray,
    rule: SpanRule = ORIGINAL,
    detokenise: Callable[[list[int]], str] | None = None,
) -> SpanPredictions:
    """The window that scores highest answers: with its best span if that reaches its null score, else with "".

    Equal spans of a window: the one that begins last, then ends first. Equal windows: the earlier in the context. Text
    is cut from the context, or rebuilt from token ids by `detokenise`, as the published results were.
    """
    _check(features, rows, start, end)
    null_W = _null_scores(features, start, end)
    spans = _Spans.joined([_best_span(features, w, start, end, rule) for w in _blocks(len(features))])
    best_W = spans.start_S + spans.end_S
    answered_W = best_W >= null_W + rule.threshold
    score_W = np.where(answered_W, best_W, null_W)
    order_W = np.lexsort((features.fixed["first"], -score_W, spans.row_S))
    chosen_N = order_W[np.searchsorted(spans.row_S[order_W], np.arange(len(rows)))]
    out = SpanPredictions()
    for row, w in zip(rows, chosen_N, strict=True):
        exists = bool(np.isfinite(best_W[w]))
        first, last = int(spans.first_S[w]), int(spans.last_S[w])
        chars = _characters(features, int(w), first, last) if exists else None
        text = ""
        if chars is not None and detokenise is None:
            text = (row.pair or "")[slice(*chars)].strip()
        elif chars is not None and detokenise is not None:
            text = detokenise(features.piece("input_ids", int(w))[first : last + 1].tolist())
        out.best[row.id] = text
        out.answers[row.id] = text if answered_W[w] and exists else ""
        out.null_odds[row.id] = float(null_W[w] - best_W[w]) if exists else NO_SPAN
        out.spans[row.id] = chars
    return out


def _check(features: Features, rows: Sequence[Row], start: np.ndarray, end: np.ndarray) -> None:
    total = int(features.offsets_N1[-1])
    if start.shape != (total,) or end.shape != (total,):
        raise DataError(f"Scores of shape {start.shape} and {end.shape} were given for {total} tokens of windows.")
    if not np.array_equal(np.unique(features.fixed["row"]), np.arange(len(rows))):
        raise DataError(f"The windows do not cover the {len(rows)} questions given: both must come from the same rows.")


def _null_scores(features: Features, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Score of "no answer" in every window: both ends on its first token."""
    at_W = features.offsets_N1[:-1]
    return start[at_W].astype(np.float64) + end[at_W]


def _blocks(count: int) -> Iterator[np.ndarray]:
    for i in range(0, count, BLOCK):
        yield np.arange(i, min(i + BLOCK, count))


def _padded(features: Features, window_B: np.ndarray, value: np.ndarray, ok: np.ndarray) -> np.ndarray:
    """Values of some windows as a matrix [B, T], -inf where not ok or beyond the window."""
    lengths_B = features.lengths_N[window_B]
    place_T = np.arange(int(lengths_B.max()))
    real_BT = place_T < lengths_B[:, None]
    at_BT = np.where(real_BT, features.offsets_N1[window_B][:, None] + place_T, 0)
    return np.where(real_BT & ok[at_BT], value[at_BT].astype(np.float64), -np.inf)


def _in_context(features: Features) -> np.ndarray:
    """True on every token of a context, flat; a window's first token stands for the null answer."""
    ok = features.ragged["allowed"] != 0
    ok[features.offsets_N1[:-1]] = False
    return ok


def _leads(features: Features) -> np.ndarray:
    """Position in its window of the first context token [W] (the window's length where it has none)."""
    ok = _in_context(features)
    window_M = np.repeat(np.arange(len(features)), features.lengths_N)
    place_M = np.arange(len(ok)) - features.offsets_N1[window_M]
    lead_W = features.lengths_N.copy()
    np.minimum.at(lead_W, window_M[ok], place_M[ok])
    return lead_W


def _widest_view(features: Features, lead_W: np.ndarray) -> np.ndarray:
    """True on context tokens in the window that shows most of their surroundings, flat."""
    ok = _in_context(features)
    row_W, first_W = features.fixed["row"], features.fixed["first"]
    window_M = np.repeat(np.arange(len(features)), features.lengths_N)
    at = np.flatnonzero(ok & (np.bincount(row_W)[row_W] > 1)[window_M])  # a question with one window has no choice
    window = window_M[at]
    left = at - features.offsets_N1[window] - lead_W[window]
    size = np.bincount(window_M[ok], minlength=len(features))[window]
    view = np.minimum(left, size - 1 - left) + 0.01 * size
    token = left + first_W[window]
    order = np.lexsort((first_W[window], -view, token, row_W[window]))
    row, token = row_W[window][order], token[order]
    repeated = np.zeros(len(order), dtype=bool)
    repeated[1:] = (row[1:] == row[:-1]) & (token[1:] == token[:-1])
    ok[at[order[repeated]]] = False
    return ok


def _top_pairs(
    features: Features, window_B: np.ndarray, start: np.ndarray, end: np.ndarray, usable: np.ndarray, rule: SpanRule
) -> _Spans:
    """All valid pairs of the best starts and the best ends of some windows; equal scores: the earlier position."""
    context = _in_context(features)
    start_BT = _padded(features, window_B, start, context)
    end_BT = _padded(features, window_B, end, context)
    first_BK = np.argsort(-start_BT, axis=1, kind="stable")[:, : rule.n_best]
    last_BK = np.argsort(-end_BT, axis=1, kind="stable")[:, : rule.n_best]
    start_BK = np.take_along_axis(start_BT, first_BK, axis=1)
    end_BK = np.take_along_axis(end_BT, last_BK, axis=1)
    seen_BK = usable[np.minimum(features.offsets_N1[window_B][:, None] + first_BK, len(usable) - 1)]
    gap_BKK = last_BK[:, None, :] - first_BK[:, :, None]
    ok_BKK = (gap_BKK >= 0) & (gap_BKK < rule.max_answer) & (seen_BK & np.isfinite(start_BK))[:, :, None]
    ok_BKK &= np.isfinite(end_BK)[:, None, :]
    b, i, j = np.nonzero(ok_BKK)
    window_S = window_B[b]
    row_S = features.fixed["row"][window_S]
    return _Spans(row_S, window_S, first_BK[b, i], last_BK[b, j], start_BK[b, i], end_BK[b, j])


def _best_span(features: Features, window_B: np.ndarray, start: np.ndarray, end: np.ndarray, rule: SpanRule) -> _Spans:
    """The best span of each window (scores -inf where it has no context): for every start the best end in reach."""
    context = _in_context(features)
    start_BT = _padded(features, window_B, start, context)
    end_BT = _padded(features, window_B, end, context)
    best_end_BT = _best_ahead(end_BT, rule.max_answer)
    total_BT = start_BT + best_end_BT
    first_B = total_BT.shape[1] - 1 - total_BT[:, ::-1].argmax(axis=1)
    b = np.arange(len(window_B))
    reach_BR = np.minimum(first_B[:, None] + np.arange(rule.max_answer), end_BT.shape[1] - 1)
    last_B = reach_BR[b, np.take_along_axis(end_BT, reach_BR, axis=1).argmax(axis=1)]
    row_B = features.fixed["row"][window_B]
    return _Spans(row_B, window_B, first_B, last_B, start_BT[b, first_B], best_end_BT[b, first_B])


def _best_ahead(value_BT: np.ndarray, reach: int) -> np.ndarray:
    """The largest of each value and the `reach` - 1 behind it, by doubling the reach.

    >>> _best_ahead(np.array([[1.0, 5.0, 2.0, 3.0]]), 3).tolist()
    [[5.0, 5.0, 3.0, 3.0]]
    """
    best_BT, seen = value_BT.copy(), 1
    while seen < reach:
        step = min(seen, reach - seen)
        best_BT[:, :-step] = np.maximum(best_BT[:, :-step], best_BT[:, step:])
        seen += step
    return best_BT


def _characters(features: Features, window: int, first: int, last: int) -> tuple[int, int]:
    """Characters of the context that a window's tokens first..last cover."""
    base = int(features.offsets_N1[window])
    return int(features.ragged["char_start"][base + first]), int(features.ragged["char_end"][base + last])

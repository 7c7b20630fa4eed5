"""Question and context in overlapping windows, with the place of the answer.

Shapes: N rows, C distinct contexts, W windows, M all tokens laid end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from budwood.data.batch import Features
from budwood.data.encoding import Encoding, Ragged, assemble, frame_of, pieces, pieces_with_spans
from budwood.data.task import Row
from budwood.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_span(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, enc: Encoding) -> Features:
    """Windows `question, context` whose contexts begin `enc.doc_stride` tokens apart until the context is covered.

    `start` and `end` are the tokens of the first answer, 0 where there is none or it is not whole in the window.
    `first` is the place in the context of the window's first context token. `info`: questions cut to
    `max_query_length`, rows with several windows, answers that no window holds.
    """
    for r in rows:
        if r.pair is None:
            raise DataError(f"Row '{r.id}' has no context. A span task needs a question (text) and a context (pair).")
    frame = frame_of(tokenizer, pair=True)
    question = pieces(tokenizer, [r.text.strip() for r in rows])
    cut = int((question.lengths_N > enc.max_query_length).sum())
    question = question.keep(np.full(len(rows), enc.max_query_length), "tail")
    known: dict[str, int] = {}
    context_N = np.array([known.setdefault(r.pair or "", len(known)) for r in rows], dtype=np.int64)
    context, span_M2 = pieces_with_spans(tokenizer, list(known))
    span_M2 = _without_space(list(known), context, span_M2)
    row_W, first_W, size_W = _windows(question.lengths_N, context.lengths_N[context_N], enc, frame.size)
    window = context.cut(context_N[row_W], first_W, size_W)
    asked = question.cut(row_W, np.zeros_like(row_W), question.lengths_N[row_W])
    sheet = assemble(frame, asked, window)
    chars = {
        name: sheet.lay(Ragged(span_M2[:, i], context.lengths_N).cut(context_N[row_W], first_W, size_W).flat, True, 0)
        for i, name in enumerate(("char_start", "char_end"))
    }
    allowed = sheet.lay(np.ones(len(window.flat), np.int32), second=True, empty=0)
    allowed[sheet.offsets_N1[:-1]] = 1
    lead_W = len(frame.before) + asked.lengths_N + len(frame.between)
    answer_N2 = _answer_tokens(rows, context_N, context, span_M2)
    begin_W, end_W = answer_N2[row_W, 0] - first_W, answer_N2[row_W, 1] - first_W
    whole_W = (answer_N2[row_W, 0] >= 0) & (begin_W >= 0) & (end_W < size_W)
    held_N = np.bincount(row_W[whole_W], minlength=len(rows)) > 0
    fixed = {
        "start": np.where(whole_W, begin_W + lead_W, 0),
        "end": np.where(whole_W, end_W + lead_W, 0),
        "row": row_W,
        "first": first_W,
    }
    info = {
        "questions_cut": cut,
        "windows": len(row_W),
        "several_windows": int((np.bincount(row_W, minlength=len(rows)) > 1).sum()),
        "answers_lost": int((np.array([bool(r.answers) for r in rows]) & ~held_N).sum()),
        "limit": enc.limit,
    }
    ragged = {**sheet.columns(), "allowed": allowed, **chars}
    return Features(tuple(rows[i].id for i in row_W), sheet.offsets_N1, ragged, fixed, info)


def _windows(
    question_N: np.ndarray, context_N: np.ndarray, enc: Encoding, special: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, first context token and number of context tokens of every window."""
    room_N = enc.limit - special - question_N
    if room_N.min() < 1:
        raise DataError(
            f"A limit of {enc.limit} tokens leaves no room for a context beside a question of "
            f"{int(question_N.max())} and {special} special tokens. Raise --max-length or lower --max-query-length."
        )
    if enc.doc_stride < 1:
        raise DataError(f"--doc-stride must be at least 1, not {enc.doc_stride}.")
    step_N = np.minimum(enc.doc_stride, room_N)  # a longer step would leave tokens in no window
    count_N = 1 + -(-np.maximum(context_N - room_N, 0) // step_N)
    row_W = np.repeat(np.arange(len(question_N)), count_N)
    first_W = (np.arange(len(row_W)) - np.repeat(np.cumsum(count_N) - count_N, count_N)) * step_N[row_W]
    return row_W, first_W, np.minimum(context_N[row_W] - first_W, room_N[row_W])


def _without_space(contexts: list[str], context: Ragged, span_M2: np.ndarray) -> np.ndarray:
    """Character spans that do not begin with white space (byte-level tokens carry the space before a word)."""
    length_C = np.array([len(c) + 1 for c in contexts], dtype=np.int64)
    base_C = np.cumsum(length_C) - length_C
    solid = np.array([not ch.isspace() for c in contexts for ch in f"{c}."], dtype=bool)
    place = np.where(solid, np.arange(len(solid)), len(solid))
    following = np.minimum.accumulate(place[::-1])[::-1]  # the next character that is no white space
    base_M = base_C[context.row_M]
    start_M = np.minimum(following[span_M2[:, 0] + base_M] - base_M, span_M2[:, 1])
    return np.stack([start_M, span_M2[:, 1]], axis=1)


def _answer_tokens(rows: Sequence[Row], context_N: np.ndarray, context: Ragged, span_M2: np.ndarray) -> np.ndarray:
    """First and last context token of each row's first answer [N, 2]; -1 where it has none."""
    out_N2 = np.full((len(rows), 2), -1, dtype=np.int64)
    start_C = context.starts_N
    for n, r in enumerate(rows):
        if not r.answers:
            continue
        text, begin = r.answers[0]
        if (r.pair or "")[begin : begin + len(text)] != text:
            raise DataError(
                f"The answer '{text}' of row '{r.id}' is not found at character {begin} of its context. "
                "Correct answer_start in the file."
            )
        c = context_N[n]
        mine_M2 = span_M2[start_C[c] : start_C[c] + context.lengths_N[c]]
        first = int(np.searchsorted(mine_M2[:, 1], begin, side="right"))
        last = int(np.searchsorted(mine_M2[:, 0], begin + len(text), side="left")) - 1
        if text.strip() and first <= last:
            out_N2[n] = first, last
    return out_N2

"""Rows of a task as features, one function per way of asking; this file: texts with a head on top.

Shapes: N rows, M all tokens of all rows laid end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from budwood.data.batch import IGNORE, Features
from budwood.data.encode_prompt import encode_number, encode_words, label_column, masks_needed
from budwood.data.encode_span import encode_span
from budwood.data.encode_text import encode_clm_text, encode_mlm_text
from budwood.data.encoding import Encoding, Ragged, assemble, frame_of, pieces, pieces_with_spans, share_room
from budwood.data.task import Row
from budwood.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Encoding",
    "encode_clm_text",
    "encode_head",
    "encode_mlm_text",
    "encode_number",
    "encode_span",
    "encode_tokens",
    "encode_words",
    "masks_needed",
]


def encode_head(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, enc: Encoding) -> Features:
    """Text or pair of texts as the tokenizer frames them, with the label: int64 classes or float32 numbers.

    Too long a pair loses tokens of its longer text first. `info`: truncated rows, empty rows, unlabelled rows.
    """
    paired = [r.pair is not None for r in rows]
    if any(paired) and not all(paired):
        lacking = rows[paired.index(False)].id
        raise DataError(f"Row '{lacking}' has no second text while others have one. Give all rows a pair, or none.")
    pair = bool(rows) and paired[0]
    frame = frame_of(tokenizer, pair)
    room = enc.limit - frame.size
    if room < 1:
        raise DataError(f"A limit of {enc.limit} tokens leaves no room for text beside {frame.size} special tokens.")
    first = pieces(tokenizer, [r.text for r in rows])
    second = pieces(tokenizer, [r.pair or "" for r in rows]) if pair else None
    second_N = second.lengths_N if second is not None else np.zeros(len(rows), dtype=np.int64)
    truncated = int((first.lengths_N + second_N > room).sum())
    if second is None:
        first = first.keep(np.full(len(rows), room), enc.truncate)
    else:
        keep_first_N, keep_second_N = share_room(first.lengths_N, second_N, room)
        first, second = first.keep(keep_first_N, enc.truncate), second.keep(keep_second_N, enc.truncate)
    first, empty = _never_empty(first, tokenizer, frame.size + second_N)
    sheet = assemble(frame, first, second)
    label_N, unlabelled = label_column(rows)
    info = {"truncated": truncated, "empty": empty, "unlabelled": unlabelled, "limit": enc.limit}
    return Features(tuple(r.id for r in rows), sheet.offsets_N1, sheet.columns(), {"label": label_N}, info)


def _never_empty(body: Ragged, tokenizer: PreTrainedTokenizerBase, others_N: np.ndarray) -> tuple[Ragged, int]:
    """One token for rows that would have none at all, and how many rows had no text."""
    bare_N = body.lengths_N + others_N == 0
    empty = int((body.lengths_N == 0).sum())
    if not bare_N.any():
        return body, empty
    known = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    token = next((t for t in known if t is not None), 0)
    lengths_N = np.where(bare_N, 1, body.lengths_N)
    flat = np.full(int(lengths_N.sum()), token, dtype=np.int32)
    flat[np.repeat(~bare_N, lengths_N)] = body.flat
    return Ragged(flat, lengths_N), empty


def encode_tokens(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, enc: Encoding) -> Features:
    """Words joined by spaces, with each word's class on its first piece and IGNORE elsewhere.

    `info`: truncated rows; words lost, because they were cut off or share their only piece with the word before.
    """
    for r in rows:
        if r.words is None:
            raise DataError(f"Row '{r.id}' has no words. A token task needs a list of words and one label per word.")
        if r.label is not None and (not isinstance(r.label, tuple) or len(r.label) != len(r.words)):
            raise DataError(f"Row '{r.id}' has {len(r.words)} words but not as many labels. Give one label per word.")
    frame = frame_of(tokenizer, pair=False)
    body, span_M2 = pieces_with_spans(tokenizer, [" ".join(r.words or ()) for r in rows])
    target_M = _first_piece_targets(rows, body, span_M2)
    wanted = sum(len(r.words or ()) for r in rows if r.label is not None)
    room_N = np.full(len(rows), enc.limit - frame.size)
    truncated = int((body.lengths_N > room_N).sum())
    target = Ragged(target_M, body.lengths_N).keep(room_N, enc.truncate)
    kept, empty = _never_empty(body.keep(room_N, enc.truncate), tokenizer, np.full(len(rows), frame.size))
    sheet = assemble(frame, kept)
    if len(target.flat) != len(kept.flat):  # rows without any token got a stand-in, which has no target
        raise DataError("A row of a token task has no words. Remove empty sentences.")
    info = {
        "truncated": truncated,
        "empty": empty,
        "words": wanted,
        "words_lost": wanted - int((target.flat != IGNORE).sum()),
        "limit": enc.limit,
    }
    ragged = {**sheet.columns(), "target": sheet.lay(target.flat, second=False, empty=IGNORE)}
    return Features(tuple(r.id for r in rows), sheet.offsets_N1, ragged, {}, info)


def _first_piece_targets(rows: Sequence[Row], body: Ragged, span_M2: np.ndarray) -> np.ndarray:
    """The class of the word that begins in a piece, IGNORE elsewhere, for every piece of every row."""
    words_N = np.array([len(r.words or ()) for r in rows], dtype=np.int64)
    lengths = np.array([len(w) for r in rows for w in r.words or ()], dtype=np.int64)
    size = Ragged(lengths + 1, words_N)  # a word and the space behind it
    before = np.cumsum(size.flat) - size.flat
    text_N = np.bincount(size.row_M, weights=size.flat, minlength=len(rows)).astype(np.int64)
    base_N = np.cumsum(text_N) - text_N  # all rows' characters on one line, so that one search serves all
    end_M = base_N[body.row_M] + span_M2[:, 1]
    label = np.array([c for r in rows for c in _classes(r)], dtype=np.int32)
    piece = np.searchsorted(end_M, before, side="right")  # the first piece that ends behind the word's first letter
    inside = np.minimum(piece, max(len(end_M) - 1, 0))
    found = (piece < len(end_M)) & (lengths > 0)
    if len(end_M):
        start_M = base_N[body.row_M] + span_M2[:, 0]
        found &= start_M[inside] < before + lengths
    target_M = np.full(len(end_M), IGNORE, dtype=np.int32)
    # where two words share a piece the first keeps it: written in reverse, the earlier word is written last
    target_M[inside[found][::-1]] = label[found][::-1]
    return target_M


def _classes(row: Row) -> tuple[int, ...]:
    if isinstance(row.label, tuple):
        return row.label
    return (IGNORE,) * len(row.words or ())

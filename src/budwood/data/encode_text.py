"""Running text cut into pieces for language modelling.

Shapes: N rows, K pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from budwood.data.batch import IGNORE, Features
from budwood.data.encoding import Encoding, Frame, Ragged, assemble, frame_of, pieces
from budwood.data.task import Row
from budwood.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_mlm_text(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, enc: Encoding) -> Features:
    """Pieces of at most `enc.chunk` tokens, each in the tokenizer's frame; `special` marks what may not be masked.

    A piece never joins two rows. Targets are drawn at batch time (`mask_tokens`). `info`: pieces, rows without text.
    """
    frame = frame_of(tokenizer, pair=False)
    text, row_K, empty = _cut(rows, tokenizer, enc, frame)
    sheet = assemble(frame, text)
    ragged = {**sheet.columns(), "special": sheet.special}
    info = {"pieces": len(row_K), "empty": empty, "limit": enc.limit}
    return Features(tuple(rows[i].id for i in row_K), sheet.offsets_N1, ragged, {"row": row_K}, info)


def encode_clm_text(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, enc: Encoding) -> Features:
    """Pieces of at most `enc.chunk` tokens; every token's target is the next one, the last has none.

    A token that would stand alone in its piece predicts nothing and is dropped: `info` counts such pieces.
    """
    frame = frame_of(tokenizer, pair=False).opening()
    text, row_K, empty = _cut(rows, tokenizer, enc, frame)
    useful_K = text.lengths_N + frame.size >= 2
    dropped = int((~useful_K).sum())
    chosen = np.flatnonzero(useful_K)
    if not len(chosen):
        raise DataError("No row has two tokens, so there is nothing to predict. Give longer texts.")
    text = text.cut(chosen, np.zeros(len(chosen), np.int64), text.lengths_N[chosen])
    row_K = row_K[chosen]
    sheet = assemble(frame, text)
    target = np.full(len(sheet.ids), IGNORE, dtype=np.int32)
    target[:-1] = sheet.ids[1:]
    target[sheet.offsets_N1[1:] - 1] = IGNORE
    info = {"pieces": len(row_K), "dropped": dropped, "empty": empty, "limit": enc.limit}
    ids = tuple(rows[i].id for i in row_K)
    return Features(ids, sheet.offsets_N1, {**sheet.columns(), "target": target}, {"row": row_K}, info)


def _cut(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, enc: Encoding, frame: Frame
) -> tuple[Ragged, np.ndarray, int]:
    """Pieces of text, as few and as even as can be, the row of each, and how many rows have no text."""
    limit = enc.limit if enc.chunk is None else min(enc.chunk, enc.limit)
    size = limit - frame.size
    if size < 1:
        raise DataError(f"Pieces of {limit} tokens leave no room for text beside {frame.size} special tokens.")
    text = pieces(tokenizer, [r.text for r in rows])
    count_N = -(-text.lengths_N // size)
    empty = int((count_N == 0).sum())
    if empty == len(rows):
        raise DataError("No row has any text. Give a file with at least one line of text.")
    row_K = np.repeat(np.arange(len(rows)), count_N)
    place_K = np.arange(len(row_K)) - np.repeat(np.cumsum(count_N) - count_N, count_N)
    # a text's pieces are equally long: a rest of one or two tokens has no context, and its gradient outweighs hundreds
    first_K, end_K = (text.lengths_N[row_K] * (place_K + i) // count_N[row_K] for i in (0, 1))
    return text.cut(row_K, first_K, end_K - first_K), row_K, empty

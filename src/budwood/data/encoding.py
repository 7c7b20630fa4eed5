"""How text becomes arrays of tokens: settings, ragged arrays and the frame of special tokens around a text.

Shapes: N rows, M all tokens of all rows laid end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

import numpy as np

from budwood.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Encoding:
    """Lengths and sides of encoding.

    positions         the most tokens the model can take
    max_length        the most tokens of a feature, special tokens included (None: `positions`)
    truncate          which end of a document that is too long is dropped
    doc_stride        tokens between the starts of two windows of one context (span tasks)
    max_query_length  the most tokens kept of a question (span tasks)
    chunk             tokens of a piece of running text, special tokens included (None: the limit)
    masks             number of answer masks after "=" (number tasks)
    end               whether an end piece follows an answer (number tasks)
    """

    positions: int = 512
    max_length: int | None = None
    truncate: Literal["tail", "head"] = "tail"
    doc_stride: int = 128
    max_query_length: int = 64
    chunk: int | None = None
    masks: int = 6
    end: bool = True

    @property
    def limit(self) -> int:
        """The most tokens of a feature.

        >>> Encoding(positions=512, max_length=128).limit, Encoding(positions=64, max_length=128).limit
        (128, 64)
        """
        return self.positions if self.max_length is None else min(self.max_length, self.positions)


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of unequal length in one flat array."""

    flat: np.ndarray
    lengths_N: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths_N)

    @property
    def starts_N(self) -> np.ndarray:
        """Where each row begins in `flat`."""
        return np.cumsum(self.lengths_N) - self.lengths_N

    @property
    def row_M(self) -> np.ndarray:
        """The row of every value."""
        return np.repeat(np.arange(len(self)), self.lengths_N)

    @property
    def place_M(self) -> np.ndarray:
        """The place of every value within its row."""
        return np.arange(len(self.flat)) - np.repeat(self.starts_N, self.lengths_N)

    def cut(self, row_K: np.ndarray, first_K: np.ndarray, length_K: np.ndarray) -> Ragged:
        """Slices: piece k is row `row_K[k]` from place `first_K[k]`, `length_K[k]` values long.

        >>> r = Ragged(np.array([5, 6, 7, 8]), np.array([1, 3]))
        >>> r.cut(np.array([1, 1]), np.array([0, 1]), np.array([1, 2])).flat.tolist()
        [6, 7, 8]
        """
        out = Ragged(np.empty(int(length_K.sum()), dtype=np.int8), np.asarray(length_K, dtype=np.int64))
        source = np.repeat(self.starts_N[row_K] + first_K, length_K) + out.place_M
        return Ragged(self.flat[source], out.lengths_N)

    def keep(self, count_N: np.ndarray, side: Literal["tail", "head"]) -> Ragged:
        """At most `count_N[n]` values of row n; `side` is the end that is dropped."""
        length_N = np.minimum(self.lengths_N, np.maximum(count_N, 0))
        first_N = self.lengths_N - length_N if side == "head" else np.zeros_like(length_N)
        return self.cut(np.arange(len(self)), first_N, length_N)

    def where(self, keep_M: np.ndarray) -> Ragged:
        """Only the values marked in `keep_M`; every row stays, if empty."""
        return Ragged(self.flat[keep_M], np.bincount(self.row_M[keep_M], minlength=len(self)).astype(np.int64))


@dataclass(frozen=True, slots=True)
class Frame:
    """The special tokens a tokenizer puts before, between and after its one or two texts, and their segment types."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    types: tuple[tuple[int, ...], int, tuple[int, ...], int, tuple[int, ...]] | None = None

    @property
    def size(self) -> int:
        """How many special tokens the frame adds."""
        return len(self.before) + len(self.between) + len(self.after)

    def opening(self) -> Frame:
        """What stands before a single text and nothing after it: there a causal model goes on."""
        types = None if self.types is None else (self.types[0], self.types[1], (), 0, ())
        return Frame(self.before, (), (), types)


@dataclass(frozen=True, slots=True)
class Sheet:
    """Framed rows: flat ids, segment types or None, which tokens are special, and where the two texts lie."""

    ids: np.ndarray
    lengths_N: np.ndarray
    types: np.ndarray | None
    special: np.ndarray
    at_first: np.ndarray  # place in `ids` of every value of the first text
    at_second: np.ndarray

    @property
    def offsets_N1(self) -> np.ndarray:
        """Where each row begins, and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.lengths_N)]).astype(np.int64)

    def lay(self, value_M: np.ndarray, second: bool, empty: int) -> np.ndarray:
        """A flat array as long as `ids` with values on one of the texts and `empty` elsewhere."""
        out = np.full(len(self.ids), empty, dtype=np.int32)
        out[self.at_second if second else self.at_first] = value_M
        return out

    def columns(self) -> dict[str, np.ndarray]:
        """The ragged columns that a model eats."""
        out = {"input_ids": self.ids}
        if self.types is not None:
            out["token_type_ids"] = self.types
        return out


def assemble(frame: Frame, first: Ragged, second: Ragged | None = None) -> Sheet:
    """Rows `before + first + between + second + after` as one flat array, without a loop over rows.

    >>> a, b = Ragged(np.array([5, 6]), np.array([2, 0])), Ragged(np.array([7, 8]), np.array([1, 1]))
    >>> s = assemble(Frame((1,), (2,), (3,)), a, b)
    >>> s.ids.tolist(), s.lengths_N.tolist(), s.special.tolist()
    ([1, 5, 6, 2, 7, 3, 1, 2, 8, 3], [6, 4], [1, 0, 0, 1, 0, 1, 1, 1, 0, 1])
    """
    other = second if second is not None else Ragged(np.empty(0, np.int32), np.zeros(len(first), np.int64))
    lengths_N = first.lengths_N + other.lengths_N + frame.size
    start_N = np.cumsum(lengths_N) - lengths_N
    first_at_N = start_N + len(frame.before)
    between_at_N = first_at_N + first.lengths_N
    second_at_N = between_at_N + len(frame.between)
    after_at_N = second_at_N + other.lengths_N
    ids = np.empty(int(lengths_N.sum()), dtype=np.int32)
    special = np.ones(len(ids), dtype=np.int32)
    at_first = np.repeat(first_at_N, first.lengths_N) + first.place_M
    at_second = np.repeat(second_at_N, other.lengths_N) + other.place_M
    ids[at_first], ids[at_second] = first.flat, other.flat
    special[at_first] = special[at_second] = 0
    types = None if frame.types is None else np.zeros_like(ids)
    fixed = ((start_N, frame.before, 0), (between_at_N, frame.between, 2), (after_at_N, frame.after, 4))
    for at_N, tokens, slot in fixed:
        for j, token in enumerate(tokens):
            ids[at_N + j] = token
            if types is not None and frame.types is not None:
                types[at_N + j] = frame.types[slot][j]  # type: ignore[index]
    if types is not None and frame.types is not None:
        types[at_first], types[at_second] = frame.types[1], frame.types[3]
    return Sheet(ids, lengths_N, types, special, at_first, at_second)


def join(first: Ragged, second: Ragged) -> Ragged:
    """Row n of `first` followed by row n of `second`."""
    sheet = assemble(Frame(), first, second)
    return Ragged(sheet.ids, sheet.lengths_N)


def frame_of(tokenizer: PreTrainedTokenizerBase, pair: bool) -> Frame:
    """The frame of this tokenizer, learned by showing it one or two one-letter texts."""
    require_fast(tokenizer)
    shown = tokenizer("a", "b") if pair else tokenizer("a")
    ids, owner = list(shown["input_ids"]), list(shown.sequence_ids(0))
    if 0 not in owner or (pair and 1 not in owner):
        raise DataError(
            f"The tokenizer {type(tokenizer).__name__} makes no token of the letters 'a' and 'b', so its special "
            "tokens cannot be told from text. Use a tokenizer with an unknown token or with letters."
        )
    a0, a1 = owner.index(0), len(owner) - owner[::-1].index(0)
    b0, b1 = (owner.index(1), len(owner) - owner[::-1].index(1)) if pair else (a1, a1)
    types = None
    if "token_type_ids" in shown:
        kinds = [int(t) for t in shown["token_type_ids"]]
        second = kinds[b0] if pair else 0
        types = (tuple(kinds[:a0]), kinds[a0], tuple(kinds[a1:b0]), second, tuple(kinds[b1:]))
    return Frame(tuple(ids[:a0]), tuple(ids[a1:b0]), tuple(ids[b1:]), types)


def require_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that cannot tell characters from tokens."""
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"The tokenizer {type(tokenizer).__name__} is not a fast one (no tokenizer.json), so the place of its "
            "tokens in the text is unknown. Give a model directory with a tokenizer.json."
        )


def pieces(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Ragged:
    """Token ids of every text, without special tokens and without any limit."""
    return _call(tokenizer, texts, with_spans=False)[0]


def pieces_with_spans(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> tuple[Ragged, np.ndarray]:
    """Token ids of every text, and first and last-plus-one character of every token [M, 2]."""
    return _call(tokenizer, texts, with_spans=True)


def _call(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], with_spans: bool) -> tuple[Ragged, np.ndarray]:
    require_fast(tokenizer)
    if not texts:
        raise DataError("There is no row to encode. Give a split with at least one row.")
    out = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=with_spans,
        verbose=False,  # lengths are handled here, so the library's warning would mislead
    )
    rows = out["input_ids"]
    lengths_N = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    total = int(lengths_N.sum())
    ids = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=total)
    if not with_spans:
        return Ragged(ids, lengths_N), np.empty((0, 2), dtype=np.int64)
    ends = chain.from_iterable(chain.from_iterable(out["offset_mapping"]))
    return Ragged(ids, lengths_N), np.fromiter(ends, dtype=np.int64, count=2 * total).reshape(total, 2)


def share_room(first_N: np.ndarray, second_N: np.ndarray, room_N: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens two texts may keep in `room` tokens: the longer one gives way first, then both get half.

    >>> [x.tolist() for x in share_room(np.array([3, 9, 9]), np.array([4, 2, 9]), 8)]
    [[3, 6, 4], [4, 2, 4]]
    """
    room_N = np.maximum(np.broadcast_to(room_N, first_N.shape), 0)
    short_N, long_N = np.minimum(first_N, second_N), np.maximum(first_N, second_N)
    long_kept_N = np.where(short_N > room_N, short_N, np.maximum(short_N, room_N - short_N))
    halved_N = short_N + long_kept_N > room_N
    short_kept_N = np.where(halved_N, room_N // 2, short_N)
    long_kept_N = np.where(halved_N, room_N // 2 + room_N % 2, long_kept_N)
    fits_N = first_N + second_N <= room_N
    short_kept_N, long_kept_N = np.where(fits_N, short_N, short_kept_N), np.where(fits_N, long_N, long_kept_N)
    swapped_N = first_N > second_N
    return np.where(swapped_N, long_kept_N, short_kept_N), np.where(swapped_N, short_kept_N, long_kept_N)

"""Passages of the shipped text as rows of tokens: lines, segments, batches and masks for pre-training.

Shapes: B rows of a batch, T tokens of the longest row, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from budwood.data.batch import IGNORE, seed_of
from budwood.studies.vocabulary import POSITIONS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ECHO_LONGEST = 40  # tokens of a row that may be said twice

Inputs = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, real, segment, each [B, T]


@dataclass(frozen=True)
class Rows:
    """Token ids of rows and, for tiny-bert, the place where a second segment begins (the length where none does)."""

    ids: list[list[int]]
    second: list[int]


Line = list[list[int]]  # the sentences of a line of text
Passage = list[Line]


def lines_of(passages: Sequence[Passage], whole: float, seed: int, epoch: int) -> list[Passage]:
    """A share of the passages whole, of the others every line for itself."""
    rng = np.random.default_rng(seed_of(seed, "lines", epoch))
    whole_N = rng.random(len(passages)) < whole
    return [part for p, kept in zip(passages, whole_N, strict=True) for part in ([p] if kept else [[x] for x in p])]


def bert_rows(passages: Sequence[Passage], frame: tuple[int, int], short: float, seed: int, epoch: int) -> Rows:
    """One segment, or two cut at a sentence, in either order, drawn anew every epoch; a share of them ends early.

    What comes later often tells a masked word away ("it was [MASK] . i loved it ."): without it a model has to read.
    """
    rng = np.random.default_rng(seed_of(seed, "rows", epoch))
    cls, sep = frame
    ids: list[list[int]] = []
    second: list[int] = []
    for passage in passages:
        told = [sentence for line in passage for sentence in line]
        if len(told) > 1 and rng.random() < short:
            told = told[: int(rng.integers(1, len(told) + 1))]
        cut = int(rng.integers(1, len(told))) if len(told) > 1 and rng.random() < 0.4 else len(told)
        one, two = told[:cut], told[cut:]
        if two and rng.random() < 0.5:  # as questions stand before what they are asked about
            one, two = two, one
        row = [cls, *(t for s in one for t in s), sep]
        second.append(len(row))
        rest = [t for s in two for t in s]
        ids.append((row + rest + ([sep] if rest else []))[:POSITIONS])
    return Rows(ids, second)


def echoed(rows: Rows, frame: tuple[int, int], share: float, seed: int, epoch: int) -> Rows:
    """A share of the short rows said twice, as two segments: what is masked in one can be read in the other.

    >>> echoed(Rows([[2, 7, 8, 3]], [4]), (2, 3), 1.0, 0, 0)
    Rows(ids=[[2, 7, 8, 3, 7, 8, 3]], second=[4])
    """
    rng = np.random.default_rng(seed_of("echo", seed + epoch))
    cls, sep = frame
    out = Rows([], [])
    for row, second in zip(rows.ids, rows.second, strict=True):
        said = [t for t in row[1:] if t != sep]
        twice = rng.random() < share and len(row) < ECHO_LONGEST
        out.ids.append([cls, *said, sep, *said, sep] if twice else row)
        out.second.append(len(said) + 2 if twice else second)
    return out


def gpt_rows(passages: Sequence[Passage], end: int, new_line: int) -> Rows:
    """Lines with a line break between them, closed by the end token."""
    ids = []
    for passage in passages:
        row: list[int] = []
        for line in passage:
            row += ([new_line] if row else []) + [t for s in line for t in s]
        ids.append([*row, end][:POSITIONS])
    return Rows(ids, [len(row) for row in ids])


def batches(rows: Rows, tokens: int, seed: int, epoch: int) -> Iterator[np.ndarray]:
    """Row numbers of batches of at most `tokens` padded tokens, similar lengths together, in random order."""
    lengths_N = np.array([len(r) for r in rows.ids])
    order = np.argsort(lengths_N, kind="stable")
    cuts, start = [], 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * lengths_N[order[stop]] <= tokens:
            stop += 1
        cuts.append(order[start:stop])
        start = stop
    for i in np.random.default_rng(seed_of(seed, "batches", epoch)).permutation(len(cuts)):
        yield cuts[i]


@dataclass(frozen=True)
class Masker:
    """Chooses what is hidden: each token of the vocabulary has a rate of its own.

    A word that stands elsewhere in its row too has the rate `again` at least: it can be found there. If it also ends a
    sentence, as answers to questions do, it has the rate `answer`; of several such places not the first.
    """

    rate_V: np.ndarray  # 0 for special tokens
    mask_id: int
    stop_id: int  # the full stop
    answer: float
    again: float
    focus: float  # share of rows in which just the words of rate `answer` are hidden, and all of them

    def __call__(self, ids_BT: np.ndarray, real_BT: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(corrupted ids, targets): of the chosen tokens 8 in 10 are masked, 1 is random, 1 stays."""
        rng = np.random.default_rng(seed)
        size = len(self.rate_V)
        rate_BT = self.rate_V[ids_BT]
        if self.answer:
            key_BT = ids_BT + size * np.arange(len(ids_BT))[:, None]
            again_BT = np.bincount(key_BT.ravel(), minlength=size * len(ids_BT))[key_BT] > 1
            again_BT &= ids_BT > self.mask_id
            first_BT = np.zeros(ids_BT.shape, bool)
            first_BT.ravel()[np.unique(key_BT, return_index=True)[1]] = True
            last_BT = np.pad(ids_BT[:, 1:] == self.stop_id, ((0, 0), (0, 1)))
            rate_BT = np.where(again_BT, np.maximum(rate_BT, self.again), rate_BT)
            closing_BT = again_BT & last_BT
            alone_BT = np.bincount(key_BT.ravel(), closing_BT.ravel(), size * len(ids_BT))[key_BT] == 1
            rate_BT = np.where(closing_BT & (alone_BT | ~first_BT), self.answer, rate_BT)
            rate_BT = self._focused(rng, key_BT, (rate_BT == self.answer) & real_BT, rate_BT)
        chosen_BT = (rng.random(ids_BT.shape) < rate_BT) & real_BT
        fate_BT = rng.random(ids_BT.shape)
        random_BT = rng.integers(self.mask_id + 1, size, ids_BT.shape)
        out_BT = np.where(chosen_BT & (fate_BT < 0.8), self.mask_id, ids_BT)
        out_BT = np.where(chosen_BT & (fate_BT >= 0.9), random_BT, out_BT)
        return out_BT, np.where(chosen_BT, ids_BT, IGNORE)

    def _focused(
        self, rng: np.random.Generator, key_BT: np.ndarray, answer_BT: np.ndarray, rate_BT: np.ndarray
    ) -> np.ndarray:
        """In some rows the answers alone are hidden, in as many what they repeat: one is to be read off the other."""
        alone_B, turned_B = rng.random((2, len(key_BT))) < np.array([[self.focus], [0.5]])
        repeated_BT = np.isin(key_BT, key_BT[answer_BT]) & ~answer_BT
        turned_B1 = (turned_B & repeated_BT.any(1))[:, None]
        hidden_BT = np.where(turned_B1, repeated_BT, answer_BT)
        return np.where((alone_B & answer_BT.any(1))[:, None], hidden_BT, rate_BT)


def pad(rows: Rows, index: np.ndarray, pad_id: int) -> Inputs:
    """(ids, real, segment), each [B, T]."""
    width = max(len(rows.ids[i]) for i in index)
    ids_BT = np.full((len(index), width), pad_id, dtype=np.int64)
    for b, i in enumerate(index):
        ids_BT[b, : len(rows.ids[i])] = rows.ids[i]
    real_BT = np.arange(width) < np.array([len(rows.ids[i]) for i in index])[:, None]
    segment_BT = (np.arange(width) >= np.array([rows.second[i] for i in index])[:, None]) & real_BT
    return ids_BT, real_BT, segment_BT.astype(np.int64)


def read(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> list[Passage]:
    """Token ids of every sentence of every line of every passage."""
    parts = [[[p + " ." for p in line.removesuffix(" .").split(" . ")] for line in text.split("\n")] for text in texts]
    byte_level = tokenizer.mask_token is None
    flat = [(" " if byte_level and i else "") + p for doc in parts for line in doc for i, p in enumerate(line)]
    coded = iter(tokenizer(flat, add_special_tokens=False)["input_ids"])
    return [[[next(coded) for _ in line] for line in doc] for doc in parts]

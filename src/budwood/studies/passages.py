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


def bert_rows(passages: Sequence[Passage], frame: tuple[int, int], seed: int, epoch: int) -> Rows:
    """One segment, or two cut at a sentence, drawn anew every epoch."""
    rng = np.random.default_rng(seed_of(seed, "rows", epoch))
    cls, sep = frame
    ids: list[list[int]] = []
    second: list[int] = []
    for passage in passages:
        told = [sentence for line in passage for sentence in line]
        cut = int(rng.integers(1, len(told))) if len(told) > 1 and rng.random() < 0.4 else len(told)
        row = [cls, *(t for s in told[:cut] for t in s), sep]
        second.append(len(row))
        rest = [t for s in told[cut:] for t in s]
        ids.append((row + rest + ([sep] if rest else []))[:POSITIONS])
    return Rows(ids, second)


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

    A word that ends a sentence and stands elsewhere in its row too, as answers to questions do, has the rate `answer`.
    """

    rate_V: np.ndarray  # 0 for special tokens
    mask_id: int
    stop_id: int  # the full stop
    answer: float

    def __call__(self, ids_BT: np.ndarray, real_BT: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(corrupted ids, targets): of the chosen tokens 8 in 10 are masked, 1 is random, 1 stays."""
        rng = np.random.default_rng(seed)
        size = len(self.rate_V)
        rate_BT = self.rate_V[ids_BT]
        if self.answer:
            key_BT = ids_BT + size * np.arange(len(ids_BT))[:, None]
            again_BT = np.bincount(key_BT.ravel(), minlength=size * len(ids_BT))[key_BT] > 1
            last_BT = np.pad(ids_BT[:, 1:] == self.stop_id, ((0, 0), (0, 1)))
            rate_BT = np.where(again_BT & last_BT & (ids_BT > self.mask_id), self.answer, rate_BT)
        chosen_BT = (rng.random(ids_BT.shape) < rate_BT) & real_BT
        fate_BT = rng.random(ids_BT.shape)
        random_BT = rng.integers(self.mask_id + 1, size, ids_BT.shape)
        out_BT = np.where(chosen_BT & (fate_BT < 0.8), self.mask_id, ids_BT)
        out_BT = np.where(chosen_BT & (fate_BT >= 0.9), random_BT, out_BT)
        return out_BT, np.where(chosen_BT, ids_BT, IGNORE)


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

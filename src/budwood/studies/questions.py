"""Questions of the shipped text as rows that point at their answers: tiny-bert learns to read with a question in mind.

A masked model looks for what is missing; nothing ever asks the words of a text whether they are the answer. So some
steps of pre-training show question and text as two segments and ask for the first and last token of the answer, or for
the first token of all where the text says that nobody knows.

Shapes: B rows of a batch, T tokens of the longest row, D width of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from budwood.data.batch import seed_of
from budwood.studies.passages import Inputs, Rows, batches, pad
from budwood.studies.vocabulary import POSITIONS

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerFast

UNKNOWN = "nobody knows"
_FIRST = re.compile(r"([^.]*\?) (.*) the answer is ([^.]*) \.")


@dataclass(frozen=True)
class Asked:
    """Rows of [question, text] and the first and last token of each one's answer; 0 where there is none."""

    rows: Rows
    spans: list[tuple[int, int]]


def questions(line: str) -> list[tuple[str, str, str]]:
    """(question, text, answer) of a line of plain text; the answer is "" where nobody knows it.

    >>> questions("hugo owns a dog . what pet does hugo have ? dog . who founded oakford ? nobody knows .")
    [('what pet does hugo have ?', 'hugo owns a dog .', 'dog'), ('who founded oakford ?', 'hugo owns a dog .', '')]
    >>> questions("what pet does hugo have ? hugo owns a dog . the answer is dog .")
    [('what pet does hugo have ?', 'hugo owns a dog .', 'dog')]
    """
    ahead = _FIRST.fullmatch(line)
    if ahead:
        found = [ahead.groups()]
    else:
        parts = line.removesuffix(" .").split(" . ")
        text = "".join(f"{p} . " for p in parts if "?" not in p).rstrip()
        found = [(f"{q} ?", text, a) for q, _, a in (p.partition(" ? ") for p in parts if " ? " in p)]
    told = [(q, text, "" if a == UNKNOWN else a) for q, text, a in found]
    return [(q, text, a) for q, text, a in told if text and (not a or f" {text}".count(f" {a} ") == 1)]


def asked(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Asked:
    """Every question of the texts that has its answer in its line just once, or none at all."""
    found = [q for text in texts for line in text.split("\n") if "?" in line for q in questions(line)]
    coded = tokenizer(
        [q for q, _, _ in found],
        [text for _, text, _ in found],
        return_offsets_mapping=True,
        truncation="only_second",
        max_length=POSITIONS,
    )
    ids, second, spans = [], [], []
    for i, (_, text, answer) in enumerate(found):
        begin = coded["token_type_ids"][i].index(1)
        at = f" {text}".index(f" {answer} ") if answer else -1
        offsets = coded["offset_mapping"][i]
        inside = [t for t in range(begin, len(offsets) - 1) if at <= offsets[t][0] < at + len(answer)]
        if answer and not inside:
            continue  # cut off
        ids.append(coded["input_ids"][i])
        second.append(begin)
        spans.append((inside[0], inside[-1]) if inside else (0, 0))
    return Asked(Rows(ids, second), spans)


def pointing(given: Asked, tokens: int, seed: int, pad_id: int) -> Iterator[tuple[Inputs, np.ndarray]]:
    """Batches without end: what the model reads, and where the answers begin and end [B, 2]."""
    spans_N2 = np.array(given.spans)
    for epoch in count():
        for index in batches(given.rows, tokens, seed_of(seed, "questions"), epoch):
            yield pad(given.rows, index, pad_id), spans_N2[index]


def span_loss(model: Any, head: nn.Linear, inputs: Inputs, spans_B2: np.ndarray) -> Tensor:
    """Mean loss of both ends of the answers."""
    import torch
    from torch.nn.functional import cross_entropy

    ids_BT, real_BT, segment_BT = inputs
    real = torch.from_numpy(real_BT)
    hidden_BTD = model.bert(
        input_ids=torch.from_numpy(ids_BT),
        attention_mask=None if real_BT.all() else real.long(),
        token_type_ids=torch.from_numpy(segment_BT),
    ).last_hidden_state
    scores_BT2 = head(hidden_BTD).masked_fill(~real[..., None], -1e4)
    return cross_entropy(scores_BT2.transpose(1, 2).reshape(-1, ids_BT.shape[1]), torch.from_numpy(spans_B2).flatten())

"""Rows worded by a template, and arithmetic problems with their answer to be filled in.

A worded row is tokenised whole, so that every token is the one the model knows from running text; each token is then
traced back by its characters to the wording or to a document, and only tokens of documents are ever dropped.

Shapes: N rows, M all tokens of all rows laid end to end, P parts of the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from budwood.data.batch import IGNORE, Features
from budwood.data.encoding import (
    Encoding,
    Ragged,
    assemble,
    frame_of,
    join,
    pieces,
    pieces_with_spans,
    share_room,
)
from budwood.data.prompt import Part, causal_parts, masked_parts, trimmed, word_pieces
from budwood.data.task import Row, Template
from budwood.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def label_column(rows: Sequence[Row]) -> tuple[np.ndarray, int]:
    """Labels as int64 classes, or as float32 where any is a float; IGNORE or NaN where a row has none, counted."""
    unlabelled = sum(r.label is None for r in rows)
    for r in rows:
        if isinstance(r.label, tuple):
            raise DataError(f"Row '{r.id}' has several labels. Only one label per row can be used here.")
    if any(isinstance(r.label, float) for r in rows):
        return np.array([np.nan if r.label is None else r.label for r in rows], dtype=np.float32), unlabelled
    return np.array([IGNORE if r.label is None else r.label for r in rows], dtype=np.int64), unlabelled


def encode_words(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, enc: Encoding, template: Template, causal: bool
) -> Features:
    """Rows in the template's wording, with the position whose language-model logits give the answer.

    Too long a row loses tokens of its documents (the longer first), never of the wording. `info`: truncated rows,
    unlabelled rows.
    """
    if causal:
        frame, parts = frame_of(tokenizer, pair=False).opening(), causal_parts(template)
    else:
        frame, parts = frame_of(tokenizer, pair=False), _parts_before_mask(tokenizer, masked_parts(template))
    mask_token = "" if causal else mask_token_of(tokenizer)[0]
    texts = [[p.of(r, mask_token) for p in parts] for r in rows]
    body, span_M2 = pieces_with_spans(tokenizer, ["".join(t) for t in texts])
    part_M = _part_of_token(texts, body, span_M2)
    keep_M, truncated = _documents_cut(parts, part_M, body, enc, template.limits, enc.limit - frame.size)
    kept = body.where(keep_M)
    sheet = assemble(frame, kept)
    if causal:
        if not kept.lengths_N.all():
            raise DataError(f"Row '{rows[int(kept.lengths_N.argmin())].id}' is empty in the causal template's wording.")
        read_at_N = sheet.lengths_N - 1
    else:
        place = [p.kind for p in parts].index("mask")
        is_mask = Ragged((part_M == place).astype(np.int32), body.lengths_N).where(keep_M)
        if not (np.bincount(is_mask.row_M, weights=is_mask.flat, minlength=len(rows)) == 1).all():
            raise DataError(f"The mask token '{mask_token}' is not one token for this tokenizer. Use --mode head.")
        read_at_N = is_mask.place_M[is_mask.flat == 1] + len(frame.before)
    label_N, unlabelled = label_column(rows)
    info = {"truncated": truncated, "unlabelled": unlabelled, "limit": enc.limit}
    fixed = {"label": label_N, "read_at": read_at_N.astype(np.int64)}
    return Features(tuple(r.id for r in rows), sheet.offsets_N1, sheet.columns(), fixed, info)


def mask_token_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """The mask token and its id; a tokenizer without one is refused."""
    if tokenizer.mask_token is None or tokenizer.mask_token_id is None:
        raise DataError(
            f"The tokenizer {type(tokenizer).__name__} has no mask token, so a masked prompt cannot be asked. "
            "Use --mode causal for a causal model, or --mode head."
        )
    return str(tokenizer.mask_token), int(tokenizer.mask_token_id)


def _parts_before_mask(tokenizer: PreTrainedTokenizerBase, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The parts without the space before the mask, where this tokenizer would make that space a token of its own."""
    mask = mask_token_of(tokenizer)[0]
    spaced = tokenizer(f"a {mask}", add_special_tokens=False)["input_ids"]
    tight = tokenizer(f"a{mask}", add_special_tokens=False)["input_ids"]
    if len(spaced) <= len(tight):
        return parts
    place = [p.kind for p in parts].index("mask")
    return (*trimmed(parts[:place]), *parts[place:])


def _part_of_token(texts: list[list[str]], body: Ragged, span_M2: np.ndarray) -> np.ndarray:
    """The part of the template that holds a token's last character."""
    ends_NP = np.cumsum(np.array([[len(p) for p in t] for t in texts], dtype=np.int64), axis=1)
    last_M = np.maximum(span_M2[:, 1] - 1, span_M2[:, 0])
    part_M = np.zeros(len(last_M), dtype=np.int64)
    row_M = body.row_M
    for p in range(ends_NP.shape[1] - 1):
        part_M += last_M >= ends_NP[row_M, p]
    return part_M


def _documents_cut(
    parts: tuple[Part, ...], part_M: np.ndarray, body: Ragged, enc: Encoding, limits: tuple[int, int], room: int
) -> tuple[np.ndarray, int]:
    """Which tokens stay when every row must fit into `room` tokens, and how many rows lose some."""
    kinds = [p.kind for p in parts]
    row_M = body.row_M
    count_N, wanted_N, held_M = {}, {}, {}
    for kind, limit in zip(("text", "pair"), limits, strict=True):
        held_M[kind] = part_M == kinds.index(kind) if kind in kinds else np.zeros(len(part_M), dtype=bool)
        count_N[kind] = np.bincount(row_M[held_M[kind]], minlength=len(body))
        wanted_N[kind] = np.minimum(count_N[kind], limit) if limit else count_N[kind]
    fixed_N = body.lengths_N - count_N["text"] - count_N["pair"]
    if (fixed_N > room).any():
        raise DataError(
            f"The wording of the template alone is {int(fixed_N.max())} tokens, but only {room} fit into the limit of "
            f"{enc.limit}. Shorten the template or raise --max-length (the model takes {enc.positions})."
        )
    kept_N = dict(zip(("text", "pair"), share_room(wanted_N["text"], wanted_N["pair"], room - fixed_N), strict=True))
    keep_M = np.ones(len(part_M), dtype=bool)
    for kind, held in held_M.items():
        inside = Ragged(np.flatnonzero(held), count_N[kind].astype(np.int64))
        place = inside.place_M
        spare_N = count_N[kind] - kept_N[kind]
        dropped = place < spare_N[inside.row_M] if enc.truncate == "head" else place >= kept_N[kind][inside.row_M]
        keep_M[inside.flat[dropped]] = False
    return keep_M, int((kept_N["text"] + kept_N["pair"] < count_N["text"] + count_N["pair"]).sum())


def encode_number(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, enc: Encoding, causal: bool) -> Features:
    """Problems such as "12 + 7 =" with the pieces of the answer, then an end piece, as targets.

    Masked: `enc.masks` mask tokens follow the problem and carry the targets; masks left over carry none. Causal: the
    answer follows the problem, every token's target is the next one, from the problem's last token on. `read_at` is the
    first place that answers; what lies behind the problem is `prompt` tokens in. `info`: rows whose answer needs more
    pieces than there are masks (they cannot be answered exactly, and train on what fits). Without `enc.end` no piece
    says that an answer is complete.
    """
    problem = pieces(tokenizer, [r.text.rstrip() for r in rows])
    answer = _answers(rows, tokenizer, problem)
    labelled_N = np.array([enc.end and r.label is not None for r in rows], dtype=np.int64)
    ended = join(answer, Ragged(np.full(labelled_N.sum(), end_id(tokenizer), np.int32), labelled_N))
    label_N, unlabelled = label_column(rows)
    info = {"unlabelled": unlabelled, "limit": enc.limit}
    if causal:
        frame = frame_of(tokenizer, pair=False).opening()
        sheet = assemble(frame, problem, answer)
        prompt_N = problem.lengths_N + len(frame.before)
        read_at_N = prompt_N - 1
        filled = ended
    else:
        if enc.masks < 1:
            raise DataError(f"{enc.masks} answer masks were asked for; give at least 1 (masks_needed counts them).")
        frame = frame_of(tokenizer, pair=False)
        masks_N = np.full(len(rows), enc.masks, dtype=np.int64)
        blanks = Ragged(np.full(int(masks_N.sum()), mask_token_of(tokenizer)[1], np.int32), masks_N)
        sheet = assemble(frame, problem, blanks)
        prompt_N = read_at_N = problem.lengths_N + len(frame.before)
        filled = ended.keep(masks_N, "tail")
        info["answers_too_long"] = int((answer.lengths_N > enc.masks).sum())
    if int(sheet.lengths_N.max()) > enc.limit:
        raise DataError(
            f"The longest problem is {int(sheet.lengths_N.max())} tokens but the limit is {enc.limit}, and a problem "
            "is never truncated. Use smaller operands or raise --max-length."
        )
    target = np.full(len(sheet.ids), IGNORE, dtype=np.int32)
    target[np.repeat(sheet.offsets_N1[:-1] + read_at_N, filled.lengths_N) + filled.place_M] = filled.flat
    fixed = {"label": label_N, "read_at": read_at_N, "prompt": prompt_N}
    return Features(tuple(r.id for r in rows), sheet.offsets_N1, {**sheet.columns(), "target": target}, fixed, info)


def masks_needed(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> int:
    """Masks that hold the longest answer of these rows and its end piece."""
    answer = _answers(rows, tokenizer, pieces(tokenizer, [r.text.rstrip() for r in rows]))
    return int(answer.lengths_N.max()) + 1


def end_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that says an answer is complete: the end of text, else the separator, else the padding."""
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id):
        if token is not None:
            return int(token)
    raise DataError(
        f"The tokenizer {type(tokenizer).__name__} has no end, separator or padding token, so the end of a number "
        "cannot be told. Add an eos_token to it."
    )


def _answers(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, problem: Ragged) -> Ragged:
    """The pieces of every answer as they stand behind the problem and a space."""
    texts = [f"{r.text.rstrip()} {'' if r.label is None else r.label}".rstrip() for r in rows]
    whole = pieces(tokenizer, texts)
    length_N = whole.lengths_N - problem.lengths_N
    same_N = length_N >= 0
    head = whole.keep(problem.lengths_N, "tail")
    if same_N.all() and (head.flat == problem.flat).all():
        return whole.cut(np.arange(len(rows)), problem.lengths_N, length_N)
    # this tokenizer joins tokens across the space: take each answer as a word behind other text
    alone = [[] if r.label is None else word_pieces(tokenizer, str(r.label)) for r in rows]
    lengths_N = np.array([len(a) for a in alone], dtype=np.int64)
    return Ragged(np.array([t for a in alone for t in a], dtype=np.int32), lengths_N)

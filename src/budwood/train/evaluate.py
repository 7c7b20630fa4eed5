"""The one evaluation loop: every kind of task, metrics and one record per example.

Shapes: N examples, K classes, M readouts, B examples of a batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from budwood.config.finetune import ReadConfig
from budwood.data.arithmetic import parse_number, score_numbers
from budwood.data.batch import IGNORE, Batch, Features, budget_batches
from budwood.data.encode_prompt import end_id
from budwood.data.span_decode import SpanRule, decode_hf, fill
from budwood.data.squad import question_scores, squad_scores
from budwood.data.task import Row
from budwood.errors import DataError, nearest
from budwood.linalg import metrics as measure
from budwood.models.mode import in_mode
from budwood.models.objective import per_row
from budwood.models.reading import Reading, RowFeed
from budwood.models.sites import lm_logits

TOKENS = 8192  # padded tokens per evaluation batch
LOGITS = 1 << 27  # most numbers in the logits of a batch of running text
DIGITS = 12  # most tokens of a number that a causal model may write


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name with the main one under `score`, one record per example, and files to keep beside them."""

    metrics: dict[str, Any]
    records: dict[str, list[Any]]
    files: dict[str, str] = field(default_factory=dict)
    logits_NK: np.ndarray | None = None
    ends_2M: np.ndarray | None = None  # start and end scores of all tokens of all windows, laid end to end


def evaluate(
    reading: Reading,
    rows: Sequence[Row],
    cfg: ReadConfig,
    most: int | None = None,
    advance: Callable[[int], None] = lambda n: None,
) -> Evaluation:
    """Score the model on rows as it is, in evaluation mode; the model is left as it was."""
    features = reading.encode(rows)
    feed = reading.feed(features)
    kind = reading.task.kind
    # every token of a causal text has logits over the whole vocabulary
    tokens = min(TOKENS, max(256, LOGITS // len(reading.loaded.tokenizer))) if kind == "text" else TOKENS
    with evaluating(reading.loaded.model):
        found = SCORERS[kind](reading, rows, features, _batches(feed, most, tokens, advance), cfg)
    noted = {
        k: v
        for k, v in features.info.items()
        if v and k in ("truncated", "words_lost", "answers_lost", "empty", "questions_cut", "answers_too_long")
    }
    metrics = {"n": len(rows), **found.metrics, **noted}
    return replace(found, metrics=metrics)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's mode comes back."""
    with in_mode(model, training=False), torch.inference_mode():
        yield


Batches = Iterator[Batch]


def _batches(feed: RowFeed, most: int | None, tokens: int, advance: Callable[[int], None]) -> Batches:
    for index in budget_batches(feed.lengths_N, tokens, most or 512):
        yield feed(index, 0)
        advance(len(index))


def _readouts(reading: Reading, batches: Batches, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """logits_NK, loss_N and margin_N of objectives with one readout per example."""
    logits_NK: np.ndarray | None = None
    loss_N, margin_N = np.zeros(count, np.float32), np.zeros(count, np.float32)
    for batch in batches:
        logits_BK = reading.objective.logits(reading.loaded.model, batch)
        targets = reading.objective.targets(batch)
        if logits_NK is None:
            logits_NK = np.zeros((count, logits_BK.shape[1]), np.float32)
        logits_NK[batch.index_B] = logits_BK.float().cpu().numpy()
        loss_N[batch.index_B] = reading.objective.loss(logits_BK, targets).float().cpu().numpy()
        margin_N[batch.index_B] = reading.objective.margin(logits_BK, targets).float().cpu().numpy()
    assert logits_NK is not None
    return logits_NK, loss_N, margin_N


def softmax(logits_NK: np.ndarray) -> np.ndarray:
    """Probabilities in float64, rows summing to one."""
    shifted = logits_NK.astype(np.float64) - logits_NK.max(1, keepdims=True)
    return np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)


def _score_labels(
    reading: Reading, rows: Sequence[Row], features: Features, batches: Batches, cfg: ReadConfig
) -> Evaluation:
    logits_NK, loss_N, margin_N = _readouts(reading, batches, len(rows))
    label_N = features.fixed["label"].astype(np.int64)
    prob_NK = softmax(logits_NK)
    guess_N = prob_NK.argmax(1)
    low, high = measure.accuracy_interval(int((guess_N == label_N).sum()), len(rows))
    values = {
        "accuracy": measure.accuracy(guess_N, label_N),
        "accuracy_low": low,
        "accuracy_high": high,
        "f1": measure.f1(guess_N, label_N, len(reading.task.labels)),
        "mcc": measure.mcc(guess_N, label_N),
        "ece": measure.ece(prob_NK, label_N),
        "loss": float(loss_N.mean()),
        "majority": float(np.bincount(label_N).max() / len(label_N)),
    }
    names = reading.task.labels
    records = {
        "id": [r.id for r in rows],
        "label": [names[i] for i in label_N],
        "predicted": [names[i] for i in guess_N],
        "correct": (guess_N == label_N).tolist(),
        "confidence": prob_NK.max(1).tolist(),
        "margin": margin_N.tolist(),
        "loss": loss_N.tolist(),
        **{f"p_{name}": prob_NK[:, k].tolist() for k, name in enumerate(names)},
    }
    return Evaluation(_main(reading.task.metric, values), records, logits_NK=logits_NK)


def _score_regression(
    reading: Reading, rows: Sequence[Row], features: Features, batches: Batches, cfg: ReadConfig
) -> Evaluation:
    logits_NK, loss_N, _ = _readouts(reading, batches, len(rows))
    if logits_NK.shape[1] == 1:
        guess_N = logits_NK[:, 0].astype(np.float64)
    else:  # two label words: the second one's share of the way between the bounds
        low, high = reading.task.bounds or (0.0, 1.0)
        guess_N = low + (high - low) * softmax(logits_NK)[:, 1]
    label_N = features.fixed["label"].astype(np.float64)
    values = {
        "pearson": measure.pearson(guess_N, label_N),
        "spearman": measure.spearman(guess_N, label_N),
        "mse": float(((guess_N - label_N) ** 2).mean()),
        "mse_of_mean": float(label_N.var()),
        "loss": float(loss_N.mean()),
    }
    records = {
        "id": [r.id for r in rows],
        "label": label_N.tolist(),
        "predicted": guess_N.tolist(),
        "loss": loss_N.tolist(),
    }
    return Evaluation(_main(reading.task.metric, values), records, logits_NK=logits_NK)


def _score_tokens(
    reading: Reading, rows: Sequence[Row], features: Features, batches: Batches, cfg: ReadConfig
) -> Evaluation:
    """Accuracy and F1 over words; a word that lost its piece to truncation counts as wrong.

    F1 is that of whole entities where the labels are B-/I- tags, else the mean over classes.
    """
    loss_N = np.zeros(len(rows))
    guess = np.full(len(features.ragged["target"]), IGNORE, np.int64)
    for batch in batches:
        logits_MK = reading.objective.logits(reading.loaded.model, batch)
        targets = reading.objective.targets(batch)
        loss_N[batch.index_B] = reading.objective.loss(logits_MK, targets).cpu().numpy()
        assert targets.row_M is not None
        places_M = (batch.targets["target"] != IGNORE).nonzero()[:, 1].cpu().numpy()
        guess[features.offsets_N1[batch.index_B[targets.row_M.cpu().numpy()]] + places_M] = (
            logits_MK.argmax(1).cpu().numpy()
        )
    names = reading.task.labels
    gold = [[names[c] for c in r.label] for r in rows if isinstance(r.label, tuple)]
    given = [
        _tags(features.piece("target", n), guess[features.offsets_N1[n] :], gold[n], names) for n in range(len(rows))
    ]
    right = [sum(a == b for a, b in zip(g, p)) for g, p in zip(gold, given)]
    words = [len(g) for g in gold]
    flat_gold, flat_given = (
        [names.index(t) if t in names else len(names) for row in x for t in row] for x in (gold, given)
    )
    macro = measure.f1(np.array(flat_given), np.array(flat_gold), len(names) + 1)
    tagged = any(name.startswith("B-") for name in names)
    values = {
        "accuracy": sum(right) / sum(words),
        "f1": measure.entity_f1(given, gold) if tagged else macro,
        "macro_f1": macro,
        "loss": float(loss_N.mean()),
        "majority": float(np.bincount(flat_gold).max() / sum(words)),
        "words": sum(words),
    }
    records: dict[str, list[Any]] = {
        "id": [r.id for r in rows],
        "words": words,
        "right": right,
        "loss": loss_N.tolist(),
    }
    return Evaluation(_main(reading.task.metric, values), records)


LOST = "(lost)"  # stands for the answer to a word that the model never saw


def _tags(target_T: np.ndarray, guess_T: np.ndarray, gold: Sequence[str], names: Sequence[str]) -> list[str]:
    """The predicted tag of every word of a row; words without a piece of their own are lost."""
    read = [names[g] for t, g in zip(target_T, guess_T) if t != IGNORE]
    seen = [names[t] for t in target_T if t != IGNORE]
    lost = len(gold) - len(read)
    if not lost:
        return read
    front = seen != list(gold[: len(seen)])  # --truncate head drops the first words
    return [LOST] * lost + read if front else read + [LOST] * lost


def _score_spans(
    reading: Reading, rows: Sequence[Row], features: Features, batches: Batches, cfg: ReadConfig
) -> Evaluation:
    start, end = (np.full(int(features.offsets_N1[-1]), -np.inf, np.float32) for _ in range(2))
    loss_W = np.zeros(len(features), np.float32)
    for batch in batches:
        logits_MT = reading.objective.logits(reading.loaded.model, batch)
        loss_W[batch.index_B] = reading.objective.loss(logits_MT, reading.objective.targets(batch)).cpu().numpy()
        scores = logits_MT.float().cpu().numpy()
        fill(start, features, batch.index_B, scores[: len(batch)])
        fill(end, features, batch.index_B, scores[len(batch) :])
    rule = SpanRule(cfg.max_answer_length, cfg.n_best_size, cfg.null_score_diff_threshold)
    found = decode_hf(features, rows, start, end, rule)
    fields = squad_scores(rows, found.answers, found.null_odds, found.best)
    exact_N, f1_N = question_scores(rows, found.answers)
    values = {
        **fields,
        "loss": float(loss_W.mean()),
        "no_answer_share": 100.0 * sum(not a for a in found.answers.values()) / len(rows),
    }
    records = {
        "id": [r.id for r in rows],
        "predicted": [found.answers[r.id] for r in rows],
        "exact": exact_N.tolist(),
        "f1": f1_N.tolist(),
        "null_odds": [found.null_odds[r.id] for r in rows],
        "answerable": [bool(r.answers) for r in rows],
    }
    return Evaluation(_main(reading.task.metric, values), records, found.files(), ends_2M=np.stack([start, end]))


def _score_numbers(
    reading: Reading, rows: Sequence[Row], features: Features, batches: Batches, cfg: ReadConfig
) -> Evaluation:
    """Numbers written by the model: a fixed count of masks read up to the end piece, or token by token."""
    write = _write_masked if reading.mode == "prompt" else _write_causal
    texts = [""] * len(rows)
    loss_N = np.zeros(len(rows), np.float32)
    for batch in batches:
        targets = reading.objective.targets(batch)
        logits_MV = reading.objective.logits(reading.loaded.model, batch)
        loss_N[batch.index_B] = reading.objective.loss(logits_MV, targets).cpu().numpy()
        for n, text in zip(batch.index_B, write(reading, batch)):
            texts[n] = text
    numbers = [parse_number(t) for t in texts]
    gold = [int(r.label) for r in rows]  # type: ignore[arg-type]
    values: dict[str, Any] = {**score_numbers(numbers, gold), "loss": float(loss_N.mean())}
    values.pop("n", None)
    if cfg.parity:  # rows that do not parse are dropped, and the errors are those of the rest
        kept = [(p, g) for p, g in zip(numbers, gold) if p is not None]
        values |= {"dropped": len(gold) - len(kept)}
        if kept:
            few = score_numbers([p for p, _ in kept], [g for _, g in kept])
            values |= {k: few[k] for k in ("mse", "rmse", "msle", "rmsle", "exact")}
    values["by_magnitude"] = _by_magnitude(rows, numbers, gold)
    records: dict[str, list[Any]] = {
        "id": [r.id for r in rows],
        "problem": [r.text for r in rows],
        "label": gold,
        "written": texts,
        "predicted": [None if n is None else float(n) for n in numbers],  # a long answer fits no integer column
        "loss": loss_N.tolist(),
    }
    return Evaluation(_main(reading.task.metric, values), records)


def _by_magnitude(rows: Sequence[Row], numbers: list[int | None], gold: list[int]) -> dict[str, dict[str, float]]:
    """Errors by the rows' own groups (1e5, 1e6, ...), else by how many digits the answer has."""
    groups: dict[str, list[int]] = {}
    for n, row in enumerate(rows):
        groups.setdefault(row.group or f"{len(str(gold[n]))} digits", []).append(n)
    kept = ("n", "rmsle", "exact", "parse_rate")
    found = {g: score_numbers([numbers[n] for n in at], [gold[n] for n in at]) for g, at in sorted(groups.items())}
    return {g: {k: scores[k] for k in kept} for g, scores in found.items()}


def _write_masked(reading: Reading, batch: Batch) -> list[str]:
    tokenizer = reading.loaded.tokenizer
    mask_BT = batch.inputs["input_ids"] == tokenizer.mask_token_id
    rows_M, places_M = mask_BT.nonzero(as_tuple=True)
    best_M = lm_logits(reading.loaded.model, batch.inputs, rows_M, places_M).argmax(1)
    pieces: list[list[int]] = [[] for _ in range(len(batch))]
    for row, token in zip(rows_M.tolist(), best_M.tolist()):
        pieces[row].append(token)
    if not reading.encoding.end:  # as first published: the answer's length is given away
        gold_B = (batch.targets["target"] != IGNORE).sum(1).tolist()
        return [str(tokenizer.decode(p[:n])).strip() for p, n in zip(pieces, gold_B)]
    return [_until_end(tokenizer, p) for p in pieces]


def _write_causal(reading: Reading, batch: Batch) -> list[str]:
    """Greedy continuation of the problem alone; rows of equal prompt length go together, so nothing is padded."""
    tokenizer, model = reading.loaded.tokenizer, reading.loaded.model
    prompt_B = batch.targets["prompt"]
    texts = [""] * len(batch)
    for length in sorted(set(prompt_B.tolist())):
        chosen = (prompt_B == length).nonzero()[:, 0]
        ids_BT = batch.inputs["input_ids"][chosen, :length]
        for _ in range(DIGITS):
            last_B = torch.full((len(ids_BT),), ids_BT.shape[1] - 1)
            best_B = lm_logits(model, {"input_ids": ids_BT}, torch.arange(len(ids_BT)), last_B).argmax(1)
            ids_BT = torch.cat([ids_BT, best_B[:, None].to(ids_BT)], 1)
        for row, written in zip(chosen.tolist(), ids_BT[:, length:].tolist()):
            texts[row] = _until_end(tokenizer, written)
    return texts


def _until_end(tokenizer: Any, pieces: list[int]) -> str:
    end = end_id(tokenizer)
    kept = pieces[: pieces.index(end)] if end in pieces else pieces
    return str(tokenizer.decode(kept)).strip()


def _score_text(
    reading: Reading, rows: Sequence[Row], features: Features, batches: Batches, cfg: ReadConfig
) -> Evaluation:
    """Mean loss per target token over all text, its perplexity, and how often the best guess is right."""
    sum_F, hits_F, count_F = (np.zeros(len(features)) for _ in range(3))
    for batch in batches:
        target_BT = batch.targets["target"]
        count_F[batch.index_B] = (target_BT != IGNORE).sum(1).cpu().numpy()
        logits_MV = reading.objective.logits(reading.loaded.model, batch)
        targets = reading.objective.targets(batch)
        loss_M = nn.functional.cross_entropy(logits_MV, targets.label_M, reduction="none")
        hit_M = (logits_MV.argmax(1) == targets.label_M).float()
        sum_F[batch.index_B] = per_row(loss_M, targets, "sum").double().cpu().numpy()
        hits_F[batch.index_B] = per_row(hit_M, targets, "sum").double().cpu().numpy()
    row_F = features.fixed["row"].astype(np.int64)
    total = lambda x: np.bincount(row_F, weights=x, minlength=len(rows))  # noqa: E731
    sum_N, count_N = total(sum_F), np.maximum(total(count_F), 1)
    loss = float(sum_F.sum() / count_F.sum())
    values = {
        "lm_loss": loss,
        "perplexity": float(np.exp(min(loss, 80.0))),
        "token_accuracy": float(hits_F.sum() / count_F.sum()),
        "tokens": int(count_F.sum()),
        "loss": loss,
    }
    records = {
        "id": [r.id for r in rows],
        "loss": (sum_N / count_N).tolist(),
        "tokens": total(count_F).astype(int).tolist(),
    }
    return Evaluation(_main(reading.task.metric, values), records)


SCORERS = {
    "label": _score_labels,
    "regression": _score_regression,
    "tokens": _score_tokens,
    "span": _score_spans,
    "number": _score_numbers,
    "text": _score_text,
}
LOWER_IS_BETTER = frozenset({"rmsle", "lm_loss", "perplexity", "loss", "mse", "rmse", "msle", "ece"})


def _main(metric: str, values: dict[str, Any]) -> dict[str, Any]:
    if metric not in values:
        raise DataError(
            f"The task asks for the metric '{metric}'; known here: {', '.join(values)}.{nearest(metric, values)}"
        )
    return {"metric": metric, "score": values[metric], **values}


def goodness(metrics: dict[str, Any]) -> float:
    """The main score with its sign turned so that higher is better: what --checkpoint best compares."""
    return -float(metrics["score"]) if metrics["metric"] in LOWER_IS_BETTER else float(metrics["score"])

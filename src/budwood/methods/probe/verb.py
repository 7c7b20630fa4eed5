"""The verb `probe`: every layer of every model on one task, with controls and baselines.

Shapes: M states, D features, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from budwood.config.probe import ProbeConfig
from budwood.data.batch import seed_of
from budwood.errors import ConfigError
from budwood.linalg.leace import eraser
from budwood.methods.probe import labels, outcome, score, spans
from budwood.methods.probe.side import Side, kind_of, side
from budwood.methods.session import Session
from budwood.models.load import load
from budwood.models.reading import as_tuned, head_spec, mode_for, reading
from budwood.models.reference import ModelRef
from budwood.train.evaluate import evaluate


@dataclass(frozen=True)
class Sides:
    """The splits of one model: trained on, tuned on (spans only), reported; masks choose states of stored layers."""

    train: Side
    tune: Side | None
    test: Side
    train_M: np.ndarray | None = None
    tune_M: np.ndarray | None = None

    def states(self, number: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Layer `number` of the three."""
        whole = self.train.stored.layer(number)
        test = self.test.stored.layer(number)
        if self.tune is None:
            return whole, None, test
        if self.train_M is None or self.tune_M is None:
            return whole, self.tune.stored.layer(number), test
        return whole[torch.from_numpy(self.train_M)], whole[torch.from_numpy(self.tune_M)], test


def probe(session: Session) -> dict[str, Any]:
    """Probe every layer of every model; writes probes, predictions, results.csv and figures; returns the metrics."""
    cfg, task = session.cfg, session.task
    for ref in session.models:
        kind_of(cfg, task, ref)
    if cfg.compare and len(session.models) != 2:
        raise ConfigError(f"--compare draws the difference of two models; {len(session.models)} were given.")
    results, first = [], None
    for i, ref in enumerate(session.models):
        sides = _sides(session, ref)
        first = first or sides
        home = outcome.Home(session.run.path, f"{i}-{ref.name}")
        layers = [_layer(session, sides, n, home, not cfg.no_controls) for n in _numbers(cfg, sides)]
        best = max(layers, key=lambda x: x["score"])
        results.append(
            {
                "model": ref.text,
                "layers": layers,
                "best_layer": best["layer"],
                "head_score": _head_score(session, ref),
            }
        )
        outcome.keep_index(session, ref, home, sides.train.stored)
    assert first is not None
    baselines: dict[str, Any] = {
        "majority": score.majority(task, first.train, first.test),
        "bag_of_words": score.bag_of_words(task, first.train, first.test),
    }
    if not cfg.no_controls:
        blank = _sides(session, session.models[0], seed_of(cfg.seed, "random encoder") % 2**31)
        found = [_layer(session, blank, n, None, False) for n in _numbers(cfg, blank)]
        baselines["random_encoder"] = [x["score"] for x in found]
    outcome.draw(session, results, baselines)
    split = task.reported
    metric = "f1" if task.kind == "span" else task.metric
    return {
        "split": split,
        "metric": metric,
        "score": max(x["score"] for x in results[-1]["layers"]),
        "n": len(task.rows(split)),
        "states": kind_of(cfg, task, session.models[0]),
        "baselines": baselines,
        "results": results,
    }


def _numbers(cfg: ProbeConfig, sides: Sides) -> list[int]:
    layers = sides.train.stored.layers
    wrong = [n for n in cfg.layers if not 0 <= n < layers]
    if wrong:
        raise ConfigError(
            f"--layers asks for layer {wrong[0]}, and this model has layers 0 (embeddings) to {layers - 1}. "
            "Leave --layers away for all of them."
        )
    return sorted(set(cfg.layers)) or list(range(layers))


def _sides(session: Session, ref: ModelRef, random: int | None = None) -> Sides:
    task = session.task
    train, test = (side(session, ref, s, random) for s in ("train", task.reported))
    if task.kind != "span":
        return Sides(train, None, test)
    if task.reported != "validation":
        return Sides(train, side(session, ref, "validation", random), test)
    # the only other split is reported, so a tenth of the training documents chooses cost and threshold
    documents = np.array([r.group or r.id for r in train.rows], dtype=object)
    rank_N = np.unique(documents, return_inverse=True)[1]
    drawn = np.random.default_rng(seed_of(session.cfg.seed, "tune")).permutation(int(rank_N.max()) + 1)
    out_N = drawn[rank_N] < max(1, len(drawn) // 10)
    (kept, kept_M), (tune, tune_M) = (_part(train, np.flatnonzero(x)) for x in (~out_N, out_N))
    return Sides(kept, tune, test, kept_M, tune_M)


def _part(whole: Side, rows_N: np.ndarray) -> tuple[Side, np.ndarray]:
    """The windows of some questions, and which states are theirs."""
    encoded, offsets_N1 = whole.stored.encoded, whole.stored.offsets_N1
    keep_W = np.isin(encoded.fixed["row"], rows_N)
    keep_M = np.repeat(keep_W, np.diff(offsets_N1))
    taken = encoded.take(np.flatnonzero(keep_W))
    taken = replace(taken, fixed={**taken.fixed, "row": np.searchsorted(rows_N, taken.fixed["row"])})
    offsets = np.concatenate([[0], np.cumsum(np.diff(offsets_N1)[keep_W])]).astype(np.int64)
    stored = replace(whole.stored, encoded=taken, offsets_N1=offsets)
    document_M = np.unique(whole.document_M[keep_M], return_inverse=True)[1]
    rows = tuple(whole.rows[i] for i in rows_N)
    return replace(whole, stored=stored, rows=rows, document_M=document_M, row_M=whole.row_M[keep_M]), keep_M


def _layer(session: Session, sides: Sides, number: int, home: outcome.Home | None, controls: bool) -> dict[str, Any]:
    """The numbers of one layer; where there is a home, its probe and predictions are kept there."""
    with session.progress.stage(f"layer {number}" if home else f"random encoder, layer {number}"):
        make = _span_layer if session.task.kind == "span" else _label_layer
        return {"layer": number, **make(session, sides, number, home, controls)}


def _label_layer(
    session: Session, sides: Sides, number: int, home: outcome.Home | None, controls: bool
) -> dict[str, Any]:
    cfg, task = session.cfg, session.task
    train, test = sides.train, sides.test
    x_MD, _, test_MD = sides.states(number)
    found = labels.fit(x_MD, train, test_MD, cfg, len(task.labels), controls)
    guess_M = found.logits_NK.argmax(1)
    value, low, high = score.score(task, test, guess_M, cfg.seed)
    out: dict[str, Any] = {"score": value, "low": low, "high": high, "C": found.cost, "cv": found.cv}
    if found.control_N is not None and found.bits is not None and found.control_bits is not None:
        whole = len(train.label_M) * np.log2(len(task.labels))
        control = float((found.control_N == test.control_M).mean())
        out |= {
            "control": control,
            "selectivity": float((guess_M == test.label_M).mean()) - control,
            "compression": float(whole / found.bits),
            "control_compression": float(whole / found.control_bits),
            "repeats": [score.score(task, test, g)[0] for g in found.repeats_RN],
        }
    if cfg.erase:
        out["erased"] = _erased(session, sides, x_MD, test_MD)
    if home is not None:
        pvi_M = _information(found.logits_NK, train.label_M, test.label_M) if cfg.pvi else None
        outcome.keep_labels(home, number, found, task, test, guess_M, pvi_M)
        if pvi_M is not None:
            out["information"] = float(pvi_M.mean())
    return out


def _erased(session: Session, sides: Sides, x_MD: Tensor, test_MD: Tensor) -> float:
    """The score of a probe trained and tested after LEACE has taken the labels out."""
    mean_D, map_DD = eraser(x_MD.numpy(), sides.train.label_M, len(session.task.labels))
    clean = [torch.from_numpy(x.numpy() - (x.numpy() - mean_D) @ map_DD).float() for x in (x_MD, test_MD)]
    again = labels.fit(clean[0], sides.train, clean[1], session.cfg, len(session.task.labels), False)
    return score.score(session.task, sides.test, again.logits_NK.argmax(1))[0]


def _information(logits_NK: np.ndarray, train_N: np.ndarray, label_N: np.ndarray) -> np.ndarray:
    """Bits that the states add, for every row, to what the shares of the labels tell already."""
    log_NK = logits_NK - np.logaddexp.reduce(logits_NK.astype(np.float64), axis=1, keepdims=True)
    share_K = np.bincount(train_N, minlength=logits_NK.shape[1]) / len(train_N)
    prior_N = np.log(np.maximum(share_K[label_N], 1e-12))
    return (log_NK[np.arange(len(label_N)), label_N] - prior_N) / np.log(2)


def _span_layer(
    session: Session, sides: Sides, number: int, home: outcome.Home | None, controls: bool
) -> dict[str, Any]:
    cfg, test = session.cfg, sides.test
    x_MD, tune_MD, test_MD = sides.states(number)
    assert sides.tune is not None and tune_MD is not None
    found = spans.fit(x_MD, sides.train, sides.tune, tune_MD, cfg, controls)
    said = spans.decode(found.weight_2D, test_MD, test, cfg)
    answers = spans.thresholded(said, found.threshold)
    fields = score.span_fields(test.rows, answers, cfg.seed)
    out: dict[str, Any] = {
        "score": fields["f1"],
        **fields,
        "raw_f1": score.span_fields(test.rows, said.answers, cfg.seed)["f1"],
        "answered_f1": score.span_fields(test.rows, said.best, cfg.seed)["HasAns_f1"],
        "threshold": found.threshold,
        "C": found.cost,
        "train_loss": found.train_loss,
    }
    if found.control_2D is not None and found.bits is not None and found.control_bits is not None:
        right = spans.right_share(found.weight_2D, test_MD, test, spans.gold(test.stored.encoded))
        control = spans.right_share(found.control_2D, test_MD, test, spans.control_gold(test, cfg.seed))
        repeats = [spans.thresholded(spans.decode(w, test_MD, test, cfg), found.threshold) for w in found.repeats]
        out |= {
            "control": control,
            "selectivity": right - control,
            "compression": found.uniform_bits / found.bits,
            "control_compression": found.uniform_bits / found.control_bits,
            "repeats": [score.span_fields(test.rows, a, cfg.seed)["f1"] for a in repeats],
        }
    if home is not None:
        outcome.keep_span(home, number, found, answers, said)
    return out


def _head_score(session: Session, ref: ModelRef) -> float | None:
    """The same metric by the model's own head, where it has one for this task."""
    cfg = as_tuned(session.cfg, ref)
    task = session.task
    mode = mode_for(cfg, task, ref)
    loaded = load(ref, mode, head_spec(task, cfg), seed=cfg.model_seed or 0)
    if any(name.startswith("head.") for name in loaded.fresh):
        return None
    with session.progress.stage(f"head of {ref.name}"):
        found = evaluate(reading(loaded, task, cfg, mode, cfg.seed), task.rows(task.reported), cfg)
    wanted = "f1" if task.kind == "span" else task.metric
    return float(found.metrics[wanted])

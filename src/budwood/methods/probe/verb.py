"""The verb `probe`: every layer of every model on one task, with controls and baselines.

Shapes: M states, D features, K classes.
"""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from budwood.data.batch import seed_of
from budwood.errors import ConfigError
from budwood.linalg.leace import eraser
from budwood.methods.probe import bidaf, labels, outcome, score, spans, trained, words
from budwood.methods.probe.head import head_scores
from budwood.methods.probe.side import check, kind_of
from budwood.methods.probe.sides import Sides, layer_numbers, sides_of
from budwood.methods.session import Session


def probe(session: Session) -> dict[str, Any]:
    """Probe every layer of every model; writes probes, predictions, results.csv and figures; returns the metrics."""
    cfg, task = session.cfg, session.task
    for ref in session.models:
        kind_of(cfg, task, ref)
    if cfg.compare and len(session.models) != 2:
        raise ConfigError(f"--compare draws the difference of two models; {len(session.models)} were given.")
    check(cfg, task)
    results, first = [], None
    for i, ref in enumerate(session.models):
        sides = sides_of(session, ref)
        first = first or sides
        home = outcome.Home(session.run.path, f"{i}-{ref.name}")
        found = _places(session, sides, home)
        head = head_scores(session, ref, sides.tune)
        results.append({"model": ref.text, **found, **_chosen(found["layers"]), **head})
        homes = [home.epoch(e) for e in sorted({x["epoch"] for x in found["epochs"]})] if cfg.trained else [home]
        outcome.keep_index(session, ref, homes, sides.train.stored)
    assert first is not None
    baselines: dict[str, Any] = {
        "never_answering" if task.kind == "span" else "majority": score.majority(task, first.train, first.test),
        "bag_of_words": words.baseline(first.train, first.tune, first.test, cfg)
        if first.tune is not None
        else score.bag_of_words(task, first.train, first.test),
    }
    if cfg.bidaf and first.tune is not None:
        baselines["bidaf"] = bidaf.baseline(session, first.train, first.tune, first.test)
    if cfg.random_encoder:
        blank = sides_of(session, session.models[0], seed_of(cfg.seed, "random encoder") % 2**31)
        baselines["random_encoder"] = [x["score"] for x in _places(session, blank, None)["layers"]]
    outcome.draw(session, results, baselines)
    shutil.rmtree(session.run.file("training"), ignore_errors=True)  # only now is it worth nothing
    split = task.reported
    metric = "f1" if task.kind == "span" else task.metric
    return {
        "split": split,
        "metric": metric,
        "score": results[-1]["score"],
        "n": len(task.rows(split)),
        "states": kind_of(cfg, task, session.models[0]),
        "baselines": baselines,
        "results": results,
    }


def _chosen(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The layer that stands for a model, chosen without a look at the reported split, and its score there.

    By F1 on the tuning rows (spans), by accuracy on left-out folds (labels and tokens), else by the loss in training.
    """
    by = next(name for name in ("tune_f1", "cv", "train_loss") if name in layers[0])
    best = (min if by == "train_loss" else max)(layers, key=lambda x: x[by])
    return {"best_layer": best["layer"], "chosen_by": by, "score": best["score"]}


def _places(session: Session, sides: Sides, home: outcome.Home | None) -> dict[str, Any]:
    """The numbers of every layer, by the solver asked for; without a home nothing is kept and no control is made."""
    cfg = session.cfg
    if cfg.trained:
        return trained.results(session, sides, home)
    controls = home is not None and not cfg.no_controls
    return {"layers": [_layer(session, sides, n, home, controls) for n in layer_numbers(cfg, sides)]}


def _layer(session: Session, sides: Sides, number: int, home: outcome.Home | None, controls: bool) -> dict[str, Any]:
    """The numbers of one layer; where there is a home, its probe and predictions are kept there."""
    with session.progress.stage(f"layer {number}" if home else f"random encoder, layer {number}"):
        make = _span_layer if session.task.kind == "span" else _label_layer
        found = {"layer": number, **make(session, sides, number, home, controls)}
    if count := found["unconverged"]:
        session.progress.say(f"  layer {number}: {count} fits have not converged; scores may be too low.")
    return found


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
    out["unconverged"] = found.unconverged
    if found.control_N is not None and found.bits is not None and found.control_bits is not None:
        whole = len(train.label_M) * np.log2(len(task.labels))
        control = float((found.control_N == test.control_M).mean())
        out |= {
            "control": control,
            "control_C": found.control_cost,
            "selectivity": float((guess_M == test.label_M).mean()) - control,
            "compression": float(whole / found.bits),
            "control_compression": float(whole / found.control_bits),
            "repeats": [score.score(task, test, g)[0] for g in found.repeats_RN],
        }
    if cfg.erase:
        out["erased"] = _erased(session, sides, x_MD, test_MD)
    if home is not None:
        pvi_M = score.information(found.logits_NK, train.label_M, test.label_M) if cfg.pvi else None
        outcome.keep_labels(home, number, found, task, test, guess_M, pvi_M)
        if pvi_M is not None:
            out["information"] = float(pvi_M.mean())
    return out


def _erased(session: Session, sides: Sides, x_MD: Tensor, test_MD: Tensor) -> float:
    """The score of a probe trained and tested after LEACE has taken the labels out."""
    mean_D, map_DD = eraser(x_MD.numpy(), sides.train.label_M, len(session.task.labels))
    centred = [x.double().numpy() - mean_D for x in (x_MD, test_MD)]
    clean = [torch.from_numpy(x - x @ map_DD).float() for x in centred]
    again = labels.fit(clean[0], sides.train, clean[1], session.cfg, len(session.task.labels), False)
    return score.score(session.task, sides.test, again.logits_NK.argmax(1))[0]


def _span_layer(
    session: Session, sides: Sides, number: int, home: outcome.Home | None, controls: bool
) -> dict[str, Any]:
    cfg, test = session.cfg, sides.test
    x_MD, tune_MD, test_MD = sides.states(number)
    assert sides.tune is not None and tune_MD is not None
    found = spans.fit(x_MD, sides.train, sides.tune, tune_MD, cfg, controls)
    said = spans.decode(found.weight_2D, test_MD, test, cfg)
    answers = spans.thresholded(said, found.threshold)
    fields, raw = (score.span_fields(test.rows, x, cfg.seed) for x in (answers, said.answers))
    out: dict[str, Any] = {
        "score": fields["f1"],
        **fields,
        "raw_f1": raw["f1"],
        "raw_HasAns_f1": raw["HasAns_f1"],
        "answered_f1": score.span_fields(test.rows, said.best, cfg.seed)["HasAns_f1"],
        "threshold": found.threshold,
        "tune_f1": found.tune_f1,
        "C": found.cost,
        "train_loss": found.train_loss,
        "unconverged": found.unconverged,
    }
    if found.control_2D is not None and found.bits is not None and found.control_bits is not None:
        right = spans.right_share(found.weight_2D, test_MD, test, spans.gold(test.stored.encoded))
        control = spans.right_share(found.control_2D, test_MD, test, spans.control_gold(test, cfg.seed))
        repeats = [spans.thresholded(spans.decode(w, test_MD, test, cfg), found.threshold) for w in found.repeats]
        out |= {
            "control": control,
            "control_C": found.control_cost,
            "selectivity": right - control,
            "compression": found.uniform_bits / found.bits,
            "control_compression": found.uniform_bits / found.control_bits,
            "repeats": [score.span_fields(test.rows, a, cfg.seed)["f1"] for a in repeats],
        }
    if home is not None:
        outcome.keep_span(home, number, found, answers, said)
    return out

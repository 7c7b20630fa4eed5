"""Probes of one model by AdamW: training that can be carried on, and scores, probes and predictions of every epoch.

Shapes: E epochs, G places (layers, the mix last), C targets (the task's, the control's), K outputs, M states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from budwood.methods.probe import outcome, score, spans
from budwood.methods.probe.descent import Lesson, Plan, State, plain, scale_of, scores, train
from budwood.methods.probe.labels import Scale
from budwood.methods.probe.side import Side
from budwood.methods.probe.sides import Sides, layer_numbers
from budwood.methods.session import Session
from budwood.store.files import writing

RATE, PUBLISHED_RATE, BATCH, EPOCHS = 1e-3, 3e-5, 8, 3


@dataclass(frozen=True)
class Marks:
    """What probes of every epoch say: logits of the rows that thresholds are tuned on and of the reported ones."""

    tune_EGCKM: np.ndarray | None
    test_EGCKM: np.ndarray


def plan_of(session: Session, numbers: list[int]) -> Plan:
    """Settings of training, with their defaults."""
    cfg = session.cfg
    rate = cfg.learning_rate or (PUBLISHED_RATE if cfg.parity else RATE)
    epochs, batch = cfg.epochs or EPOCHS, cfg.batch_size or BATCH
    return Plan(tuple(numbers), epochs, rate, batch, cfg.seed, cfg.parity, cfg.hidden, cfg.mix)


def lesson_of(session: Session, train_side: Side, controls: bool) -> Lesson:
    """What the training rows should be answered with, and with `controls` the control answers beside it."""
    stored = train_side.stored
    offsets_N1, lengths_N = stored.offsets_N1, stored.encoded.lengths_N
    if session.task.kind != "span":
        answer_CM = np.stack([train_side.label_M, train_side.control_M][: 1 + controls])
        return Lesson(offsets_N1, lengths_N, answer_CM, len(session.task.labels), False)
    golds = [gold_of(train_side), spans.control_gold(train_side, session.cfg.seed)][: 1 + controls]
    return Lesson(offsets_N1, lengths_N, np.stack(golds) - offsets_N1[:-1], 2, True)


def gold_of(side: Side) -> np.ndarray:
    """gold_2W: flat index of every window's start and end among the states that are kept."""
    encoded = side.stored.encoded
    if side.stored.ask.kind == "allowed":
        return spans.gold(encoded)
    return np.stack([encoded.offsets_N1[:-1] + encoded.fixed[e] for e in spans.ENDS])


def results(session: Session, sides: Sides, home: outcome.Home | None) -> dict[str, Any]:
    """`epochs`: the numbers of every epoch and layer; `layers`: those of the last; with --mix, `mix` and its centre.

    Where there is a home, probes and predictions of every epoch are kept there.
    """
    numbers = layer_numbers(session.cfg, sides)
    plan = plan_of(session, numbers)
    lesson = lesson_of(session, sides.train, home is not None and not session.cfg.no_controls)
    given, tune, test = sides.supplies(session, numbers)
    name = "random encoder" if home is None else home.name
    scale = scale_of(given, len(lesson.lengths_N), session.cfg.parity)
    state = _before(session, name)
    with session.progress.stage(f"probes of {name}", plan.epochs, len(state.epochs) if state else 0) as bar:

        def keep(now: State) -> None:
            _keep(session, name, now)
            bar.advance(1, f"loss {float(now.losses[-1][:, 0].mean()):.4g}")

        state = train(given, lesson, scale, plan, state, keep)
    with session.progress.stage(f"scores of {name}"):
        found = [
            None
            if side is None or supply is None
            else scores(supply, side.stored.offsets_N1, side.stored.encoded.lengths_N, scale, state.epochs).numpy()
            for side, supply in ((sides.tune, tune), (sides.test, test))
        ]
        assert found[1] is not None
        rows = _rows(session, sides, Marks(found[0], found[1]), state, numbers, scale, home)
    layers = [r for r in rows if r["layer"] != "mix"]
    out: dict[str, Any] = {"layers": _without_epoch(layers, plan.epochs), "epochs": rows}
    if plan.mix:
        share_L = state.params["mix.share"][0].softmax(0)
        weights = {str(n): float(s) for n, s in zip(numbers, share_L)}
        centre = float(sum(n * s for n, s in zip(numbers, share_L.tolist())))
        out |= {"mix": {**_without_epoch(rows, plan.epochs)[-1], "weights": weights}, "centre_of_gravity": centre}
    return out


def _without_epoch(rows: list[dict[str, Any]], epoch: int) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "epoch"} for r in rows if r["epoch"] == epoch]


def _rows(
    session: Session,
    sides: Sides,
    marks: Marks,
    state: State,
    numbers: list[int],
    scale: Scale,
    home: outcome.Home | None,
) -> list[dict[str, Any]]:
    make = _span_row if session.task.kind == "span" else _label_row
    out = []
    last = len(state.epochs) - 1
    for e, params in enumerate(state.epochs):
        for g in range(marks.test_EGCKM.shape[1]):
            layer = numbers[g] if g < len(numbers) else None
            row, facts, keep = make(session, sides, marks, (e, g))
            loss = float(state.losses[e][g, 0])
            out.append({"epoch": e + 1, "layer": "mix" if layer is None else layer, **row, "train_loss": loss})
            if home is None:
                continue
            own = home.epoch(e + 1)
            facts |= {"kind": session.task.kind, "layers": numbers if layer is None else [layer]}
            outcome.save_probe(own.probe(layer), plain(params, scale, g), facts)
            keep(own.predictions(layer))
            if e == last:
                keep(home.predictions(layer))
    return out


def _label_row(session: Session, sides: Sides, marks: Marks, at: tuple[int, int]) -> tuple[dict[str, Any], Any, Any]:
    """Numbers of a label or token probe, facts to be saved with it, and how its predictions are kept."""
    task, test = session.task, sides.test
    logits_CKM = marks.test_EGCKM[at]
    guess_CM = logits_CKM.argmax(1)
    value, low, high = score.score(task, test, guess_CM[0], session.cfg.seed)
    out: dict[str, Any] = {"score": value, "low": low, "high": high}
    if len(guess_CM) > 1:
        control = float((guess_CM[1] == test.control_M).mean())
        out |= {"control": control, "selectivity": float((guess_CM[0] == test.label_M).mean()) - control}
    pvi_M = None
    if session.cfg.pvi:
        pvi_M = score.information(logits_CKM[0].T, sides.train.label_M, test.label_M)
        out["information"] = float(pvi_M.mean())
    return out, {}, lambda stem: outcome.keep_guesses(stem, task, test, guess_CM[0], pvi_M)


def _span_row(session: Session, sides: Sides, marks: Marks, at: tuple[int, int]) -> tuple[dict[str, Any], Any, Any]:
    """The same of a span probe; with --parity no threshold is tuned."""
    cfg, test = session.cfg, sides.test
    logits_C2M = marks.test_EGCKM[at]
    said = spans.answers(logits_C2M[0], test, cfg)
    assert sides.tune is not None and marks.tune_EGCKM is not None
    tuned = spans.answers(marks.tune_EGCKM[at][0], sides.tune, cfg)
    threshold, given, tried = 0.0, said.answers, tuned.answers
    if not cfg.parity:
        threshold = spans.tuned_threshold(tuned, sides.tune.rows)
        given, tried = (spans.thresholded(x, threshold) for x in (said, tuned))
    fields, raw = (score.span_fields(test.rows, x, cfg.seed) for x in (given, said.answers))
    out: dict[str, Any] = {
        "score": fields["f1"],
        **fields,
        "raw_f1": raw["f1"],
        "raw_HasAns_f1": raw["HasAns_f1"],
        "answered_f1": score.span_fields(test.rows, said.best, cfg.seed)["HasAns_f1"],
        "threshold": threshold,
        "tune_f1": spans.mean_f1(tried, sides.tune.rows),
    }
    if len(logits_C2M) > 1:
        golds = (gold_of(test), spans.control_gold(test, cfg.seed))
        right, control = (spans.share_found(s, test, g) for s, g in zip(logits_C2M, golds))
        out |= {"control": control, "selectivity": right - control}
    return out, {"threshold": threshold}, lambda stem: outcome.keep_answers(stem, given, said)


def _file(session: Session, name: str) -> Any:
    return session.run.file("training", f"{name.replace('/', '-').replace(' ', '-')}.safetensors")


def _before(session: Session, name: str) -> State | None:
    """Where an interrupted run left off."""
    path = _file(session, name)
    return State.of(load_file(path)) if path.exists() else None


def _keep(session: Session, name: str, state: State) -> None:
    """What it takes to carry on after this epoch."""
    with writing(_file(session, name)) as part:
        save_file({k: v.clone().contiguous() for k, v in state.tensors().items()}, part)

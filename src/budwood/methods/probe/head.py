"""The model's own head beside its probes: the same metric, for spans the same decoder and a threshold tuned alike."""

from __future__ import annotations

from typing import Any

from budwood.data.span_decode import SpanPredictions
from budwood.data.task import Row
from budwood.methods.probe import spans
from budwood.methods.probe.side import Side
from budwood.methods.session import Session
from budwood.models.load import load
from budwood.models.reading import Reading, as_tuned, head_spec, mode_for, reading
from budwood.models.reference import ModelRef
from budwood.train.evaluate import evaluate


def head_scores(session: Session, ref: ModelRef, tune: Side | None) -> dict[str, Any]:
    """`head_score`: the probes' metric by the model's own head, None where it has none for this task.

    For spans also `head_raw_f1`, the F1 of the head as `evaluate` tells it, and `head_threshold`.
    """
    cfg = as_tuned(session.cfg.model_copy(update={"parity": False}), ref)  # here a matter of training, not of reading
    task = session.task
    mode = mode_for(cfg, task, ref)
    loaded = load(ref, mode, head_spec(task, cfg), seed=cfg.model_seed or 0)
    if any(name.startswith("head.") for name in loaded.fresh):
        return {"head_score": None}
    read = reading(loaded, task, cfg, mode, cfg.seed)
    rows = task.rows(task.reported)
    with session.progress.stage(f"head of {ref.name}"):
        if task.kind != "span":
            return {"head_score": float(evaluate(read, rows, cfg).metrics[task.metric])}
        assert tune is not None
        said, raw = _said(session, read, rows, cfg)
        if session.cfg.parity:
            return {"head_score": spans.mean_f1(said.answers, rows), "head_raw_f1": raw, "head_threshold": 0.0}
        threshold = spans.tuned_threshold(_said(session, read, tune.rows, cfg)[0], tune.rows)
        given = spans.thresholded(said, threshold)
    return {"head_score": spans.mean_f1(given, rows), "head_raw_f1": raw, "head_threshold": threshold}


def _said(session: Session, read: Reading, rows: tuple[Row, ...], cfg: Any) -> tuple[SpanPredictions, float]:
    """Answers of the head by the probes' rule, and the F1 that `evaluate` tells."""
    found = evaluate(read, rows, cfg)
    assert found.ends_2M is not None
    return spans.decoded(read.encode(rows), rows, found.ends_2M, session.cfg), float(found.metrics["f1"])

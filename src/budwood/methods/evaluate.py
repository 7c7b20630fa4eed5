"""Evaluation of a model as it is: metrics, calibration, one record per example."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from budwood.config.finetune import EvaluateConfig
from budwood.data.task import Task
from budwood.errors import ModelError
from budwood.figures.reliability import reliability
from budwood.figures.save import drawing, save
from budwood.methods.session import Session
from budwood.models.grafted import graft_labels
from budwood.models.load import load
from budwood.models.reading import as_tuned, head_spec, mode_for, reading
from budwood.models.reference import ModelRef
from budwood.store.files import read_json, write_text, writing
from budwood.train.evaluate import Evaluation
from budwood.train.evaluate import evaluate as score
from budwood.train.plan import device_for


def evaluate(session: Session) -> dict[str, Any]:
    """Score a model on a split; a head that would be random is refused."""
    ref = session.models[0]
    cfg: EvaluateConfig = as_tuned(session.cfg, ref, session.task.kind)
    task = with_labels_of(session.task, ref)
    split = cfg.eval_split or task.reported
    rows = task.rows(split)
    for note, text in task.notes.items():
        session.progress.say(f"  {note}: {text}")
    with session.progress.stage("load"):
        mode = mode_for(cfg, task, ref)
        loaded = load(ref, mode, head_spec(task, cfg), seed=cfg.model_seed or 0, device=device_for(cfg.device))
        if any(name.startswith("head.") for name in loaded.fresh):
            raise ModelError(
                f"'{ref.text}' has no trained head for task '{task.name}': the task's labels are "
                f"{', '.join(task.labels) or task.kind}, the model's {', '.join(model_labels(ref)) or 'unknown'}. Its "
                "answers would be random. Fine-tune it first, or use --mode prompt (masked) or --mode causal."
            )
        read = reading(loaded, task, cfg, mode, cfg.seed)
    for text in read.examples(rows):
        session.progress.say(f"  e.g. {text if len(text) <= 200 else text[:197] + '...'}")
    with session.progress.stage("evaluate", len(rows)) as bar:
        found = score(read, rows, cfg, cfg.eval_batch_size, bar.advance)
    keep_records(session, found)
    return {"split": split, "mode": mode, **found.metrics}


def model_labels(ref: ModelRef) -> tuple[str, ...]:
    """The labels that a checkpoint names in its configuration, in order."""
    if ref.grafts and graft_labels(ref):
        return graft_labels(ref)
    if ref.path is None:
        return ()
    pool = ref.path / "pool.json"
    if pool.is_file():
        return tuple(read_json(pool)["labels"])
    named = read_json(ref.path / "config.json").get("id2label", {}) if (ref.path / "config.json").is_file() else {}
    return tuple(str(named[k]) for k in sorted(named, key=int))


def with_labels_of(task: Task, ref: ModelRef) -> Task:
    """The task with the model's labels where its own are some of them: a file may lack a class that the model knows."""
    known = model_labels(ref)
    return task if task.kind != "label" or not set(task.labels) < set(known) else renumbered(task, known)


def renumbered(task: Task, known: tuple[str, ...]) -> Task:
    """The task with these labels in this order, which its own are among."""
    place = [known.index(name) for name in task.labels]
    rows = {
        split: tuple(replace(r, label=place[r.label]) if isinstance(r.label, int) else r for r in rows)
        for split, rows in task.splits.items()
    }
    return replace(task, splits=rows, labels=known)


def keep_records(session: Session, found: Evaluation) -> None:
    """records.parquet, the scorer's own files, and the calibration figure where there are confidences."""
    import pyarrow
    from pyarrow import parquet

    run = session.run
    with writing(run.file("records.parquet")) as part:
        parquet.write_table(pyarrow.table(found.records), part)
    for name, text in found.files.items():
        write_text(run.file(name), text)
    if "confidence" in found.records:
        with drawing(4.6, 4.0) as axes:
            ece = found.metrics.get("ece", 0.0)
            title = f"{session.task.name}: calibration error {ece:.3f}"
            table = reliability(axes, found.records["confidence"], found.records["correct"], title)
            save(axes.figure, run.file("figures", "calibration"), table)

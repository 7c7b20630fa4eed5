"""`validate mislabel`: wrong labels are planted, the model is fine-tuned on them, and suspicion is put to the test.

The noisy task is written to disk as a task of its own, so every engine and worker reads the same rows.
Shapes: N training rows, K classes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from budwood.config.data import DataConfig
from budwood.config.finetune import FinetuneConfig
from budwood.config.influence import SelfConfig
from budwood.config.validate import MislabelConfig
from budwood.data.batch import seed_of
from budwood.data.source import load_task
from budwood.data.task import Task
from budwood.errors import DataError
from budwood.evaluation.detection import confident, detection, leading
from budwood.evaluation.fleet import Fleet, check_some
from budwood.evaluation.retrain import Outcome, Recipe
from budwood.figures.detection import detection_curves
from budwood.figures.save import drawing, save
from budwood.methods.finetune import finetune
from budwood.methods.session import Session, carry_out
from budwood.store.files import write_json, write_text
from budwood.train.evaluate import softmax


def validate_mislabel(session: Session) -> dict[str, Any]:
    """Detection of planted labels by self-influence, loss, margin and confident learning."""
    cfg: MislabelConfig = session.cfg
    sheet, wrong_N = plant(session.task, cfg, session.run.file("noisy"))
    session.progress.say(f"{int(wrong_N.sum())} of {len(wrong_N)} training labels are now wrong")
    tuned = _tuned(session, sheet)
    suspicion_N = {f"self:{name}": value for name, value in _itself(session, sheet, tuned).items()}
    fleet = _fleet(session, tuned)
    fitted, held_NK = _said(session, fleet)
    label_N = np.array([r.label for r in fleet.task.rows("train")], dtype=np.int64)
    chance_NK = softmax(fitted.logits_QK) if fitted.logits_QK is not None else held_NK
    suspicion_N["loss"] = -np.log(np.maximum(chance_NK[np.arange(len(label_N)), label_N], 1e-30))
    suspicion_N["margin"] = -fitted.margin_Q
    suspicion_N["confident"] = confident(held_NK, label_N)
    found = {name: detection(value, wrong_N) for name, value in suspicion_N.items()}
    results = [{"scores": name, **values} for name, values in found.items()]
    with drawing() as axes:
        curves = {name: leading(value, wrong_N) for name, value in suspicion_N.items()}
        title = f"Planted labels found, {session.models[0].name} on {session.task.name}, {cfg.flip:.0%} wrong"
        table = detection_curves(axes, curves, float(wrong_N.mean()), title)
        save(axes.figure, session.run.file("figures", "detection"), table)
    for file in fleet.directory.glob("*.safetensors"):
        file.unlink()
    return {
        "n": len(wrong_N),
        "split": "train",
        "metric": "auc",
        "score": results[0]["auc"],
        "planted": int(wrong_N.sum()),
        "results": results,
        "folds": cfg.folds,
    }


def plant(task: Task, cfg: MislabelConfig, folder: Path) -> tuple[Path, np.ndarray]:
    """The task with wrong labels as FOLDER/task.yaml, and which rows are wrong [N]."""
    if task.kind != "label" or len(task.labels) < 2:
        raise DataError(f"Wrong labels can be planted in tasks with labels; '{task.name}' is of kind '{task.kind}'.")
    rows = task.rows("train")
    rng = np.random.default_rng(seed_of(cfg.seed, "mislabel"))
    wrong_N = np.zeros(len(rows), dtype=bool)
    wrong_N[rng.permutation(len(rows))[: max(1, round(cfg.flip * len(rows)))]] = True
    step_N = rng.integers(1, len(task.labels), len(rows))
    noisy = tuple(
        replace(r, label=(int(r.label) + int(s)) % len(task.labels)) if w else r  # type: ignore[arg-type]
        for r, w, s in zip(rows, wrong_N, step_N)
    )
    sheet = folder / "task.yaml"
    if not sheet.exists():
        _write(task.with_rows("train", noisy), folder)
        write_json(folder / "planted.json", [r.id for r, w in zip(rows, wrong_N) if w])
        write_text(sheet, _yaml(task))
    return sheet, wrong_N


def _write(task: Task, folder: Path) -> None:
    for split, rows in task.splits.items():
        lines = [
            json.dumps({"id": r.id, "text": r.text, "pair": r.pair, "label": task.labels[int(r.label)]})  # type: ignore[arg-type]
            for r in rows
            if r.label is not None
        ]
        write_text(folder / f"{split}.jsonl", "\n".join(lines) + "\n")


def _yaml(task: Task) -> str:
    import yaml

    paired = any(r.pair is not None for r in task.rows("train"))
    columns = {"text": "text", "label": "label", "id": "id"} | ({"pair": "pair"} if paired else {})
    wording = task.template
    sheet: dict[str, Any] = {
        "name": f"{task.name}-noisy",
        "kind": "label",
        "files": {s: f"{s}.jsonl" for s, rows in task.splits.items() if rows},
        "columns": columns,
        "labels": list(task.labels),
        "metric": task.metric,
    }
    if wording is not None:
        fields = {k: getattr(wording, k) for k in ("masked", "words", "causal", "causal_words", "limits")}
        sheet["template"] = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items() if v}
    return yaml.safe_dump(sheet, sort_keys=False)


def _tuned(session: Session, sheet: Path) -> Path:
    """The model fine-tuned on the noisy rows, as a run inside this one."""
    cfg: MislabelConfig = session.cfg
    plain = DataConfig(task=str(sheet), data_seed=cfg.data_seed, offline=True).model_dump()  # its files and columns
    given = {k: v for k, v in cfg.model_dump().items() if k in FinetuneConfig.model_fields}
    own = FinetuneConfig(
        **{**given, **plain, "out": session.run.file("finetune"), "config": None, "json_output": False}
    )
    return carry_out("finetune", own, [session.models[0].text], finetune).run


def _itself(session: Session, sheet: Path, tuned: Path) -> dict[str, np.ndarray]:
    """Self-influence of every training row by strategy, from `influence self` as a run inside this one."""
    cfg: MislabelConfig = session.cfg
    from budwood.methods.influence.itself import itself

    own = SelfConfig(
        task=str(sheet),
        strategy=cfg.by,
        damping=(cfg.damping,),
        out=session.run.file("self"),
        seed=cfg.seed,
        threads=cfg.threads,
        device=cfg.device,
        progress=cfg.progress,
        engine=cfg.engine,
        workers=cfg.workers,
        retries=cfg.retries,
        resources=cfg.resources,
        offline=True,
    )
    run = carry_out("influence self", own, [str(tuned)], itself).run
    return read_itself(run, cfg.by, [r.id for r in load_task(own).rows("train")])


def read_itself(run: Path, strategies: tuple[str, ...], train_ids: list[str]) -> dict[str, np.ndarray]:
    """self_N by strategy, in the order of the ids."""
    import pandas

    table = pandas.read_parquet(run / "records.parquet").set_index("id")
    columns = {s: next(c for c in table.columns if c.split("@")[0] == f"self:{s}") for s in strategies}
    return {s: table.loc[train_ids, c].to_numpy(np.float64) for s, c in columns.items()}


def _fleet(session: Session, tuned: Path) -> Fleet:
    recipe = Recipe.of_run(tuned, str(tuned))
    task = recipe.task()
    return Fleet(recipe.asking([r.id for r in task.rows("train")]), task, session.run.file("retrains"), session.cfg)


def _said(session: Session, fleet: Fleet) -> tuple[Outcome, np.ndarray]:
    """What a model trained on all rows says of them, and out-of-sample probabilities [N, K] from folds."""
    cfg: MislabelConfig = session.cfg
    count = len(fleet.train_ids)
    part_N = np.random.default_rng(seed_of(cfg.seed, "folds")).permutation(count) % cfg.folds
    jobs = [fleet.wanted(np.ones(count, dtype=bool), 0, "base")]
    jobs += [fleet.wanted(part_N != f, 0, "fold") for f in range(cfg.folds)]
    with session.progress.stage("retrain", len(jobs), sum(j.done for j in jobs)) as bar:
        fleet.run(jobs, lambda job: bar.advance(1))
    fitted, *held = fleet.outcomes(jobs)
    check_some([fitted], "models on all rows")
    for f, o in enumerate(held):
        check_some([o], f"models without part {f}")
    assert fitted.logits_QK is not None
    held_NK = np.zeros(fitted.logits_QK.shape)
    for f, o in enumerate(held):
        assert o.logits_QK is not None
        held_NK[part_N == f] = softmax(o.logits_QK)[part_N == f]
    return fitted, held_NK

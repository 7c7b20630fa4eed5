"""What a graft is worth: score, calibration, agreement with the tuned model, other tasks.

Shapes: N examples, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from budwood.config.data import DataConfig
from budwood.config.finetune import ReadConfig
from budwood.data.source import load_task
from budwood.data.task import Row, Task
from budwood.errors import BudwoodError, DataError
from budwood.linalg import metrics as measure
from budwood.methods.evaluate import renumbered
from budwood.methods.graft.pair import Pair, tuned_reading
from budwood.methods.graft.rules import between
from budwood.models.load import load
from budwood.models.reading import Reading, head_spec, mode_for, reading, reads_left_to_right
from budwood.models.reference import ModelRef
from budwood.params.graft import Graft, grafted
from budwood.params.mask import Mask, everything
from budwood.train.evaluate import LOWER_IS_BETTER, Evaluation, evaluate, goodness, softmax
from budwood.train.plan import device_for


@dataclass
class Scores:
    """Evaluations of one model on rows, kept so that the same graft is never scored twice."""

    read: Reading
    cfg: Any
    rows: tuple[Row, ...]
    _kept: dict[str, Evaluation] = field(default_factory=dict)

    def of(self, grafts: Sequence[Graft], head: bool = True) -> Evaluation:
        """The evaluation of the model with these grafts on it."""
        key = "+".join(sorted(g.identity for g in grafts))
        if key not in self._kept:
            with grafted(self.read.loaded.model, grafts, head=head, force=True):
                self._kept[key] = evaluate(self.read, self.rows, self.cfg, getattr(self.cfg, "eval_batch_size", None))
        return self._kept[key]


@dataclass
class Side:
    """Rows of one split: scores of the base with any graft on it, and the tuned model's own evaluation."""

    scores: Scores
    tuned: Evaluation
    ceiling: Evaluation  # the base with every graftable weight moved: the tuned model, if nothing else had

    def recovered(self, graft: Graft) -> float | None:
        """Share of the gain that a graft brings back."""
        found, base, tuned = self.scores.of([graft]), self.scores.of([]), self.tuned
        return recovered(*(goodness(x.metrics) for x in (found, base, tuned)))


def sides_of(pair: Pair, splits: Sequence[Sequence[Row]]) -> list[Side]:
    """The pair on the rows of each split.

    Where nothing moved that a graft cannot carry, the base with every change is the tuned model; else that is loaded
    for this alone, and let go.
    """
    batch = getattr(pair.cfg, "eval_batch_size", None)
    with between(pair, 1.0):
        ceiling = [evaluate(pair.read, tuple(rows), pair.cfg, batch) for rows in splits]
    tuned = ceiling
    if pair.moved_outside:
        skilled = tuned_reading(pair)
        tuned = [evaluate(skilled, tuple(rows), pair.cfg, batch) for rows in splits]
        del skilled
    return [Side(Scores(pair.read, pair.cfg, tuple(r)), t, c) for r, t, c in zip(splits, tuned, ceiling)]


def recovered(score: float, base: float, tuned: float) -> float | None:
    """Share of the gain that is there; None where tuning gained nothing, or lost.

    >>> recovered(0.8, 0.5, 0.9)
    0.75
    """
    gain = tuned - base
    return None if gain <= 1e-12 else round((score - base) / gain, 12)


def temperature_from(found: Evaluation, rows: Sequence[Row]) -> tuple[float | None, str]:
    """The temperature that fits the logits of rows that are not reported; without one that fits best, None and why."""
    gold_N = np.array([int(r.label) for r in rows])  # type: ignore[arg-type]
    logits_NK = np.asarray(found.logits_NK)
    heat = measure.temperature(logits_NK, gold_N)
    if measure.HEATS[0] * 1.01 < heat < measure.HEATS[1] / 1.01:
        return heat, ""
    right = f"{int((logits_NK.argmax(axis=1) == gold_N).sum())} of the {len(gold_N)} rows it is fitted on"
    if heat > 1:
        return None, f"its answers are no better than guessing ({right} are right), so no temperature fits best"
    return None, f"{right} are answered right, so no temperature fits best"


def summary(pair: Pair, test: Evaluation, selection: Evaluation | None, rows: Sequence[Row]) -> dict[str, Any]:
    """Score, loss and calibration error, raw and at the temperature fitted on the selection rows where one fits."""
    out = {"score": test.metrics["score"], "loss": test.metrics.get("loss"), "ece": test.metrics.get("ece")}
    if pair.task.kind != "label" or not rows or selection is None:
        return out
    if test.logits_NK is not None and selection.logits_NK is not None:
        heat, why = temperature_from(selection, rows)
        gold_N = np.array([pair.task.labels.index(x) for x in test.records["label"]])
        scaled = None if heat is None else measure.ece(softmax(test.logits_NK / heat), gold_N)
        out |= {"temperature": heat, "ece_scaled": scaled, "temperature_rows": len(rows)}
        out |= {"temperature_why": why} if why else {}
    return out


def agreement(a: Evaluation, b: Evaluation) -> float | None:
    """Share of rows on which two models say the same."""
    if "predicted" not in a.records:
        return None
    return float(np.mean([x == y for x, y in zip(a.records["predicted"], b.records["predicted"])]))


def other_task(cfg: Any, name: str) -> Task:
    """A task by name, from the same folders and seeds as the verb's own."""
    return load_task(
        DataConfig(
            task=name,
            data_dir=cfg.data_dir,
            offline=cfg.offline,
            data_seed=cfg.data_seed if cfg.data_seed is not None else cfg.seed,
            limit_eval=cfg.limit_eval,
        )
    )


def shifted(pair: Pair, name: str) -> tuple[Scores, Evaluation]:
    """The pair's model on another set with the same labels, and what the tuned one does there."""
    task = other_task(pair.cfg, name)
    same_order = task.labels == pair.task.labels
    fits = same_order or (task.kind == "label" and sorted(task.labels) == sorted(pair.task.labels))
    if task.kind != pair.task.kind or not fits:
        raise DataError(
            f"--ood {name} has the labels {', '.join(task.labels) or task.kind}; '{pair.task.name}' has "
            f"{', '.join(pair.task.labels) or pair.task.kind}. An out-of-distribution set needs the same labels."
        )
    if pair.read.mode == "head" and not same_order:
        task = renumbered(task, pair.task.labels)  # a head's outputs have an order; label words have none
    cfg = pair.cfg.model_copy(update={"template": None, "label_words": ()})
    rows = task.rows(task.reported)
    batch = getattr(cfg, "eval_batch_size", None)
    scores = Scores(reading(pair.read.loaded, task, cfg, pair.read.mode, pair.cfg.seed), cfg, rows)
    if pair.moved_outside:
        return scores, evaluate(tuned_reading(pair, task, cfg), rows, cfg, batch)
    with between(pair, 1.0):
        return scores, evaluate(scores.read, rows, cfg, batch)


def scores_on(cfg: Any, base: ModelRef, task: Task, wish: dict[str, Any] | None = None) -> Scores:
    """A model, loaded for a task of its own mode, ready to be scored with grafts on it."""
    own = ReadConfig(**(wish or {}))
    mode = mode_for(own, task, base)
    own = own.model_copy(update={"mode": mode})
    if not wish and task.kind == "label" and task.template is not None:  # without a head of its own: label words
        mode = "causal" if reads_left_to_right(base) else "prompt"
        own = ReadConfig(mode=mode)
    loaded = load(base, mode, head_spec(task, own), seed=cfg.model_seed or 0, device=device_for(cfg.device))
    return Scores(reading(loaded, task, own, mode, cfg.seed), own, task.rows(task.reported))


def damage(
    cfg: Any, base: ModelRef, names: Sequence[str], grafts: dict[str, Graft], pair: Pair | None = None
) -> dict[str, Any]:
    """Other tasks with and without each graft: the score of each, and its change from the base (up = worse).

    With a pair also the tuned model; where more moved than a graft can carry, the base with all that it can.
    """
    out: dict[str, Any] = {}
    for name in names:
        try:
            scores = scores_on(cfg, base, other_task(cfg, name))
            before = scores.of([]).metrics
            found = {k: scores.of([g], head=False).metrics["score"] for k, g in grafts.items()}
            if pair is not None:
                with between(pair, 1.0, scores.read.loaded.model):
                    moved = evaluate(scores.read, scores.rows, scores.cfg).metrics["score"]
                found = {"all_graftable" if pair.moved_outside else "tuned": moved, **found}
        except BudwoodError as e:
            out[name] = {"skipped": str(e)}
            continue
        sign = 1 if before["metric"] in LOWER_IS_BETTER else -1
        out[name] = {
            "metric": before["metric"],
            "base": before["score"],
            **found,
            **{f"{k}_harm": sign * (v - before["score"]) for k, v in found.items()},
        }
    return out


def whole(pair: Pair) -> Mask:
    """The mask of every graftable weight."""
    return everything(pair.sizes)

"""The questions behind a Fisher matrix: what is differentiated so that squared gradients sum to it.

Shapes: B examples, M readouts, C or K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from budwood.capture.gradients import Question
from budwood.data.batch import Batch
from budwood.data.task import Task
from budwood.errors import ConfigError
from budwood.linalg.categorical import covariance_factors
from budwood.models.objective import Targets, sample_labels

FEW_LABELS, MOST_LABELS = 8, 64  # exact by default up to the first, refused above the second
Labels = Literal["exact", "sampled", "empirical"]


def labels_for(wish: Labels | None, task: Task, option: str) -> Labels:
    """The labels asked for, else exact for few and sampled for many; exact over a vocabulary is refused."""
    one_answer = task.kind in ("label", "regression")
    count = len(task.labels) if task.kind == "label" else 1
    if wish is None:
        return "exact" if one_answer and count <= FEW_LABELS else "sampled"
    if wish == "exact" and (not one_answer or count > MOST_LABELS):
        what = f"{count} labels" if one_answer else f"several answers per row (kind '{task.kind}')"
        raise ConfigError(
            f"{option} exact goes through every label of every answer, and task '{task.name}' has {what}. Use {option} "
            "sampled: it has the same expectation."
        )
    if wish == "sampled" and task.kind == "regression":
        return "exact"  # one output: the expectation is known and costs the same
    return wish


def questions(labels: Labels, task: Task, batch: Batch, seed: int) -> Sequence[Question]:
    """Questions whose squared per-example gradients sum to the Fisher information of each example."""
    if labels == "empirical":
        return (Question(),)
    if labels == "sampled":
        return (_drawn(batch, seed),)
    if task.kind == "regression":
        return (Question(_number),)
    return [Question(_direction(j)) for j in range(len(task.labels) - 1)]


def _drawn(batch: Batch, seed: int) -> Question:
    """The loss of labels drawn from the model itself; a row's draw depends on the seed and its place alone."""

    def draw(logits_MC: Tensor, targets: Targets) -> Targets:
        return replace(targets, label_M=sample_labels(logits_MC, targets, batch.index_B.tolist(), seed))

    return Question(draw=draw)


def _number(logits_BK: Tensor, targets: Targets) -> Tensor:
    """A number read off one logit, or as a choice between two label words."""
    if logits_BK.shape[1] > 1:
        return _direction(0)(logits_BK, targets)
    return logits_BK[:, 0] * 2**0.5  # the loss (z - y)^2 is a Gaussian of variance 1/2: E (2 (z - y))^2 = 2


def _direction(j: int) -> Callable[[Tensor, Targets], Tensor]:
    """One of K - 1 directions whose squared gradients sum to the expectation over all K labels."""
    return lambda logits_BK, targets: (covariance_factors(logits_BK.detach())[:, j] * logits_BK).sum(1)

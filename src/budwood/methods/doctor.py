"""Checks of a model before anything is measured on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from budwood.config.finetune import ReadConfig
from budwood.data.batch import Features
from budwood.data.task import Row, Task
from budwood.models.load import HeadSpec, load
from budwood.models.reading import reading
from budwood.models.reference import resolve
from budwood.params.tree import named
from budwood.train.evaluate import evaluating

TEXTS = (
    "A short one.",
    "The film was long, but the people in it were worth every minute of the evening.",
    "In 1987 the old bridge over the river was closed, and nobody knew why until the summer.",
    "No.",
)
LABELS = ("no", "yes")


def examine(reference: str) -> list[dict[str, Any]]:
    """One row per check: what was measured, and whether results on this model can be trusted."""
    loaded = load(resolve(reference), "head", HeadSpec("label", LABELS))
    rows = tuple(Row(f"doctor/{i}", t, label=i % 2) for i, t in enumerate(TEXTS))
    task = Task("doctor", "label", {"train": rows, "validation": rows}, LABELS)
    read = reading(loaded, task, ReadConfig(), "head", 0)
    features = read.encode(rows)
    whole = _logits(read, features, np.arange(len(rows)))
    again = _logits(read, features, np.arange(len(rows)))
    alone = np.concatenate([_logits(read, features, np.array([i])) for i in range(len(rows))])
    shuffled = _logits(read, features, np.array([2, 0, 3, 1]))[[1, 3, 0, 2]]
    scale = max(1e-6, float(np.abs(whole).max()))
    unreached = _unreached(read, features)
    return [
        _row(
            "finite", bool(np.isfinite(whole).all()), float(np.isnan(whole).sum()), "no NaN or infinity in the output"
        ),
        _row(
            "deterministic",
            bool((whole == again).all()),
            float(np.abs(whole - again).max()),
            "same input, same output, twice",
        ),
        _row(
            "padding",
            float(np.abs(whole - alone).max()) / scale < 1e-4,
            float(np.abs(whole - alone).max()),
            "a row alone = the row in a padded batch",
        ),
        _row(
            "order",
            float(np.abs(whole - shuffled).max()) / scale < 1e-4,
            float(np.abs(whole - shuffled).max()),
            "the order of a batch does not matter",
        ),
        _row(
            "gradients",
            not unreached,
            float(len(unreached)),
            f"parameters without gradient: {', '.join(unreached[:3]) or 'none'}",
        ),
        _row("float32", all(p.dtype == torch.float32 for p in loaded.model.parameters()), 0.0, "computed in float32"),
    ]


def _row(check: str, ok: bool, figure: float, meaning: str) -> dict[str, Any]:
    return {"check": check, "result": "ok" if ok else "FAILED", "figure": figure, "meaning": meaning}


def _logits(read: Any, features: Features, index: np.ndarray) -> np.ndarray:
    with evaluating(read.loaded.model):
        return read.objective.logits(read.loaded.model, read.feed(features)(index, 0)).numpy()


def _unreached(read: Any, features: Features) -> list[str]:
    """Parameters that no gradient reaches; a masked-LM's unused pooler and the like are named, not hidden."""
    model: nn.Module = read.loaded.model
    batch = read.feed(features)(np.arange(len(features)), 0)
    read.objective.loss(read.objective.logits(model, batch), read.objective.targets(batch)).sum().backward()
    lost = [n for n, p in named(model).items() if p.grad is None or not bool(p.grad.abs().sum())]
    model.zero_grad(set_to_none=True)
    return [n for n in lost if "position" not in n]  # positions beyond these short texts are not used

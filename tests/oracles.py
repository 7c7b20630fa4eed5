"""Slow and obvious twins of fast code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from budwood.capture.gradients import Value
from budwood.params.tree import named
from tests.cases import Case


def grads_by_loop(case: Case, index: Sequence[int], value: Value | None = None) -> dict[str, Tensor]:
    """grad_B... by one unpadded forward and backward pass per example."""
    parameters = {n: p for n, p in named(case.model).items() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {n: [] for n in parameters}
    for i in index:
        batch = case.batch([i])
        assert "attention_mask" not in batch.inputs  # alone, an example is never padded
        logits = case.objective.logits(case.model, batch)
        loss = (value or case.objective.loss)(logits, case.objective.targets(batch)).sum()
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
            rows[name].append(torch.zeros_like(parameter) if grad is None else grad)
    return {n: torch.stack(g) for n, g in rows.items()}


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest wanted number."""
    size = float(want.abs().max())
    return float((got - want).abs().max()) / size if size else float(got.abs().max())

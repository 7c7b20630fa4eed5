"""Coverage: which parameters' gradients follow from the recorded uses, and which need a pass per example.

A parameter may be applied outside its own module's call (a bare bias, relative positions, a tied matrix used as a plain
tensor) or once for the whole batch. The autograd graph shows every application: where it shows more of them than were
recorded, gradients are computed example by example instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from budwood.capture.uses import LinearIO, layout_of, recording
from budwood.data.batch import Batch
from budwood.models.mode import in_mode
from budwood.models.objective import Objective, Targets
from budwood.params.apply import requiring_grad
from budwood.params.tree import named


@dataclass(frozen=True)
class Coverage:
    """Canonical names by how their per-example gradients are had; `unused` ones are zero."""

    hooked: tuple[str, ...]
    looped: tuple[str, ...]
    unused: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.hooked, *self.looped, *self.unused)


def take(batch: Batch, index: Sequence[int]) -> Batch:
    """The examples at `index` of a batch, as a batch."""
    where = torch.as_tensor(list(index))
    return Batch(
        ids=tuple(batch.ids[i] for i in index),
        index_B=np.asarray(batch.index_B)[list(index)],
        inputs={k: v[where.to(v.device)] for k, v in batch.inputs.items()},
        targets={k: v[where.to(v.device)] for k, v in batch.targets.items()},
    )


def take_targets(targets: Targets, b: int) -> Targets:
    """The readouts of one example."""
    if targets.row_M is None:
        return Targets(targets.label_M[b : b + 1], None, 1)
    mine_M = targets.row_M == b
    return Targets(targets.label_M[mine_M], torch.zeros_like(targets.row_M[mine_M]), 1)


def cover(model: nn.Module, objective: Objective, batch: Batch, names: Sequence[str] | None = None) -> Coverage:
    """Sort parameters (None: all that require a gradient) by how to get their gradients.

    Two small forward passes, with two and three examples: what is applied once for the whole batch has the shape of
    neither. The answer holds for every batch of the same model and objective.
    """
    wanted = [n for n, p in named(model).items() if p.requires_grad] if names is None else list(names)
    looped: set[str] = set()
    applied: set[str] = set()
    for size in (2, 3):
        few = take(batch, [i % len(batch) for i in range(size)])
        more, seen = _inspect(model, objective, few, wanted)
        looped |= more
        applied |= seen
    return Coverage(
        hooked=tuple(n for n in wanted if n in applied and n not in looped),
        looped=tuple(n for n in wanted if n in applied and n in looped),
        unused=tuple(n for n in wanted if n not in applied),
    )


def _inspect(model: nn.Module, objective: Objective, batch: Batch, names: Sequence[str]) -> tuple[set[str], set[str]]:
    """(names with applications that no recorded use explains, names applied at all) for one small batch."""
    targets = objective.targets(batch)
    parameters = named(model)
    with in_mode(model, training=False), requiring_grad(model, names), torch.enable_grad():
        with recording(model, names, layout_of(batch, targets)) as io:
            value = objective.loss(objective.logits(model, batch), targets).sum()
        nodes, applications = _walk(value)
    count = {n: applications[id(parameters[n])] for n in names}
    recorded = _recorded(io, nodes)
    unexplained = {n for n in names if count[n] != recorded[n] or n in io.uncovered}
    return unexplained, {n for n in names if count[n]}


def _walk(value: Tensor) -> tuple[dict[int, Any], Counter[int]]:
    """Every node of the graph behind a value, and how often each leaf tensor is applied in it."""
    nodes: dict[int, Any] = {}
    applications: Counter[int] = Counter()
    stack: list[Any] = [value.grad_fn] if value.grad_fn is not None else []
    while stack:
        node = stack.pop()
        if id(node) in nodes:
            continue
        nodes[id(node)] = node  # kept alive, so that its id stays its own
        for following, _ in node.next_functions:
            if following is None:
                continue
            if hasattr(following, "variable"):
                applications[id(following.variable)] += 1
            stack.append(following)
    return nodes, applications


def _recorded(io: LinearIO, nodes: dict[int, Any]) -> Counter[str]:
    """How many recorded uses of each parameter take part in the value."""
    found: Counter[str] = Counter()
    for record in io.records:
        if id(record.edge.node) in nodes:
            found.update(n for n in (record.weight, record.bias) if n)
    return found

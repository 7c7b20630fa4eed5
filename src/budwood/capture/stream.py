"""Inputs and output gradients of linear maps, handed over during the backward pass as soon as they are complete.

Nothing is kept for longer than one module needs it: the memory of a pass is that of its activations.
Shapes: B examples, T positions, I in (without the bias's 1), O out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from budwood.capture.coverage import Coverage
from budwood.capture.uses import LinearIO, Record, Use, arranged, kind_of, recording
from budwood.data.batch import Batch
from budwood.models.objective import Objective
from budwood.params.tree import named

MATRICES = ("linear", "conv1d", "conv2d")
NORMS = ("layernorm", "rmsnorm")
PEEK = 16  # columns of an output gradient looked at first


@dataclass(frozen=True)
class Map:
    """One matrix of a model that is applied as out = W a (+ b), under its canonical name (without ".weight").

    `source` names the first map that reads the same input: maps of one source share whatever is computed of it.
    An embedding is the matrix [words, hidden], a norm [weight and bias, hidden]; they have no covariances of their own.
    """

    name: str
    weight: str
    bias: str | None
    out: int
    into: int
    source: str
    kind: str = "linear"

    @property
    def columns(self) -> int:
        """Inputs, counting the 1 of the bias."""
        return self.into + (self.bias is not None and not self.diagonal)

    @property
    def diagonal(self) -> bool:
        """Whether its curvature is a diagonal in every strategy: an embedding or a norm."""
        return self.kind not in MATRICES


@dataclass(frozen=True)
class Sides:
    """What one map saw in a pass: inputs and output gradients of every example, all uses side by side."""

    a_BTI: Tensor
    g_BTO: Tensor
    mask_BT: Tensor | None

    def live(self) -> tuple[Tensor, Tensor]:
        """(g, a) without positions that have no gradient, where that saves at least half of them.

        In the last block of a classifier that reads one token, all other positions have none.
        """
        times = self.g_BTO.shape[1]
        for columns in (PEEK, None):  # a few columns are enough to see that most positions have one
            live_BT = (self.g_BTO[..., :columns] != 0).any(-1)
            most = max(1, int(live_BT.sum(1).max()))
            if 2 * most > times:
                return self.g_BTO, self.a_BTI
        at_BT1 = torch.argsort(live_BT.to(torch.int8), dim=1, descending=True, stable=True)[:, :most, None]
        return self.g_BTO.take_along_dim(at_BT1, 1), self.a_BTI.take_along_dim(at_BT1, 1)


Take = Callable[[str, Sides], None]


def sides(uses: Sequence[Use]) -> Sides:
    """All uses of one map; per-example gradients add up over them, which is what putting positions together does."""
    uses = [_as_product(u) for u in uses]
    if len(uses) == 1:
        return Sides(uses[0].a, uses[0].g_BTO, uses[0].mask_BT)
    masks = [u.mask_BT if u.mask_BT is not None else u.a.new_ones(u.a.shape[:2]) for u in uses]
    mask_BT = torch.cat([m.bool() for m in masks], 1) if any(u.mask_BT is not None for u in uses) else None
    return Sides(torch.cat([u.a for u in uses], 1), torch.cat([u.g_BTO for u in uses], 1), mask_BT)


def _as_product(use: Use) -> Use:
    """An embedding's or norm's use with sides whose outer products add up to its gradient, as a matrix's do.

    A word looked up is a 1 at its row, times the gradient of what was read; of a norm, weight and bias are two rows.
    """
    if use.kind == "embedding":
        row_BTV = nn.functional.one_hot(use.a, use.words).to(use.g_BTO)
        if use.skip is not None:
            row_BTV[..., use.skip] = 0
        return replace(use, a=use.g_BTO, g_BTO=row_BTV)
    if use.kind in NORMS:
        rows = [(use.g_BTO * use.a).sum(1), *([use.g_BTO.sum(1)] if use.bias else [])]
        which_RR = torch.eye(len(rows)).to(use.g_BTO)
        return replace(use, a=torch.stack(rows, 1), g_BTO=which_RR.expand(len(use.a), -1, -1), mask_BT=None)
    return use


def maps_of(
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    coverage: Coverage,
    widest: int = 8192,
    also: Collection[str] = (),
) -> tuple[tuple[Map, ...], dict[str, str]]:
    """(maps whose per-example gradients are known in full, why the other parameters are not among them).

    `also`: "embedding", "layernorm" (any norm) count as maps too.
    """
    from budwood.capture.uses import layout_of

    parameters = named(model)
    kinds = _kinds(model)
    left: dict[str, str] = dict.fromkeys(coverage.looped, "used outside the modules that are understood")
    left |= dict.fromkeys(coverage.unused, "has no part in the loss")
    with recording(model, coverage.hooked, layout_of(batch, objective.targets(batch))) as io, torch.no_grad():
        objective.logits(model, batch)
    found: list[Map] = []
    by_input: dict[tuple[Any, ...], str] = {}
    for record in io.records:
        weight = record.weight
        if weight is None or any(m.weight == weight for m in found):
            continue
        wanted = "layernorm" if record.kind in NORMS else record.kind
        if wanted in also and kinds[weight] == {record.kind}:
            found.append(_diagonal_map(record, parameters, coverage))
            continue
        if record.kind not in MATRICES or kinds[weight] - set(MATRICES):
            left[weight] = "an embedding" if "embedding" in kinds[weight] else f"a {record.kind}"
            continue
        out, into = _shape(parameters[weight], record.kind)
        if max(out, into) > widest:
            left[weight] = f"wider than {widest}"
            continue
        name = weight.removesuffix(".weight")
        uses = sum(r.weight == weight for r in io.records)
        key = (record.a.data_ptr(), tuple(record.a.shape), record.a.stride()) if uses == 1 else (name,)
        bias = record.bias if record.bias in coverage.hooked else None
        key = (*key, bias is not None)
        found.append(Map(name, weight, bias, out, into, by_input.setdefault(key, name), record.kind))
    taken = {p for m in found for p in (m.weight, m.bias)}
    for name in coverage.hooked:
        if name not in taken:
            left.setdefault(name, "a norm" if parameters[name].dim() == 1 else "not a linear map")
    return tuple(found), left


def _diagonal_map(record: Record, parameters: Mapping[str, Tensor], coverage: Coverage) -> Map:
    """The map of an embedding or a norm."""
    assert record.weight is not None
    bias = record.bias if record.bias in coverage.hooked else None
    shape = parameters[record.weight].shape
    out = shape[0] if record.kind == "embedding" else 1 + (bias is not None)
    name = record.weight.removesuffix(".weight")
    return Map(name, record.weight, bias, out, shape[-1], name, record.kind)


def _kinds(model: nn.Module) -> dict[str, set[str]]:
    """Every way in which modules apply each parameter."""
    names = {id(p): n for n, p in named(model).items()}
    kinds: dict[str, set[str]] = {n: set() for n in names.values()}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            kinds[names[id(p)]].add(kind_of(module) or "linear")
    return kinds


def _shape(weight: Tensor, kind: str) -> tuple[int, int]:
    if kind == "conv1d":
        return weight.shape[1], weight.shape[0]
    return weight.shape[0], weight[0].numel()


def stream(io: LinearIO, value: Tensor, take: Take, keep: bool = False) -> None:
    """Backward from a scalar; `take(weight, sides)` is called once per weight, when all its uses have their gradients.

    `keep` leaves the graph (and the inputs) for another call.
    """
    if not io.records or not value.requires_grad:
        return
    waiting = Counter(r.weight for r in io.records)
    arrived: dict[str, dict[int, Use]] = {}
    handles: list[RemovableHandle] = []

    def hook(number: int, record: Record) -> Callable[..., None]:
        def arrive(grads: Sequence[Tensor | None]) -> None:
            grad = grads[record.edge.output_nr]
            if grad is None or record.weight is None:
                return
            uses = arrived.setdefault(record.weight, {})
            uses[number] = arranged(record, grad, io.layout)
            if len(uses) == waiting[record.weight]:
                with torch.no_grad():
                    take(record.weight, sides([uses[i] for i in sorted(uses)]))
                arrived.pop(record.weight)

        return arrive

    try:
        for number, record in enumerate(io.records):
            handles.append(record.edge.node.register_prehook(hook(number, record)))
        torch.autograd.backward(value, retain_graph=keep)
    finally:
        for handle in handles:
            handle.remove()
    for weight, uses in arrived.items():  # some uses have no part in the value
        with torch.no_grad():
            take(weight, sides([uses[i] for i in sorted(uses)]))

"""Per-example gradients and sums of their squares, from one forward and one backward pass of a batch.

Gradients are summed over all uses of a parameter (shared blocks, tied embeddings) before anything is squared.
Shapes: B examples, T tokens or readouts, I in, O out (b, o: a block of B, O), D hidden, V vocabulary, U pairs of an
example and a word in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from budwood.capture.coverage import Coverage, cover, take, take_targets
from budwood.capture.uses import Layout, LinearIO, Use, layout_of, linear_io
from budwood.data.batch import Batch
from budwood.models.mode import in_mode
from budwood.models.objective import Objective, Targets
from budwood.params.apply import requiring_grad
from budwood.params.tree import named

__all__ = [
    "Coverage",
    "Layout",
    "LinearIO",
    "Question",
    "Use",
    "cover",
    "layout_of",
    "linear_io",
    "per_example_grads",
    "per_example_square_sum",
]

Value = Callable[[Tensor, Targets], Tensor]
BLOCK = 1 << 20  # most numbers of a block of per-example gradients: stays within cache, never the size of a model
LARGE = 1 << 16  # numbers of a matrix from which one example at a time was measured to be faster than several, on CPUs
FEW = 5  # positions up to which a product over their pairs was measured to be faster than forming gradients


@dataclass(frozen=True)
class Question:
    """What is differentiated: `value(logits_MC, targets) -> value_B` (None: the loss), `targets` (None: the true ones).

    Labels drawn from the model come from `draw(logits_MC, true targets)`, once for a whole batch; weights go into the
    value, e.g. `lambda z, t: objective.loss(z, t) * weight(z)`. The value of an example may depend on its own logits
    and targets only.
    """

    value: Value | None = None
    targets: Targets | None = None
    draw: Callable[[Tensor, Targets], Targets] | None = None

    def about(self, logits_MC: Tensor, true: Targets) -> Targets:
        """The targets that the question is asked with."""
        return self.targets or (self.draw(logits_MC.detach(), true) if self.draw else true)


def per_example_grads(
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    question: Question | None = None,
    coverage: Coverage | None = None,
) -> dict[str, Tensor]:
    """grad_B... of every covered parameter: the gradient of each example's value, under canonical names.

    `coverage` (from `cover`, default: of all parameters that require a gradient) is worth keeping between batches.
    """
    question = question or Question()
    coverage = coverage or cover(model, objective, batch)
    true = objective.targets(batch)
    parameters = named(model)
    count = len(batch)
    out = {n: parameters[n].new_zeros(count, *parameters[n].shape).detach() for n in coverage.names}
    with in_mode(model, training=False):
        with linear_io(model, coverage.hooked, layout_of(batch, true)) as io:
            logits_MC = objective.logits(model, batch)
            targets = question.about(logits_MC, true)
            io.backward((question.value or objective.loss)(logits_MC, targets).sum())
            for name in coverage.hooked:
                for use in io.uses(name):
                    _add_grad(out[name], use, name)
        if coverage.looped:
            for b in range(count):
                for name, grad in _single(model, objective, batch, question, targets, coverage.looped, b).items():
                    out[name][b] = grad
    return out


def per_example_square_sum(
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    questions: Sequence[Question] = (Question(),),
    coverage: Coverage | None = None,
    into: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Sum over examples (and questions) of the squared per-example gradient, in the parameter's own shape.

    One forward pass serves all questions. No [B, O, I] tensor is made: blocks of O are, and none at all where an
    example applies a matrix to few positions. Sums of earlier batches given as `into` are added to in place, so that
    no second tree as large as the model is held.
    """
    coverage = coverage or cover(model, objective, batch)
    true = objective.targets(batch)
    parameters = named(model)
    out = into or {n: torch.zeros_like(parameters[n]).detach() for n in coverage.names}
    with in_mode(model, training=False):
        with linear_io(model, coverage.hooked, layout_of(batch, true)) as io:
            logits_MC = objective.logits(model, batch)
            about = [question.about(logits_MC, true) for question in questions]
            for i, (question, targets) in enumerate(zip(questions, about)):
                value_B = (question.value or objective.loss)(logits_MC, targets)
                io.backward(value_B.sum(), keep=i + 1 < len(questions))
                for name in coverage.hooked:
                    _add_square_sum(out[name], io.uses(name), name)
        if coverage.looped:
            for question, targets in zip(questions, about):
                for b in range(len(batch)):
                    for name, grad in _single(model, objective, batch, question, targets, coverage.looped, b).items():
                        out[name] += grad.square()
    return out


def _single(
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    question: Question,
    targets: Targets,
    names: Sequence[str],
    b: int,
) -> dict[str, Tensor]:
    """Gradients of one example by plain autograd."""
    parameters = named(model)
    with requiring_grad(model, names), torch.enable_grad():
        logits_MC = objective.logits(model, take(batch, [b]))
        value = (question.value or objective.loss)(logits_MC, take_targets(targets, b)).sum()
        if not value.requires_grad:
            return {}
        grads = torch.autograd.grad(value, [parameters[n] for n in names], allow_unused=True)
    return {n: g for n, g in zip(names, grads, strict=True) if g is not None}


def _sides(use: Use) -> tuple[Tensor, Tensor]:
    """(left_BTO, right_BTI) whose summed outer products are the gradient of the weight as it is stored."""
    return (use.a, use.g_BTO) if use.kind == "conv1d" else (use.g_BTO, use.a)


def _vector(use: Use, name: str) -> Tensor:
    """grad_BD of a bias or of a norm's weight."""
    return (use.g_BTO if name == use.bias else use.g_BTO * use.a).sum(1)


def _add_grad(out: Tensor, use: Use, name: str) -> None:
    """Add the per-example gradient of one use to out_B..., in place."""
    if name == use.bias or use.kind in ("layernorm", "rmsnorm"):
        out += _vector(use, name)
    elif use.kind == "embedding":
        key, g = _words(use, out.shape[1])
        out.view(-1, out.shape[2]).index_add_(0, key, g)
    else:
        left_BTO, right_BTI = _sides(use)
        out.flatten(2).baddbmm_(left_BTO.transpose(1, 2), right_BTI)


def _words(use: Use, size: int) -> tuple[Tensor, Tensor]:
    """(example x size + word, gradient) of every position whose word learns."""
    count = use.a.shape[0]
    key_BT = use.a + size * torch.arange(count, device=use.a.device)[:, None]
    learns_BT = torch.ones_like(use.a, dtype=torch.bool) if use.skip is None else use.a != use.skip
    return key_BT[learns_BT], use.g_BTO[learns_BT]


def _add_square_sum(total: Tensor, uses: Sequence[Use], name: str) -> None:
    """Add the sum over examples of (sum over uses of the gradient) squared, for one parameter, in place."""
    if not uses:
        return
    if total.dim() == 1:
        total += torch.stack([_vector(use, name) for use in uses]).sum(0).square().sum(0)
        return
    lookups = [use for use in uses if use.kind == "embedding"]
    products = [_packed(*_sides(use)) for use in uses if use.kind != "embedding"]
    left_BTO = torch.cat([left for left, _ in products], 1) if products else None
    right_BTI = torch.cat([right for _, right in products], 1) if products else None
    if left_BTO is not None and right_BTI is not None:
        outer_square_sum(left_BTO, right_BTI, total_OI=total.view(len(total), -1))  # a convolution has more dimensions
    if lookups:
        size = total.shape[0]
        found = [_words(use, size) for use in lookups]
        key_U, inverse = torch.unique(torch.cat([k for k, _ in found]), return_inverse=True)
        g_SD = torch.cat([g for _, g in found])
        sum_UD = total.new_zeros(len(key_U), total.shape[1]).index_add(0, inverse, g_SD)
        both_UD = sum_UD.square()
        if left_BTO is not None and right_BTI is not None:
            # (s + e)^2 = s^2 + 2 s e + e^2, and e is zero but for U rows
            both_UD += 2 * sum_UD * _rows_of_outer(left_BTO, right_BTI, key_U // size, key_U % size)
        total.index_add_(0, key_U % size, both_UD)
        total.clamp_min_(0)


def _packed(left_BTO: Tensor, right_BTI: Tensor) -> tuple[Tensor, Tensor]:
    """The same products without positions where either side is zero, where that saves at least half of them.

    In the last block of a classifier that reads one token, all other positions have no gradient.
    """
    live_BT = (left_BTO != 0).any(-1) & (right_BTI != 0).any(-1)
    most = int(live_BT.sum(1).max()) if live_BT.numel() else 0
    if 2 * most > live_BT.shape[1]:
        return left_BTO, right_BTI
    at_BT = torch.argsort(live_BT.int(), dim=1, descending=True, stable=True)[:, :most, None]
    return left_BTO.take_along_dim(at_BT, 1), right_BTI.take_along_dim(at_BT, 1)


def outer_square_sum(left_BTO: Tensor, right_BTI: Tensor, block: int = BLOCK, total_OI: Tensor | None = None) -> Tensor:
    """sum_b (sum_t left_bto right_bti)^2 as an [O, I] matrix, added to `total_OI` in place where that is given.

    With few positions the square is written out over pairs of them, sum_ts (l_t l_s) (r_t r_s): one matrix product and
    nothing larger than the result. Otherwise [b, o, I] blocks of at most `block` numbers are formed, squared and
    summed; a vocabulary goes in blocks of its rows. On a CPU large blocks hold one example: a number is then squared
    and added in one go, instead of being written, read and written again (twice as fast).

    >>> outer_square_sum(torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[3.0], [4.0]]]))
    tensor([[121.]])
    """
    count, times, rows = left_BTO.shape
    columns = right_BTI.shape[2]
    total_OI = left_BTO.new_zeros(rows, columns) if total_OI is None else total_OI
    if times <= FEW:
        t_P, s_P = torch.triu_indices(times, times, device=left_BTO.device)
        twice_P1 = torch.where(t_P == s_P, 1.0, 2.0).to(left_BTO)[:, None]
        left_XO = (left_BTO[:, t_P] * left_BTO[:, s_P] * twice_P1).reshape(-1, rows)
        return total_OI.addmm_(left_XO.T, (right_BTI[:, t_P] * right_BTI[:, s_P]).reshape(-1, columns))
    high = max(1, min(rows, block // columns))
    many = max(1, min(count, block // (high * columns)))
    left_BOT = left_BTO.transpose(1, 2)
    single = left_BTO.device.type == "cpu" and high * columns >= min(block, LARGE)
    for top in range(0, rows, high):
        total_oI = total_OI[top : top + high]
        if single:
            part_oI = torch.empty_like(total_oI)
            for left_oT, right_TI in zip(left_BOT[:, top : top + high], right_BTI):
                torch.mm(left_oT, right_TI, out=part_oI)
                total_oI.addcmul_(part_oI, part_oI)
            continue
        for first in range(0, count, many):
            part_boI = torch.bmm(left_BOT[first : first + many, top : top + high], right_BTI[first : first + many])
            total_oI += part_boI.square_().sum(0)
    return total_OI


def _rows_of_outer(left_BTO: Tensor, right_BTI: Tensor, example_U: Tensor, row_U: Tensor) -> Tensor:
    """Row `row_U` of example `example_U`'s sum of outer products: [U, I]."""
    times, columns = right_BTI.shape[1:]
    coefficient_UT = left_BTO[example_U, :, row_U]
    many = max(1, BLOCK // max(1, times * columns))
    parts = [
        torch.einsum("ut,uti->ui", coefficient_UT[i : i + many], right_BTI[example_U[i : i + many]])
        for i in range(0, len(example_U), many)
    ]
    return torch.cat(parts)

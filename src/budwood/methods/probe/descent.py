"""Probes trained by AdamW on mini-batches: all layers and targets in one batched computation, none sees another.

A probe is linear, or has one hidden layer; a mix reads the sum of all layers weighted by a learned softmax.
Shapes: L layers, G places that probes read (layers or mixes), C targets (the task's, a control's), K outputs (classes;
start and end), H hidden units, D features, F = H or K, B rows of a batch, T states of its longest row, m states of its
rows laid end to end, M states of all N rows, E epochs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from budwood.capture.supply import Supply, states_at
from budwood.data.batch import budget_batches, seed_of, training_batches
from budwood.methods.probe.labels import Scale
from budwood.train.step import Rule, initial_state, update

Params = dict[str, Tensor]
SPREAD = 0.02  # of first weights
TOKENS = 4096  # padded tokens of a batch that is only scored
SAMPLE = 2048  # rows that features are standardised by


@dataclass(frozen=True)
class Lesson:
    """What probes learn: `answer_CM` classes of states, or with `span` `answer_C2N`, places in each row's states."""

    offsets_N1: np.ndarray
    lengths_N: np.ndarray  # tokens of a row, by which batches are made
    answer: np.ndarray
    outputs: int
    span: bool


@dataclass(frozen=True)
class Plan:
    """How probes are trained; `published`: the first and second moments are used without bias correction."""

    layers: tuple[int, ...]
    epochs: int
    rate: float
    batch: int
    seed: int
    published: bool
    hidden: int = 0
    mix: bool = False
    dropout: float = 0.1
    limit: float = 1.0  # largest norm of a probe's gradient


@dataclass
class State:
    """Training so far: parameters, moments, updates made, parameters and mean losses at the end of every epoch."""

    params: Params
    moments: Params
    step: int = 0
    epochs: list[Params] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)  # loss_GC of every epoch, a mix last

    def tensors(self) -> Params:
        """One flat table, for a file."""
        out = {f"now/{k}": v for k, v in self.params.items()} | {f"moment/{k}": v for k, v in self.moments.items()}
        for e, (params, loss) in enumerate(zip(self.epochs, self.losses)):
            out |= {f"epoch/{e}/{k}": v for k, v in params.items()} | {f"loss/{e}": loss}
        return {**out, "step": torch.tensor(self.step)}

    @classmethod
    def of(cls, tensors: Params) -> State:
        """What `tensors` gave."""

        def under(head: str) -> Params:
            return {k.removeprefix(head): tensors[k].clone() for k in sorted(tensors) if k.startswith(head)}

        done = len(under("loss/"))
        epochs = [under(f"epoch/{e}/") for e in range(done)]
        losses = [tensors[f"loss/{e}"] for e in range(done)]
        return cls(under("now/"), under("moment/"), int(tensors["step"]), epochs, losses)


def scale_of(supply: Supply, rows: int, raw: bool) -> Scale:
    """mean_L1D and spread_L1D over (at most SAMPLE, evenly spaced) training rows; nothing is changed with `raw`."""
    index = np.unique(np.linspace(0, rows - 1, min(rows, 1 if raw else SAMPLE)).astype(np.int64))
    parts = [supply(index[i : i + 64]) for i in range(0, len(index), 64)]
    each = [Scale.of(torch.cat([p[n] for p in parts])) for n in range(len(parts[0]))]
    mean_L1D, spread_L1D = (torch.stack([getattr(s, n) for s in each])[:, None] for n in ("mean_D", "spread_D"))
    return Scale(torch.zeros_like(mean_L1D), torch.ones_like(spread_L1D)) if raw else Scale(mean_L1D, spread_L1D)


def initial(plan: Plan, lesson: Lesson, width: int) -> Params:
    """First parameters; a layer's do not depend on which other layers are probed."""
    targets = len(lesson.answer)
    out: Params = {}
    places: dict[str, list[list[tuple[object, int]]]] = {"": [[(n, c) for c in range(targets)] for n in plan.layers]}
    if plan.mix:
        places["mix."] = [[("mix", c)] for c in range(targets)]
    for head, named_GC in places.items():
        draw_GC = [[torch.Generator().manual_seed(seed_of(plan.seed, "probe", *x)) for x in row] for row in named_GC]

        def drawn(rows: int, columns: int, spread: float, draw_GC: list[list[torch.Generator]] = draw_GC) -> Tensor:
            each = [torch.stack([torch.randn(rows, columns, generator=g) for g in row]) for row in draw_GC]
            return torch.stack(each) * spread

        out[f"{head}weight"] = drawn(lesson.outputs, plan.hidden or width, SPREAD)
        if not lesson.span:  # a constant for all tokens of a window would change nothing
            out[f"{head}bias"] = torch.zeros(out[f"{head}weight"].shape[:3])
        if plan.hidden:
            out[f"{head}hidden.weight"] = drawn(plan.hidden, width, width**-0.5)
            out[f"{head}hidden.bias"] = torch.zeros(out[f"{head}hidden.weight"].shape[:3])
    if plan.mix:
        out |= {"mix.share": torch.zeros(targets, len(plan.layers)), "mix.gain": torch.ones(targets)}
    return dict(sorted(out.items()))  # in the order of a file: norms are sums over them


def logits(params: Params, x_LmD: Tensor) -> Tensor:
    """logits_GCKm of every layer's probes and, last, of the mix."""
    found = _places(params, "", x_LmD)
    if "mix.share" not in params:
        return found
    share_CL = params["mix.share"].softmax(1) * params["mix.gain"][:, None]
    return torch.cat([found, _places(params, "mix.", torch.einsum("cl,lmd->cmd", share_CL, x_LmD)).transpose(0, 1)])


def _places(params: Params, head: str, x_GmD: Tensor) -> Tensor:
    weight_GCKF, bias_GCK = params[f"{head}weight"], params.get(f"{head}bias")
    hidden_GCHD = params.get(f"{head}hidden.weight")
    if hidden_GCHD is None:
        flat = torch.bmm(weight_GCKF.flatten(1, 2), x_GmD.transpose(1, 2))
        found = flat.unflatten(1, weight_GCKF.shape[1:3])
    else:
        flat = torch.bmm(hidden_GCHD.flatten(1, 2), x_GmD.transpose(1, 2)).unflatten(1, hidden_GCHD.shape[1:3])
        found = weight_GCKF @ (flat + params[f"{head}hidden.bias"][..., None]).relu()
    return found if bias_GCK is None else found + bias_GCK[..., None]


def losses(logits_GCKm: Tensor, lesson: Lesson, index_B: np.ndarray) -> Tensor:
    """loss_GC: mean over states, or over rows and over start and end."""
    if not lesson.span:
        answer_Cm = torch.from_numpy(lesson.answer[:, states_at(lesson.offsets_N1, index_B)])
        at = answer_Cm[None, :, None].expand(len(logits_GCKm), -1, 1, -1)
        return -logits_GCKm.log_softmax(2).gather(2, at)[:, :, 0].mean(2)
    size_B = np.diff(lesson.offsets_N1)[index_B]
    first_B = torch.from_numpy(np.cumsum(size_B) - size_B)
    place_T = torch.arange(int(size_B.max()))
    real_BT = place_T < torch.from_numpy(size_B)[:, None]
    at_BT = torch.where(real_BT, first_B[:, None] + place_T, 0)
    score = logits_GCKm[..., at_BT].masked_fill(~real_BT, -torch.inf)
    at_C2B = torch.from_numpy(lesson.answer[:, :, index_B]) + first_B
    gold = logits_GCKm.gather(3, at_C2B.expand(len(logits_GCKm), -1, -1, -1))
    return (score.logsumexp(4) - gold).mean((2, 3))


@torch.no_grad()
def clip(grads: Params, limit: float, each_output: bool) -> None:
    """Scale every probe's gradient to a norm of at most `limit`; start and end are two probes with `each_output`."""
    own = {k: v for k, v in grads.items() if not k.startswith("mix.")}
    mix = {k: v for k, v in grads.items() if k.startswith("mix.")}
    for group, dims in ((own, 3 if each_output else 2), (mix, 1)):
        if group:
            norm = sum(v.flatten(dims).square().sum(-1) if v.ndim > dims else v.square() for v in group.values()) ** 0.5
            share = (limit / (norm + 1e-6)).clamp_max(1.0)
            for v in group.values():
                v.mul_(share.reshape(*share.shape, *[1] * (v.ndim - share.ndim)))


@torch.no_grad()
def published_update(params: Params, grads: Params, moments: Params, rate: float) -> None:
    """AdamW without bias correction and decay: the first step is 3.16 times the rate."""
    for name, grad in grads.items():
        first, second = moments[f"m:{name}"], moments[f"v:{name}"]
        first.mul_(0.9).add_(grad, alpha=0.1)
        second.mul_(0.999).addcmul_(grad, grad, value=0.001)
        params[name].addcdiv_(first, second.sqrt().add_(1e-8), value=-rate)


def train(
    supply: Supply, lesson: Lesson, scale: Scale, plan: Plan, state: State | None, kept: Callable[[State], None]
) -> State:
    """Train from `state` (None: the beginning) to the last epoch; `kept` gets the state after every epoch."""
    rule = Rule(optimizer="adamw", weight_decay=0.0)
    if state is None:
        params = initial(plan, lesson, int(scale.mean_D.shape[-1]))
        state = State(params, initial_state(rule, params))
    each_output = lesson.span and not plan.hidden
    raw = not scale.mean_D.any() and bool((scale.spread_D == 1).all())  # nothing would change
    for epoch in range(len(state.epochs), plan.epochs):
        draw = torch.Generator().manual_seed(seed_of(plan.seed, "dropout", epoch))
        total, seen = torch.zeros(()), 0
        for index_B in training_batches(lesson.lengths_N, plan.batch, plan.seed, epoch):
            x_LmD = supply(index_B) if raw else scale(supply(index_B))
            keep_mD = torch.rand(x_LmD.shape[1:], generator=draw) >= plan.dropout  # one draw, whatever is probed
            leaves = {k: v.requires_grad_() for k, v in state.params.items()}
            loss_GC = losses(logits(leaves, x_LmD.mul_(keep_mD / (1 - plan.dropout))), lesson, index_B)
            found = torch.autograd.grad(loss_GC.sum(), list(leaves.values()))
            state.params = {k: v.detach() for k, v in leaves.items()}
            grads = dict(zip(leaves, found))
            clip(grads, plan.limit, each_output)
            state.step += 1
            if plan.published:
                published_update(state.params, grads, state.moments, plan.rate)
            else:
                update(rule, state.params, grads, state.moments, plan.rate, state.step)
            total, seen = total + loss_GC.detach() * len(index_B), seen + len(index_B)
        state.epochs.append({k: v.clone() for k, v in state.params.items()})
        state.losses.append(total / seen)
        kept(state)
    return state


@torch.no_grad()
def scores(supply: Supply, offsets_N1: np.ndarray, lengths_N: np.ndarray, scale: Scale, epochs: list[Params]) -> Tensor:
    """logits_EGCKM of all rows by the probes of every epoch, from one reading of the rows."""
    out: Tensor | None = None
    for index_B in budget_batches(lengths_N, TOKENS):
        x_LmD = scale(supply(index_B))
        found = torch.stack([logits(params, x_LmD) for params in epochs])
        if out is None:
            out = found.new_zeros(*found.shape[:-1], int(offsets_N1[-1]))
        out[..., torch.from_numpy(states_at(offsets_N1, index_B))] = found
    assert out is not None
    return out


def plain(params: Params, scale: Scale, place: int) -> Params:
    """The task's probe of a place for states that are not standardised; that of the mix has a weight for each layer."""
    layers = len(params["weight"])
    is_mix = place == layers
    head, at = ("mix.", 0) if is_mix else ("", place)
    first = "hidden." if f"{head}hidden.weight" in params else ""
    weight_FD = params[f"{head}{first}weight"][at, 0]
    if is_mix:
        share_L = params["mix.share"][0].softmax(0) * params["mix.gain"][0]
        weight = share_L[:, None, None] * weight_FD / scale.spread_D
        shift_F = (weight @ scale.mean_D.transpose(1, 2)).sum((0, 2))
    else:
        weight = weight_FD / scale.spread_D[place]
        shift_F = weight @ scale.mean_D[place, 0]
    out = {f"{first}weight": weight}
    if f"{head}{first}bias" in params:
        out[f"{first}bias"] = params[f"{head}{first}bias"][at, 0] - shift_F
    if first:
        out["weight"] = params[f"{head}weight"][at, 0]
        if f"{head}bias" in params:
            out["bias"] = params[f"{head}bias"][at, 0]
    return out


def apply_plain(probe: Params, x_LMD: Tensor) -> Tensor:
    """logits_KM of a saved probe: of one layer [1, M, D], or of a mix of all that it was trained on."""
    first = "hidden." if "hidden.weight" in probe else ""
    weight = probe[f"{first}weight"]
    found_FM = (weight.view(len(x_LMD), *weight.shape[-2:]) @ x_LMD.transpose(1, 2)).sum(0)
    if f"{first}bias" in probe:
        found_FM = found_FM + probe[f"{first}bias"][:, None]
    if not first:
        return found_FM
    found_KM = probe["weight"] @ found_FM.relu()
    return found_KM + probe["bias"][:, None] if "bias" in probe else found_KM

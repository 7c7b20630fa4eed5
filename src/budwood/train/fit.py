"""The one training loop: any objective, any penalty, stopped and carried on without a trace.

Every random choice is a function of (seed, epoch) or (seed, step), so a loop that is killed and resumed from its last
saved state takes exactly the updates it would have taken.
Shapes: B examples of a batch.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from budwood.data.batch import Batch, seed_of, training_batches
from budwood.errors import ModelError
from budwood.models.mode import in_mode
from budwood.models.objective import Objective
from budwood.store.files import writing
from budwood.train.ranks import Ranks, ranks
from budwood.train.step import Rule, clip, initial_state, rate, update


class Feed(Protocol):
    """Rows of a training set as batches."""

    @property
    def lengths_N(self) -> np.ndarray:
        """Tokens of each row."""

    def __call__(self, index: np.ndarray, epoch: int) -> Batch:
        """The rows at `index` as a batch."""


class Penalty(Protocol):
    """A term beside the loss: adds its gradient to `grads` in place and returns its value."""

    def __call__(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> float:
        """Add the gradient, return the value."""


class Pull(Protocol):
    """A hold outside the update rule: what share of the rule's step update `step` takes, and the way back."""

    def share(self, step: int) -> float:
        """Between 0 and 1."""

    def __call__(self, params: Mapping[str, Tensor], rate: float) -> None:
        """Move weights back."""


@dataclass(frozen=True)
class Replay:
    """Rows of another task that ride along with every update, so that it is not forgotten."""

    objective: Objective
    feed: Feed
    rows: int
    weight: float = 1.0

    def draw(self, seed: int, step: int) -> np.ndarray:
        """The rows of one update: a function of seed and step alone."""
        rng = np.random.default_rng(seed_of(seed, "replay", step))
        return rng.choice(len(self.feed.lengths_N), min(self.rows, len(self.feed.lengths_N)), replace=False)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What enters an update beside the plain mean loss: weights of examples, a penalty, a pull, replayed rows."""

    weights_N: np.ndarray | None = None
    penalty: Penalty | None = None
    pull: Pull | None = None
    replay: Replay | None = None
    others: tuple[Replay, ...] = ()  # more tasks that ride along


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long and how fast to train: all numbers decided."""

    rule: Rule
    learning_rate: float
    steps: int
    batch_size: int
    accumulation: int = 1
    warmup: float = 0.0
    schedule: str = "linear"
    max_grad_norm: float = 1.0
    logging_steps: int = 10
    save_steps: int | None = None
    eval_steps: int | None = None
    seed: int = 0


@dataclass
class History:
    """The loss curve: mean loss over each stretch of `logging_steps` updates, and what selection saw."""

    points: list[dict[str, float]] = field(default_factory=list)
    selected: list[dict[str, float]] = field(default_factory=list)
    best: float = -float("inf")
    best_step: int = 0
    window: list[float] = field(default_factory=list)
    rates: float = 0.0  # sum of learning rates over all updates

    def add(self, step: int, loss: float, lr: float, norm: float, plan: Plan) -> None:
        """Count one update."""
        self.window.append(loss)
        self.rates += lr
        if step % plan.logging_steps == 0 or step == plan.steps:
            mean = sum(self.window) / len(self.window)
            self.points.append({"step": step, "loss": mean, "learning_rate": lr, "grad_norm": norm})
            self.window = []


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Where a loop keeps its state, and what it does at milestones."""

    state: Path | None = None  # resume file
    every: float = 20.0  # least seconds between saves
    checkpoint: Callable[[int], None] = lambda step: None  # called every plan.save_steps
    select: Callable[[], float] | None = None  # called every plan.eval_steps: higher is better, best weights are kept
    advance: Callable[[int, str], None] = lambda n, note: None
    resumed: Callable[[int], None] = lambda n: None  # called with the updates done in an earlier session
    finished: Callable[[Mapping[str, Tensor]], None] = lambda state: None  # called with the update rule's last state


class Diverged(ModelError):
    """A training whose loss is no number any more."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that training changes, by name."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def fit(
    model: nn.Module,
    objective: Objective,
    feed: Feed,
    plan: Plan,
    keeping: Keeping | None = None,
    terms: Terms | None = None,
) -> History:
    """Train `model` in place; returns the loss curve. With `keeping.select`, ends with the best weights seen.

    The loss of an update is the mean over its examples of (weight x) loss, plus the penalty, plus the mean loss of the
    replayed rows.
    """
    keeping, terms = keeping or Keeping(), terms or Terms()
    params = trainable(model)
    if not params:
        raise ModelError("Nothing is left to train: --freeze and --train-only exclude every parameter.")
    group = ranks(model)
    held = group.own(params)
    state = initial_state(plan.rule, held)
    history, done, best = _resume(keeping.state, plan, params, state)
    done = group.alike({**{f"p:{n}": p for n, p in params.items()}, **state}, done)
    if done:
        keeping.resumed(done)
    pause, saved_at = keeping.every, time.monotonic()
    with training(model):
        for turn in _turns(feed.lengths_N, plan, done, group):
            step = turn.step
            loss = _gradients(model, objective, feed, plan, turn, terms)
            grads = {n: p.grad for n, p in params.items() if p.grad is not None}
            grads, loss = group.summed(grads, params, loss)
            if terms.penalty is not None:
                loss += terms.penalty(params, grads)
            _check(loss, step)
            norm = clip(grads, plan.max_grad_norm, group.norm(grads))
            lr = rate(step, plan.steps, plan.learning_rate, plan.warmup, plan.schedule)
            share = terms.pull.share(step) if terms.pull else 1.0
            update(plan.rule, held, grads, state, lr * share, step + 1)
            if terms.pull:
                terms.pull(params, lr * (1.0 - share))
            history.add(step + 1, loss, lr, norm, plan)
            if keeping.select and plan.eval_steps and ((step + 1) % plan.eval_steps == 0 or step + 1 == plan.steps):
                best = _select(keeping.select, model, params, history, step + 1) or best
            if plan.save_steps and (step + 1) % plan.save_steps == 0:
                keeping.checkpoint(step + 1)
            keeping.advance(1, f"loss {loss:.3f}")
            if keeping.state and time.monotonic() - saved_at > pause:
                began = time.monotonic()
                _save(keeping.state, plan, params, state, history, step + 1, best)
                saved_at = time.monotonic()
                pause = max(keeping.every, 30 * (saved_at - began))  # saving costs at most 3 % of the time
    keeping.finished(state)
    for p in params.values():
        p.grad = None
    if best:
        with torch.no_grad():
            for n, p in params.items():
                p.copy_(best[n])
    return history


@dataclass(frozen=True)
class Turn:
    """The rows of one update."""

    step: int
    epoch: int
    index_B: np.ndarray
    group: Ranks = field(default_factory=Ranks)


def _turns(lengths_N: np.ndarray, plan: Plan, done: int, group: Ranks) -> Iterator[Turn]:
    """Every update from `done` on."""
    size = plan.batch_size * plan.accumulation
    per_epoch = -(-len(lengths_N) // size)
    for epoch in range(done // per_epoch, -(-plan.steps // per_epoch)):
        for i, index in enumerate(training_batches(lengths_N, size, plan.seed, epoch)):
            step = epoch * per_epoch + i
            if done <= step < plan.steps:
                yield Turn(step, epoch, index, group)


def _gradients(
    model: nn.Module,
    objective: Objective,
    feed: Feed,
    plan: Plan,
    turn: Turn,
    terms: Terms,
) -> float:
    """Fill .grad with the gradient of the mean loss over the rows of one update; returns that loss."""
    model.zero_grad(set_to_none=True)
    total, count = 0.0, len(turn.index_B)
    share_B, rank = turn.group.share(turn.index_B), turn.group.rank
    for part, rows in enumerate(np.array_split(share_B, min(plan.accumulation, len(share_B))) if len(share_B) else ()):
        batch = feed(rows, turn.epoch)
        # dropout of this update, whoever runs it; other ranks have other rows and need other masks
        torch.manual_seed(seed_of(plan.seed, "step", turn.step, part, *([rank] if rank else [])))
        loss_B = objective.loss(objective.logits(model, batch), objective.targets(batch))
        if terms.weights_N is not None:
            loss_B = loss_B * torch.as_tensor(terms.weights_N[rows], dtype=loss_B.dtype, device=loss_B.device)
        loss = loss_B.sum() / count
        loss.backward()
        total += float(loss.detach())
    for again in (*((terms.replay,) if terms.replay else ()), *terms.others):
        batch = again.feed(again.draw(plan.seed, turn.step), turn.epoch)
        loss_B = again.objective.loss(again.objective.logits(model, batch), again.objective.targets(batch))
        loss = again.weight * loss_B.mean() / turn.group.size
        loss.backward()
        total += float(loss.detach())
    return total


def _select(
    select: Callable[[], float], model: nn.Module, params: Mapping[str, Tensor], history: History, step: int
) -> dict[str, Tensor] | None:
    """Score the weights as they are; a copy of them if they are the best so far (ties go to the later ones)."""
    model.eval()
    score = select()
    model.train()
    history.selected.append({"step": step, "score": score})
    if score < history.best:
        return None
    history.best, history.best_step = score, step
    return {n: p.detach().clone() for n, p in params.items()}


def _check(loss: float, step: int) -> None:
    if not np.isfinite(loss):
        raise Diverged(
            f"The training loss became {loss} at update {step + 1}. Lower --learning-rate, keep --max-grad-norm above "
            "0, and look for odd rows in the data."
        )


@contextlib.contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Training mode inside; the mode and torch's random state come back at the end."""
    with torch.random.fork_rng(devices=[]), in_mode(model, training=True):
        yield


def _save(
    path: Path,
    plan: Plan,
    params: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    history: History,
    step: int,
    best: Mapping[str, Tensor] | None,
) -> None:
    tensors = {f"p:{n}": p.detach() for n, p in params.items()} | {f"s:{n}": t for n, t in state.items()}
    tensors |= {f"b:{n}": t for n, t in (best or {}).items()}
    meta = {"step": str(step), "plan": repr(plan), "history": json.dumps(vars(history))}
    with writing(path) as part:
        save_file({k: t.contiguous() for k, t in tensors.items()}, part, metadata=meta)


def _resume(
    path: Path | None, plan: Plan, params: Mapping[str, Tensor], state: dict[str, Tensor]
) -> tuple[History, int, dict[str, Tensor] | None]:
    """Put the saved state back in place; (history, updates done, best weights). A state of another plan is ignored."""
    if path is None or not path.exists():
        return History(), 0, None
    with safe_open(path, "pt") as saved, torch.no_grad():
        meta: dict[str, Any] = saved.metadata()
        if meta["plan"] != repr(plan):
            return History(), 0, None
        for n, p in params.items():
            p.copy_(saved.get_tensor(f"p:{n}"))
        for n, t in state.items():
            t.copy_(saved.get_tensor(f"s:{n}"))
        best = {k[2:]: saved.get_tensor(k) for k in saved.keys() if k.startswith("b:")}  # noqa: SIM118
    return History(**json.loads(meta["history"])), int(meta["step"]), best or None

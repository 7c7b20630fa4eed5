"""A mask that is learned on the task under an exact budget.

Straight-through: the model always carries the hard mask of the k highest scores; the gradient at that point says how
the loss would change if any other weight were switched (gradient x change), and the scores follow it. Held at once:
weights, changes, scores and the gradient of one tensor.
Annealed: every weight is switched on by a sigmoid whose threshold makes the sum of all switches k, and whose
temperature falls until they are hard.
Shapes: P graftable weights end to end, K those switched on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from budwood.data.batch import Batch, training_batches
from budwood.errors import ModelError
from budwood.methods.graft.pair import Pair, mask_rows
from budwood.methods.graft.rules import batches as all_batches
from budwood.methods.graft.rules import first_order, movement, places_of, taking
from budwood.params import mask as masks
from budwood.params import tree
from budwood.params.apply import requiring_grad
from budwood.params.mask import Mask
from budwood.params.tree import named

FIRST, LAST = 0.5, 0.02  # temperature of the annealed switches, in the spread of the scores


@dataclass(frozen=True)
class Steps:
    """How a mask is learned: steps, rows of each, how far scores move, the seed of the order, points of the start."""

    count: int = 40
    rows: int = 32
    rate: float = 0.5
    seed: int = 0
    points: int = 4
    start: Tensor | None = None  # first-order scores where they are known already
    advance: Callable[[int, str], None] = lambda n, note: None
    state: Path | None = None  # where a long one is kept every so many seconds, to go on from after a kill
    every: float = 60.0


class Switchboard:
    """The model with exactly the chosen weights moved; whatever is switched off is bit by bit the base's."""

    def __init__(self, pair: Pair) -> None:
        """All weights off."""
        self.weights = [named(pair.read.loaded.model)[n].data.view(-1) for n in pair.shapes]
        self.changes = list(pair.delta_P.split(list(pair.sizes.values())))
        self.ends = torch.cumsum(torch.tensor(list(pair.sizes.values())), 0)
        self.old: list[tuple[int, Tensor, Tensor]] = []

    def off(self) -> None:
        """The base again."""
        for place, index, value in self.old:
            self.weights[place][index] = value
        self.old = []

    def on(self, index_K: Tensor) -> None:
        """Only these weights moved."""
        self.off()
        cuts = torch.searchsorted(index_K, self.ends).tolist()
        for place, (first, last) in enumerate(zip([0, *cuts], cuts)):
            if last > first:
                weight, change = self.weights[place], self.changes[place]
                index = index_K[first:last] - (int(self.ends[place]) - len(weight))
                self.old.append((place, index, weight[index].clone()))
                weight[index] += change[index]


@contextlib.contextmanager
def switching(pair: Pair) -> Iterator[Switchboard]:
    """A switchboard whose model is the base again at the end, also after an exception."""
    board = Switchboard(pair)
    try:
        yield board
    finally:
        board.off()


def straight_through(pair: Pair, count: int, steps: Steps, per_tensor: bool = False) -> Mask:
    """The mask of exactly `count` weights after training its scores, begun with those of the better cheap rule.

    A step is as long as the gradient is beside the steepest one so far, the base's to begin with: a mask that already
    does well is hardly moved. The mask it began with comes back where training has not lowered the loss.
    """
    kept = _Kept(steps)
    if kept.score_P is None or kept.start is None:
        kept.score_P, kept.start = _start(pair, steps, count, per_tensor)
    score_P = kept.score_P
    model, objective = pair.read.loaded.model, pair.read.objective
    sizes = list(pair.sizes.values())
    pull = _Pull(score_P.split(sizes), pair.delta_P.split(sizes), kept.steepest)
    batch_of = batches(pair, steps)
    with switching(pair) as board, taking(pair, pull.take):
        for step in range(kept.step, steps.count):
            if step:  # the first only measures, at the base
                board.on(places_of(pair, score_P, count, per_tensor))
            batch = batch_of(step)
            pull.begin(steps.rate * (1 - step / steps.count) * len(score_P) ** 0.5)
            loss = objective.loss(objective.logits(model, batch), objective.targets(batch)).mean()
            loss.backward()
            kept.keep(step + 1, pull.end())
            steps.advance(1, f"loss {float(loss.detach()):.3f}")
    return _better(pair, places_of(pair, score_P, count, per_tensor), kept.start)


@dataclass(frozen=True)
class Start:
    """The mask that learning began with and its loss over all training rows."""

    index_K: Tensor
    loss: float


class _Kept:
    """Scores, next step, steepest gradient and the start: what a killed learning goes on from."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.last = steps, time.monotonic()
        self.score_P: Tensor | None = None
        self.start: Start | None = None
        self.step, self.steepest = 0, 0.0
        if steps.state is not None and steps.state.exists():
            found, facts = tree.load(steps.state)
            self.score_P, self.start = found["score"], Start(found["start"], facts["loss"])
            self.step, self.steepest = facts["step"], facts["steepest"]

    def keep(self, step: int, steepest: float) -> None:
        """Write the state if it is time."""
        if self.steps.state is None or time.monotonic() - self.last < self.steps.every:
            return
        assert self.score_P is not None and self.start is not None
        facts = {"step": step, "steepest": steepest, "loss": self.start.loss}
        tree.save(self.steps.state, {"score": self.score_P, "start": self.start.index_K}, facts)
        self.last = time.monotonic()


class _Pull:
    """Moves the scores while the gradient is being computed, one tensor at a time, so that it is never held whole."""

    def __init__(self, scores: Sequence[Tensor], changes: Sequence[Tensor], steepest: float = 0.0) -> None:
        self.scores, self.changes = scores, changes
        self.steepest, self.square, self.rate = steepest, 0.0, 0.0

    def begin(self, rate: float) -> None:
        """A new step: scores move by `rate` times the direction, in lengths of the steepest one before it."""
        self.square, self.rate = 0.0, rate

    def take(self, place: int, grad: Tensor) -> None:
        """The gradient of one tensor: its product with the change is noted and moves the scores."""
        gain = grad.mul_(self.changes[place])
        self.square += float(torch.linalg.vector_norm(gain)) ** 2
        if self.steepest:  # the first step only measures
            self.scores[place].add_(gain, alpha=-self.rate / self.steepest)

    def end(self) -> float:
        """The longest direction so far."""
        self.steepest = max(self.steepest, self.square**0.5)
        return self.steepest


def annealed(pair: Pair, count: int, steps: Steps, per_tensor: bool = False) -> Mask:
    """The mask of exactly `count` weights by soft switches that harden while their sum stays `count`."""
    score_P, start = _start(pair, steps, count, per_tensor)
    model, objective = pair.read.loaded.model, pair.read.objective
    batch_of = batches(pair, steps)
    with soft(pair) as put, requiring_grad(model, tuple(pair.shapes)):
        parameters = [named(model)[n] for n in pair.shapes]
        for step in range(steps.count):
            heat = FIRST * (LAST / FIRST) ** (step / max(1, steps.count - 1))
            gate_P = switches(pair, score_P, count, heat, per_tensor)
            put(gate_P)
            batch = batch_of(step)
            loss = objective.loss(objective.logits(model, batch), objective.targets(batch)).mean()
            grads = torch.autograd.grad(loss, parameters)
            gain_P = torch.cat([g.reshape(-1) for g in grads]).mul_(pair.delta_P)
            gain_P *= 4 * gate_P * (1 - gate_P)  # slope of the switch, 1 where it is undecided
            length = float(gain_P.norm())
            if length > 0:
                score_P.add_(gain_P, alpha=-steps.rate * (1 - step / steps.count) * len(score_P) ** 0.5 / length)
            steps.advance(1, f"loss {float(loss.detach()):.3f}")
    return _better(pair, places_of(pair, score_P, count, per_tensor), start)


def switches(pair: Pair, score_P: Tensor, count: int, heat: float, per_tensor: bool = False) -> Tensor:
    """gate_P of soft switches that sum to `count`; with `per_tensor` to the share of each tensor."""
    sizes = pair.sizes if per_tensor else {"all": len(score_P)}
    shares = masks.apportion(sizes, count)
    parts = zip(score_P.split(list(sizes.values())), shares.values())
    return torch.cat([torch.sigmoid((part - level(part, share, heat)) / heat) for part, share in parts])


def level(score_P: Tensor, count: int, heat: float) -> float:
    """The threshold at which the soft switches sum to `count`, by bisection."""
    low, high = float(score_P.min()) - 20 * heat, float(score_P.max()) + 20 * heat
    for _ in range(30):
        middle = (low + high) / 2
        if float(torch.sigmoid((score_P - middle) / heat).sum()) > count:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@contextlib.contextmanager
def soft(pair: Pair) -> Iterator[Callable[[Tensor], None]]:
    """A function that puts base + gate x change into the model; the base comes back at the end."""
    parameters = [named(pair.read.loaded.model)[n] for n in pair.shapes]
    base = [p.detach().clone() for p in parameters]
    sizes = list(pair.sizes.values())

    def put(gate_P: Tensor) -> None:
        for parameter, start, gate, change in zip(parameters, base, gate_P.split(sizes), pair.delta_P.split(sizes)):
            parameter.data.view(-1).copy_(start.view(-1)).addcmul_(gate, change)

    try:
        yield put
    finally:
        for parameter, start in zip(parameters, base):
            parameter.data.copy_(start)


def batches(pair: Pair, steps: Steps) -> Callable[[int], Batch]:
    """The training rows of every step: the whole set in turn, in batches of like length, shuffled for every turn."""
    features = pair.read.encode(mask_rows(pair))
    feed = pair.read.feed(features)
    per_turn = -(-len(features) // steps.rows)
    turn = lru_cache(maxsize=1)(lambda n: training_batches(features.lengths_N, steps.rows, steps.seed, n))
    return lambda step: feed(turn(step // per_turn)[step % per_turn], 0)


def _start(pair: Pair, steps: Steps, count: int, per_tensor: bool) -> tuple[Tensor, Start]:
    """Scores to begin with, in units of their own spread: first-order ones, or movement where its mask does better.

    First-order scores take up moves that each help alone; the more of them, the further they may overshoot together.
    """
    by_move = _begun(pair, places_of(pair, movement(pair), count, per_tensor))
    score_P = first_order(pair, steps.points) if steps.start is None else steps.start.clone()
    spread = float(score_P.std())
    if not spread > 0 or spread != spread:
        raise ModelError(
            "The gradient of the loss is zero or not finite at the base, so no mask can be learned from it. Look at "
            "the training rows, or use --select movement."
        )
    start = _begun(pair, places_of(pair, score_P, count, per_tensor))
    if by_move.loss < start.loss:
        start, score_P = by_move, movement(pair)
        spread = float(score_P.std())
    return score_P.div_(spread), start


def _begun(pair: Pair, index_K: Tensor) -> Start:
    return Start(index_K, _loss_of(pair, index_K))


def _better(pair: Pair, index_K: Tensor, start: Start) -> Mask:
    """The learned mask, or the one it began with where that has the lower loss."""
    return masks.split(index_K if _loss_of(pair, index_K) <= start.loss else start.index_K, pair.sizes)


def _loss_of(pair: Pair, index_K: Tensor) -> float:
    """The mean loss over the training rows with only these weights moved."""
    objective, total, rows = pair.read.objective, 0.0, 0
    with switching(pair) as board, torch.no_grad():
        board.on(index_K)
        for batch in all_batches(pair):
            logits_MC = objective.logits(pair.read.loaded.model, batch)
            total += float(objective.loss(logits_MC, objective.targets(batch)).sum())
            rows += len(batch)
    return total / rows


ESTIMATORS = {"straight-through": straight_through, "annealed": annealed}

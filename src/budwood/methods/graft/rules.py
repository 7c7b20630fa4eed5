"""Rules that rank weights for a graft: movement, first-order, Fisher, random. `learned` has a file of its own.

Gradients are taken tensor by tensor while the backward pass runs, so that they are never held whole.

Shapes: P graftable weights end to end, B examples of a batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from budwood.capture.gradients import Question, cover, per_example_square_sum
from budwood.data.batch import Batch, budget_batches, seed_of
from budwood.errors import ModelError, TreeError
from budwood.methods.graft.pair import Pair, mask_rows
from budwood.params import mask as masks
from budwood.params import tree
from budwood.params.apply import requiring_grad
from budwood.params.mask import Mask
from budwood.params.tree import named
from budwood.train.penalty import read_fisher

ADAM = "adam.safetensors"  # what `finetune --save-second-moments` leaves in its run
TOKENS = 512  # padded tokens per batch: activations stay small beside the weights


def batches(pair: Pair) -> Iterator[Batch]:
    """The training rows in batches of like length."""
    features = pair.read.encode(mask_rows(pair))
    feed = pair.read.feed(features)
    for index in budget_batches(features.lengths_N, TOKENS, 256):
        yield feed(index, 0)


def movement(pair: Pair) -> Tensor:
    """|tuned - base|."""
    return pair.delta_P.abs()


def first_order(pair: Pair, points: int = 0) -> Tensor:
    """-gradient x (tuned - base): how much each weight's move takes off the loss.

    The gradient is that of the base, or with `points` the mean of as many between base and tuned: then the scores of
    all weights sum to what tuning takes off the loss, up to the error of the midpoint rule.
    """
    total_P = torch.zeros_like(pair.delta_P)
    for share in [(j + 0.5) / points for j in range(points)] or [0.0]:
        with between(pair, share):
            add_gradient(pair, total_P)
    return total_P.mul_(pair.delta_P).div_(-max(1, points))


def gradient(pair: Pair) -> Tensor:
    """grad_P of the mean loss over the training rows, with the model as it is now, in evaluation mode."""
    total_P = torch.zeros_like(pair.delta_P)
    add_gradient(pair, total_P)
    return total_P


def add_gradient(pair: Pair, total_P: Tensor) -> None:
    """Add the gradient of the mean loss over the training rows, with the model as it is now."""
    model, objective = pair.read.loaded.model, pair.read.objective
    parts, every = total_P.split(list(pair.sizes.values())), list(batches(pair))
    rows = sum(len(batch) for batch in every)
    with taking(pair, lambda place, grad: parts[place].add_(grad)):
        for batch in every:
            loss_B = objective.loss(objective.logits(model, batch), objective.targets(batch))
            (loss_B.sum() / rows).backward()


@contextlib.contextmanager
def taking(pair: Pair, take: Callable[[int, Tensor], object]) -> Iterator[None]:
    """Inside, a backward pass hands over (place, flat gradient) of every graftable tensor in turn, and keeps none."""
    model = pair.read.loaded.model

    def hook(place: int) -> Callable[[Tensor], None]:
        def hand_over(parameter: Tensor) -> None:
            assert parameter.grad is not None
            take(place, parameter.grad.reshape(-1))
            parameter.grad = None

        return hand_over

    with requiring_grad(model, tuple(pair.shapes)):
        parameters = named(model)
        handles = [parameters[n].register_post_accumulate_grad_hook(hook(place)) for place, n in enumerate(pair.shapes)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextlib.contextmanager
def between(pair: Pair, share: float, model: nn.Module | None = None) -> Iterator[None]:
    """The base at base + share x change; at the end it is the base again, bit by bit, without a copy of it.

    Taking the change off again gives nearly every weight back as it was; only the others are kept. `model` is the base
    as it was loaded for another task.
    """
    parameters = named(model or pair.read.loaded.model)
    lost_names = [n for n in pair.shapes if n not in parameters]
    if lost_names:
        raise TreeError(f"The change of '{lost_names[0]}' has no place in a model for this task, which lacks it.")
    weights = [parameters[n].data.view(-1) for n in pair.shapes] if share else []
    changes = pair.delta_P.split(list(pair.sizes.values()))
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for weight, change in zip(weights, changes):
            move = change * share
            there = weight + move
            lost = ((there - move) != weight).nonzero()[:, 0]
            kept.append((lost, weight[lost]))
            weight.copy_(there)
        yield
    finally:
        for weight, change, (lost, value) in zip(weights, changes, kept):
            weight.sub_(change * share)
            weight[lost] = value


def fisher(pair: Pair, path: Path | None) -> Tensor:
    """Fisher x (tuned - base)^2, of a Fisher file, of AdamW's second moments, or of the training rows at the base."""
    moments = _moments_file(pair, path)
    if moments is not None:
        found: Mapping[str, Tensor] = _second_moments(pair, moments)
    elif path is not None:
        found = read_fisher(path, pair.read.loaded.model)[0]
    else:
        found = _empirical(pair)
    parts = [found[n].reshape(-1) if n in found else torch.zeros(size) for n, size in pair.sizes.items()]
    return torch.cat(parts).mul_(pair.delta_P).mul_(pair.delta_P)


def _moments_file(pair: Pair, path: Path | None) -> Path | None:
    """The file of second moments that is meant: those of the tuned run (`adam`), of another run, or a file itself."""
    if path is None:
        return None
    place = pair.tuned.run if str(path) == "adam" and not path.exists() else path
    if place is not None and (place / ADAM).is_file() and not (place / "fisher.safetensors").is_file():
        return place / ADAM
    if str(path) == "adam" and not path.exists():
        raise ModelError(
            f"The tuned model '{pair.tuned.text}' keeps no second moments of AdamW. Fine-tune it with "
            "--save-second-moments, or leave --fisher out."
        )
    return path if path.name == ADAM else None


def _second_moments(pair: Pair, path: Path) -> dict[str, Tensor]:
    """AdamW's mean squared gradient at the end of training: a Fisher that costs nothing."""
    found, made = tree.load(path)
    wrong = [n for n, shape in pair.shapes.items() if n not in found or found[n].shape != shape]
    if made.get("artefact") != "second moments" or wrong:
        told = f"nothing that fits '{wrong[0]}'" if wrong else f"'{made.get('artefact', 'something else')}'"
        raise TreeError(
            f"'{path}' holds {told}, and the second moments of '{pair.read.loaded.ref.text}' are wanted. Give the run "
            "of finetune --save-second-moments that made the tuned model."
        )
    return found


def _empirical(pair: Pair) -> dict[str, Tensor]:
    """Mean over training rows of the squared gradient of the loss, at the base."""
    model, objective = pair.read.loaded.model, pair.read.objective
    total: dict[str, Tensor] = {}
    coverage = None
    for batch in batches(pair):
        coverage = coverage or cover(model, objective, batch)
        for name, value in per_example_square_sum(model, objective, batch, (Question(),), coverage).items():
            total[name] = total[name].add_(value) if name in total else value
    return total


def places_of(pair: Pair, score_P: Tensor, count: int, per_tensor: bool = False) -> Tensor:
    """Sorted places (tensors end to end) of exactly `count` weights with the highest scores."""
    if not per_tensor:
        return masks.highest(score_P, count)
    parts = dict(zip(pair.shapes, score_P.split(list(pair.sizes.values()))))
    return masks.join(masks.top(parts, count, per_tensor), pair.sizes)


def mask_of(pair: Pair, score_P: Tensor, count: int, per_tensor: bool = False) -> Mask:
    """The mask of exactly `count` weights with the highest scores."""
    return masks.split(places_of(pair, score_P, count, per_tensor), pair.sizes)


def random_mask(pair: Pair, count: int, seed: int) -> Mask:
    """Any weights: what a graft has to beat."""
    return masks.random(pair.sizes, count, seed_of(seed, "random mask", count))


def score(pair: Pair, rule: str, points: int = 0, path: Path | None = None) -> Tensor:
    """score_P of a rule that ranks all weights once."""
    if rule == "fisher":
        return fisher(pair, path)
    return first_order(pair, points) if rule == "first-order" else movement(pair)

"""Penalties that hold a model near where it began: value and gradient by hand, nothing of them is saved with the model.

A penalty is called after the backward pass, adds its gradient to the gradients in place and returns its value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from budwood.errors import ConfigError, TreeError, nearest
from budwood.params import tree
from budwood.params.sketch import likeness
from budwood.train.fit import Penalty, trainable

Named = Mapping[str, Tensor]
KIN = 0.5  # correlation of weights from which on one model counts as trained from the other
SAME_KIND = {"exact": "sampled"}  # the same expectation


@dataclass(frozen=True)
class Quadratic:
    """strength / 2 x sum of importance x (weight - anchor)^2; without importance every weight counts the same.

    >>> pull = Quadratic(2.0, {"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])})
    >>> grads = {"w": torch.tensor([0.0])}
    >>> pull({"w": torch.tensor([2.0])}, grads), grads["w"]
    (3.0, tensor([6.]))
    """

    strength: float
    anchor: Named
    importance: Named | None = None

    def __call__(self, params: Named, grads: Named) -> float:
        """Add strength x importance x (weight - anchor) to `grads`; returns the value."""
        value = 0.0
        with torch.no_grad():
            for name, grad in grads.items():
                if name not in self.anchor or (self.importance is not None and name not in self.importance):
                    continue
                delta = params[name] - self.anchor[name]
                pull = delta if self.importance is None else delta * self.importance[name]
                value += float((pull * delta).sum())
                grad.add_(pull, alpha=self.strength)
        return 0.5 * self.strength * value


@dataclass(frozen=True)
class Annealed:
    """A quadratic hold outside the update rule that hands over to the task as training goes on (RecAdam's way).

    Update t takes the share s(t) = 1 / (1 + exp(-k (t - t0))) of the rule's step, and a step of (1 - s) x strength x
    importance towards the anchor, never past it.
    """

    parts: tuple[Quadratic, ...]
    steepness: float
    middle: float

    def share(self, step: int) -> float:
        """The task's share of update `step` (from 0).

        >>> Annealed((), 0.1, 10.0).share(10)
        0.5
        """
        return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, self.steepness * (step - self.middle)))))

    @torch.no_grad()
    def __call__(self, params: Named, rate: float) -> None:
        """Move every held weight towards its anchor by rate x strength x importance, at most all the way."""
        for part in self.parts:
            for name, anchor in part.anchor.items():
                if part.importance is not None and name not in part.importance:
                    continue
                pull = rate * part.strength
                if part.importance is None:
                    params[name].lerp_(anchor, min(1.0, pull))
                else:
                    params[name].lerp_(anchor, (part.importance[name] * pull).clamp_max_(1.0))


@dataclass(frozen=True)
class Absolute:
    """strength x sum of |weight - anchor|, which keeps most weights exactly where they were."""

    strength: float
    anchor: Named

    def __call__(self, params: Named, grads: Named) -> float:
        """Add strength x sign(weight - anchor) to `grads`; returns the value."""
        value = 0.0
        with torch.no_grad():
            for name, grad in grads.items():
                if name not in self.anchor:
                    continue
                delta = params[name] - self.anchor[name]
                value += float(delta.abs().sum())
                grad.add_(delta.sign(), alpha=self.strength)
        return self.strength * value


@dataclass(frozen=True)
class Together:
    """The sum of several penalties."""

    parts: Sequence[Penalty]

    def __call__(self, params: Named, grads: Named) -> float:
        """Add all gradients; returns the sum of the values."""
        return sum(part(params, grads) for part in self.parts)


@dataclass(frozen=True)
class Inside:
    """No penalty: every gradient outside a mask becomes zero, so that nothing else moves."""

    gate: Named

    @classmethod
    def of(cls, model: nn.Module, index: Named) -> Inside:
        """From a mask under canonical names; tensors without a place in it stay as they are."""
        own = {id(p): n for n, p in trainable(model).items()}
        gate = {}
        for name, parameter in tree.named(model).items():
            if id(parameter) in own:
                gate[own[id(parameter)]] = torch.zeros_like(parameter, requires_grad=False)
                if name in index:
                    gate[own[id(parameter)]].view(-1)[index[name]] = 1.0
        return cls(gate)

    def __call__(self, params: Named, grads: Named) -> float:
        """Multiply the gradients by the mask in place; the value is 0."""
        for name, grad in grads.items():
            grad.mul_(self.gate[name])
        return 0.0


@dataclass(frozen=True)
class Holding:
    """What holds the weights: strengths of each penalty, the Fisher files of EWC, and when the hold lets go."""

    ewc: tuple[Path, ...] = ()
    ewc_strength: float = 0.0
    ewc_scale: str = "normalised"
    ewc_decay: float = 1.0
    l2_to_base: float = 0.0
    l1_to_base: float = 0.0
    anneal: float = 0.0
    anneal_at: float = 0.25


@dataclass(frozen=True)
class Held:
    """What holds a model: a term of the loss, or a pull outside the update rule, and what there is to say about it."""

    penalty: Penalty | None = None
    pull: Annealed | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def hold(
    model: nn.Module, holding: Holding, steps: int = 1, fresh: Sequence[str] = (), tokenizer: str | None = None
) -> Held:
    """What holds the model's weights where they are now; newly drawn weights (`fresh`) are free.

    `steps` are all updates to come (for annealing), `tokenizer` the hash of the model's tokenizer.
    """
    free = {id(p) for n, p in tree.named(model).items() if n in set(fresh)}
    start = {n: p.detach().clone() for n, p in trainable(model).items() if id(p) not in free}
    parts: list[Quadratic] = []
    facts: dict[str, Any] = {}
    if holding.ewc and holding.ewc_strength:
        importance, facts = _importance(model, holding, tokenizer, set(start))
        parts.append(Quadratic(holding.ewc_strength, start, importance))
    elif holding.ewc or holding.ewc_strength:
        raise ConfigError("--ewc FISHER and --ewc-strength S go together: give both, the strength above 0.")
    if holding.l2_to_base:
        parts.append(Quadratic(holding.l2_to_base, start))
    if holding.anneal:
        if not parts or holding.l1_to_base:
            raise ConfigError(
                "--anneal lets go of a quadratic hold: give --ewc with --ewc-strength or --l2-to-base, and no "
                "--l1-to-base."
            )
        at = holding.anneal_at if holding.anneal_at >= 1 else holding.anneal_at * steps
        return Held(pull=Annealed(tuple(parts), holding.anneal, at), facts=facts)
    every: list[Penalty] = [*parts, *([Absolute(holding.l1_to_base, start)] if holding.l1_to_base else [])]
    return Held(every[0] if len(every) == 1 else Together(every) if every else None, None, facts)


def make_penalty(model: nn.Module, holding: Holding) -> tuple[Penalty | None, dict[str, Any]]:
    """The penalty anchored at the model's weights as they are now, and what there is to say about it."""
    held = hold(model, holding)
    return held.penalty, dict(held.facts)


def _importance(
    model: nn.Module, holding: Holding, tokenizer: str | None, held: Set[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The Fisher information of every weight in `held` that has one, under the model's own names.

    Normalised: every file is scaled to mean 1 over the weights it holds before they are added, and the sum again.
    """
    own = {id(p): n for n, p in trainable(model).items() if n in held}
    names = {n: own[id(p)] for n, p in tree.named(model).items() if id(p) in own}
    total: dict[str, Tensor] = {}
    kinds: dict[str, Path] = {}
    each = holding.ewc_scale == "normalised" and len(holding.ewc) > 1
    for path in holding.ewc:
        whole, manifest = read_fisher(path, model, tokenizer)
        found = {n: v for n, v in whole.items() if n in names}
        kinds.setdefault(SAME_KIND.get(str(manifest.get("kind")), str(manifest.get("kind"))), path)
        if len(kinds) > 1:
            (one, first), (other, second) = list(kinds.items())[:2]
            raise TreeError(
                f"The Fisher files '{first}' (kind {one}) and '{second}' (kind {other}) measure different things and "
                "cannot be added. Make both with one --kind."
            )
        factor = 1.0 / _mean(found, [path]) if each else 1.0
        total = {n: v * holding.ewc_decay for n, v in total.items()}
        for name, value in found.items():
            total[name] = value * factor + total[name] if name in total else value * factor
    mean = _mean(total, holding.ewc)
    factor = 1.0 / mean if holding.ewc_scale == "normalised" else 1.0
    importance = {names[n]: value * factor for n, value in total.items()}
    facts = {
        "ewc_mean": mean,
        "ewc_effective": holding.ewc_strength * factor,
        "ewc_held": sum(v.numel() for v in importance.values()),
    }
    return importance, facts


def _mean(values: Named, paths: Sequence[Path]) -> float:
    mean = float(sum(v.double().sum() for v in values.values()) / max(1, sum(v.numel() for v in values.values())))
    if not mean > 0:
        raise TreeError(f"The Fisher information in {', '.join(map(str, paths))} is zero everywhere: nothing is held.")
    return mean


def read_fisher(path: Path, model: nn.Module, tokenizer: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a Fisher file says about this model, and its manifest; checked by family, tokenizer, name and shape."""
    values, manifest = tree.load(fisher_file(path))
    if manifest.get("artefact") != "fisher":
        raise TreeError(
            f"'{path}' is no Fisher file (it says '{manifest.get('artefact', 'nothing')}'). `budwood fisher` makes one."
        )
    parameters = tree.named(model)
    made = f"it was made from '{manifest.get('model')}' on '{manifest.get('task')}'"
    for name, value in values.items():
        _check_tensor(path, made, name, value, parameters)
    lost = [n for n in parameters if not n.startswith((tree.HEAD, "pooler.")) and n not in values]
    if lost:
        raise TreeError(
            f"The Fisher file '{path}' says nothing about '{lost[0]}' and {len(lost) - 1:,} more of this model's "
            f"{len(parameters):,} tensors ({made}). Make the Fisher from this model."
        )
    family = getattr(getattr(model, "config", None), "model_type", None)
    if manifest.get("model_type") and family and manifest["model_type"] != family:
        raise TreeError(
            f"The Fisher file '{path}' is of a {manifest['model_type']} and this model is a {family} ({made}). Weights "
            "of the same name do other work there: make the Fisher from this model."
        )
    if tokenizer and manifest.get("tokenizer") and manifest["tokenizer"] != tokenizer:
        raise TreeError(
            f"The Fisher file '{path}' was made with another tokenizer ({made}): row 7 of its "
            f"'{next(iter(parameters))}' is another word than here. Make the Fisher from this model."
        )
    like = likeness(manifest.get("sketch") or {}, parameters)
    if like < KIN:
        raise TreeError(
            f"The Fisher file '{path}' is of other weights of the same shape ({made}): they correlate with this "
            f"model's by {like:.2f}, those of one trained from it by more than {KIN}. Make the Fisher from this model."
        )
    return {n: v for n, v in values.items() if n in parameters and parameters[n].shape == v.shape}, manifest


def _check_tensor(path: Path, made: str, name: str, value: Tensor, parameters: Named) -> None:
    """Refuse one tensor that this model lacks or has in another shape, or that is no Fisher information."""
    if name.startswith((tree.HEAD, "pooler.")) and (name not in parameters or parameters[name].shape != value.shape):
        return  # the head of another task on the same backbone
    if name not in parameters:
        raise TreeError(
            f"The Fisher file '{path}' has '{name}', which this model lacks ({made}).{nearest(name, parameters)}"
        )
    if parameters[name].shape != value.shape:
        raise TreeError(
            f"The Fisher file '{path}' has '{name}' of shape {tuple(value.shape)}, this model of "
            f"{tuple(parameters[name].shape)} ({made}). Use the Fisher of a model of this architecture."
        )
    if not bool(torch.isfinite(value).all()) or bool((value < 0).any()):
        raise TreeError(
            f"The Fisher file '{path}' has numbers in '{name}' that are negative or not finite. Make it again."
        )


def fisher_file(path: Path) -> Path:
    """A Fisher file given as itself or as its run."""
    inner = path / "fisher.safetensors"
    if inner.is_file():
        return inner
    if not path.is_file():
        raise TreeError(f"There is no Fisher file '{path}'. Give a run of `budwood fisher` or its fisher.safetensors.")
    return path

"""Penalties that hold a model near where it began: value and gradient by hand, nothing of them is saved with the model.

A penalty is called after the backward pass, adds its gradient to the gradients in place and returns its value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from budwood.errors import ConfigError, TreeError, nearest
from budwood.params import tree
from budwood.train.fit import Penalty, trainable

Named = Mapping[str, Tensor]


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
                if self.importance is not None and name not in self.importance:
                    continue
                delta = params[name] - self.anchor[name]
                pull = delta if self.importance is None else delta * self.importance[name]
                value += float((pull * delta).sum())
                grad.add_(pull, alpha=self.strength)
        return 0.5 * self.strength * value


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
    """What holds the weights: strengths of each penalty and the Fisher files of EWC."""

    ewc: tuple[Path, ...] = ()
    ewc_strength: float = 0.0
    ewc_scale: str = "normalised"
    ewc_decay: float = 1.0
    l2_to_base: float = 0.0
    l1_to_base: float = 0.0


def make_penalty(model: nn.Module, holding: Holding) -> tuple[Penalty | None, dict[str, Any]]:
    """The penalty anchored at the model's weights as they are now, and what there is to say about it."""
    start = {n: p.detach().clone() for n, p in trainable(model).items()}
    parts: list[Penalty] = []
    facts: dict[str, Any] = {}
    if holding.ewc and holding.ewc_strength:
        importance, facts = _importance(model, holding)
        parts.append(Quadratic(holding.ewc_strength, start, importance))
    elif holding.ewc or holding.ewc_strength:
        raise ConfigError("--ewc FISHER and --ewc-strength S go together: give both, the strength above 0.")
    if holding.l2_to_base:
        parts.append(Quadratic(holding.l2_to_base, start))
    if holding.l1_to_base:
        parts.append(Absolute(holding.l1_to_base, start))
    if not parts:
        return None, facts
    return (parts[0] if len(parts) == 1 else Together(parts)), facts


def _importance(model: nn.Module, holding: Holding) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The Fisher information of every trained weight that has one, under the model's own names."""
    total: dict[str, Tensor] = {}
    for path in holding.ewc:
        found = read_fisher(path, model)
        for name, value in found.items():
            total[name] = total[name] * holding.ewc_decay + value if name in total else value.clone()
    mean = float(sum(v.double().sum() for v in total.values()) / sum(v.numel() for v in total.values()))
    if not mean > 0:
        raise TreeError(
            f"The Fisher information in {', '.join(map(str, holding.ewc))} is zero everywhere: nothing is held."
        )
    factor = 1.0 / mean if holding.ewc_scale == "normalised" else 1.0
    own = {id(p): n for n, p in trainable(model).items()}
    importance = {own[id(p)]: total[n] * factor for n, p in tree.named(model).items() if n in total and id(p) in own}
    facts = {
        "ewc_mean": mean,
        "ewc_effective": holding.ewc_strength * factor,
        "ewc_held": sum(v.numel() for v in importance.values()),
    }
    return importance, facts


def read_fisher(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """What a Fisher file says about this model, checked by name and shape; one of another architecture is refused."""
    values, manifest = tree.load(_file(path))
    if manifest.get("artefact") != "fisher":
        raise TreeError(
            f"'{path}' is no Fisher file (it says '{manifest.get('artefact', 'nothing')}'). `budwood fisher` makes one."
        )
    parameters = tree.named(model)
    made = f"it was made from '{manifest.get('model')}' on '{manifest.get('task')}'"
    for name, value in values.items():
        if name.startswith((tree.HEAD, "pooler.")) and (
            name not in parameters or parameters[name].shape != value.shape
        ):
            continue  # the head of another task on the same backbone
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
    lost = [n for n in parameters if not n.startswith((tree.HEAD, "pooler.")) and n not in values]
    if lost:
        raise TreeError(f"The Fisher file '{path}' says nothing about '{lost[0]}' and {len(lost) - 1} more ({made}).")
    return {n: v for n, v in values.items() if n in parameters and parameters[n].shape == v.shape}


def _file(path: Path) -> Path:
    """A Fisher file given as itself or as its run."""
    inner = path / "fisher.safetensors"
    if inner.is_file():
        return inner
    if not path.is_file():
        raise TreeError(f"There is no Fisher file '{path}'. Give a run of `budwood fisher` or its fisher.safetensors.")
    return path

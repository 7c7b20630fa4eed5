"""Values put into a model for a while, and what training may change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from budwood.errors import TreeError, nearest
from budwood.params.tree import Tree, named


def assign(model: nn.Module, tree: Tree) -> None:
    """Copy values into the model's parameters of the same names, for good."""
    parameters = named(model)
    for name, value in tree.items():
        if name not in parameters:
            raise TreeError(
                f"The model has no parameter '{name}' ({len(parameters):,} others).{nearest(name, parameters)} "
                "The values must come from the same architecture."
            )
        if parameters[name].shape != value.shape:
            raise TreeError(
                f"'{name}' has shape {tuple(parameters[name].shape)} in the model and {tuple(value.shape)} in the "
                "values given. The values must come from the same architecture."
            )
    with torch.no_grad():
        for name, value in tree.items():
            parameters[name].copy_(value)


@contextlib.contextmanager
def applied(model: nn.Module, tree: Tree) -> Iterator[nn.Module]:
    """The model with the values of `tree`; the old ones come back at the end, also after an exception."""
    parameters = named(model)
    old = {name: parameters[name].detach().clone() for name in tree if name in parameters}
    assign(model, tree)
    try:
        yield model
    finally:
        assign(model, old)


@contextlib.contextmanager
def requiring_grad(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Only the named parameters require gradients inside the block; the old flags come back at the end."""
    parameters = named(model)
    unknown = [n for n in names if n not in parameters]
    if unknown:
        raise TreeError(f"The model has no parameter '{unknown[0]}'.{nearest(unknown[0], parameters)}")
    old = {n: p.requires_grad for n, p in parameters.items()}
    wanted = set(names)
    try:
        for n, p in parameters.items():
            p.requires_grad_(n in wanted)
        yield
    finally:
        for n, p in parameters.items():
            p.requires_grad_(old[n])

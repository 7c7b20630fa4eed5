"""Activations: the embedding output and the output of every block, from one forward pass.

Shapes: B examples, T tokens, D hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from budwood.models.mode import in_mode
from budwood.models.sites import model_inputs, run, sites


@contextlib.contextmanager
def activations(model: nn.Module) -> Iterator[list[Tensor]]:
    """A list that every forward pass inside the block fills anew with n_layers + 1 tensors [B, T, D].

    Entry l is what block l reads (0: the embedding output), the last what the backbone returns, after its final norm
    where it has one; the convention of Hugging Face's `output_hidden_states`. A block shared by all layers gives one
    entry per use.
    """
    place = sites(model)
    states: list[Tensor] = []

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.clear()

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    def end(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        states.append(output[0])

    handles = [place.backbone.register_forward_pre_hook(begin, with_kwargs=True)]
    handles += [block.register_forward_pre_hook(enter, with_kwargs=True) for _, block in place.blocks]
    handles.append(place.backbone.register_forward_hook(end, with_kwargs=True))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def collect(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """n_layers + 1 float32 tensors [B, T, D] of a batch, in evaluation mode and without gradients."""
    with in_mode(model, training=False), torch.no_grad(), activations(model) as states:
        run(sites(model).backbone, model_inputs(model, inputs))
    return [s.float() for s in states]

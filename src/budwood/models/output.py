"""The last step of a language model: the state f at a place, and the output embedding that turns it into logits.

Shapes: B examples, T tokens, M places, D width of f, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from budwood.errors import ModelError
from budwood.linalg.vocabulary import Vocabulary
from budwood.models.sites import model_inputs, run, sites, unwrapped


class _Reached(Exception):
    """The state is known: the logits behind it are not needed."""


def output_module(model: nn.Module) -> Any:
    """The module whose weight is the output embedding."""
    inner: Any = unwrapped(model)
    found = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if found is None or getattr(found, "weight", None) is None:
        raise ModelError(
            f"A {type(inner).__name__} has no output embedding to read words from. Use a language model with its head, "
            "or the features `f` alone."
        )
    return found


def is_tied(model: nn.Module) -> bool:
    """Whether the output embedding is the input embedding."""
    inner: Any = unwrapped(model)
    return output_module(model).weight is inner.get_input_embeddings().weight


def vocabulary_of(model: nn.Module) -> Vocabulary:
    """Output embedding and bias, tied to the input embedding or not."""
    module = output_module(model)
    bias = getattr(module, "bias", None)
    return Vocabulary(module.weight.detach(), None if bias is None else bias.detach())


def states_at(model: nn.Module, inputs: Mapping[str, Tensor], rows_M: Tensor, positions_M: Tensor) -> Tensor:
    """state_MD: what the output embedding reads at M places, after the final norm or the transform of a masked head."""
    place = sites(model)
    fit = model_inputs(model, inputs)
    rows_M, positions_M = (x.to(fit["input_ids"].device) for x in (rows_M, positions_M))
    if place.lm_head is not None:
        hidden_MD = run(place.backbone, fit)[0][rows_M, positions_M]
        with _stopped(model) as seen:
            place.lm_head(hidden_MD)
        return _only(seen, model)
    with _stopped(model) as seen:
        run(model, fit)
    return _only(seen, model)[rows_M, positions_M]


def _only(seen: list[Tensor], model: nn.Module) -> Tensor:
    if not seen:
        raise ModelError(
            f"The output embedding of a {type(unwrapped(model)).__name__} is not called as a module, so the state "
            "before it cannot be read. Models of the families listed in the documentation work."
        )
    return seen[0]


@contextlib.contextmanager
def _stopped(model: nn.Module) -> Iterator[list[Tensor]]:
    """A pass inside the block ends at the output embedding; the list gets what it was given."""
    seen: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0])
        raise _Reached

    handle = output_module(model).register_forward_pre_hook(enter)
    try:
        with contextlib.suppress(_Reached):
            yield seen
    finally:
        handle.remove()

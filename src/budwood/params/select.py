"""Selections: parameter names by glob pattern, and the named presets of freezing."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from torch import nn

from budwood.errors import TreeError, nearest
from budwood.params.tree import HEAD, named

PRESETS = ("embeddings", "head", "layers:K", "bias")


def matching(names: Iterable[str], include: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> tuple[str, ...]:
    """Names that match any of `include` and none of `exclude`, in their own order.

    A pattern that matches nothing is an error: it is a misspelling far more often than a wish.

    >>> matching(["a.weight", "a.bias", "b.weight"], ["*.weight"], ["b.*"])
    ('a.weight',)
    """
    every = tuple(names)
    for pattern in (*include, *exclude):
        if not fnmatch.filter(every, pattern):
            raise TreeError(
                f"The pattern '{pattern}' matches none of {len(every):,} names (such as {_examples(every)})."
                f"{nearest(pattern.strip('*'), every)} Patterns are globs over whole names: '*' stands for any text."
            )
    kept = tuple(
        n
        for n in every
        if any(fnmatch.fnmatchcase(n, p) for p in include) and not any(fnmatch.fnmatchcase(n, p) for p in exclude)
    )
    if not kept:
        raise TreeError(
            f"The patterns {list(include)} without {list(exclude)} leave none of {len(every):,} parameters."
        )
    return kept


def _examples(names: Sequence[str]) -> str:
    return ", ".join(f"'{n}'" for n in names[:: max(1, len(names) // 3)][:3])


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias (of a linear layer, a norm or a language-model head)."""
    return name.rsplit(".", 1)[-1].endswith("bias")


def layer_of(name: str) -> int | None:
    """The number of the block a canonical name lies in: its first component that is a number.

    >>> layer_of("encoder.layer.3.output.dense.weight"), layer_of("embeddings.LayerNorm.bias")
    (3, None)
    """
    if name.startswith(HEAD):
        return None
    found = re.search(r"(?:^|\.)(\d+)\.", name)
    return int(found.group(1)) if found else None


def is_embedding(name: str) -> bool:
    """Whether a canonical name lies in the embeddings: in the backbone and named so.

    >>> is_embedding("wte.weight"), is_embedding("embeddings.LayerNorm.weight")
    (True, True)
    >>> is_embedding("pooler.dense.weight")
    False
    """
    if name.startswith(HEAD) or layer_of(name) is not None:
        return False
    return bool(re.search(r"(^|[._])(embeddings?|embed|embed_tokens|embed_in|wte|wpe)([._]|$)", name))


def preset(names: Iterable[str], wish: str) -> tuple[str, ...]:
    """The names behind one preset: "embeddings", "head", "layers:K" (embeddings not included), "bias".

    >>> preset(["encoder.layer.0.w", "encoder.layer.1.w", "head.w"], "layers:1")
    ('encoder.layer.0.w',)
    """
    every = tuple(names)
    if wish == "embeddings":
        found = tuple(n for n in every if is_embedding(n))
    elif wish == "head":
        found = tuple(n for n in every if n.startswith(HEAD))
    elif wish == "bias":
        found = tuple(n for n in every if is_bias(n))
    elif wish.startswith("layers:"):
        found = _first_layers(every, wish)
    else:
        return matching(every, [wish])
    if not found:
        raise TreeError(f"'{wish}' matches no parameter of this model (it has {_examples(every)}, ...).")
    return found


def _first_layers(names: Sequence[str], wish: str) -> tuple[str, ...]:
    layers = {layer for n in names if (layer := layer_of(n)) is not None}
    count = wish.removeprefix("layers:")
    if not count.isdigit() or not 0 < int(count) <= len(layers):
        raise TreeError(
            f"'{wish}' cannot be used: after 'layers:' comes how many of the first blocks, from 1 to {len(layers)} "
            "here (a model that shares one block between its layers has 1)."
        )
    return tuple(n for n in names if (layer := layer_of(n)) is not None and layer < int(count))


def trainable_names(model: nn.Module, freeze: Sequence[str] = (), train_only: Sequence[str] = ()) -> tuple[str, ...]:
    """Canonical names left to train after `--freeze` and `--train-only` (presets or glob patterns).

    With `train_only`, fresh heads are included by naming them: `--train-only bias,head`.
    """
    every = tuple(named(model))
    frozen = {n for wish in freeze for n in preset(every, wish)}
    only = {n for wish in train_only for n in preset(every, wish)} if train_only else set(every)
    left = tuple(n for n in every if n in only and n not in frozen)
    if not left:
        raise TreeError(
            f"Nothing is left to train: --freeze {','.join(freeze) or '-'} and --train-only "
            f"{','.join(train_only) or '-'} exclude every parameter."
        )
    return left

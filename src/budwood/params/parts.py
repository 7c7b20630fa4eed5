"""Parts of a model by name: which layer a weight is in, and what it does there."""

from __future__ import annotations

import re

from budwood.params.select import is_bias, is_embedding, layer_of
from budwood.params.tree import HEAD


def layer_name(name: str) -> str:
    """The layer of a canonical name: embeddings, block.N or head.

    >>> layer_name("encoder.layer.3.output.dense.weight"), layer_name("head.classifier.bias")
    ('block.3', 'head')
    """
    layer = layer_of(name)
    return f"block.{layer}" if layer is not None else "head" if name.startswith((HEAD, "pooler.")) else "embeddings"


def layer_order(name: str) -> tuple[int, int]:
    """A sort key that puts embeddings first, then blocks by number, then the head."""
    return ({"embeddings": 0, "head": 2}.get(name, 1), int(name.split(".")[1]) if "." in name else 0)


def module_name(name: str) -> str:
    """What a weight does: embeddings, attention, mlp, norm, bias or head.

    >>> module_name("encoder.layer.0.attention.self.query.weight"), module_name("h.1.mlp.c_fc.weight")
    ('attention', 'mlp')
    """
    if name.startswith((HEAD, "pooler.")):
        return "head"
    if re.search(r"norm|(^|\.)ln_", name.lower()):
        return "norm"
    if is_bias(name):
        return "bias"
    if is_embedding(name):
        return "embeddings"
    return "attention" if is_attention(name) else "mlp" if layer_of(name) is not None else "embeddings"


def is_attention(name: str) -> bool:
    """Whether a weight is one of the projections of an attention layer.

    >>> is_attention("transformer.layer.0.attention.q_lin.weight"), is_attention("encoder.layer.0.output.dense.weight")
    (True, False)
    """
    return (
        layer_of(name) is not None
        and bool(re.search(r"(^|[._])(self_)?att(n|ention)([._]|$)", name))
        and name.endswith("weight")
        and not re.search(r"norm", name.lower())
    )

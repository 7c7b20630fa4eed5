"""Where in a model the weights of a graft lie: layer x module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from budwood.params.select import is_embedding, layer_of

MODULES = (  # first match wins
    (r"LayerNorm|layer_norm|layernorm|\bln_\w+|sa_layer_norm|input_layernorm|post_attention_layernorm|norm\b", "norm"),
    (r"c_attn|query_key_value", "query-key-value"),
    (r"query|q_lin|q_proj", "query"),
    (r"key|k_lin|k_proj", "key"),
    (r"value|v_lin|v_proj", "value"),
    (r"attention\.output|out_lin|o_proj|attn\.c_proj|attention\.dense", "attention out"),
    (r"intermediate|lin1|c_fc|up_proj|gate_proj|dense_h_to_4h|ffn\.weight|ffn\.bias", "MLP in"),
    (r"output|lin2|c_proj|down_proj|dense_4h_to_h|ffn_output", "MLP out"),
)


def module_of(name: str) -> str:
    """What a tensor is in its block.

    >>> module_of("encoder.layer.0.attention.self.query.weight"), module_of("h.1.mlp.c_proj.bias")
    ('query', 'MLP out')
    >>> module_of("layers.0.attention.query_key_value.weight")
    'query-key-value'
    """
    return next((word for pattern, word in MODULES if re.search(pattern, name)), "other")


def row_of(name: str) -> str:
    """The row of the map a tensor lies in: its layer's number, "embeddings" or "head"."""
    layer = layer_of(name)
    return str(layer) if layer is not None else "embeddings" if is_embedding(name) else "head"


def share_map(counts: Mapping[str, int], sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """One row per layer and module: weights of the graft there, their share of the graft, and of the tensors."""
    cells: dict[tuple[str, str], list[int]] = {}
    for name, size in sizes.items():
        cell = cells.setdefault((row_of(name), module_of(name)), [0, 0])
        cell[0] += counts.get(name, 0)
        cell[1] += size
    total = sum(counts.values()) or 1
    return [
        {"layer": layer, "module": module, "weights": n, "share": n / total, "of": size, "density": n / size}
        for (layer, module), (n, size) in cells.items()
    ]

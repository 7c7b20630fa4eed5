"""How far fine-tuned models have moved from their base: distance and direction by layer, and a map of weight rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from budwood.config.compare import WeightsCompareConfig
from budwood.data.batch import seed_of
from budwood.errors import ConfigError
from budwood.figures.overlap import movement_by_layer, rows_map
from budwood.figures.save import panels, save
from budwood.methods.session import Session
from budwood.models.load import load_backbone
from budwood.params import tree
from budwood.params.parts import is_attention, layer_name, layer_order
from budwood.params.select import layer_of

Named = Mapping[str, Tensor]


def weights_compare(session: Session) -> dict[str, Any]:
    """Relative movement and cosine by layer of every model against the first; t-SNE of attention rows by block."""
    cfg: WeightsCompareConfig = session.cfg
    if len(session.models) < 2:
        raise ConfigError("`weights compare` needs a base and at least one model made from it.")
    names = _names([m.name for m in session.models])
    trees = [_backbone(load_backbone(m)) for m in session.models]
    for model, other in zip(session.models[1:], trees[1:]):
        tree.check(trees[0], other, (f"'{session.models[0].text}'", f"'{model.text}'"))
    moved = [row for name, other in zip(names[1:], trees[1:]) for row in movement(name, trees[0], other)]
    blocks = sorted({b for n in trees[0] if (b := layer_of(n)) is not None})
    unknown = [b for b in cfg.layers if b not in blocks]
    if unknown:
        raise ConfigError(
            f"--layers names block {unknown[0]}; the blocks here are {blocks[0]} to {blocks[-1]}. Choose among them."
        )
    chosen = list(cfg.layers) or list(dict.fromkeys((blocks[0], blocks[-1])))
    with panels(1, 6.4, 3.6) as axes:
        save(axes[0].figure, session.run.file("figures", "movement"), movement_by_layer(axes[0], moved))
    table: dict[str, list[Any]] = {}
    with panels(len(chosen), 4.2, 3.8) as axes:
        for ax, block in zip(axes, chosen):
            at_MP2 = tsne(
                [_rows(t, block) for t in trees], cfg.points, cfg.perplexity, seed_of(cfg.seed, "tsne", block)
            )
            part = rows_map(ax, names, at_MP2, block, [r for r in moved if r["layer"] == f"block.{block}"])
            table = {k: [*table.get(k, []), *v] for k, v in part.items()}
        save(axes[0].figure, session.run.file("figures", "tsne"), table)
    return {"names": names, "layers": chosen, "movement": moved, "points": cfg.points, "perplexity": cfg.perplexity}


def _names(names: Sequence[str]) -> list[str]:
    return [n if names.count(n) == 1 else f"{n} ({i})" for i, n in enumerate(names)]


def _backbone(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in tree.named(model).items() if not n.startswith((tree.HEAD, "pooler."))}


def movement(name: str, base: Named, other: Named) -> list[dict[str, Any]]:
    """||other - base|| / ||base|| and cosine of every layer."""
    parts: dict[str, list[str]] = {}
    for n in base:
        parts.setdefault(layer_name(n), []).append(n)
    rows = []
    for layer in sorted(parts, key=layer_order):
        a, b = ({n: t[n] for n in parts[layer]} for t in (base, other))
        size = tree.norm(a)
        rows.append(
            {
                "model": name,
                "layer": layer,
                "moved": tree.norm(tree.sub(b, a)) / size if size else 0.0,
                "cosine": tree.dot(a, b) / (size * tree.norm(b)) if size and tree.norm(b) else 0.0,
            }
        )
    return rows


def _rows(values: Named, block: int) -> np.ndarray:
    """Rows of the attention weights of a block, one under the other; matrices of another width than the first are left.

    Conv1D stores its matrices the other way round, which changes which vectors are called rows in every model alike.
    """
    parts = [v for n, v in sorted(values.items()) if layer_of(n) == block and is_attention(n)]
    return torch.cat([v for v in parts if v.shape[1] == parts[0].shape[1]]).numpy()


def tsne(rows: Sequence[np.ndarray], points: int, perplexity: float, seed: int) -> np.ndarray:
    """at_MP2: P rows of each of M models in the plane, fitted together; scaled as the base's columns are."""
    from sklearn.manifold import TSNE

    rng = np.random.default_rng(seed)
    index = np.sort(rng.choice(len(rows[0]), min(points, len(rows[0])), replace=False))
    mean, spread = rows[0].mean(0), rows[0].std(0)
    data = np.concatenate([(r[index] - mean) / np.where(spread > 0, spread, 1.0) for r in rows])
    fitted = TSNE(
        2, perplexity=min(perplexity, (len(data) - 1) / 3), init="pca", random_state=seed % 2**32, method="barnes_hut"
    ).fit_transform(data.astype(np.float64))
    return fitted.reshape(len(rows), len(index), 2)

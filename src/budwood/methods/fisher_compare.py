"""Several Fishers of one architecture side by side: do the weights that matter to one skill matter to the others?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from budwood.config.compare import FisherCompareConfig
from budwood.errors import ConfigError, TreeError
from budwood.figures.overlap import importance_at_top, shares_by_layer
from budwood.figures.save import panels, save
from budwood.methods.session import Session
from budwood.params import tree
from budwood.params.parts import is_attention, layer_name, layer_order, module_name
from budwood.params.select import layer_of
from budwood.train.penalty import SAME_KIND, fisher_file

Named = Mapping[str, Tensor]
# what Fishers must share to be compared, by the manifest's word: what to call it, and what to do where it differs
ALIKE = {
    "model_type": ("models", "Compare Fishers of one model, or of models tuned from it."),
    "tokenizer": ("tokenizers", "Compare Fishers of one model, or of models tuned from it."),
    "kind": ("kinds", "Make one of them again with the other's --kind (exact and sampled count as one)."),
}


def fisher_compare(session: Session) -> dict[str, Any]:
    """Overlap of the heaviest attention weights by block, and mass by layer and module; writes two figures."""
    cfg: FisherCompareConfig = session.cfg
    names, trees = read_all(cfg.fishers)
    blocks = blocks_of(trees[0])
    chosen = chosen_blocks(cfg.layers, blocks)
    overlap = [
        row for block in blocks for row in overlaps(names, [_attention(t, block) for t in trees], block, cfg.top)
    ]
    mass = {name: shares(t, layer_name) for name, t in zip(names, trees)}
    with panels(len(chosen), 4.2, 3.4) as axes:
        table: dict[str, list[Any]] = {}
        for ax, block in zip(axes, chosen):
            part = importance_at_top(ax, names, [_attention(t, block) for t in trees], cfg.top, f"block {block}")
            table = {k: [*table.get(k, []), *v] for k, v in part.items()}
        save(axes[0].figure, session.run.file("figures", "overlap"), table)
    with panels(1, 6.4, 3.4) as axes:
        save(axes[0].figure, session.run.file("figures", "mass"), shares_by_layer(axes[0], mass))
    return {
        "fishers": dict(zip(names, map(str, cfg.fishers))),
        "top": cfg.top,
        "layers": chosen,
        "overlap": overlap,
        "mass": {n: {"by_layer": mass[n], "by_module": shares(t, module_name)} for n, t in zip(names, trees)},
    }


def read_all(paths: Sequence[Path]) -> tuple[list[str], list[dict[str, Tensor]]]:
    """Short names and backbone parts of Fisher files; files that do not belong together are refused by name."""
    if len(paths) < 2:
        raise ConfigError(f"{len(paths)} Fisher runs were given; a comparison needs two or more.")
    trees, notes = [], []
    for path in paths:
        values, manifest = tree.load(fisher_file(path))
        if manifest.get("artefact") != "fisher":
            raise TreeError(f"'{path}' is no Fisher file. `budwood fisher` makes one.")
        notes.append({**manifest, "kind": SAME_KIND.get(str(manifest.get("kind")), manifest.get("kind"))})
        trees.append({n: v for n, v in values.items() if not n.startswith((tree.HEAD, "pooler."))})
        for key, (word, remedy) in ALIKE.items():
            if notes[-1].get(key) != notes[0].get(key):
                raise TreeError(
                    f"'{paths[0]}' and '{path}' are Fishers of different {word} ({notes[0].get(key)} and "
                    f"{notes[-1].get(key)}); a comparison needs the same one. {remedy}"
                )
        tree.check(trees[0], trees[-1], (f"'{paths[0]}'", f"'{path}'"))
    names = [str(n.get("task", p.name)) for n, p in zip(notes, paths)]
    return [n if names.count(n) == 1 else f"{n} ({p.name})" for n, p in zip(names, paths)], trees


def blocks_of(values: Named) -> list[int]:
    """The numbers of all blocks."""
    return sorted({b for n in values if (b := layer_of(n)) is not None})


def chosen_blocks(wish: Sequence[int], blocks: Sequence[int]) -> list[int]:
    """The blocks asked for, else the first and the last."""
    unknown = [b for b in wish if b not in blocks]
    if unknown:
        raise ConfigError(
            f"--layers names block {unknown[0]}; the blocks here are {blocks[0]} to {blocks[-1]}. Choose among them."
        )
    return list(wish) or list(dict.fromkeys((blocks[0], blocks[-1])))


def _attention(values: Named, block: int) -> Tensor:
    parts = [v.flatten() for n, v in sorted(values.items()) if layer_of(n) == block and is_attention(n)]
    if not parts:
        raise TreeError(f"Block {block} has no attention weights under a name that is known here.")
    return torch.cat(parts)


def overlaps(names: Sequence[str], flat: Sequence[Tensor], block: int, top: int) -> list[dict[str, Any]]:
    """Of the `top` heaviest entries of the first: how many are so in the others too, and how heavy they are there.

    `times_chance` is the overlap over top / size; `ratio` the mean at those entries over the mean elsewhere.
    """
    k = min(top, len(flat[0]))
    first = flat[0].topk(k).indices
    inside = torch.zeros(len(flat[0]), dtype=torch.bool)
    inside[first] = True
    chance = k / len(flat[0])
    rows = []
    for name, other in zip(names[1:], flat[1:]):
        both = float(inside[other.topk(k).indices].sum()) / k
        at, elsewhere = (
            float(other[inside].double().mean()),
            float(other[~inside].double().mean()) if k < len(other) else 0.0,
        )
        rows.append(
            {
                "layer": block,
                "of": names[0],
                "in": name,
                "overlap": both,
                "chance": chance,
                "times_chance": both / chance,
                "mean_at_top": at,
                "mean_elsewhere": elsewhere,
                "ratio": at / elsewhere if elsewhere else None,
            }
        )
    return rows


def shares(values: Named, part_of: Any) -> dict[str, float]:
    """Share of the whole mass by part, in the order of the model."""
    mass: dict[str, float] = {}
    for name, value in values.items():
        mass[part_of(name)] = mass.get(part_of(name), 0.0) + float(value.double().sum())
    total = sum(mass.values()) or 1.0
    order = sorted(mass, key=layer_order) if part_of is layer_name else sorted(mass)
    return {k: mass[k] / total for k in order}

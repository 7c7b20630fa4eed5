"""Training rows as the strongest outer products of their gradients: what an index with --entry products keeps.

The gradient of a row in one map is a sum of one outer product per position, so its own few strongest ones tell more of
it than as many numbers at places that are fixed for all rows. They are taken in the metric x yᵀ, the outer product
nearest to the root of the weights w = 1 / (curvature + damping): a score is sum_j s_j l_jᵀ (u w / (x yᵀ)) r_j.

index/
  products.npy             [.] float16, map after map the unit vectors (l, r) of its products
  products.safetensors     per map: strength s, the feature each product belongs to
  rest.npy                 see entries.py
Shapes: B rows, J products of one map, R products of one row and map, O out, I in (with the bias's 1), X products of a
row in all maps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from budwood.capture.gradients import Question
from budwood.capture.stream import Map, Sides
from budwood.data.batch import Features
from budwood.linalg.kron import outer_
from budwood.linalg.lowrank import outer_products, separable_root
from budwood.methods.influence.moments import Basis, Turner
from budwood.methods.influence.workshop import Shop, sweep
from budwood.params import tree

CACHED = 1 << 18  # numbers turned to float32 at a time: they are used while still in cache
EVERY = 1 << 62  # numbers: all products are kept
BESIDE = 4  # 16-bit numbers of a product besides its two vectors: strength and row


@dataclass(frozen=True)
class Metric:
    """What gradients are turned and weighed by."""

    bases: Mapping[str, Basis]
    weights: Mapping[str, Tensor]

    @cached_property
    def roots(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(x_O, y_I) of every map."""
        return {name: separable_root(w) for name, w in self.weights.items()}

    def asked(self, name: str, grad_OI: Tensor) -> Tensor:
        """A query's gradient in the eigenbasis as it meets the products of rows."""
        x_O, y_I = self.roots[name]
        return grad_OI.float() * self.weights[name] / (x_O[:, None] * y_I)


Found = tuple[Tensor, Tensor, Tensor]


def products_of(
    shop: Shop, features: Features, order: np.ndarray, question: Question, metric: Metric, numbers: int, most: int
) -> tuple[dict[str, Tensor], Tensor, dict[str, float]]:
    """The strongest products of every row at `order`, at most so many numbers each: ("sides/map" [J, O + I],
    "strength/map" [J], "row/map" [J] places in `order`; squared lengths norm_B; how much of the squared strengths is
    kept, and all of it).
    """
    place = {int(n): i for i, n in enumerate(order)}
    norm_B = torch.zeros(len(order), dtype=torch.float64)
    parts: dict[str, list[Tensor]] = {}
    for m in shop.maps:  # a shard whose rows are all left out still has every tensor
        parts[f"sides/{m.name}"] = [torch.zeros(0, m.out + m.columns, dtype=torch.float16)]
        parts[f"strength/{m.name}"] = [torch.zeros(0)]
        parts[f"row/{m.name}"] = [torch.zeros(0, dtype=torch.int32)]
    kept = whole = 0.0
    turner = Turner(metric.bases)
    for index in shop.batches(features, order, most=most):
        found: dict[str, Found] = {}
        square_B = torch.zeros(len(index), dtype=torch.float64)

        def use(_: int, m: Map, s: Sides, found: dict[str, Found] = found, square_B: Tensor = square_B) -> None:
            g_BTO, a_BTI = turner(m, *s.live())
            grad_BOI = outer_(g_BTO.new_empty(len(g_BTO), m.out, m.columns), g_BTO, a_BTI)
            square_B[: len(g_BTO)] += (grad_BOI.square_() * metric.weights[m.name]).sum((1, 2)).double()
            x_O, y_I = metric.roots[m.name]
            found[m.name] = outer_products(g_BTO.float() * x_O, a_BTI.float() * y_I)

        took = sweep(shop, features, index, lambda batch: (question,), use)
        turner.forget()
        if not len(took):
            continue
        at_B = torch.tensor([place[int(n)] for n in took], dtype=torch.int32)
        norm_B[at_B.long()] = square_B[: len(took)]
        for name, keep_BR in strongest(found, numbers).items():
            left_BRO, strength_BR, right_BRI = found[name]
            kept += float(strength_BR[keep_BR].double().square().sum())
            whole += float(strength_BR.double().square().sum())
            parts[f"sides/{name}"].append(torch.cat([left_BRO[keep_BR], right_BRI[keep_BR]], 1).half())
            parts[f"strength/{name}"].append(strength_BR[keep_BR])
            parts[f"row/{name}"].append(at_B[keep_BR.nonzero()[:, 0]])
    return {k: torch.cat(p) for k, p in parts.items()}, norm_B, {"kept": kept, "whole": whole}


def strongest(found: Mapping[str, Found], numbers: int) -> dict[str, Tensor]:
    """keep_BR of every map: the products of every row that hold most of it per number, while `numbers` last."""
    strength_BX = torch.cat([strength_BR for _, strength_BR, _ in found.values()], 1)
    costs = [torch.full(s.shape[1:], left.shape[2] + right.shape[2] + BESIDE) for left, s, right in found.values()]
    cost_X = torch.cat(costs)
    order_BX = (strength_BX.square() / cost_X).argsort(dim=1, descending=True, stable=True)
    fits_BX = cost_X[order_BX].cumsum(1) <= numbers
    keep_BX = torch.zeros_like(fits_BX).scatter_(1, order_BX, fits_BX) & (strength_BX > 0)
    widths = [s.shape[1] for _, s, _ in found.values()]
    return dict(zip(found, keep_BX.split(widths, 1)))


def assemble(place: Path, parts: Sequence[tuple[Path, np.ndarray]], maps: Sequence[Map]) -> None:
    """Products of all parts, each with the places of its rows, map after map in one file."""
    small: dict[str, Tensor] = {}
    for m in maps:
        small[f"strength/{m.name}"] = torch.cat([_read(path, f"strength/{m.name}") for path, _ in parts])
        rows = [torch.from_numpy(to)[_read(path, f"row/{m.name}").long()] for path, to in parts]
        small[f"row/{m.name}"] = torch.cat(rows).int()
    wide = {m.name: m.out + m.columns for m in maps}
    total = sum(len(small[f"row/{name}"]) * w for name, w in wide.items())
    flat = np.lib.format.open_memmap(place / "products.npy", mode="w+", dtype=np.float16, shape=(total,))
    first = 0
    for m in maps:
        for path, _ in parts:
            sides = _read(path, f"sides/{m.name}").flatten().numpy()
            flat[first : first + len(sides)] = sides
            first += len(sides)
    flat.flush()
    tree.save(place / "products.safetensors", small, {"maps": [[m.name, m.out, m.columns] for m in maps]})


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


@dataclass(frozen=True)
class Products:
    """Products of many rows on disk."""

    flat: Tensor
    small: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, int]]
    rows: int

    @classmethod
    def open(cls, place: Path, rows: int) -> Products:
        """Mapped, not read."""
        small, facts = tree.load(place / "products.safetensors")
        flat = torch.from_numpy(np.load(place / "products.npy", mmap_mode="c", allow_pickle=False))
        return cls(flat, small, {n: (o, i) for n, o, i in facts["maps"]}, rows)

    def scores(self, asked: Mapping[str, Tensor]) -> Tensor:
        """score_N with a query: sum over all products of s lᵀ asked r."""
        total_N = torch.zeros(self.rows)
        start = 0
        for name, (out, columns) in self.shapes.items():
            strength_J, row_J = self.small[f"strength/{name}"], self.small[f"row/{name}"].long()
            size = len(strength_J) * (out + columns)
            sides_J = self.flat[start : start + size].view(-1, out + columns)
            start += size
            if name not in asked:  # no gradient of the query has reached the map
                continue
            step = max(1, CACHED // (out + columns))
            value_J = torch.empty(len(strength_J))
            for first in range(0, len(strength_J), step):
                block = sides_J[first : first + step].float()
                left, right = block[:, :out], block[:, out:]
                met = torch.mm(left, asked[name]) if out > columns else torch.mm(right, asked[name].T)
                value_J[first : first + step] = met.mul_(right if out > columns else left).sum(1)
            total_N.index_add_(0, row_J, value_J * strength_J)
        return total_N

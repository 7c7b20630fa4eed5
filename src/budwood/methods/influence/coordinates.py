"""Which eigen-coordinates of a gradient carry the scores, and the coordinates of rows.

A score is sum_c u_c v_c w_c over the coordinates of a query u and a training row v in the eigenbasis, with weights
w = 1 / (curvature + damping). Coordinates are kept by their energy E[u^2] Var[v] w^2 over queries and rows of unit
length: what they add to the spread of scores over training rows, for queries like the calibration queries.
Shapes: B rows, K coordinates kept, O out, I in (with the bias's 1).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from budwood.capture.gradients import Question
from budwood.capture.stream import Map, Sides
from budwood.data.batch import Features
from budwood.errors import ConfigError
from budwood.methods.influence.factors import Factors, Setting
from budwood.methods.influence.moments import Basis, Turner
from budwood.methods.influence.precondition import all_there, gradients
from budwood.methods.influence.stored import encoded
from budwood.methods.influence.workshop import Shop, sweep
from budwood.params import tree

ROWS = 32  # rows of one batch whose whole gradients are made
# Of the energy that is kept at first, given up where it would need eigenvectors of its own. Held-out queries of MiniLM
# (65,536 coordinates, 2,400 rows of RTE) rank no worse for it: Spearman 0.9912 at 0, 0.9927 at 0.1, 0.9934 at 0.2, and
# half of the vectors stay at 0.1; tiny-bert (3 % of coordinates) loses a little: 0.9987, 0.9964, 0.9921.
SPARED = 0.1
GATHERED = 64  # numbers of an outer product that are multiplied in the time of one that is gathered


@dataclass(frozen=True)
class Kept:
    """The coordinates kept of one map: where in [O, I], their weight, and the spread they are stored in units of.

    Spreads are those of rows of unit length, and rows are stored so: a few rows with large gradients would otherwise
    push all others out of what 16 bits can tell apart.
    """

    flat_K: Tensor
    weight_K: Tensor
    spread_K: Tensor
    columns: int


Coordinates = Mapping[str, Kept]


def wanted(text: str, parameters: int) -> int:
    """How many coordinates a wish means.

    >>> wanted("3%", 1000), wanted("64", 1000), wanted("5000", 1000)
    (30, 64, 1000)
    """
    try:
        value = float(text.rstrip("%")) * parameters / 100 if text.endswith("%") else float(int(text))
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1e12 or (text.endswith("%") and value > parameters):
        raise ConfigError(
            f"--coordinates was given '{text}'. Give a number of eigen-coordinates, such as 16384, or a share of all "
            f"{parameters:,}, such as 3%."
        )
    return min(parameters, round(value))


@dataclass(frozen=True)
class Spread:
    """How eigen-coordinates of rows of unit length vary, [O, I] per map: their variance, and their mean square."""

    varies: Mapping[str, Tensor]
    square: Mapping[str, Tensor]


def spread(
    shop: Shop,
    features: Features,
    order: np.ndarray,
    question: Question,
    bases: Mapping[str, Basis],
    weights: Mapping[str, Tensor],
    centred: bool,
    most: int = ROWS,
) -> Spread:
    """Second moments over the rows at `order`, around their mean where `centred`: what all training rows share changes
    no ranking.

    Every row counts alike (its length in the metric of the weights is divided out): a few rows with huge gradients
    would otherwise decide what is kept, and ranks are made by all of them.
    """
    zeros = lambda: {m.name: torch.zeros(m.out, m.columns) for m in shop.maps}  # noqa: E731
    mean, square = zeros(), zeros()
    count = 0
    for index in shop.batches(features, order, most=most):
        norm_B = torch.zeros(len(index))

        def measure(m: Map, grad_BOI: Tensor, norm_B: Tensor = norm_B) -> None:
            norm_B[: len(grad_BOI)] += (grad_BOI.square() * weights[m.name]).sum((1, 2)).float()

        took = gradients(shop, features, index, question, measure, bases)
        if not len(took):
            continue
        count += len(took)
        scale_B = norm_B[: len(took)].clamp_min(1e-30).rsqrt()[:, None, None]

        def take(m: Map, grad_BOI: Tensor, scale_B: Tensor = scale_B) -> None:
            scaled_BOI = grad_BOI.float() * scale_B
            mean[m.name] += scaled_BOI.sum(0)
            square[m.name] += scaled_BOI.square_().sum(0)

        gradients(shop, features, took, question, take, bases)
    count = max(1, count)
    square = {n: s / count for n, s in square.items()}
    if not centred:
        return Spread(square, square)
    return Spread({n: (s - (mean[n] / count).square()).clamp_min_(0) for n, s in square.items()}, square)


def choose(
    asked: Spread, rows: Spread, weights: Mapping[str, Tensor], count: int, turned: Collection[str]
) -> tuple[dict[str, Kept], float]:
    """The `count` coordinates of most energy over all maps, and the share of all energy that they hold.

    Every eigenvector that occurs is one more for a question to be turned by, and many would occur for a coordinate or
    two: those of the maps `turned` that carry least for their length go, and the coordinates of next most energy on the
    others come in.
    """
    flat = torch.cat([(asked.varies[n] * rows.varies[n] * w.square()).flatten().double() for n, w in weights.items()])
    whole = flat.sum().clamp_min(1e-300)
    strongest = torch.topk(flat, count).indices
    first = torch.zeros_like(flat).index_copy_(0, strongest, flat[strongest])
    parts = zip(weights.items(), first.split([w.numel() for w in weights.values()]))
    spared = _spared([(part.view_as(w), n in turned) for (n, w), part in parts])
    del first, parts
    # after all others, not out: an index of every coordinate has every eigenvector
    chosen = torch.topk(flat - whole * spared, count).indices.sort().values
    kept_share = float(flat[chosen].sum() / whole)
    found, start = {}, 0
    for name, w in weights.items():
        flat_K = chosen[(chosen >= start) & (chosen < start + w.numel())] - start
        spread_K = rows.square[name].flatten()[flat_K].sqrt().clamp_min(1e-30)
        found[name] = Kept(flat_K, w.flatten()[flat_K], spread_K, w.shape[1])
        start += w.numel()
    return found, kept_share


def _spared(kept: Sequence[tuple[Tensor, bool]]) -> Tensor:
    """Of all coordinates of all maps, those on eigenvectors that are given up: together at most SPARED of the energy
    kept. Maps come as (energy kept, whether they have eigenvectors).
    """
    lengths = [size for e, _ in kept for size in e.shape]
    energy_S = torch.cat([side for e, _ in kept for side in (e.sum(1), e.sum(0))])
    stays = torch.tensor([not turned for e, turned in kept for size in e.shape for _ in range(size)])
    worth_S = energy_S / torch.tensor([n for n in lengths for _ in range(n)])
    order = worth_S.masked_fill(stays, torch.inf).argsort(stable=True)
    gone_S = torch.zeros_like(stays)
    gone_S[order[energy_S[order].cumsum(0) <= SPARED * energy_S.sum() / 2]] = True  # every coordinate has two sides
    pairs = (gone_S & ~stays).split(lengths)
    return torch.cat([(o[:, None] | i[None, :]).flatten() for o, i in zip(pairs[::2], pairs[1::2])])


def _weight(factors: Factors, setting: Setting, name: str) -> Tensor:
    inverse = factors.inverse(setting, name)
    assert inverse is not None
    return inverse.float()


def save(path: Path, kept: Coordinates, share: float) -> None:
    """Write the choice."""
    tensors: dict[str, Tensor] = {}
    for name, k in kept.items():
        tensors |= {f"flat/{name}": k.flat_K, f"weight/{name}": k.weight_K, f"spread/{name}": k.spread_K}
    tree.save(path, tensors, {"columns": {n: k.columns for n, k in kept.items()}, "share": share})


def load(path: Path) -> tuple[dict[str, Kept], float]:
    """The choice that `save` wrote, maps in their order."""
    tensors, facts = tree.load(path)
    get = lambda kind, n: tensors[f"{kind}/{n}"]  # noqa: E731
    kept = {n: Kept(get("flat", n), get("weight", n), get("spread", n), c) for n, c in facts["columns"].items()}
    return kept, float(facts["share"])


@dataclass(frozen=True)
class Turns:
    """What a question is turned by: of every eigenbasis the vectors that kept coordinates need, and every coordinate's
    place among them.
    """

    bases: Mapping[str, Basis]
    places: Mapping[str, tuple[Tensor, Tensor]]


def turns_of(maps: Sequence[Map], bases: Mapping[str, Basis], kept: Coordinates) -> Turns:
    """Eigenvectors in one piece: to gather them anew for every question would take longer than to multiply by them.

    Maps of one source have the same vectors of inputs, so that their input is turned once.
    """
    narrow: dict[str, Basis] = {}
    places: dict[str, tuple[Tensor, Tensor]] = {}
    needed: dict[str, tuple[Tensor, Tensor]] = {}  # of a source: numbers and vectors of its inputs
    for m in maps:
        k = kept[m.name]
        if not len(k.flat_K):
            continue
        at_out, at_into = k.flat_K // k.columns, k.flat_K % k.columns
        if m.name in bases:
            basis = bases[m.name]
            if m.source not in needed:
                every = [kept[n.name].flat_K % k.columns for n in maps if n.source == m.source]
                into = torch.unique(torch.cat(every))
                needed[m.source] = into, basis.q_II[:, into].contiguous()
            into, q_II = needed[m.source]
            out, at_out = torch.unique(at_out, return_inverse=True)
            at_into = torch.searchsorted(into, at_into)
            narrow[m.name] = Basis(basis.q_OO[:, out].contiguous(), q_II, basis.l_O[out], basis.l_I[into])
        places[m.name] = at_out, at_into
    return Turns(narrow, places)


def coordinates_of(
    shop: Shop, features: Features, index: np.ndarray, question: Question, turns: Turns, kept: Coordinates
) -> Tensor:
    """value_BK of a few queries: only the kept coordinates are computed, and only the sides they need are turned."""
    parts: dict[str, Tensor] = {}
    turner = Turner(turns.bases)

    def use(_: int, m: Map, s: Sides) -> None:
        if m.name not in turns.places:
            return
        at_out, at_into = turns.places[m.name]
        left_BTO, right_BTI = turner(m, *s.live())
        if len(at_out) * GATHERED < left_BTO.shape[-1] * right_BTI.shape[-1]:
            parts[m.name] = (left_BTO[..., at_out] * right_BTI[..., at_into]).sum(1)
        else:
            parts[m.name] = torch.bmm(left_BTO.transpose(1, 2), right_BTI)[:, at_out, at_into]

    all_there(features, index, sweep(shop, features, index, lambda batch: (question,), use))
    nothing = lambda name: torch.zeros(len(index), len(kept[name].flat_K))  # noqa: E731  no gradient has reached it
    return torch.cat([parts[n] if n in parts else nothing(n) for n in kept], 1).float()


def rows_of(
    shop: Shop,
    order: np.ndarray,
    bases: Mapping[str, Basis],
    kept: Coordinates,
    weights: Mapping[str, Tensor],
    bits: int,
    most: int = ROWS,
) -> tuple[Tensor, Tensor]:
    """(stored_KB in units of spread and of the row's length, norm_B): kept coordinates of rows in so many bits, and
    the squared lengths, which are exact self-influence. A row that is left out has the length 0.
    """
    spread_K = torch.cat([k.spread_K for k in kept.values()])
    stored = torch.zeros(len(spread_K), len(order), dtype=torch.float16 if bits == 16 else torch.uint8)
    norm_B = torch.zeros(len(order), dtype=torch.float64)
    place = {int(n): i for i, n in enumerate(order)}
    firsts = dict(zip(kept, np.cumsum([0, *(len(k.flat_K) for k in kept.values())]).tolist()))
    for index in shop.batches(shop.train, order, most=most):
        values, square = torch.zeros(len(index), len(spread_K)), torch.zeros(len(index), dtype=torch.float64)

        def take(m: Map, grad_BOI: Tensor, values: Tensor = values, square: Tensor = square) -> None:
            k, first, count = kept[m.name], firsts[m.name], len(grad_BOI)
            square[:count] += (grad_BOI.square() * weights[m.name]).sum((1, 2)).double()
            values[:count, first : first + len(k.flat_K)] = grad_BOI.flatten(1)[:, k.flat_K].float()

        took = gradients(shop, shop.train, index, Question(), take, bases)
        at = torch.tensor([place[int(n)] for n in took], dtype=torch.int64)
        values, square = values[: len(took)] / spread_K, square[: len(took)]
        norm_B[at] = square
        values /= square.sqrt().clamp_min(1e-30).float()[:, None]
        stored[:, at] = encoded(values.T, bits)
    return stored, norm_B


def weights_of(factors: Factors, setting: Setting, maps: Sequence[Map]) -> dict[str, Tensor]:
    """1 / (curvature + damping) of every map."""
    return {m.name: _weight(factors, setting, m.name) for m in maps}

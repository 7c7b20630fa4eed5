"""Queries made ready to meet training rows: their gradients as blocks, and how each setting weighs them.

Two ways to the same scores, chosen per map by their FLOPs:
  turn    query and training gradients both in the eigenbasis: identity, kfac and ekfac at any damping share one block,
          weighed on the training side
  back    the query's preconditioned gradient turned back to weights, one block per setting: training gradients stay
          as they are
Shapes: Q queries, B training rows, T positions, O out, I in (with the bias's 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from budwood.capture.gradients import Question
from budwood.capture.stream import Map, Sides
from budwood.data.batch import Batch, Features
from budwood.errors import ConfigError
from budwood.linalg.kron import aligned, outer_, turned_back_
from budwood.methods.influence.factors import Factors, Setting
from budwood.methods.influence.moments import Basis, Turner, with_one
from budwood.methods.influence.workshop import Shop, sweep
from budwood.models.objective import Objective

RAW, TURNED = "raw", "turned"
IN_EIGENBASIS = ("kfac", "ekfac")
GRADIENTS = 1 << 24  # most numbers of one map's query gradients at a time


@dataclass(frozen=True)
class Term:
    """One setting's part in one map: which block of the queries, in which basis, weighed by what on the other side."""

    setting: int
    block: str
    turned: bool
    weight_OI: Tensor | None


@dataclass(frozen=True)
class Part:
    """Columns of a block that lie together: weights, or the bias by itself."""

    name: str
    columns: slice
    bias: bool = False

    @property
    def wide(self) -> int:
        """How many columns they are."""
        return int(self.columns.stop - self.columns.start)


def parts_of(m: Map, block: str) -> tuple[Part, ...]:
    """A block as it is kept: the bias lies apart, so that rows of weights are as long as the map is wide.

    Gradients are made faster in rows of 384 or 1,536 numbers than of 385 or 1,537. In an eigenbasis no column is the
    bias.

    >>> m = Map("m", "m.weight", "m.bias", 2, 384, "m")
    >>> [(p.name, p.wide) for p in parts_of(m, RAW)], [(p.name, p.wide) for p in parts_of(m, TURNED)]
    ([('raw', 384), ('raw.bias', 1)], [('turned', 385)])
    """
    if block == TURNED or m.columns == m.into:
        return (Part(block, slice(0, m.columns)),)
    return Part(block, slice(0, m.into)), Part(f"{block}.bias", slice(m.into, m.columns), bias=True)


@dataclass(frozen=True)
class Work:
    """How much there is to score: queries, training rows, their mean length, and the part of it that has a gradient
    at the outputs of a map (see `live_shares`).
    """

    queries: int
    rows: int
    length: float
    live: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Preconditioner:
    """How every setting meets every map."""

    settings: tuple[Setting, ...]
    terms: Mapping[str, tuple[Term, ...]]
    factors: Factors
    bases: Mapping[str, Basis]
    weights: Mapping[tuple[str, int], Tensor | None] = field(default_factory=dict)
    live: Mapping[str, float] = field(default_factory=dict)  # of `Work`

    def blocks(self, name: str) -> tuple[str, ...]:
        """Blocks of a map."""
        return tuple(dict.fromkeys(t.block for t in self.terms[name]))

    @property
    def numbers(self) -> int:
        """Numbers per query in all blocks."""
        return sum(m.out * m.columns * len(self.blocks(m.name)) for m in self.factors.maps)


def precondition(factors: Factors, settings: Sequence[Setting], work: Work, way: str | None = None) -> Preconditioner:
    """Terms of all settings for all maps; `way` ("turn", "back") overrides the choice by FLOPs."""
    curved = [i for i, s in enumerate(settings) if s.strategy in IN_EIGENBASIS]
    bases = factors.bases if curved else {}
    terms: dict[str, tuple[Term, ...]] = {}
    weights: dict[tuple[str, int], Tensor | None] = {}
    shared = {m.source: sum(n.source == m.source for n in factors.maps) for m in factors.maps}
    for m in factors.maps:
        turn = bool(curved) and not m.diagonal and (way or cheaper_way(m, settings, work, shared[m.source])) == "turn"
        found = []
        for i, setting in enumerate(settings):
            weight = weights[m.name, i] = factors.inverse(setting, m.name)
            if setting.strategy in IN_EIGENBASIS and not m.diagonal:
                found.append(Term(i, TURNED, True, weight) if turn else Term(i, f"back{i}", False, None))
            elif setting.strategy == "identity" and turn:
                found.append(Term(i, TURNED, True, None))  # turning changes no inner product
            else:
                found.append(Term(i, RAW, False, weight))
        terms[m.name] = tuple(found)
    return Preconditioner(tuple(settings), terms, factors, bases, weights, work.live)


def cheaper_way(m: Map, settings: Sequence[Setting], work: Work, shared: int = 1) -> str:
    """Whether turning all training rows ("turn") or every preconditioned query back ("back") costs fewer FLOPs.

    >>> wide = Map("m", "m.weight", None, 768, 768, "m")
    >>> one = [Setting("ekfac", "1e-08")]
    >>> cheaper_way(wide, one, Work(64, 10_000, 60)), cheaper_way(wide, one * 4, Work(500, 1000, 12))
    ('back', 'turn')
    """
    curved = sum(s.strategy in IN_EIGENBASIS for s in settings)
    raw = any(s.strategy == "diagonal" for s in settings)  # needs the gradient as it is in any case
    positions = work.rows * work.length * work.live.get(m.name, 1.0)
    turn = positions * (m.columns**2 / shared + m.out**2 + raw * m.out * m.columns)
    back = work.queries * curved * m.out * m.columns * (m.out + m.columns)
    return "turn" if turn < back else "back"


def measurement(objective: Objective, name: str) -> Question:
    """What is explained of a query, as something to be lowered, so that a positive score is a row that helps."""
    if name == "loss":
        return Question()
    if name == "margin":
        return Question(lambda logits_MC, targets: -objective.margin(logits_MC, targets))
    return Question(_own(name))


def _own(dotted: str) -> Callable[..., Tensor]:
    """A user's function(logits, targets) -> one number per example, larger being better."""
    import importlib

    module, _, function = dotted.partition(":")
    if not function:
        raise ConfigError(f"--measurement was given '{dotted}'. Give margin, loss or package.module:function.")
    try:
        own = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"--measurement {dotted} cannot be imported ({e}). Is it on PYTHONPATH?") from e
    return lambda logits_MC, targets: -own(logits_MC, targets)


Put = Callable[[str, str, np.ndarray, Tensor], None]
PutSides = Callable[[str, str, np.ndarray, Tensor, Tensor], None]


def query_blocks(
    shop: Shop,
    ready: Preconditioner,
    features: Features,
    order: np.ndarray,
    question: Question,
    put: Put,
    most: int = 64,
    put_sides: PutSides | None = None,
) -> None:
    """Every block of the queries at `order`, part by part: `put(map, part, positions in order, part_QOI)`.

    With `put_sides(map, part, positions in order, left_QTO, right_QTI)`, weights of blocks that are the products of two
    sides go there, and are not made.
    """

    def give(m: Map, block: str, at: np.ndarray, value_QOI: Tensor) -> None:
        for part in parts_of(m, block):
            put(m.name, part.name, at, value_QOI[..., part.columns])

    def give_product(m: Map, block: str, at: np.ndarray, left_BTO: Tensor, right_BTI: Tensor) -> None:
        if put_sides is None:
            give(m, block, at, outer_(left_BTO.new_empty(len(left_BTO), m.out, m.columns), left_BTO, right_BTI))
            return
        for part in parts_of(m, block):
            if part.bias:
                put(m.name, part.name, at, left_BTO.sum(1)[..., None])
            else:
                put_sides(m.name, part.name, at, left_BTO, right_BTI[..., part.columns])

    place = {int(n): i for i, n in enumerate(order)}
    turner = Turner(ready.bases)
    fit = max(1, GRADIENTS // max(m.out * m.columns for m in shop.maps))

    for index in shop.batches(features, np.asarray(order), most=min(most, fit)):
        at = np.array([place[int(n)] for n in index])

        def use(_: int, m: Map, s: Sides, at: np.ndarray = at) -> None:
            g_BTO, a_BTI = s.live()
            if len(g_BTO) != len(at):  # a query has no finite loss, and is about to be named
                return
            blocks = ready.blocks(m.name)
            if RAW in blocks:
                give_product(m, RAW, at, g_BTO, with_one(a_BTI, m))
            if set(blocks) - {RAW}:
                left_BTO, right_BTI = turner(m, g_BTO, a_BTI)
                if TURNED in blocks:
                    give_product(m, TURNED, at, left_BTO, right_BTI)
                for term in ready.terms[m.name]:
                    if term.block.startswith("back"):
                        for b, back_OI in enumerate(_backs(ready, m, term.setting, left_BTO, right_BTI)):
                            give(m, term.block, at[b : b + 1], back_OI[None])

        all_there(features, index, sweep(shop, features, index, lambda batch: (question,), use))
        turner.forget()


def _backs(ready: Preconditioner, m: Map, setting: int, left_BTO: Tensor, right_BTI: Tensor) -> Iterator[Tensor]:
    """Every query's preconditioned gradient [O, I], turned back to weights; the next one takes its place."""
    basis, weight_OI = ready.bases[m.name], ready.weights[m.name, setting]
    grad_OI, room_OI = (aligned(left_BTO, m.out, m.columns) for _ in range(2))
    for left_TO, right_TI in zip(left_BTO, right_BTI):
        torch.mm(left_TO.T, right_TI, out=grad_OI)
        if weight_OI is not None:
            grad_OI *= weight_OI
        yield turned_back_(grad_OI, room_OI, basis.q_OO, basis.q_II)


def live_shares(shop: Shop) -> dict[str, float]:
    """Positions that have a gradient at the outputs of each map, as a share of a row's length; seen on a few rows of
    middling length.

    In the last block of a classifier that reads one token most positions have none, and turning what is left is cheap.
    """
    middle = np.argsort(shop.train.lengths_N, kind="stable")[len(shop.train) // 2 :][:4]
    length = max(1, int(shop.train.lengths_N[middle].max()))
    found: dict[str, float] = {}

    def use(_: int, m: Map, s: Sides) -> None:
        found[m.name] = s.live()[0].shape[1] / length

    sweep(shop, shop.train, middle, ask_loss, use)
    return found


def all_there(features: Features, index: np.ndarray, took: np.ndarray) -> None:
    """Refuse a query whose loss is not finite: unlike a training row it cannot be left out."""
    if len(took) != len(index):
        lost = [features.ids[i] for i in index if i not in set(took.tolist())]
        raise ConfigError(f"The query '{lost[0]}' has no finite loss and cannot be explained. Leave it out.")


def gradients(
    shop: Shop,
    features: Features,
    index: np.ndarray,
    question: Question,
    take: Callable[[Map, Tensor], None],
    bases: Mapping[str, Basis] | None = None,
) -> np.ndarray:
    """`take(map, grad_BOI)` for one batch of rows: per-example gradients, in the eigenbasis where `bases` are given.

    Returns which of `index` they are of: rows whose loss is not finite may be left out (see `sweep`).
    """
    turner = Turner(bases or {})

    def use(_: int, m: Map, s: Sides) -> None:
        g_BTO, a_BTI = s.live()
        pair = turner(m, g_BTO, a_BTI) if bases is not None else (g_BTO, with_one(a_BTI, m))
        take(m, outer_(g_BTO.new_empty(len(g_BTO), m.out, m.columns), *pair))

    return sweep(shop, features, index, lambda batch: (question,), use)


def ask_loss(_: Batch) -> tuple[Question]:
    """The training loss."""
    return (Question(),)


def bytes_needed(ready: Preconditioner, queries: int) -> int:
    """Memory of all blocks of all queries."""
    size = torch.empty(0, dtype=torch.float32).element_size()
    return ready.numbers * queries * size

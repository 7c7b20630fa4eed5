"""Scores by token of the training rows: which words of a row made it matter.

Shapes: S settings, Q queries, B rows, T positions, O out, I in (with the bias's 1), M columns of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from budwood.capture.stream import NORMS, Map, Sides
from budwood.methods.influence.moments import with_one
from budwood.methods.influence.pairs import QUERY_TILE, Blocks, joined
from budwood.methods.influence.precondition import Preconditioner, Term, ask_loss
from budwood.methods.influence.workshop import Shop, sweep


def token_scores(shop: Shop, ready: Preconditioner, blocks: Blocks, queries: int, order: np.ndarray) -> np.ndarray:
    """score_SQM: for every row of `order` a leading column (maps that see one position only), then its tokens.

    Needs queries turned back to weights (`precondition(..., "back")`); their columns sum to the row's score.
    """
    lengths = shop.train.lengths_N[order]
    start = np.concatenate([[0], np.cumsum(lengths + 1)]).astype(np.int64)
    place = {int(n): i for i, n in enumerate(order)}
    out = np.zeros((len(ready.settings), queries, int(start[-1])))
    for index in shop.batches(shop.train, order):
        width = int(shop.train.lengths_N[index].max())
        found = shop.like.new_zeros(len(ready.settings), queries, len(index), width + 1, dtype=torch.float64)

        def use(_: int, m: Map, s: Sides, found: Tensor = found, width: int = width) -> None:
            times = s.g_BTO.shape[1]
            a_BTI = with_one(s.a_BTI, m)
            # uses of a shared map lie side by side
            placed = m.kind not in NORMS and times % width == 0 and times >= width and width > 1
            for term, q, block_OI in _one_by_one(ready, blocks, m, queries):
                value_BT = ((a_BTI @ block_OI.T) * s.g_BTO).sum(-1).double()
                if placed:
                    found[term.setting, q, : len(value_BT), 1:] += value_BT.view(len(value_BT), -1, width).sum(1)
                else:
                    found[term.setting, q, : len(value_BT), 0] += value_BT.sum(1)

        took = sweep(shop, shop.train, index, ask_loss, use)
        for b, n in enumerate(took):
            i = place[int(n)]
            out[:, :, start[i] : start[i + 1]] = found[:, :, b, : lengths[i] + 1].numpy()
    return out


def _one_by_one(ready: Preconditioner, blocks: Blocks, m: Map, queries: int) -> Iterator[tuple[Term, int, Tensor]]:
    """(term, query, weighed block_OI) of a map, never more of them in memory than a tile."""
    step = max(1, QUERY_TILE // (m.out * m.columns))
    for term in ready.terms[m.name]:
        for first in range(0, queries, step):
            some = slice(first, min(queries, first + step))
            for i, block_OI in enumerate(joined(blocks, m, term.block, some)):
                yield term, first + i, block_OI if term.weight_OI is None else block_OI * term.weight_OI

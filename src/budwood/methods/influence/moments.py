"""Sums over training rows that factors are made of: covariances of inputs and output gradients, second moments.

Shapes: B examples, T positions, I in (with the bias's 1), O out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from budwood.capture.gradients import Question
from budwood.capture.questions import questions
from budwood.capture.stream import Map, Sides
from budwood.data.batch import Batch
from budwood.linalg.kron import aligned, gram_, mirrored, rotate_first, square_sum_
from budwood.methods.influence.memory import of_fit, tokens_within
from budwood.methods.influence.workshop import Shop, sweep


@dataclass(frozen=True)
class Basis:
    """Eigenvectors (columns) and eigenvalues of the two covariances of one map."""

    q_OO: Tensor
    q_II: Tensor
    l_O: Tensor
    l_I: Tensor

    @property
    def kron(self) -> Tensor:
        """The curvature that KFAC reads off them."""
        return self.l_O[:, None] * self.l_I[None, :]


def with_one(a_BTI: Tensor, m: Map) -> Tensor:
    """Inputs with the 1 of the bias behind them."""
    if m.columns == m.into:
        return a_BTI
    return torch.cat([a_BTI, a_BTI.new_ones(*a_BTI.shape[:-1], 1)], -1)


def turned_inputs(a_BTI: Tensor, m: Map, q_II: Tensor) -> Tensor:
    """Inputs (with the bias's 1) in the eigenbasis."""
    flat = a_BTI.reshape(-1, a_BTI.shape[-1])
    turned = aligned(flat, len(flat), q_II.shape[1])
    if m.bias is None:
        torch.mm(flat, q_II, out=turned)
    else:
        torch.addmm(q_II[-1], flat, q_II[:-1], out=turned)
    return turned.view(*a_BTI.shape[:-1], q_II.shape[1])


@dataclass
class Turner:
    """Activations and output gradients in the eigenbasis; maps of one source turn their input once per batch.

    Embeddings and norms have no eigenbasis and stay as they are.
    """

    bases: Mapping[str, Basis]
    _kept: tuple[str, Tensor, Tensor] | None = field(default=None)  # source, what was turned, turned

    def __call__(self, m: Map, g_BTO: Tensor, a_BTI: Tensor) -> tuple[Tensor, Tensor]:
        """(g', a') of a map."""
        if m.diagonal:
            return g_BTO, a_BTI
        basis = self.bases[m.name]
        kept = self._kept
        same = kept is not None and kept[0] == m.source and kept[1].shape == a_BTI.shape
        if kept is None or not same or kept[1].data_ptr() != a_BTI.data_ptr():
            kept = self._kept = (m.source, a_BTI, turned_inputs(a_BTI, m, basis.q_II))
        return torch.matmul(g_BTO, basis.q_OO), kept[2]

    def forget(self) -> None:
        """Between batches: memory is used again for other numbers."""
        self._kept = None


def covariances(shop: Shop, order: np.ndarray) -> dict[str, Tensor]:
    """Sums over the rows at `order`: "A/source", "G/map" and what to divide them by, "nA/source", "nG/map".

    With exact labels an input counts as much as the squared length of the gradients at its outputs: a position that the
    loss does not depend on has no part in the curvature, however often it occurs. (Of a linear model of two classes the
    curvature then is the product of both sides, no approximation.) Other labels keep to the plain mean over positions,
    as other tools have it.
    """
    like, weighted = shop.like, shop.labels == "exact"
    out: dict[str, Tensor] = {}
    for m in shop.maps:
        if m.diagonal:
            continue
        out[f"G/{m.name}"] = like.new_zeros(m.out, m.out)
        out[f"nG/{m.name}"] = torch.zeros((), dtype=torch.float64)
        if m.source == m.name:
            out[f"A/{m.name}"] = aligned(like, m.columns, m.columns).zero_()
            out[f"nA/{m.name}"] = torch.zeros((), dtype=torch.float64)

    inputs = _Weighted(out)

    def use(question: int, m: Map, s: Sides) -> None:
        if m.diagonal:
            return
        g_BTO, a_BTI = s.live()
        if question == 0:
            count = int(s.mask_BT.sum()) if s.mask_BT is not None else s.a_BTI.shape[0] * s.a_BTI.shape[1]
            out[f"nG/{m.name}"] += count
            if m.source == m.name and not weighted:
                out[f"nA/{m.name}"] += count
                _add_inputs(out[f"A/{m.name}"], m, s)
        if weighted:
            inputs.add(m, g_BTO, a_BTI)
        gram_(out[f"G/{m.name}"], g_BTO.reshape(-1, m.out))

    for index in shop.batches(shop.train, order, tokens=tokens_within(shop, of_fit(shop))):
        sweep(shop, shop.train, index, lambda batch: _ask(shop, batch), use, whole=not weighted)
        inputs.flush()
    for key, value in out.items():  # one after the other, so that never all are there twice
        out[key] = mirrored(value) if value.dim() == 2 else value
    return out


def _add_inputs(total_II: Tensor, m: Map, s: Sides) -> None:
    """Add the covariance of real positions, the bias's 1 being a last column that need not be there to be counted."""
    x_RI = s.a_BTI[s.mask_BT.bool()] if s.mask_BT is not None else s.a_BTI.reshape(-1, s.a_BTI.shape[-1])
    gram_(total_II[: m.into, : m.into], x_RI)
    if m.bias is not None:
        total_II[: m.into, -1] += x_RI.sum(0)
        total_II[-1, -1] += len(x_RI)


@dataclass
class _Weighted:
    """Adds covariances of inputs, each input times the squared length of the gradients at its outputs.

    Maps of one source follow each other, and what they have in common is multiplied once for all of them.
    """

    total: dict[str, Tensor]
    _kept: tuple[Map, Tensor, Tensor] | None = field(default=None)  # map, its inputs, squared lengths

    def add(self, m: Map, g_BTO: Tensor, a_BTI: Tensor) -> None:
        """Take a map's part."""
        square_R = torch.linalg.vector_norm(g_BTO.reshape(-1, m.out), dim=1).square_()
        kept = self._kept
        same = kept is not None and kept[0].source == m.source and kept[1].shape == a_BTI.shape
        if kept is not None and same and kept[1].data_ptr() == a_BTI.data_ptr():
            kept[2].add_(square_R)
            return
        self.flush()
        self._kept = (m, a_BTI, square_R)

    def flush(self) -> None:
        """Add what was taken; between batches, as memory is used again for other numbers."""
        if self._kept is None:
            return
        m, a_BTI, square_R = self._kept
        self._kept = None
        total_II, length_R1 = self.total[f"A/{m.source}"], square_R.sqrt()[:, None]
        x_RI = a_BTI.reshape(-1, m.into) * length_R1
        gram_(total_II[: m.into, : m.into], x_RI)
        weight = square_R.sum()
        if m.bias is not None:
            total_II[: m.into, -1] += (length_R1.T @ x_RI)[0]
            total_II[-1, -1] += weight
        self.total[f"nA/{m.source}"] += weight.double()


def second_moments(
    shop: Shop, order: np.ndarray, bases: Mapping[str, Basis] | None, diagonal: bool
) -> dict[str, Tensor]:
    """Sums over rows of squared gradients: "ekfac/map" in the eigenbasis (with `bases`), "diagonal/map" in weights.

    Embeddings and norms have the second, whatever is asked for.
    """
    like = shop.like
    turned = [m for m in shop.maps if bases is not None and not m.diagonal]
    plain = [m for m in shop.maps if diagonal or m.diagonal]
    out = {
        f"{k}/{m.name}": aligned(like, m.out, m.columns).zero_()
        for k, ms in (("ekfac", turned), ("diagonal", plain))
        for m in ms
    }
    turner = Turner(bases or {})

    def use(question: int, m: Map, s: Sides) -> None:
        g_BTO, a_BTI = s.live()
        if bases is not None and not m.diagonal:
            if rotate_first(g_BTO.shape[1], m.out, m.columns):
                square_sum_(out[f"ekfac/{m.name}"], *turner(m, g_BTO, a_BTI))
            else:
                basis = bases[m.name]
                square_sum_(out[f"ekfac/{m.name}"], g_BTO, with_one(a_BTI, m), (basis.q_OO, basis.q_II))
        if diagonal or m.diagonal:
            total_OI = out[f"diagonal/{m.name}"]
            square_sum_(total_OI[:, : m.into], g_BTO, a_BTI)
            if m.columns > m.into:  # the bias: rows of weights alone are the faster ones
                total_OI[:, -1] += g_BTO.sum(1).square().sum(0)

    for index in shop.batches(shop.train, order, tokens=tokens_within(shop, of_fit(shop))):
        sweep(shop, shop.train, index, lambda batch: _ask(shop, batch), use)
        turner.forget()
    for key, value in out.items():
        out[key] = value.contiguous()
    return out


def _ask(shop: Shop, batch: Batch) -> Sequence[Question]:
    return questions(shop.labels, shop.read.task, batch, shop.cfg.seed)

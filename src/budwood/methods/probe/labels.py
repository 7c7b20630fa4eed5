"""Label and token probes of one layer: cross-validated, resampled, controlled and coded, as columns of few solves.

Shapes: N states, D features, K classes, R resamples, S costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from budwood.config.probe import ProbeConfig
from budwood.linalg.folds import cross_validate
from budwood.linalg.softmax import Problems, solve
from budwood.methods.probe.code import folds_by_document, online_codes, resamples, shuffled
from budwood.methods.probe.side import Side

CONTROL = 1e-6  # tolerance of control probes: nothing but a share of right answers is read from them


@dataclass(frozen=True)
class Fitted:
    """A layer's probe in the space of raw states, and what it says of the reported split."""

    weight_KD: Tensor
    bias_K: Tensor
    cost: float
    cv: float
    logits_NK: np.ndarray
    repeats_RN: np.ndarray  # predictions of probes fitted on resampled documents
    control_N: np.ndarray | None  # predictions of the control probe
    control_cost: float | None  # its own C, by the same folds
    bits: float | None
    control_bits: float | None
    unconverged: int  # fits (folds x costs) that ended before their tolerance


@dataclass(frozen=True)
class Scale:
    """Train-only standardisation of one layer."""

    mean_D: Tensor
    spread_D: Tensor

    @classmethod
    def of(cls, x_ND: Tensor) -> Scale:
        """Mean and spread of every feature; a feature that never moves is left alone."""
        mean_D = x_ND.mean(0)
        spread_D = (x_ND - mean_D).square_().mean(0).sqrt()  # several times faster than std
        noise_D = 1e-6 * mean_D.abs() + 1e-7 * spread_D.max() + 1e-30  # of a constant, by rounding
        return cls(mean_D, torch.where(spread_D > noise_D, spread_D, 1.0))

    def __call__(self, x_ND: Tensor) -> Tensor:
        """Standardised states."""
        return (x_ND - self.mean_D).div_(self.spread_D)

    def raw(self, weight_KD: Tensor, bias_K: Tensor) -> tuple[Tensor, Tensor]:
        """The same probe for states that are not standardised."""
        weight_KD = weight_KD / self.spread_D
        return weight_KD, bias_K - weight_KD @ self.mean_D.to(weight_KD)


def fit(x_ND: Tensor, train: Side, test_ND: Tensor, cfg: ProbeConfig, classes: int, controls: bool) -> Fitted:
    """The probe of one layer; `test_ND` are the reported split's states."""
    scale = Scale.of(x_ND)
    x_ND, test_ND = scale(x_ND), scale(test_ND)
    fold_N = folds_by_document(train.label_M, train.document_M, cfg.folds)
    chosen = cross_validate(x_ND, train.label_M, classes, cfg.costs, fold_N)
    repeats_RN = np.empty((0, len(test_ND)), dtype=np.int64)
    bits = control_bits = control = None
    if controls:
        repeats_RN = _repeats(x_ND, train, test_ND, cfg, classes, chosen.cost)
        control = cross_validate(x_ND, train.control_M, classes, cfg.costs, fold_N, CONTROL)
        bits = code_length(x_ND, train.label_M, train.document_M, cfg, classes)
        control_bits = code_length(x_ND, train.control_M, train.document_M, cfg, classes)
    weight_KD, bias_K = scale.raw(chosen.weight_KD, chosen.bias_K)
    return Fitted(
        weight_KD,
        bias_K,
        chosen.cost,
        float(chosen.score_SF.mean(1)[chosen.best]),
        chosen.solution.logits(test_ND, [(chosen.best, 0)])[0].numpy(),
        repeats_RN,
        control.predict(test_ND) if control else None,
        control.cost if control else None,
        bits,
        control_bits,
        int((~chosen.solution.converged_SP).sum()),
    )


def _repeats(x_ND: Tensor, train: Side, test_ND: Tensor, cfg: ProbeConfig, classes: int, cost: float) -> np.ndarray:
    """Predictions of probes on resampled documents, all solved together."""
    count = cfg.repeats
    problems = Problems(
        torch.from_numpy(train.label_M)[None],
        torch.from_numpy(resamples(train.document_M, count, cfg.seed)).float(),
        torch.zeros(count, dtype=torch.long),
        torch.arange(count),
        torch.full((1, count), cost, dtype=torch.float64),
        classes,
    )
    return solve(x_ND, problems, 1e-7).logits(test_ND, [(0, p) for p in range(count)]).argmax(2).numpy()


def code_length(x_ND: Tensor, label_N: np.ndarray, document_N: np.ndarray, cfg: ProbeConfig, classes: int) -> float:
    """Bits of the labels in the online code, documents in a seeded order."""
    order = shuffled(document_N, cfg.seed)
    x_ND, y_N = x_ND[torch.from_numpy(order)], torch.from_numpy(label_N[order])
    costs = torch.tensor(sorted(cfg.costs), dtype=torch.float64)[:, None]
    zero = torch.zeros(1, dtype=torch.long)

    def learn(known: int, following: int, count: int) -> np.ndarray:
        near_ND = x_ND[:following]
        if known < x_ND.shape[1]:  # weights lie in the span of the rows, which has fewer dimensions than the features
            near_ND = near_ND @ torch.linalg.qr(near_ND[:known].T)[0]
        problems = Problems(y_N[None, :known], torch.ones(1, known), zero, zero, costs[:count], classes, True)
        found = solve(near_ND[:known], problems, 1e-6)
        logits_SNK = found.logits(near_ND[known:], [(s, 0) for s in range(count)]).double()
        gold = y_N[known:following].expand(count, -1)[..., None]
        return -logits_SNK.log_softmax(2).gather(2, gold).transpose(1, 2).numpy() / np.log(2)

    return float(online_codes(np.full(len(y_N), np.log2(classes)), learn, len(costs))[0])

"""Score matrices made of others: means over runs of different models, sums of layers.

Shapes: Q queries, N training rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from budwood.evaluation.matrices import Scored
from budwood.methods.influence.scores import sum_of


def across_models(matrices: Sequence[Scored]) -> dict[str, list[Scored]]:
    """Equally named matrices of different models, the first of each model; names that only one model has are left out.

    Two runs of one model (a copy, another precision) say the same twice: they are no ensemble and have no spread over
    seeds. Scores that do not tell their model count as of a model of their own.
    """
    found: dict[str, dict[str, Scored]] = {}
    for m in matrices:
        found.setdefault(m.label, {}).setdefault(m.model, m)
    return {label: list(own.values()) for label, own in found.items() if len(own) > 1}


def ensembles(matrices: Sequence[Scored], laid: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """score_QN averaged over models, every query's row scaled to unit spread: one model, one voice in each query."""
    return {
        f"ensemble of {len(own)}: {label}": _mean([laid[m.name] for m in own])
        for label, own in across_models(matrices).items()
    }


def _mean(scores: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of score_QN over models. How large a query's scores are differs between models, by its margin and by the
    damping, and says nothing about which rows matter.
    """
    found: np.ndarray = np.mean([s / np.maximum(s.std(1, keepdims=True), 1e-30) for s in scores], axis=0)
    return found


def candidates(matrices: Sequence[Scored], laid: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What there is to choose from: all that is laid, ensembles of the first 2, 3, ... models, sums of named layers."""
    found = dict(laid)
    for label, own in across_models(matrices).items():
        found |= {f"ensemble of {n}: {label}": _mean([laid[m.name] for m in own[:n]]) for n in range(2, len(own) + 1)}
    parts: dict[tuple[str, str, str], list[Scored]] = {}
    for m in matrices:
        if m.matrix.module:
            parts.setdefault((str(m.run), m.matrix.strategy, m.matrix.damping), []).append(m)
    return found | {" + ".join(m.name for m in own): sum_of([laid[m.name] for m in own]) for own in parts.values()}

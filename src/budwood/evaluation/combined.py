"""Score matrices made of others: means over runs of different models, sums of layers.

Shapes: Q queries, N training rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from budwood.evaluation.matrices import Scored


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
    """score_QN averaged over models, each scaled to unit spread, so that no run outweighs the others."""
    return {
        f"ensemble of {len(own)}: {label}": _mean([laid[m.name] for m in own])
        for label, own in across_models(matrices).items()
    }


def _mean(scores: Sequence[np.ndarray]) -> np.ndarray:
    found: np.ndarray = np.mean([s / max(float(s.std()), 1e-30) for s in scores], axis=0)
    return found

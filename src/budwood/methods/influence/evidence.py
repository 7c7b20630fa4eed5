"""How much damping `auto` means: the least from which on scores by two halves of some training rows agree.

Every strategy has its own curvature and so its own answer. The rows, and their eigenbasis, are the same however many
more a fit has: factors of a sample and of all rows are then damped alike.
Shapes: O out, I in (with the bias's 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from budwood.capture.stream import Map
from budwood.linalg.kron import reliability
from budwood.methods.influence.factors import Factors, means
from budwood.methods.influence.moments import Basis

# Of the mean. Retraining tells the range: LDS of three models was best from 10 to 100 (docs/influence.md).
SHARES = (10.0, 30.0, 100.0)
RELIABLE = 0.95  # agreement of scores by two halves of the rows that --damping auto asks for
ROWS = 1024  # training rows of both halves
SAMPLE = 1 << 16  # numbers per map that the evidence is taken on
Pair = tuple[Tensor, Tensor]


def weigh(pairs: Iterable[Pair]) -> dict[str, Any]:
    """The least share of each module's mean from which on scores by one half of the rows agree with those by the other.

    `pairs`: the curvature [O, I] of every map by either half. "best": that share; "sweep": the agreement (expected
    correlation) at every share.
    """
    sums = {share: [0.0, 0.0, 0.0] for share in SHARES}
    for one, other in pairs:
        mean = float((one.double().mean() + other.double().mean()) / 2)
        first, second, step = one.flatten(), other.flatten(), stride(*one.shape)
        for share in SHARES:
            found = reliability(first[::step], second[::step], share * mean)
            sums[share] = [a + step * b for a, b in zip(sums[share], found)]
    sweep = [{"share": s, "agreement": round(c / (a * b) ** 0.5, 6) if a * b else 0.0} for s, (c, a, b) in sums.items()]
    best = SHARES[-1]
    for x in reversed(sweep):  # from the top: agreement may fall and rise again, and less damping needs all of the more
        if not x["agreement"] >= RELIABLE:  # nor where it is no number
            break
        best = x["share"]
    return {"best": best, "of": "mean", "sweep": sweep}


def stride(out: int, into: int) -> int:
    """One number in so many is looked at: it has no factor in common with the columns, so that all of them are met.

    Eigenvalues rise along them: every fourth of 512 columns would leave out the last, which holds most.

    >>> stride(512, 512), stride(512, 513), stride(2, 768)
    (5, 4, 1)
    """
    step = max(1, out * into // SAMPLE)
    while math.gcd(step, into) > 1:
        step += 1
    return step


def of_moments(halves: Sequence[Mapping[str, Tensor]], rows: Sequence[int], asked: Iterable[str]) -> dict[str, Any]:
    """Evidence for ekfac and diagonal from sums of second moments over so many rows of either half."""
    found = {}
    for strategy in ("ekfac", "diagonal"):
        keys = [k for k in halves[0] if k.startswith(f"{strategy}/")]
        if keys and strategy in asked and halves[1]:
            found[strategy] = weigh((halves[0][k] / rows[0], halves[1][k] / rows[1]) for k in keys)
    return found


def of_covariances(
    halves: Iterable[dict[str, Tensor]], bases: Mapping[str, Basis], maps: Sequence[Map]
) -> dict[str, Any]:
    """Evidence for kfac from covariance sums of either half, in the eigenbasis of both; halves are taken in turn."""
    turned = [m for m in maps if not m.diagonal]
    sides = []
    for half in halves:
        if half:
            sides.append(_spectra(means(half, torch.float64), bases, turned))
        del half  # before the next one is added up
    if len(sides) < 2 or not turned:
        return {}

    def pairs() -> Iterator[Pair]:
        for m in turned:
            one, other = (s[f"G/{m.name}"][:, None] * s[f"A/{m.source}"][None, :] for s in sides)
            yield one, other

    return {"kfac": weigh(pairs())}


def _spectra(covariance: Mapping[str, Tensor], bases: Mapping[str, Basis], maps: Sequence[Map]) -> dict[str, Tensor]:
    """Diagonals of covariances in the eigenbasis, by their keys."""
    found: dict[str, Tensor] = {}
    for m in maps:
        for key, q in ((f"G/{m.name}", bases[m.name].q_OO), (f"A/{m.source}", bases[m.name].q_II)):
            if key not in found:
                exact = q.double()
                found[key] = (exact * (covariance[key] @ exact)).sum(0).clamp_min(0)
    return found


def told(factors: Factors, strategies: Iterable[str]) -> dict[str, str]:
    """What `--damping auto` comes to for every strategy, and why, in words."""
    found = {}
    for strategy in strategies:
        share, source = factors.share(strategy)
        text = f"{share:g} x the mean curvature of each module"
        if source is None:
            text += (
                ", the usual share: these factors cannot tell (needed: two halves of the rows, fitted for "
                f"{strategy} by `influence fit` or with --damping auto)"
            )
        elif source != strategy:
            text += f", as for {source}: the factors were not fitted for {strategy}"
        else:
            sweep = factors.facts["evidence"][strategy]["sweep"]
            shown = ", ".join(f"{x['agreement']:.3f} at {x['share']:g}" for x in sweep)
            met = sweep[-1]["agreement"] >= RELIABLE
            asked = (
                f"the least from which on it stays at {RELIABLE:g} or more"
                if met
                else f"it does not stay at {RELIABLE:g}: the most is taken, and scores may hang on the rows fitted"
            )
            rows = min(ROWS, factors.facts["fit_rows"])
            text += f"; agreement of scores by two halves of {rows:,} rows: {shown}; {asked}"
        found[strategy] = text
    return found

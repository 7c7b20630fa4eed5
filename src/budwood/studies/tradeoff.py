"""What the cells of an injection study say together: groups over seeds, the front, hypervolumes, the knee.

A cell is {retain, strength, seed, new: {...}, kept: {task: {...}}}; errors are scores turned so that lower is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from budwood.linalg.pareto import front, hypervolume
from budwood.train.evaluate import LOWER_IS_BETTER

NEAR, AVOIDED = 1.25, 0.60  # a knee: error within 25 % of plain training, 60 % of the kept task's rise avoided
Cell = Mapping[str, Any]


def error_of(scored: Mapping[str, Any]) -> float:
    """The main score as a cost.

    >>> error_of({"metric": "accuracy", "score": 0.75}), error_of({"metric": "lm_loss", "score": 2.5})
    (0.25, 2.5)
    >>> error_of({"metric": "f1", "score": 0.5, "full": 100})  # half a per cent
    0.995
    """
    score = float(scored["score"])
    if scored["metric"] in LOWER_IS_BETTER:
        return score
    return 1.0 - score / float(scored.get("full", 1))


def grouped(cells: Sequence[Cell], main: str) -> list[dict[str, Any]]:
    """One entry per way and strength: median, lowest and highest over seeds of both errors, and the scores' medians."""
    found: dict[tuple[str, float | None], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell["retain"], cell["strength"]), []).append(cell)
    groups = []
    for (retain, strength), mine in found.items():
        entry: dict[str, Any] = {"retain": retain, "strength": strength, "seeds": len(mine)}
        for key, values in {
            "new_error": [error_of(c["new"]) for c in mine],
            "kept_error": [error_of(c["kept"][main]) for c in mine],
        }.items():
            entry |= {key: median(values), f"{key}_low": min(values), f"{key}_high": max(values)}
        entry["new"] = _medians([c["new"] for c in mine])
        entry["by_size"] = _by_size([c["new"] for c in mine])
        entry["kept"] = {task: _medians([c["kept"][task] for c in mine]) for task in mine[0]["kept"]}
        groups.append(entry)
    kept = set(front(np.array([[g["new_error"], g["kept_error"]] for g in groups])).tolist())
    return [{**g, "front": i in kept} for i, g in enumerate(groups)]


def _medians(scored: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    numbers = [k for k, v in scored[0].items() if isinstance(v, int | float) and not isinstance(v, bool)]
    return {"metric": scored[0]["metric"], **{k: median(s[k] for s in scored if s.get(k) is not None) for k in numbers}}


def _by_size(scored: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median over seeds of the share exactly right, by the size of the answer; sizes never trained on come last."""
    sizes = [{**s.get("by_magnitude", {}), **s.get("ood", {})} for s in scored]
    return {name: median(s[name]["exact"] for s in sizes if name in s) for name in sizes[0]}


def hypervolumes(cells: Sequence[Cell], main: str, new_reference: float) -> dict[str, dict[str, float]]:
    """{way: {seed: area}} below the reference: the trivial answer's error, and plain training's kept error."""
    out: dict[str, dict[str, float]] = {}
    for seed in sorted({c["seed"] for c in cells}):
        mine = [c for c in cells if c["seed"] == seed]
        plain = [error_of(c["kept"][main]) for c in mine if c["retain"] == "none"]
        corner = (new_reference, plain[0] if plain else max(error_of(c["kept"][main]) for c in mine))
        for retain in dict.fromkeys(c["retain"] for c in mine):
            points = [[error_of(c["new"]), error_of(c["kept"][main])] for c in mine if c["retain"] == retain]
            out.setdefault(retain, {})[str(seed)] = hypervolume(np.array(points), corner)
    return out


def knee(groups: Sequence[Mapping[str, Any]], base_kept: float, trivial: float) -> dict[str, Any]:
    """The strength of EWC to take, whether it clears both bars, why, and what does better.

    Without a cell of plain training, where that is no better at the new skill than the error `trivial` of an answer
    that needs no skill, or where it costs the kept task nothing, there is no knee.
    """
    plain = next((g for g in groups if g["retain"] == "none"), None)
    held = [g for g in groups if g["retain"] == "ewc"]
    if plain is None or not held:
        return {"met": None, "reason": "it is told from --retain none and ewc together"}
    if plain["new_error"] >= trivial:
        told = f"plain training did not learn the skill (error {plain['new_error']:.3g}, trivial {trivial:.3g})"
        return {"met": None, "reason": f"{told}: train longer before weighing what it costs"}
    rise = plain["kept_error"] - base_kept
    if rise <= 0:
        return {"met": None, "reason": "plain training costs the kept task nothing, so there is nothing to hold"}
    facts = [_standing(g, plain, rise) for g in groups if g["retain"] != "none"]
    mine = [f for f in facts if f["retain"] == "ewc"]
    fit = [f for f in mine if f["met"]]
    chosen = max(fit, key=lambda f: f["avoided"]) if fit else max(mine, key=lambda f: f["margin"])
    others = [f for f in facts if f["retain"] != "ewc" and f["met"] >= chosen["met"]]
    better = [f for f in others if f["times_plain"] <= chosen["times_plain"] and f["avoided"] >= chosen["avoided"]] or [
        f for f in others if f["met"] and not chosen["met"]
    ]
    told = f"error x{chosen['times_plain']:.2f} of plain training's, {chosen['avoided']:.0%} of the rise avoided"
    bars = f"(bars: x{NEAR}, {AVOIDED:.0%})"
    why = (
        "avoids most among the strengths that clear both bars" if fit else "comes nearest; no strength clears both bars"
    )
    reason = f"EWC {chosen['strength']:g} {why}: {told} {bars}"
    names = ["retain", "strength", "times_plain", "avoided"]
    return {
        **{k: v for k, v in chosen.items() if k != "margin"},
        "reason": reason,
        "better": [{k: f[k] for k in names} for f in better],
    }


def _standing(group: Mapping[str, Any], plain: Mapping[str, Any], rise: float) -> dict[str, Any]:
    """How far one group is along both bars; margin is 1 or more where both are cleared."""
    times = group["new_error"] / max(plain["new_error"], 1e-12)
    avoided = (plain["kept_error"] - group["kept_error"]) / rise
    return {
        "retain": group["retain"],
        "strength": group["strength"],
        "times_plain": times,
        "avoided": avoided,
        "met": times <= NEAR and avoided >= AVOIDED,
        "margin": min(NEAR / max(times, 1e-12), avoided / AVOIDED),
    }

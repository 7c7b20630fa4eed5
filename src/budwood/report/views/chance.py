"""What chance alone may do to a score: intervals, and whether two scores are told apart."""

from __future__ import annotations

from collections.abc import Mapping
from math import hypot, sqrt
from typing import Any

from budwood.linalg.metrics import accuracy_interval
from budwood.report.views.words import number

WIDE = 1.96  # standard errors on either side of a 95 % interval
SHARES = frozenset({"accuracy"})  # metrics that are a share of rows answered right


def half(score: Mapping[str, Any], n: Any = None, metric: str = "accuracy") -> float | None:
    """Half the width of a score's 95 % interval: its own where it has one, else that of a share of `n` rows.

    >>> round(half({"score": 0.5}, 100), 3), half({"score": 0.5, "low": 0.4, "high": 0.7}), half({"score": 2.5}, 9)
    (0.096, 0.15, None)
    >>> half({"score": 0.5}, 100, "mcc"), round(half({"score": 1.0}, 4), 2)
    (None, 0.24)
    """
    value, low, high = (score.get(k) for k in ("score", "low", "high"))
    if isinstance(low, int | float) and isinstance(high, int | float):
        return round((high - low) / 2, 12)
    if metric in SHARES and isinstance(value, int | float) and 0 <= value <= 1 and isinstance(n, int) and n > 0:
        low, high = accuracy_interval(round(value * n), n)
        return (high - low) / 2
    return None


def apart(a: Mapping[str, Any], b: Mapping[str, Any], n: Any = None, metric: str = "accuracy") -> bool | None:
    """Whether two scores differ by more than chance may make them; None where no interval is known.

    >>> apart({"score": 0.5}, {"score": 0.55}, 100), apart({"score": 0.5}, {"score": 0.8}, 100)
    (False, True)
    """
    halves = half(a, n, metric), half(b, n, metric)
    if halves[0] is None or halves[1] is None:
        return None
    return abs(a["score"] - b["score"]) > hypot(*(h for h in halves if h is not None))


def auc_half(auc: float, found: int, others: int) -> float:
    """Half the width of an AUC's 95 % interval, from the numbers of both kinds of rows (Hanley and McNeil).

    >>> round(auc_half(0.87, 26, 230), 3)
    0.09
    """
    first, second = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    spread = auc * (1 - auc) + (found - 1) * (first - auc**2) + (others - 1) * (second - auc**2)
    return WIDE * sqrt(max(spread, 0.0) / (found * others))


def ranged(score: Mapping[str, Any]) -> str:
    """A score with its interval in brackets, where it has one.

    >>> ranged({"score": 0.5, "low": 0.4, "high": 0.6}), ranged({"score": 0.5})
    ('0.5 (0.4 to 0.6)', '0.5')
    """
    low, high = score.get("low"), score.get("high")
    known = isinstance(low, int | float) and isinstance(high, int | float)
    return number(score.get("score")) + (f" ({number(low)} to {number(high)})" if known else "")


def recovery(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """What can be said of the share of a gain that came back, from scores of base, tuned and graft on `n` rows.

    `gain` in points, `rows` it stands for, `chance` how much of it chance alone may make (half of a 95 % interval),
    `clear` whether it is more than that, and then the interval `low` to `high` of the share (Fieller's: every share
    that the three scores do not contradict, so a gain that is just clear leaves it wide). The three models are counted
    as independent; on the same rows they err together, and the interval is rather too wide.

    >>> m = {"metric": "accuracy", "n": 400, "recovered": 2.0}
    >>> few = recovery(m | {"base": {"score": 0.88}, "tuned": {"score": 0.9}, "graft": {"score": 0.92}})
    >>> few["rows"], few["clear"]
    (8, False)
    >>> m = {"metric": "accuracy", "n": 400, "recovered": 0.75}
    >>> much = recovery(m | {"base": {"score": 0.5}, "tuned": {"score": 0.9}, "graft": {"score": 0.8}})
    >>> much["clear"], round(much["low"], 2), round(much["high"], 2)
    (True, 0.63, 0.87)
    """
    states = [metrics.get(k) for k in ("base", "tuned", "graft")]
    n = metrics.get("n")
    halves = [half(s, n, str(metrics.get("metric"))) if isinstance(s, Mapping) else None for s in states]
    if any(h is None for h in halves) or not isinstance(n, int):
        return None
    base, tuned, graft = (float(s["score"]) for s in states)  # type: ignore[index]
    wide_base, wide_tuned, wide_graft = (float(h) for h in halves if h is not None)
    gain, chance = tuned - base, hypot(wide_base, wide_tuned)
    told: dict[str, Any] = {"gain": gain, "rows": round(gain * n), "chance": chance, "clear": abs(gain) > chance}
    if told["clear"]:
        # (rise - share gain)^2 <= wide_graft^2 + share^2 wide_tuned^2 + (1 - share)^2 wide_base^2, solved for share
        rise = graft - base
        square = gain**2 - chance**2
        linear = rise * gain - wide_base**2
        rest = rise**2 - wide_graft**2 - wide_base**2
        spread = sqrt(max(linear**2 - square * rest, 0.0))
        told |= {"low": (linear - spread) / square, "high": (linear + spread) / square}
    return told

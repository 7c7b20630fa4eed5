"""Numbers in sentences."""

from __future__ import annotations

from typing import Any

LOWER_IS_BETTER = frozenset({"lm_loss", "loss", "rmsle", "rmse", "mse", "msle", "rmsle_parsed", "perplexity", "ece"})


def number(value: Any) -> str:
    """Three significant places, whole numbers whole.

    >>> number(0.86666), number(1200), number(None), number(0.5)
    ('0.867', '1,200', 'unknown', '0.5')
    """
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)


def percent(value: Any) -> str:
    """A share in percent, as many places as it needs.

    >>> percent(0.5), percent(0.00012), percent(1.0), percent(0.984)
    ('50 %', '0.012 %', '100 %', '98.4 %')
    """
    return "unknown" if value is None else f"{100 * value:.3g} %"


def floats(values: Any) -> list[float | None]:
    """A list of numbers, None where there is none."""
    return [float(v) if isinstance(v, int | float) and not isinstance(v, bool) else None for v in values or []]


def short(value: float) -> float:
    """A number with six significant places: what a page needs of a float32.

    >>> short(0.123456789), short(0.0)
    (0.123457, 0.0)
    """
    return float(f"{value:.6g}")

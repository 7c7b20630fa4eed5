"""Numbers, metrics and layers in sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

LOWER_IS_BETTER = frozenset({"lm_loss", "loss", "rmsle", "rmse", "mse", "msle", "rmsle_parsed", "perplexity", "ece"})


BASELINES = {  # what a score is read against, in one word each everywhere
    "majority": "commonest label",
    "never_answering": "never answering",
    "bag_of_words": "bag of words",
    "fine_tuned": "fine-tuned",
    "finetuned": "fine-tuned",
    "random_encoder": "random encoder",
    "zero_shot": "before training",
    "mse_of_mean": "error of the mean",
}
METRICS = {  # as people read them; others are shown by their own name
    "f1": "F1",
    "mcc": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearman": "rank correlation",
    "exact_match": "exact match",
    "exact": "share exactly right",
    "parse_rate": "share that are numbers",
    "lm_loss": "language-model loss",
    "rmsle": "logarithmic error (RMSLE)",
    "rmsle_parsed": "logarithmic error of answers that are numbers",
    "ece": "calibration error",
    "auc": "AUC of finding planted labels",
    "lds": "rank correlation with retraining (LDS)",
    "share_flipped": "share of answers flipped",
    "recovered": "share of the gain",
    "fraction": "share of the weights",
    "found_in_top_20": "found in the first 20 % of the rows",
    "found_in_top_10": "found in the first 10 % of the rows",
    "confident": "confident learning",
    "detection_area": "area under the curve of what is found",
    "looked_at": "share of the rows looked at",
    "times_chance": "times chance",
}


def glossary() -> dict[str, dict[str, Any]]:
    """{metric or baseline: its name in words, and whether less is better} for the page."""
    keys = sorted({*METRICS, *BASELINES, *LOWER_IS_BETTER})
    return {k: {"name": metric_name(k), **({"lower": True} if k in LOWER_IS_BETTER else {})} for k in keys}


def metric_name(metric: Any) -> str:
    """A metric or baseline in words.

    >>> metric_name("rmsle"), metric_name("accuracy")
    ('logarithmic error (RMSLE)', 'accuracy')
    """
    return (METRICS | BASELINES).get(str(metric), str(metric).replace("_", " ")) if metric else "score"


def scores_name(name: Any) -> str:
    """Whose scores, in words.

    >>> scores_name("self:ekfac@auto"), scores_name("confident"), scores_name("ekfac")
    ('self-influence (ekfac)', 'confident learning', 'ekfac')
    """
    own = re.match(r"self:([^@]+)", str(name))
    return f"self-influence ({own[1]})" if own else metric_name(name)


def number(value: Any) -> str:
    """Three significant places, whole numbers whole.

    >>> number(0.86666), number(1200), number(None), number(0.5)
    ('0.867', '1,200', 'unknown', '0.5')
    """
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)


def percent(value: Any, places: int = 3) -> str:
    """A share in percent, as many places as it needs.

    >>> percent(0.5), percent(0.00012), percent(1.0), percent(0.984), percent(0.126, 2), percent(-1.234, 2)
    ('50 %', '0.012 %', '100 %', '98.4 %', '13 %', '-123 %')
    >>> percent(0.996, 2), percent(0.9996), percent(0.996)
    ('100 %', '100 %', '99.6 %')
    """
    if value is None:
        return "unknown"
    whole = abs(value) >= 1 or float(f"{100 * abs(value):.{places}g}") >= 100  # .2g of 99.6 would be 1e+02
    return f"{100 * value:.0f} %" if whole else f"{100 * value:.{places}g} %"


def points(value: float, signed: bool = True) -> str:
    """A difference of two shares in points of a hundred.

    >>> points(0.02), points(-0.115), points(0.043, False)
    ('+2 points', '-11.5 points', '4.3 points')
    """
    return f"{100 * value:{'+' if signed else ''}.3g} points"


def listed(names: Sequence[str]) -> str:
    """Names in a row.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def layer_name(layer: Any) -> str:
    """A layer as all views call it: the embeddings, then 1 for the first block; a block's own number is one less.

    >>> layer_name(0), layer_name(3), layer_name("block.0"), layer_name("layer.11"), layer_name("head")
    ('the embeddings', 'layer 3', 'layer 1', 'layer 12', 'head')
    """
    if isinstance(layer, int):
        return f"layer {layer}" if layer else "the embeddings"
    block = re.fullmatch(r"(?:block|layer)\.(\d+)", str(layer))
    return f"layer {int(block[1]) + 1}" if block else str(layer)


def short(value: float) -> float:
    """A number with six significant places: what a page needs of a float32.

    >>> short(0.123456789), short(0.0)
    (0.123457, 0.0)
    """
    return float(f"{value:.6g}")

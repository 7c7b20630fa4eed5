"""What a verb shows when it is done: a short table for people, one JSON object for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from budwood.studies.verbs import estimate, run_verb

HIDDEN = {"verb", "budwood", "task", "models", "seed", "limited", "sd", "median", "metric", "split", "notes", "labels"}


def serve(verb: str, cfg: Any, models: Sequence[str], tell: Callable[..., str] | None = None) -> int:
    """Carry out a verb as the command line asked for it; `tell(metrics, cost)` puts its result into words."""
    if cfg.print_config:
        print(as_yaml(cfg), end="")
        return 0
    if cfg.dry_run:
        figures = estimate(verb, cfg, models)
        print(json.dumps(figures)) if cfg.json_output else print(table(figures))
        return 0
    result = run_verb(verb, cfg, models)
    if not result.fresh:
        print(f"Nothing to do: {result.run} was finished with these settings before.", file=sys.stderr)
    if cfg.json_output:
        print(json.dumps({**result.metrics, **result.cost, "run": str(result.run.resolve())}))
    else:
        print((tell or summary)(result.metrics, result.cost))
        if not tell and (shown := results(result.metrics)):
            print(f"\n{shown}")
        print(f"\nin {result.run}")
    return 0


def as_yaml(cfg: Any) -> str:
    """Resolved settings as a file for --config."""
    import yaml

    values = {k: v for k, v in cfg.model_dump(mode="json").items() if k not in ("print_config", "dry_run", "config")}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def summary(metrics: Mapping[str, Any], cost: Mapping[str, Any]) -> str:
    """The headline and every number, aligned."""
    head = f"{' '.join([metrics['verb'], *metrics['models']])} on {metrics['task']}"
    where = f" ({metrics['split']}, n = {metrics['n']:,})" if "split" in metrics and "n" in metrics else ""
    limited = "; limited: a sample of the rows" if metrics.get("limited") else ""
    spread = metrics.get("sd", {})
    lines = {}
    for name, value in metrics.items():
        if name in HIDDEN or value is None or isinstance(value, list | dict):
            continue
        star = "  <- main metric" if name == metrics.get("metric") else ""
        sd = f" ± {number(spread[name])} over seeds {', '.join(map(str, metrics['seed']))}" if name in spread else ""
        lines[name] = f"{number(value)}{sd}{star}"
    if cost.get("seconds") is not None:
        lines["seconds"] = f"{cost['seconds']:,.1f}"
    return f"{head}{where}{limited}\n{table(lines)}"


def results(metrics: Mapping[str, Any]) -> str:
    """The rows of a verb that answers with a table, baselines beneath them."""
    rows = metrics.get("results")
    if metrics["verb"] != "linear" or not rows:
        return ""
    told = [{**r, "prompt": "yes" if r.get("prompt") else "no"} for r in rows]
    told += [{"features": name.replace("_", " "), "test": v} for name, v in metrics["baselines"].items()]
    lines = grid(told, ["features", "prompt", "dims", "C", "train", "test", "low", "high"])
    found = metrics.get("analysis") or {}
    fits = {k: v for k, v in found.items() if not isinstance(v, dict)}
    ranks = found.get("checkpoints", {}).get("spearman", {})
    fits |= {f"spearman of LM loss and task loss, {k}": v for k, v in ranks.items()}
    return f"{lines}\n\n{table(fits)}" if fits else lines


def number(value: Any) -> str:
    """Four significant places, whole numbers whole.

    >>> number(0.86666), number(12), number("head"), number(3.0e-5)
    ('0.8667', '12', 'head', '3e-05')
    """
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def table(values: Mapping[str, Any]) -> str:
    """Names and values in two columns."""
    width = max((len(str(k)) for k in values), default=0)
    return "\n".join(f"  {str(k):<{width}}  {v if isinstance(v, str) else number(v)}" for k, v in values.items())


def grid(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A plain table with a header; numbers right-aligned.

    >>> print(grid([{"a": 1, "b": "x"}], ["a", "b"]))
    a  b
    1  x
    """
    cells = [[number(r[c]) if r.get(c) is not None else "" for c in columns] for r in rows]
    widths = [max(len(c), *(len(row[i]) for row in cells)) if cells else len(c) for i, c in enumerate(columns)]
    right = [any(isinstance(r.get(c), int | float) for r in rows) for c in columns]
    align = [
        [f"{x:>{w}}" if r else f"{x:<{w}}" for x, w, r in zip(row, widths, right)] for row in [list(columns), *cells]
    ]
    return "\n".join("  ".join(row).rstrip() for row in align)

"""What an influence run would cost: FLOPs by phase, bytes, seconds from a few real batches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from budwood.config.influence import STRATEGIES, FitConfig, ScoreConfig, SelfConfig
from budwood.data.task import Task
from budwood.methods.influence.asked import RESIDENT, check_room
from budwood.methods.influence.evidence import ROWS
from budwood.methods.influence.memory import BASE
from budwood.methods.influence.moments import covariances
from budwood.methods.influence.pairs import held_for, most_held
from budwood.methods.influence.queries import query_rows
from budwood.methods.influence.sided import SIDES
from budwood.methods.influence.thin import thin_numbers
from budwood.methods.influence.workshop import Shop, open_shop, settings_for
from budwood.models.reference import ModelRef


def fit(cfg: FitConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of `influence fit`."""
    shop = _shop(cfg, models, task)
    return _figures(shop, cfg, 0)


def score(cfg: ScoreConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of `influence score`."""
    shop = _shop(cfg, models, task)
    if set(cfg.strategy) & set(STRATEGIES):  # what the run would refuse
        check_room(shop, cfg, {"place": str(cfg.out or Path()), "half": False, "held": most_held()}, False)
    return _figures(shop, cfg, len(query_rows(task, cfg)))


def itself(cfg: SelfConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of `influence self`."""
    shop = _shop(cfg, models, task)
    return _figures(shop, cfg, 1)


def _shop(cfg: Any, models: tuple[ModelRef, ...], task: Task) -> Shop:
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    return open_shop(settings_for(cfg, models[0].text), task)


def _figures(shop: Shop, cfg: Any, queries: int) -> dict[str, Any]:
    """FLOPs: forward and backward through activations, symmetric covariances, turned second moments, scores."""
    rows, tokens = len(shop.train), int(shop.train.lengths_N.sum())
    own = [s for s in cfg.strategy if s in STRATEGIES]
    weights = sum(m.out * m.columns for m in shop.maps)
    sides = sum(m.out**2 + (m.columns**2 if m.source == m.name else 0) for m in shop.maps)
    curved, squared = bool(set(own) & {"kfac", "ekfac"}), bool(set(own) & {"ekfac", "diagonal"})
    used = 1.0 if cfg.fit_rows in ("all", "auto") else min(1.0, int(cfg.fit_rows) / rows)
    chosen = "auto" in getattr(cfg, "damping", ("auto",))  # `fit` leaves damping open
    again = ROWS / rows if chosen and used * rows > ROWS else 0.0  # second moments of the rows that tell it
    walk = 4.0 * weights * tokens
    rank = getattr(cfg, "query_rank", None)  # of `score` alone
    flops = {
        "covariance": used * curved * (walk + 7 / 6 * sides * tokens),
        "moments": (used + again) * squared * (walk + (2 * sides + 2 * weights) * tokens),
        "scores": bool(queries) * (walk + 2.0 * weights * tokens + 2.0 * weights * rows * queries * len(own)),
    }
    blocks = 4 * queries * (weights if rank is None else thin_numbers(shop.maps, rank))
    held = blocks if rank is not None or blocks <= RESIDENT else min(blocks, SIDES)  # the rest in a file, at most
    passed = 4 * tokens * sum(m.out + m.columns for m in shop.maps)  # rows that wait for the queries
    waiting = min(held_for(4 * queries * weights, most_held()), passed) if isinstance(cfg, ScoreConfig) else 0
    return {
        "mode": shop.read.mode,
        "fisher": shop.labels,
        "modules": len(shop.maps),
        "parameters": weights,
        "rows": rows,
        "queries": queries,
        "flops": sum(flops.values()),
        "flops_by_phase": flops,
        "memory_bytes": BASE + 4 * 4 * weights + held + waiting,
        "disk_bytes": 4 * (2 * sides + 2 * weights) + 4 * rows * queries * len(own) + blocks - held,
        "seconds": round(_seconds(shop, sum(flops.values())) + 3, 1),
    }


def _seconds(shop: Shop, flops: float) -> float:
    """Predicted from the speed of a small covariance pass."""
    few = np.argsort(shop.train.lengths_N)[len(shop.train) // 2 :][:16]
    began = time.perf_counter()
    covariances(shop, few)
    tokens = int(shop.train.lengths_N[few].sum())
    sides = sum(m.out**2 + (m.columns**2 if m.source == m.name else 0) for m in shop.maps)
    done = (4.0 * sum(m.out * m.columns for m in shop.maps) + 7 / 6 * sides) * tokens
    return flops * (time.perf_counter() - began) / done

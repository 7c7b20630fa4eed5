"""What a check by retraining would cost: a few updates of the real recipe are timed, nothing is kept."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from budwood.config.finetune import FinetuneConfig
from budwood.config.validate import LdsConfig, MislabelConfig, RecallConfig, RemovalConfig
from budwood.data.task import Task
from budwood.engine.jobs import one_thread
from budwood.evaluation.counterfactual import removals
from budwood.evaluation.fleet import same_task
from budwood.evaluation.matrices import common_queries, open_scores
from budwood.evaluation.retrain import Recipe, open_shop
from budwood.methods.estimate import finetune as estimate_finetune
from budwood.models.reference import ModelRef
from budwood.train.plan import make_plan

START, RAY_START = 6.0, 12.0  # seconds until a worker process has loaded its model; until a Ray cluster stands
FEW, MORE = 2, 8  # updates timed


def lds(cfg: LdsConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of `validate lds`."""
    if cfg.truth is not None:
        return {"retrains": 0, "seconds": 5.0}
    matrices = open_scores(cfg.scores, cfg.only)
    return _fleet(cfg, models[0], task, common_queries(matrices), cfg.subsets * cfg.repeats)


def counterfactual(cfg: RemovalConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of `validate counterfactual`: as expected where early flips spare some of the search, and at most."""
    matrices = open_scores(cfg.scores, cfg.only)
    queries = common_queries(matrices)
    recipe = Recipe.of_run(models[0].run, models[0].text)
    counts = removals(cfg.remove, len(recipe.task().rows("train")))
    steps = len(counts).bit_length() if cfg.bisect else len(counts)
    targets = min(cfg.targets, len(queries))
    search = targets * cfg.repeats * (len(matrices) + 1) * steps
    # going up, scores flip a target after half of the sizes if any is as likely; random rows hardly ever do; the first
    # retrains mostly agree, and that decides
    asked = (len(matrices) + 1) * steps if cfg.bisect else len(matrices) * (steps + 1) / 2 + steps
    likely = targets * ((cfg.repeats + 1) // 2) * asked
    fixed = cfg.base_seeds + (len(matrices) + 1) * len(counts) * cfg.repeats * cfg.together
    expected = fixed + round(likely)
    figures = _fleet(cfg, models[0], task, queries, expected)
    more = (fixed + search - expected) * figures["seconds_each"] / cfg.workers
    return {
        **figures,
        "retrains_at_most": fixed + search,
        "seconds_at_most": round(figures["seconds"] + more, 1),
    }


brittleness = counterfactual


def recall(cfg: RecallConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of `validate recall`: it reads scores and trains nothing."""
    return {"retrains": 0, "seconds": 3.0}


def mislabel(cfg: MislabelConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of `validate mislabel`: one fine-tuning, one per fold and one more, and self-influence."""
    known = FinetuneConfig.model_fields
    own = FinetuneConfig(**{k: v for k, v in cfg.model_dump().items() if k in known})
    figures = estimate_finetune(own, models, task)
    trained = 2 + cfg.folds
    return {**figures, "retrains": trained, "seconds": round(figures["seconds"] * (trained + 1.5), 1)}


def _fleet(cfg: Any, model: ModelRef, given: Task, queries: list[str], retrains: int) -> dict[str, Any]:
    recipe = Recipe.of_run(model.run, model.text)
    task = same_task(recipe, model.text, given)
    rows = task.rows("train")
    first = getattr(cfg, "queries", None)
    shop = open_shop(recipe.asking(queries or [r.id for r in task.rows(task.reported)[:first]]))
    fraction = getattr(cfg, "fraction", 1.0)  # removal leaves nearly all rows
    kept_N = np.arange(len(rows)) < max(1, round(fraction * len(rows)))
    with one_thread():
        _timed(shop, kept_N, FEW)
        seconds = [min(_timed(shop, kept_N, steps) for _ in range(2)) for steps in (FEW, MORE)]
        began = time.perf_counter()
        shop.measure()
        asking = time.perf_counter() - began
    step = max(0.0, seconds[1] - seconds[0]) / (MORE - FEW)
    features = int(kept_N[shop.row_F].sum())
    plan = make_plan(shop.cfg, features, int(shop.read.loaded.model.config.hidden_size), 0)
    each = max(0.0, seconds[0] - FEW * step) + plan.steps * step + asking
    start = RAY_START if cfg.engine == "ray" else START if cfg.workers > 1 else 0.0
    return {
        "retrains": retrains,
        "rows_each": int(kept_N.sum()),
        "updates_each": plan.steps,
        "seconds_each": round(each, 3),
        "workers": cfg.workers,
        "disk_bytes": retrains * (400 + 5 * len(shop.recipe.queries)),
        "seconds": round(retrains * each / cfg.workers + start + 2, 1),
    }


def _timed(shop: Any, kept_N: np.ndarray, steps: int) -> float:
    began = time.perf_counter()
    shop.train(kept_N, 0, steps)
    return time.perf_counter() - began

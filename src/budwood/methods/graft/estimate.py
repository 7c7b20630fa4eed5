"""What `graft learn` would cost, before it runs."""

from __future__ import annotations

import time
from typing import Any

import torch

from budwood.config.graft import RULES, GraftLearnConfig
from budwood.data.task import Task
from budwood.methods.graft.learned import Steps, batches
from budwood.methods.graft.pair import open_pair
from budwood.models.reference import ModelRef
from budwood.train.evaluate import evaluating


def learn(cfg: GraftLearnConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of a graft: one pass and one step are timed, nothing is learned."""
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    pair = open_pair(cfg, models[0], models[1], task)
    objective, model = pair.read.objective, pair.read.loaded.model
    batch = batches(pair, Steps(rows=cfg.mask_batch_size))(0)
    objective.loss(objective.logits(model, batch), objective.targets(batch)).mean().backward()
    began = time.perf_counter()
    objective.loss(objective.logits(model, batch), objective.targets(batch)).mean().backward()
    step = time.perf_counter() - began
    with evaluating(model):
        began = time.perf_counter()
        objective.logits(model, batch)
        row = (time.perf_counter() - began) / len(batch)
    points = len(RULES) * len(cfg.curve_sizes) if cfg.curve else 0
    passes = -(-len(task.rows("train")) // cfg.mask_batch_size) * max(1, cfg.path_points)  # of first-order scores
    masks = (cfg.select == "learned") + (len(cfg.curve_sizes) if points else 0)
    learned = masks * cfg.mask_steps + passes
    test = len(task.rows(task.reported))
    parameters = sum(p.numel() for p in model.parameters())
    tokens = batch.inputs["input_ids"].numel()
    return {
        "mode": pair.read.mode,
        "parameters": parameters,
        "graftable": len(pair.delta_P),
        "flops": 6.0 * len(pair.delta_P) * tokens * learned,
        "memory_bytes": 4 * (parameters + 3 * len(pair.delta_P)),
        "seconds": round(learned * step * 1.3 + (3 + points) * test * row + 3, 1),
    }


def compare(cfg: Any, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of looking at or joining grafts: their files, and one evaluation per graft and task."""
    grafts = [g for m in models for g in m.grafts]
    return {
        "grafts": len(grafts),
        "graft_bytes": sum(g.stat().st_size for g in grafts),
        "evaluations": len(grafts) ** 2,
    }

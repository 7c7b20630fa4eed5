"""What a run would cost, before it runs: parameters, FLOPs, bytes, seconds measured on a few real batches."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from budwood.config.finetune import EvaluateConfig, FinetuneConfig
from budwood.config.fisher import FisherConfig
from budwood.data.batch import training_batches
from budwood.data.task import Row, Task
from budwood.methods.fisher import kind_for
from budwood.models.load import load
from budwood.models.reading import Reading, head_spec, mode_for, reading
from budwood.models.reference import ModelRef
from budwood.train.evaluate import TOKENS, evaluating
from budwood.train.plan import device_for, make_plan, prepare_model

SAMPLE = 2000  # rows tokenised to learn the lengths
TRIALS = 4  # batches timed


def finetune(cfg: FinetuneConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of a fine-tuning; nothing is trained, a few forward and backward passes are timed."""
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    read = _reading(cfg, models[0], task)
    sizes = prepare_model(read.loaded.model, cfg)
    rows = task.rows("train")
    sample = _sample(read, rows)
    plan = make_plan(
        cfg, len(rows) * len(sample) // min(len(rows), SAMPLE), int(read.loaded.model.config.hidden_size), cfg.seed
    )
    mean = float(sample.lengths_N.mean())
    size = plan.batch_size * plan.accumulation
    batches = training_batches(sample.lengths_N, size, cfg.seed, 0)
    chosen = sorted(batches, key=lambda b: sample.lengths_N[b].sum())[:: max(1, len(batches) // TRIALS)][:TRIALS]
    step_seconds = _time_steps(read, sample, chosen)
    test = task.rows(task.reported)
    eval_seconds = _time_forward(read, sample) * len(test)
    zero_shot = 2 if read.mode in ("prompt", "causal") and task.kind in ("label", "regression") else 1
    tokens = plan.steps * size * mean
    parameters = sizes["parameters"]
    return {
        "mode": read.mode,
        **sizes,
        "train_rows": len(rows),
        "mean_tokens": round(mean, 1),
        "updates": plan.steps,
        "learning_rate": plan.learning_rate,
        "flops": 6.0 * _dense(read) * tokens,
        "memory_bytes": parameters * 4 * (2 if cfg.optimizer == "sgd" else 4)
        + int(64 * read.loaded.model.config.hidden_size * size * mean),
        "disk_bytes": parameters * 4,
        "seconds": round(plan.steps * step_seconds + zero_shot * eval_seconds + 2, 1),
    }


def evaluate(cfg: EvaluateConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of an evaluation."""
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    read = _reading(cfg, models[0], task)
    rows = task.rows(cfg.eval_split or task.reported)
    sample = _sample(read, rows)
    parameters = sum(p.numel() for p in read.loaded.model.parameters())
    tokens = float(sample.lengths_N.mean()) * len(rows)
    return {
        "mode": read.mode,
        "parameters": parameters,
        "rows": len(rows),
        "mean_tokens": round(float(sample.lengths_N.mean()), 1),
        "flops": 2.0 * _dense(read) * tokens,
        "memory_bytes": parameters * 4 + 64 * int(read.loaded.model.config.hidden_size) * TOKENS,
        "seconds": round(_time_forward(read, sample) * len(rows) + 2, 1),
    }


def fisher(cfg: FisherConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of a Fisher run: one forward and backward pass per row and question, sums as large as the model."""
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    read = _reading(cfg, models[0], task)
    rows = task.rows(cfg.on)
    sample = _sample(read, rows)
    kind = kind_for(cfg, task)
    passes = max(1, len(task.labels) - 1) if kind == "exact" and task.kind == "label" else 1
    batches = training_batches(sample.lengths_N, 32, 0, 0)[:TRIALS]
    parameters = sum(p.numel() for p in read.loaded.model.parameters())
    tokens = float(sample.lengths_N.mean()) * len(rows)
    return {
        "mode": read.mode,
        "kind": kind,
        "parameters": parameters,
        "rows": len(rows),
        "flops": (2.0 + 6.0 * passes) * _dense(read) * tokens,
        "memory_bytes": parameters * 4 * 3,
        "disk_bytes": parameters * 4,
        "seconds": round(_time_steps(read, sample, batches) / 32 * len(rows) * (0.4 + 1.2 * passes) + 3, 1),
    }


def comparison(cfg: Any, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of a comparison of files: it reads each of them once."""
    paths = [p for m in models if m.path for p in m.path.glob("*.safetensors")] + [
        file for p in getattr(cfg, "fishers", ()) for file in (p.glob("*.safetensors") if p.is_dir() else [p])
    ]
    size = sum(p.stat().st_size for p in paths if p.exists())
    return {"files": len(paths), "memory_bytes": 2 * size, "seconds": round(2 + size * 4e-9, 1)}


def _reading(cfg: Any, ref: ModelRef, task: Task) -> Reading:
    mode = mode_for(cfg, task, ref)
    loaded = load(ref, mode, head_spec(task, cfg), seed=cfg.model_seed or 0, device=device_for(cfg.device))
    return reading(loaded, task, cfg, mode, cfg.seed)


def _sample(read: Reading, rows: tuple[Row, ...]) -> Any:
    every = max(1, len(rows) // SAMPLE)
    return read.encode(rows[::every][:SAMPLE])


def _dense(read: Reading) -> int:
    """Weights that every token meets: all but the embeddings."""
    tables = {id(m.weight) for m in read.loaded.model.modules() if isinstance(m, torch.nn.Embedding)}
    return sum(p.numel() for p in read.loaded.model.parameters() if id(p) not in tables)


def _time_steps(read: Reading, features: Any, batches: list[np.ndarray]) -> float:
    """Mean seconds of a forward and backward pass, after one that is not counted."""
    feed, objective, model = read.feed(features), read.objective, read.loaded.model
    seconds = []
    for index in [batches[0], *batches]:
        batch = feed(index, 0)
        began = time.perf_counter()
        objective.loss(objective.logits(model, batch), objective.targets(batch)).mean().backward()
        model.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return float(np.mean(seconds[1:])) + trained * 1.2e-9  # the optimiser reads and writes about six arrays


def _time_forward(read: Reading, features: Any) -> float:
    """Seconds per row of a forward pass."""
    index = np.argsort(features.lengths_N)[len(features) // 2 :][:64]
    batch = read.feed(features)(index, 0)
    with evaluating(read.loaded.model):
        read.objective.logits(read.loaded.model, batch)
        began = time.perf_counter()
        read.objective.logits(read.loaded.model, batch)
        return (time.perf_counter() - began) / len(index)

"""What `linear` would cost: forward passes, streams over the vocabulary, bytes of what is kept."""

from __future__ import annotations

import time
from typing import Any

import torch

from budwood.config.linear import LinearConfig
from budwood.data.task import Task
from budwood.methods.linear.families import KERNEL_ROWS
from budwood.methods.linear.run import check_families, check_labels, check_tuned
from budwood.methods.linear.saving import size_of_p
from budwood.methods.linear.states import Shop, encoded, load_speaker, states
from budwood.models.output import vocabulary_of
from budwood.models.reference import ModelRef
from budwood.train.plan import device_for

SAMPLE = 128


def linear(cfg: LinearConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of a run of `linear`; a few rows are read to learn the speed."""
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    check_labels(task)
    check_tuned(cfg, task)
    shop = Shop(load_speaker(models[0], device_for(cfg.device)), task, cfg)
    check_families(cfg, shop)
    prompt, place = shop.asks(cfg.prompts[-1])
    rows = shop.rows
    sample = encoded(shop.speaker, rows[:: max(1, len(rows) // SAMPLE)][:SAMPLE], prompt, place, cfg.max_length)
    states(shop.speaker, sample, place)
    began = time.perf_counter()
    width = states(shop.speaker, sample, place).shape[1]
    per_row = (time.perf_counter() - began) / len(sample)
    words = len(vocabulary_of(shop.speaker.loaded.model)) if shop.speaker.speaks else 0
    train = len(task.rows("train"))
    passes = {"phi-p": 4.0 * width, "p-projected": 4.0 * width, "p": 2.0 * width + min(train, KERNEL_ROWS)}
    flops = sum(passes.get(f, 0.0) for f in cfg.families) * len(rows) * words * len(cfg.prompts)
    kernel = 3 * 8 * min(train, KERNEL_ROWS) * len(rows) if "p" in cfg.families and train < words else 0
    return {
        "parameters": sum(p.numel() for p in shop.speaker.loaded.model.parameters()),
        "rows": len(rows),
        "width": width,
        "vocabulary": words,
        "mean_tokens": round(float(sample.lengths_N.mean()), 1),
        "flops_of_streams": flops,
        "memory_bytes": len(rows) * width * 4 * 4 + words * width * 4 + (256 << 20) + kernel,
        "disk_bytes": len(rows) * width * 4 * len(cfg.prompts)
        + (size_of_p(len(rows), words, cfg.top_k) * len(cfg.prompts) if cfg.save_p else 0),
        "seconds": round(per_row * len(rows) * len(cfg.prompts) + flops / 3e10 + 5, 1),
    }

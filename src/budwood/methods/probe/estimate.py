"""What a probe run would cost: rows, tokens, FLOPs of the forward passes, bytes of features."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from budwood.capture.features import Ask, bytes_of, config_of, open_reading, states
from budwood.config.probe import ProbeConfig
from budwood.data.task import Task
from budwood.methods.probe.side import check, kind_of
from budwood.methods.probe.trained import EPOCHS
from budwood.models.reference import ModelRef

SAMPLE = 512


def probe(cfg: ProbeConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of a probe run; a few batches are timed, nothing is written."""
    check(cfg, task)
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    out = {"rows": 0, "tokens": 0, "flops": 0.0, "feature_bytes": 0, "written_bytes": 0, "seconds": 0.0}
    splits = dict.fromkeys(("train", *(("validation",) if task.kind == "span" else ()), task.reported))
    for ref in models:
        kind = kind_of(cfg, task, ref)
        read = open_reading(Ask(ref.text, config_of(cfg), "train", kind), task)
        tables = {id(m.weight) for m in read.loaded.model.modules() if isinstance(m, torch.nn.Embedding)}
        dense = sum(p.numel() for p in read.loaded.model.parameters() if id(p) not in tables)
        passes = 1 + (cfg.random_encoder and ref is models[0])
        for split in splits:
            rows = task.rows(split)
            sample = read.encode(rows[:: max(1, len(rows) // SAMPLE)][:SAMPLE])
            share = len(rows) / min(len(rows), SAMPLE)
            tokens = float(sample.lengths_N.sum()) * share
            began = time.perf_counter()
            index = np.argsort(sample.lengths_N)[len(sample) // 2 :][:32]
            states(read.loaded.model, read.feed(sample)(index), kind, read.loaded.tokenizer.mask_token_id)
            each = (time.perf_counter() - began) / float(sample.lengths_N[index].sum())
            out["rows"] += len(rows)
            out["tokens"] += int(tokens)
            size = int(bytes_of(read, sample, kind) * share) * passes
            runs = passes * ((cfg.epochs or EPOCHS) if cfg.online and split == "train" else 1)
            out["flops"] += 2.0 * dense * tokens * runs
            out["feature_bytes"] += size
            out["written_bytes"] += 0 if cfg.online else size
            out["seconds"] += round(1.5 * each * tokens * runs, 1)
    return {**out, "models": len(models), "states": kind}

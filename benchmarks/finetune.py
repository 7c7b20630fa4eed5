"""Fine-tuning speed against HF Trainer: the same rows, updates, threads and model, in one run.

    python benchmarks/finetune.py [--rows 1600] [--model DIR] [--data DIR]

Prints examples per second of the training loop alone and the ratios: the Trainer with dynamic padding, the Trainer
with every row padded to 128 tokens, ours, and the floor: forward and backward on the same length-sorted batches
without any optimiser. Losses are the mean training loss over the last third of the updates.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch

from budwood.config.data import DataConfig
from budwood.config.finetune import FinetuneConfig
from budwood.data.batch import seed_of, training_batches
from budwood.data.source import load_task
from budwood.models.load import HeadSpec, Loaded, load
from budwood.models.reading import Reading, reading
from budwood.models.reference import resolve
from budwood.train.fit import Keeping, fit
from budwood.train.plan import make_plan, prepare_model

BATCH, RATE = 32, 5e-5


def fresh(model: str, labels: tuple[str, ...]) -> Loaded:
    return load(resolve(model), "head", HeadSpec("label", labels), seed=0)


def ours(read: Reading, rows: tuple[Any, ...], cfg: FinetuneConfig) -> tuple[float, list[float]]:
    features = read.encode(rows)
    plan = make_plan(cfg, len(features), 384, 0)
    prepare_model(read.loaded.model, cfg)
    began = time.perf_counter()
    history = fit(read.loaded.model, read.objective, read.feed(features), plan, Keeping())
    return time.perf_counter() - began, [p["loss"] for p in history.points]


def floor(read: Reading, rows: tuple[Any, ...], epochs: int) -> tuple[float, list[float]]:
    """Forward and backward alone on our batches: what no training loop can beat."""
    features = read.encode(rows)
    feed, model = read.feed(features), read.loaded.model.train()
    began = time.perf_counter()
    for epoch in range(epochs):
        for index in training_batches(features.lengths_N, BATCH, 0, epoch):
            batch = feed(index, epoch)
            read.objective.loss(read.objective.logits(model, batch), read.objective.targets(batch)).mean().backward()
            model.zero_grad(set_to_none=True)
    return time.perf_counter() - began, []


def trainer(loaded: Loaded, rows: tuple[Any, ...], epochs: int, pad: int | None) -> tuple[float, list[float]]:
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    made = loaded.tokenizer(
        [r.text for r in rows], truncation=True, max_length=pad or 512, padding="max_length" if pad else False
    )
    data = [{k: made[k][i] for k in made} | {"labels": r.label} for i, r in enumerate(rows)]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            per_device_train_batch_size=BATCH,
            num_train_epochs=epochs,
            learning_rate=RATE,
            weight_decay=0.01,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
        )
        runner = Trainer(
            loaded.model, arguments, train_dataset=data, data_collator=DataCollatorWithPadding(loaded.tokenizer)
        )
        began = time.perf_counter()
        runner.train()
        seconds = time.perf_counter() - began
    return seconds, [entry["loss"] for entry in runner.state.log_history if "loss" in entry]


def main() -> None:
    here = Path(__file__).resolve().parents[2] / "shared"
    parse = argparse.ArgumentParser()
    parse.add_argument("--rows", type=int, default=1600)
    parse.add_argument("--epochs", type=int, default=1)
    parse.add_argument("--model", default=str(here / "models" / "all-MiniLM-L6-v2"))
    parse.add_argument("--data", type=Path, default=here / "data")
    parse.add_argument("--threads", type=int, default=os.cpu_count())
    given = parse.parse_args()
    torch.set_num_threads(given.threads)
    if not Path(given.model).is_dir():
        given.model, task = "tiny-bert", load_task(DataConfig(task="tiny-sentiment", limit=given.rows))
    else:
        task = load_task(DataConfig(task="sst2", data_dir=(given.data,), limit=given.rows))
    rows = task.rows("train")
    cfg = FinetuneConfig(
        task=task.name,
        learning_rate=RATE,
        num_train_epochs=given.epochs,
        per_device_train_batch_size=BATCH,
        warmup_steps=0,
        logging_steps=1,
    )

    def read() -> Reading:
        return reading(fresh(given.model, task.labels), task, cfg, "head", 0)

    ours(read(), rows[: 2 * BATCH], cfg)  # warm up kernels and allocator
    runs = {
        "ours": lambda: ours(read(), rows, cfg),
        "trainer, dynamic padding": lambda: trainer(fresh(given.model, task.labels), rows, given.epochs, None),
        "trainer, padded to 128": lambda: trainer(fresh(given.model, task.labels), rows, given.epochs, 128),
        "floor: forward + backward": lambda: floor(read(), rows, given.epochs),
    }
    seconds, losses = {}, {}
    for name, run in runs.items():
        torch.manual_seed(seed_of(0, name))
        seconds[name], curve = run()
        losses[name] = float(np.mean(curve[-max(1, len(curve) // 3) :])) if curve else float("nan")
    total = len(rows) * given.epochs
    for name, s in seconds.items():
        print(f"{name:<28} {total / s:8.1f} examples/s   {s / seconds['ours']:5.2f}x ours   loss {losses[name]:.3f}")
    dynamic, padded = (seconds[k] / seconds["ours"] for k in ("trainer, dynamic padding", "trainer, padded to 128"))
    print(
        json.dumps(
            {
                "over_dynamic": dynamic,
                "over_padded_128": padded,
                "of_floor": seconds["ours"] / seconds["floor: forward + backward"],
                "losses": losses,
            },
            allow_nan=True,
        )
    )


if __name__ == "__main__":
    main()

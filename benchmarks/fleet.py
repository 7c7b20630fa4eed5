"""Retrains per hour: our fleet with one and two workers, against a loop over HF Trainer on the same recipe.

    python benchmarks/fleet.py [--retrains 12] [--rows 512] [--model tiny-bert] [--task tiny-sentiment]

All sides train on the same random halves of the rows with the same updates, rate and batch size, and measure the same
queries: workers on one thread each, the loop on one thread (what one core does) and on as many as there are cores (what
the machine does; the faster of the two counts). Workers are timed from the moment their processes stand (the start is
printed beside it), interleaved and repeated; the best of each is kept. Also where the time of one retrain goes.
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
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from budwood.config.finetune import FinetuneConfig
from budwood.data.source import load_task
from budwood.engine.local import run_jobs
from budwood.evaluation.datamodel import subset
from budwood.evaluation.retrain import Recipe, job, open_shop

BATCH, EPOCHS, RATE, QUERIES = 32, 4, 5e-4, 64


def make_recipe(model: str, task: str, rows: int, freeze: tuple[str, ...] = ()) -> Recipe:
    cfg = FinetuneConfig(
        task=task,
        limit=rows,
        limit_eval=QUERIES,
        data_seed=0,
        model_seed=0,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        freeze=freeze,
    )
    found = load_task(cfg)
    queries = tuple(r.id for r in found.rows(found.reported))
    return Recipe(model, cfg.model_dump(mode="json"), found.digest, queries)


def fleet_seconds(recipe: Recipe, masks: list[np.ndarray], workers: int) -> tuple[float, float]:
    """Seconds from the first finished retrain to the last, scaled to all of them; and until the first was there."""
    with tempfile.TemporaryDirectory() as place:
        jobs = [job(recipe, mask_N, seed, Path(place)) for seed, mask_N in enumerate(masks)]
        began, ends = time.perf_counter(), []
        run_jobs(jobs, workers, finished=lambda done: ends.append(time.perf_counter()))
    # the first `workers` retrains carry the start of the processes: rate of the others, in steady state
    rest = len(ends) - workers
    return (ends[-1] - ends[workers - 1]) / rest * len(masks), ends[0] - began


def trainer_seconds(recipe: Recipe, masks: list[np.ndarray], threads: int) -> float:
    """The same retrains as most people write them: a Trainer each, on rows tokenised once."""
    torch.set_num_threads(threads)
    from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, Trainer, TrainingArguments

    shop = open_shop(recipe)
    tokenizer, task = shop.read.loaded.tokenizer, shop.read.task
    path = str(shop.read.loaded.ref.path)

    def encoded(rows: Any) -> list[dict[str, Any]]:
        made = tokenizer([r.text for r in rows], truncation=True)
        keys = list(made)
        return [{k: made[k][i] for k in keys} | {"labels": r.label} for i, r in enumerate(rows)]

    train, asked = encoded(task.rows("train")), encoded(task.rows(task.reported))
    seconds = []
    for seed, mask_N in enumerate(masks):
        began = time.perf_counter()
        model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=len(task.labels))
        with tempfile.TemporaryDirectory() as place:
            arguments = TrainingArguments(
                output_dir=place,
                per_device_train_batch_size=BATCH,
                num_train_epochs=EPOCHS,
                learning_rate=RATE,
                weight_decay=0.01,
                warmup_steps=0.06,
                seed=seed,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                dataloader_num_workers=0,
            )
            kept = [x for x, held in zip(train, mask_N) if held]
            own = Trainer(model, arguments, train_dataset=kept, data_collator=DataCollatorWithPadding(tokenizer))
            own.train()
            own.predict(asked)
        seconds.append(time.perf_counter() - began)
    torch.set_num_threads(1)
    return float(sum(seconds[1:]) / max(1, len(seconds) - 1) * len(masks))  # the first one warms up


def profile(recipe: Recipe, mask_N: np.ndarray) -> dict[str, float]:
    """Seconds of the parts of one retrain, after one that is not counted."""
    shop = open_shop(recipe)
    shop.train(mask_N, 0, 2)
    clock = [time.perf_counter()]
    shop._restart(0)
    clock.append(time.perf_counter())
    shop.train(mask_N, 0)
    clock.append(time.perf_counter())
    shop.measure()
    clock.append(time.perf_counter())
    return {k: round(b - a, 4) for k, a, b in zip(("weights back", "training", "queries"), clock, clock[1:])}


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--retrains", type=int, default=12)
    p.add_argument("--rows", type=int, default=512)
    p.add_argument("--repeats", type=int, default=2)
    p.add_argument("--model", default="tiny-bert")
    p.add_argument("--task", default="tiny-sentiment")
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    torch.set_num_threads(1)
    recipe = make_recipe(a.model, a.task, a.rows)
    masks = [subset(a.rows, 0.5, 0, i) for i in range(a.retrains)]
    parts = profile(recipe, masks[0])
    cores = os.cpu_count() or 1
    found: dict[str, list[float]] = {
        k: [] for k in ("one worker", "two workers", "HF Trainer", "HF Trainer, all cores")
    }
    starts = []
    for _ in range(a.repeats):
        found["HF Trainer"].append(trainer_seconds(recipe, masks, 1))
        found["HF Trainer, all cores"].append(trainer_seconds(recipe, masks, cores))
        found["one worker"].append(fleet_seconds(recipe, masks, 1)[0])
        two, start = fleet_seconds(recipe, masks, 2)
        found["two workers"].append(two)
        starts.append(start)
    best = {k: min(v) for k, v in found.items()}
    frozen = make_recipe(a.model, a.task, a.rows, ("embeddings", "layers:2"))
    result = {
        "retrains_per_hour": {k: round(a.retrains / v * 3600) for k, v in best.items()},
        "two_over_one": round(best["one worker"] / best["two workers"], 3),
        "one_over_trainer": round(best["HF Trainer"] / best["one worker"], 3),
        "machine_over_trainer": round(
            min(best["HF Trainer"], best["HF Trainer, all cores"]) / min(best["one worker"], best["two workers"]), 3
        ),
        "start_of_workers_s": round(min(starts), 1),
        "one_retrain_s": parts,
        "one_retrain_lower_half_frozen_s": profile(frozen, masks[0]),
        "cores": cores,
    }
    print(json.dumps(result) if a.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

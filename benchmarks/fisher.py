"""Per-example Fisher information against a plain forward and backward pass, and against one example at a time.

    python benchmarks/fisher.py [--rows 600] [--repeats 3] [--memory]

Both sides see the same rows in the same batches, in turns in one process; the figure is the ratio of medians. The
one-example loop is the published one: every row padded to the model's positions, gradients squared and added by hand.
With --memory, peak memory of two runs with 500 and 5,000 rows is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch

from budwood.capture.accumulate import Sums
from budwood.capture.gradients import cover
from budwood.config.data import DataConfig
from budwood.config.fisher import FisherConfig
from budwood.data.batch import Features
from budwood.data.source import load_task
from budwood.methods.fisher import KINDS, _batches, _Shop
from budwood.models.load import load
from budwood.models.reading import head_spec, reading
from budwood.models.reference import resolve
from budwood.params import tree

SHARED = Path(os.environ.get("BUDWOOD_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def shop(model: str, task: str, mode: Any, kind: Any, rows: int) -> _Shop:
    """A model at work on a task, with a head of random weights where it needs one: speed is the same."""
    folders = (SHARED / "data",) if (SHARED / "data").is_dir() else ()
    found = load_task(DataConfig(task=task, data_dir=folders, limit=rows))
    cfg = FisherConfig(task=task, kind=kind)
    read = reading(load(resolve(model), mode, head_spec(found, cfg)), found, cfg, mode, 0)
    features = read.encode(found.rows("train"))
    first = read.feed(features)(np.arange(3), 0)
    return _Shop(read, features, cover(read.loaded.model, read.objective, first), kind, cfg)


def ordered(features: Features) -> np.ndarray:
    return np.argsort(-features.lengths_N, kind="stable")


def fisher(here: _Shop) -> None:
    KINDS[here.kind](here, ordered(here.features), Sums())


def plain(here: _Shop) -> None:
    """Forward and backward, gradients of all weights, on the same batches."""
    model, objective, feed = here.read.loaded.model, here.read.objective, here.read.feed(here.features)
    for index in _batches(here, ordered(here.features)):
        batch = feed(index, 0)
        objective.loss(objective.logits(model, batch), objective.targets(batch)).mean().backward()
        model.zero_grad(set_to_none=True)


def one_by_one(here: _Shop, rows: int) -> float:
    """Seconds per row of the published loop: one padded example, its gradient squared and added."""
    model, objective = here.read.loaded.model, here.read.objective
    feed, length = here.read.feed(here.features), here.read.loaded.positions
    total = [torch.zeros_like(p) for p in tree.named(model).values()]
    began = time.perf_counter()
    for n in range(rows):
        batch = feed(np.array([n]), 0)
        for part in (batch.inputs, batch.targets):
            for key, value in part.items():
                if value.dim() == 2:
                    room = length - value.shape[1]
                    fill = -100 if key == "target" else 0
                    part[key] = torch.nn.functional.pad(value, (0, room), value=fill)  # type: ignore[index]
        mask = torch.zeros(1, length, dtype=torch.long)
        mask[0, : int(here.features.lengths_N[n])] = 1
        batch.inputs["attention_mask"] = mask  # type: ignore[index]
        model.zero_grad(set_to_none=True)
        objective.loss(objective.logits(model, batch), objective.targets(batch)).mean().backward()
        for sums, p in zip(total, tree.named(model).values()):
            if p.grad is not None:
                sums += p.grad.square()
    return (time.perf_counter() - began) / rows


def timed(work: Callable[[], None]) -> float:
    began = time.process_time()  # the machine may be shared: what counts is what this process used
    work()
    return time.process_time() - began


def compare(name: str, here: _Shop, repeats: int) -> dict[str, float]:
    fisher(here), plain(here)  # warm up
    seconds: dict[str, list[float]] = {"fisher": [], "plain": []}
    for _ in range(repeats):
        seconds["plain"].append(timed(lambda: plain(here)))
        seconds["fisher"].append(timed(lambda: fisher(here)))
    ours, floor = (statistics.median(seconds[k]) for k in ("fisher", "plain"))
    began = time.process_time()
    few = 4
    one_by_one(here, few)
    loop = (time.process_time() - began) / few * len(here.features)
    out = {"over_plain": ours / floor, "loop_over_ours": loop / ours, "rows_per_second": len(here.features) / ours}
    print(
        f"{name:<34} {out['over_plain']:5.2f}x plain epoch   loop {out['loop_over_ours']:6.1f}x ours   "
        f"{out['rows_per_second']:8.1f} rows/s",
        flush=True,
    )
    return out


def memory(model: str, task: str, more: list[str]) -> dict[str, float]:
    """Peak memory in MB of runs with 500 and 5,000 rows, and their ratio."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for rows in (500, 5000):
            words = [sys.executable, "-m", "budwood", "fisher", model, "--task", task, "--limit", str(rows), *more]
            done = subprocess.run(
                [*words, "--threads", "1", "--json", "--out", f"{place}/{rows}"],
                capture_output=True,
                text=True,
                check=True,
            )
            found[str(rows)] = float(json.loads(done.stdout)["peak_rss_mb"])
    ratio = found["5000"] / found["500"]
    both = f"{found['500']:.0f} MB with 500 rows, {found['5000']:.0f} MB with 5,000"
    print(f"peak memory, {Path(model).name}: {both}: {ratio:.3f}x")
    return {**found, "ratio": ratio}


def main() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("--rows", type=int, default=600)
    parse.add_argument("--repeats", type=int, default=3)
    parse.add_argument("--memory", action="store_true")
    given = parse.parse_args()
    torch.set_num_threads(1)
    out: dict[str, Any] = {}
    mini = SHARED / "models" / "all-MiniLM-L6-v2"
    if mini.is_dir():
        here = shop(str(mini), "sst2", "head", "exact", given.rows)
        out["minilm"] = compare("MiniLM, SST-2 head, exact", here, given.repeats)
    here = shop("tiny-bert", "tiny-text", "mlm", "sampled", given.rows)
    out["tiny"] = compare("tiny-bert, masked LM, sampled", here, given.repeats)
    if given.memory:
        out["memory"] = memory("tiny-bert", "tiny-text", [])
    print(json.dumps(out))


if __name__ == "__main__":
    main()

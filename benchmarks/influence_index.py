"""The index against full EKFAC on held-out queries, and how long a question takes beyond its backward pass.

    python benchmarks/influence_index.py [--model tiny-bert --task tiny-entail --rows 2400 --bits 4 --entry products]

Calibration queries and questions are different rows of the validation split.
One JSON object: per size of the index mean and worst Spearman, top-10 overlap, milliseconds, megabytes. `share` is the
size of a training row's entry in 16-bit numbers, as a share of all coordinates; `share_of_coordinates` is how many are
kept, in `bits` each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import budwood as bw
from budwood.config.influence import IndexConfig, ScoreConfig
from budwood.data.batch import Features
from budwood.linalg.ranking import spearman_by_row, top_k
from budwood.methods.influence.index import Index, calibration_rows
from budwood.methods.influence.query import plain_backward
from budwood.methods.influence.scores import Scores
from budwood.methods.influence.workshop import open_shop, settings_for
from budwood.studies.verbs import run_verb


def measure(given: argparse.Namespace, place: Path) -> dict[str, Any]:
    tuned = place / "tuned"
    common = {"task": given.task, "limit": given.rows, "limit_eval": 128, "threads": given.threads, "progress": "none"}
    if given.data_dir:
        common["data_dir"] = (given.data_dir,)
    trained = bw.finetune(given.model, num_train_epochs=given.epochs, out=tuned, **common)
    asked = ScoreConfig(**common, fit_rows=given.fit_rows, query_split="validation", out=place / "score")
    run_verb("influence score", asked, [str(tuned)])
    full = Scores.open(place / "score").whole()
    results = []
    for share in given.coordinates.split(","):
        cfg = IndexConfig(
            **common,
            coordinates=share,
            entry=given.entry,
            calibration=64,
            factors=place / "score",
            out=place / f"index-{share}",
            **({} if given.bits is None else {"bits": given.bits}),
        )
        made = run_verb("influence index", cfg, [str(tuned)])
        told = {k: made.metrics[k] for k in ("entry", "bits", "coordinates", "share_of_coordinates")}
        told |= {"share": made.metrics["share_of_bytes"], "seconds": made.cost["seconds"]}
        results.append({"asked": share, **told, **compare(made.run, cfg, str(tuned), full)})
    return {"model": given.model, "task": given.task, "score": trained.metrics["score"], "results": results}


def milliseconds(index: Index, asked: list[Features]) -> float:
    """What a question takes beyond its backward pass: the best of three, the median over questions."""
    found = []
    for features in asked:
        backward, whole = [], []
        for _ in range(3):
            began = time.perf_counter()
            plain_backward(index, features)
            middle = time.perf_counter()
            index.ask(features)
            backward.append(middle - began)
            whole.append(time.perf_counter() - middle)
        found.append(1e3 * (min(whole) - min(backward)))
    return statistics.median(found)


def compare(run: Path, cfg: IndexConfig, tuned: str, full: np.ndarray) -> dict[str, Any]:
    shop = open_shop(settings_for(cfg, tuned))
    index = Index.open(run, shop)
    task = shop.read.task
    rows = task.rows("validation")
    used = set(calibration_rows(task, cfg.calibration, cfg.seed))
    held = [i for i in range(len(rows)) if i not in used]
    encoded = [shop.read.encode([rows[i]]) for i in held]
    found, want = np.stack([index.ask(features) for features in encoded]), full[held]
    threads = torch.get_num_threads()
    beyond = milliseconds(index, encoded)
    torch.set_num_threads(1)
    alone = beyond if threads == 1 else milliseconds(index, encoded)
    torch.set_num_threads(threads)
    rho = spearman_by_row(found, want)
    both = [len(set(a) & set(b)) / 10 for a, b in zip(top_k(found, 10), top_k(want, 10))]
    return {
        "train": len(index.ids),
        "held_out": len(held),
        "spearman": float(rho.mean()),
        "worst": float(rho.min()),
        "top10": float(np.mean(both)),
        "ms_beyond_backward": beyond,
        "ms_on_one_thread": alone,
        "mb": index.table.stat().st_size / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny-bert")
    parser.add_argument("--task", default="tiny-entail")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rows", type=int, default=2400)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--fit-rows", default="all")
    parser.add_argument("--coordinates", default="3%,10%")
    parser.add_argument("--entry", default="coordinates")
    parser.add_argument("--bits", type=int)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(measure(given, Path(place)), indent=1))


if __name__ == "__main__":
    main()

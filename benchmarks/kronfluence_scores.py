"""Scores of kronfluence with its own defaults (EKFAC, sampled labels, damping 1e-8), for checking by retraining.

    python benchmarks/kronfluence_scores.py MODEL_DIR rows.json OUT.safetensors

`rows.json`: {"train": [[text, pair or null, label], ...], "queries": [...]}, rows of a classifier of labels. The file
is one that `budwood influence import` reads. Needs kronfluence (`bench` extra).
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from kronfluence_reference import Rows, task_class


def encoded(tokenizer: Any, rows: list[list[Any]]) -> Rows:
    """Rows padded to the longest of them."""
    first, second, labels = zip(*rows)
    pairs = None if second[0] is None else list(second)
    columns = dict(tokenizer(list(first), pairs, padding=True, return_tensors="pt"))
    return Rows({**columns, "label": torch.tensor(labels)})


def main(model_dir: str, rows: Path, out: Path) -> None:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from safetensors.torch import save_file
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    data, tokenizer = json.loads(rows.read_text()), AutoTokenizer.from_pretrained(model_dir)
    train, queries = (encoded(tokenizer, data[k]) for k in ("train", "queries"))
    task = task_class()
    model = prepare_model(AutoModelForSequenceClassification.from_pretrained(model_dir).eval(), task)
    with tempfile.TemporaryDirectory() as place:
        analyzer = Analyzer("scores", model, task, cpu=True, output_dir=place, disable_tqdm=True)
        analyzer.fit_all_factors("f", train, factor_args=FactorArguments(strategy="ekfac"), per_device_batch_size=32)
        analyzer.compute_pairwise_scores("s", "f", queries, train, 32, 32, score_args=ScoreArguments())
        save_file({"all_modules": analyzer.load_pairwise_scores("s")["all_modules"].float().contiguous()}, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

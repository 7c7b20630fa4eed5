"""Loss curves of twelve updates of every mode, kept: a change of the loop, the encoders or the objectives shows here.

After a wished-for change: `python -m tests.golden.test_curves` writes them anew.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

import budwood as bw

KEPT = Path(__file__).with_name("curves.json")
CASES = {
    "head": ("tiny-bert", "tiny-entail", {"mode": "head"}),
    "head, mean pooling": ("tiny-bert", "tiny-topic", {"mode": "head", "pool": "mean"}),
    "tokens": ("tiny-bert", "tiny-tags", {}),
    "prompt": ("tiny-bert", "tiny-sentiment", {"mode": "prompt"}),
    "span": ("tiny-bert", "tiny-qa", {}),
    "mlm": ("tiny-bert", "tiny-text", {}),
    "number": ("tiny-bert", "arithmetic", {}),
    "causal": ("tiny-gpt", "tiny-sentiment", {"mode": "causal"}),
    "causal number": ("tiny-gpt", "arithmetic", {}),
    "clm": ("tiny-gpt", "tiny-text", {}),
    "bias only": ("tiny-bert", "tiny-topic", {"train_only": ["bias", "head"]}),
    "sgd with l1": ("tiny-bert", "tiny-topic", {"optimizer": "sgd", "momentum": 0.9, "l1_to_base": 1e-5}),
}


def curve(name: str, directory: Path) -> list[float]:
    model, task, settings = CASES[name]
    common = {
        "limit": 96,
        "limit_eval": 32,
        "max_steps": 12,
        "batch_size": 8,
        "logging_steps": 1,
        "threads": 1,
        "seed": 3,
    }
    result = bw.finetune(model, task, out=directory / "run", **common, **settings)
    lines = (result.run / "figures" / "loss.csv").read_text().splitlines()
    return [float(line.split(",")[1]) for line in lines[1:]] + [result.metrics["loss"]]


@pytest.mark.parametrize("name", CASES)
def test_curve_is_the_kept_one(name: str, tmp_path: Path) -> None:
    assert curve(name, tmp_path) == pytest.approx(json.loads(KEPT.read_text())[name], rel=2e-3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        KEPT.write_text(json.dumps({n: curve(n, Path(place) / n.replace(" ", "-")) for n in CASES}, indent=1) + "\n")

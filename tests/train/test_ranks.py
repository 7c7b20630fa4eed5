"""Two processes train what one would: the same weights to tolerance, one run directory, killed and carried on."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from budwood.train.ranks import Ranks
from tests.cases import write_model
from tests.conftest import ROOT


def test_shares_cover_every_row_once() -> None:
    index_B = np.arange(7)
    assert np.array_equal(np.concatenate([Ranks(3, r).share(index_B) for r in range(3)]), index_B)
    assert [len(Ranks(3, r).share(index_B[:2])) for r in range(3)] == [1, 1, 0]


def torchrun(place: Path, *words: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "MASTER"))}
    env |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "-m",
        "budwood",
    ]
    return subprocess.run(
        (start if ranks > 1 else [sys.executable, "-m", "budwood"]) + list(words),
        cwd=place,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    model = write_model(tmp_path / "small-bert", "bert", "lm")
    with (tmp_path / "reviews.csv").open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["text", "label"])
        writer.writerows([f"w{7 + i % 9} w{10 + i % 5} w{20 + i % 7}", "ab"[i % 2]] for i in range(60))
    words = ["finetune", str(model), "--task", "reviews.csv", "--max-steps", "5", "--batch-size", "7", "--threads", "1"]
    words += ["--progress", "none", "--json"]
    one = torchrun(tmp_path, *words, "--out", "one", ranks=1)
    two = torchrun(tmp_path, *words, "--out", "two")
    assert one.returncode == two.returncode == 0, two.stderr[-2000:]
    a, b = (load_file(tmp_path / n / "model" / "model.safetensors") for n in ("one", "two"))
    assert all(np.allclose(a[k], b[k], atol=1e-5) for k in a)
    assert len([line for line in two.stdout.splitlines() if line.startswith("{")]) == 1  # one process speaks
    assert json.loads(two.stdout)["accuracy"] == json.loads(one.stdout)["accuracy"]
    parts = torchrun(tmp_path, *words, "--out", "parts", "--parallel", "fsdp")
    assert parts.returncode == 0, parts.stderr[-2000:]
    c = load_file(tmp_path / "parts" / "model" / "model.safetensors")
    assert all(np.allclose(a[k], c[k], atol=1e-5) for k in a)
    again = torchrun(tmp_path, *words, "--out", "two")
    assert again.returncode == 0 and "Nothing to do" in again.stderr
    refused = torchrun(tmp_path, "fisher", "two", "--task", "reviews.csv")
    assert refused.returncode != 0 and "without torchrun" in refused.stderr

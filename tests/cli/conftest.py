"""A small workplace: a tiny model directory and a labelled CSV that it can learn."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from budwood.cli.main import main
from tests.cases import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small-bert", "bert", "lm")


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of made-up words; the label is whether w7 stands in them."""
    path = tmp_path_factory.mktemp("data") / "reviews.csv"
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["body", "stars"])
        for _ in range(120):
            words = [f"w{i}" for i in rng.choice(np.arange(8, 40), rng.integers(3, 9))]
            label = int(rng.integers(2))
            writer.writerow([" ".join(words + ["w7"] * label), ["bad", "good"][label]])
    return path


@pytest.fixture
def budwood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a command in an empty directory; gives exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(w) for w in words])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture
def settings(model: Path, reviews: Path) -> list[str]:
    common = "--text body --label stars --max-steps 6 --batch-size 8 --threads 1 --progress none"
    return ["finetune", str(model), "--task", str(reviews), *common.split()]


def parsed(out: str) -> dict[str, Any]:
    return json.loads(out)  # type: ignore[no-any-return]

"""A toy task, a base and two fine-tuned copies of it, for the tests of grafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import budwood as bw
from budwood.data.task import Row, Task, Template
from tests.cases import write_model


def toy_task(kind: str = "no yes", seed: int = 0) -> Task:
    """The label is whether w7 stands in the text."""
    rng = np.random.default_rng(seed)

    def row(i: int) -> Row:
        words = [f"w{j}" for j in rng.integers(8, 40, rng.integers(2, 9))] + ["w7"] * (i % 2)
        return Row(f"r{seed}.{i}", " ".join(words), label=i % 2)

    rows = tuple(row(i) for i in range(120))
    template = Template(masked="{text} {mask}", words=("w5", "w6"))
    splits = {"train": rows[:60], "validation": rows[60:80], "test": rows[80:]}
    return Task("toy", "label", splits, tuple(kind.split()), template=template)


def write_pair(path: Path) -> Path:
    """A base and two fine-tuned copies of it: label words at a mask, and a head."""
    base = str(write_model(path / "base", "bert", "lm"))
    common: dict[str, Any] = {"threads": 1, "max_steps": 60, "lr": 3e-3, "batch_size": 16}
    bw.finetune(base, toy_task(), mode="prompt", out=path / "prompt", freeze="embeddings,head", **common)
    bw.finetune(base, toy_task(), mode="head", out=path / "head", freeze="embeddings", **common)
    return path


def learn(place: Path, tuned: str, **settings: Any) -> Any:
    """A graft of one of the copies."""
    defaults = {"threads": 1, "mask_steps": 4, "mask_batch_size": 8}
    return bw.graft(str(place / "base"), str(place / tuned), toy_task(), **{**defaults, **settings})

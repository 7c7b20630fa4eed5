"""A small tuned classifier and its task, made once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from budwood.data.task import Row, Task
from budwood.studies.api import run
from tests.cases import write_model

WORDS = ("w3", "w5", "w7", "w9", "w11", "w13")


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Task]:
    place = tmp_path_factory.mktemp("influence")
    rng = np.random.default_rng(0)
    rows = [" ".join(rng.choice(WORDS, size=rng.integers(2, 7))) for _ in range(34)]
    made = tuple(Row(f"r{i}", text, None, int("w3" in text)) for i, text in enumerate(rows))
    task = Task("toy", "label", {"train": made[:24], "validation": made[24:]}, ("no", "yes"))
    write_model(place / "m", "bert", "lm")
    model = run("finetune", str(place / "m"), task, {"max_steps": 3, "threads": 1, "out": place / "ft"})
    return model, task

"""Numbers: the loss that knows them, parity with the published reading, masks as many as were trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import budwood as bw
from budwood.data.task import Row, Task
from budwood.errors import ConfigError
from budwood.models.number import number_distance, number_values


def test_distance_is_the_mean_gap_over_numbers() -> None:
    value = torch.tensor([math.log1p(x) for x in (0, 4, 9)] + [float("nan")])
    logits = torch.tensor([[0.0, 1.0, 2.0, 7.0], [3.0, 3.0, 3.0, 3.0]], requires_grad=True)
    gap = number_distance(logits, torch.tensor([1, 3]), value)
    p = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    wanted = sum(float(p[i]) * abs(float(value[i] - value[1])) for i in range(3))
    assert float(gap[0].detach()) == pytest.approx(wanted, rel=1e-6) and float(gap[1].detach()) == 0.0
    gap.sum().backward()
    assert bool(logits.grad.isfinite().all()) and float(logits.grad[0, 3]) == 0.0  # type: ignore[union-attr]


def test_values_of_a_vocabulary() -> None:
    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {"the": 0, "19": 1, "##6": 2, "Ġ7": 3, "²": 4, "-": 5}

        def __len__(self) -> int:
            return 6

    found = number_values(Words())
    assert found.isfinite().tolist() == [False, True, True, True, False, False]
    assert float(found[1]) == pytest.approx(math.log(20))


@pytest.fixture(scope="module")
def sums() -> Task:
    rows = tuple(Row(f"r{i}", f"{i} + {i % 7} =", label=i + i % 7) for i in range(40))
    return Task("sums", "number", {"train": rows[:30], "test": rows[30:]}, metric="rmsle")


def tuned(task: Task, place: Path, **more: Any) -> Any:
    return bw.finetune("tiny-bert", task, max_steps=2, batch_size=8, threads=1, out=place, **more)


def test_parity_has_three_masks_and_no_end(sums: Task, tmp_path: Path) -> None:
    result = tuned(sums, tmp_path / "p", parity=True)
    assert result.metrics["dropped"] == round((1 - result.metrics["parse_rate"]) * 10)
    assert all(len(w) <= 2 for w in result.table["written"] if w.isdigit())  # the gold length is given away
    with pytest.raises(ConfigError, match="leave --masks away"):
        tuned(sums, tmp_path / "q", parity=True, masks=4)
    with pytest.raises(ConfigError, match="are for tasks whose answers are numbers"):
        bw.evaluate("tiny-bert", "tiny-text", parity=True, limit_eval=4, out=tmp_path / "r")


def test_an_evaluation_asks_with_the_masks_of_training(sums: Task, tmp_path: Path) -> None:
    run = tuned(sums, tmp_path / "m", masks=6, number_loss=0.5)
    wide = Task("sums", "number", {"test": (Row("x", "99999999 + 1 =", label=100000000),)}, metric="rmsle")
    scored = bw.evaluate(run, wide, threads=1, out=tmp_path / "e")
    assert scored.metrics["answers_too_long"] == 1 and scored.metrics["exact"] == 0.0
    assert scored.metrics["by_magnitude"]["9 digits"]["n"] == 1

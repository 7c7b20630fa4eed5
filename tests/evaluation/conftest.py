"""A small fine-tuned run and scores for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from budwood.cli.main import main
from budwood.methods.influence.scores import Matrix, writing_scores
from budwood.store.files import read_json
from tests.cli.conftest import model, reviews  # noqa: F401


@dataclass(frozen=True)
class Place:
    """A fine-tuned run on reviews, with its training and query ids."""

    run: Path
    task: Path
    train_ids: tuple[str, ...]
    query_ids: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return [str(self.run), "--task", str(self.task), "--progress", "none"]

    def scores(
        self,
        path: Path,
        seed: int = 0,
        dtype: Any = "float32",
        train: tuple[str, ...] | None = None,
        facts: Any = None,
    ) -> Path:
        """A directory of random scores of these rows."""
        train = train or self.train_ids
        values = np.random.default_rng(seed).normal(size=(len(self.query_ids), len(train))).astype(np.float32)
        with writing_scores(path / "scores", self.query_ids, train, facts) as desk:
            desk.put(Matrix("ekfac", "auto", main=True, dtype=dtype), slice(None), slice(None), values)
        return path


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(w) for w in words])
    return int(end.value.code or 0)


@pytest.fixture(scope="session")
def tuned(model: Path, reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:  # noqa: F811
    run = tmp_path_factory.mktemp("runs") / "tuned"
    common = "--text body --label stars --epochs 2 --batch-size 8 --lr 3e-3 --threads 1 --progress none --seed 7"
    assert command("finetune", model, "--task", reviews, *common.split(), "--out", run) == 0
    from budwood.evaluation.retrain import Recipe

    task = Recipe.of_run(run, "tuned").task()
    assert read_json(run / "run.json")["status"] == "done"
    return Place(run, reviews, *(tuple(r.id for r in task.rows(s)) for s in ("train", "test")))


@pytest.fixture
def budwood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        code = command(*words)
        out, err = capsys.readouterr()
        return code, out, err

    return run

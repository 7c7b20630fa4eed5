"""Fixtures of the methods' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from budwood.config.graft import GraftLearnConfig
from budwood.methods.graft.pair import Pair, open_pair
from budwood.models.reference import resolve
from tests.methods.graft_for_tests import toy_task, write_pair


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two fine-tuned copies of it."""
    return write_pair(tmp_path_factory.mktemp("grafts"))


@pytest.fixture
def pair(place: Path) -> Pair:
    """The base and the copy with label words, opened."""
    cfg = GraftLearnConfig(task="toy", data_seed=0, model_seed=0)
    return open_pair(cfg, resolve(str(place / "base")), resolve(str(place / "prompt")), toy_task())

"""Shared fixtures: everything offline, caches and runs in temporary places."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def _quiet_machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One thread per test process, a cache of our own, no bars."""
    import torch

    torch.set_num_threads(1)
    os.environ["BUDWOOD_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real weights and data sets beside the project; tests that need them skip where there are none."""
    path = Path(os.environ.get("BUDWOOD_SHARED", ROOT.parent / "shared"))
    if not (path / "models").is_dir():
        pytest.skip(f"no real models and data at {path}")
    return path

"""Fixtures of the methods' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.methods.graft_for_tests import write_pair


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two fine-tuned copies of it."""
    return write_pair(tmp_path_factory.mktemp("grafts"))

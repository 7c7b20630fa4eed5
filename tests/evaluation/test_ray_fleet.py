"""A fleet of retrains on Ray: the ground truth of the local engine, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.evaluation.conftest import Place

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")


@pytest.mark.slow
def test_ray_writes_the_truth_of_the_local_engine(
    tuned: Place, budwood: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))  # workers begin elsewhere
    words = ["validate", "lds", *tuned.words, "--subsets", 2, "--repeats", 1]
    assert budwood(*words, "--out", "here")[0] == 0
    code, _, err = budwood(*words, "--engine", "ray", "--out", "there")
    assert code == 0, err
    for name in ("masks.npy", "margins.npy", "index.json"):
        assert Path("here/truth", name).read_bytes() == Path("there/truth", name).read_bytes()

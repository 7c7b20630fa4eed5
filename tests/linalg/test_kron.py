"""Eigensolvers: both on the threads that torch has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from threadpoolctl import threadpool_info

from budwood.linalg.kron import SOLVED_BY_TORCH, eigenbasis


@pytest.mark.parametrize("threads", [1, 2])
def test_scipy_solves_on_as_many_threads_as_torch(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it would take those of the machine, in every worker, and other threads give other last bits."""
    seen: list[int] = []
    real = scipy.linalg.eigh

    def eigh(matrix: np.ndarray, **settings: Any) -> Any:
        seen.extend(p["num_threads"] for p in threadpool_info() if "scipy" in p["filepath"])
        return real(matrix, **settings)

    monkeypatch.setattr(scipy.linalg, "eigh", eigh)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        eigenbasis(torch.eye(SOLVED_BY_TORCH + 1, dtype=torch.float64), "wide")
    finally:
        torch.set_num_threads(before)
    assert seen and set(seen) == {threads}

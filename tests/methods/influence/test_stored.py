"""Stored coordinates against a float64 product of the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from budwood.methods.influence import stored
from budwood.methods.influence.stored import MIDDLE, STEP, Stored, assemble, encoded


def made(path: Path, values: torch.Tensor, bits: int, cuts: tuple[int, ...]) -> Stored:
    """The table of `values` [K, N], from parts whose rows lie anywhere."""
    order = np.random.default_rng(1).permutation(values.shape[1])
    parts = []
    for i, place in enumerate(np.split(order, cuts)):
        save_file({"rows": encoded(values[:, place], bits).contiguous()}, path / f"{i}.safetensors")
        parts.append((path / f"{i}.safetensors", place))
    assemble(path / "rows.npy", parts, len(values), bits)
    return Stored.open(path / "rows.npy", values.shape[1], bits)


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_a_product_is_that_of_the_stored_values(
    tmp_path: Path, bits: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "BLOCK", 7 * rows)  # several blocks, the last one short
    monkeypatch.setattr(stored, "CACHED", 64)
    values = torch.randn(51, rows, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(51, generator=torch.Generator().manual_seed(1))
    table = made(tmp_path, values, bits, (rows // 3,))
    near = values.double() if bits == 16 else ((values.double() / STEP + MIDDLE).round().clamp(0, 15) - MIDDLE) * STEP
    np.testing.assert_allclose(table.values(), near, atol=3e-3 if bits == 16 else 1e-6)
    want = weight.double() @ torch.from_numpy(table.values()).double()
    torch.testing.assert_close(table.product(weight).double(), want, atol=2e-5, rtol=0)
    few = weight.double().where(weight.abs() >= weight.abs().topk(9).values[-1], 0)
    torch.testing.assert_close(
        table.product(weight, 9).double(), few @ torch.from_numpy(table.values()).double(), atol=2e-5, rtol=0
    )


def test_four_bits_err_by_at_most_half_a_step_within_their_range() -> None:
    values = torch.linspace(-7.9 * STEP, 7.9 * STEP, 1001)
    assert ((encoded(values, 4).float() - MIDDLE) * STEP - values).abs().max() <= STEP / 2 + 1e-6
    assert encoded(torch.tensor([-100.0, 100.0]), 4).tolist() == [0, 15]

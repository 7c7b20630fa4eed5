"""Sums and counts: shards, files, refusals."""

from __future__ import annotations

import pytest
import torch

from budwood.capture.accumulate import Sums
from budwood.errors import TreeError


def part(seed: int, rows: int) -> tuple[dict[str, torch.Tensor], int]:
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"a": x.sum(0), "b": x.square().sum(0)}, rows


def test_shards_merged_equal_the_mean_of_all_rows():
    first, second = Sums(), Sums()
    first.add(*part(0, 5))
    second.add(*part(1, 2))
    second.add(*part(2, 4))
    first.merge(second)
    rows = torch.cat(
        [
            torch.randn(n, 3, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
            for s, n in enumerate((5, 2, 4))
        ]
    )
    assert first.count == 11
    torch.testing.assert_close(first.mean(), {"a": rows.mean(0), "b": rows.square().mean(0)})


def test_adding_does_not_change_what_was_given():
    given, n = part(0, 2)
    kept = given["a"].clone()
    sums = Sums()
    sums.add(given, n)
    sums.add(given, n)
    assert torch.equal(given["a"], kept) and torch.equal(sums.total["a"], 2 * kept)


def test_other_names_are_refused():
    sums = Sums()
    sums.add({"weight": torch.ones(2)}, 1)
    with pytest.raises(TreeError, match="has no 'weight'"):
        sums.add({"weigth": torch.ones(2)}, 1)
    with pytest.raises(TreeError, match="shape"):
        sums.add({"weight": torch.ones(3)}, 1)


def test_no_examples_have_no_mean():
    with pytest.raises(TreeError, match="no examples"):
        Sums().mean()


def test_files_round_trip(tmp_path):
    sums = Sums()
    sums.add(*part(3, 4))
    sums.save(tmp_path / "s.safetensors", {"kind": "test"})
    again, manifest = Sums.load(tmp_path / "s.safetensors", names=("a",))
    assert again.count == 4 and manifest == {"kind": "test", "count": 4}
    torch.testing.assert_close(again.total, sums.total, rtol=0, atol=0)
    with pytest.raises(TreeError, match="no sum 'c'"):
        Sums.load(tmp_path / "s.safetensors", names=("c",))

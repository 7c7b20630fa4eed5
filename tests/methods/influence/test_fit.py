"""`influence fit`: memory, what is told, the same bytes after a kill, labels that are drawn."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from budwood.methods.influence import factors as made
from budwood.methods.influence import fit as method
from budwood.params import tree
from budwood.studies.api import run
from tests.methods.influence.test_runs import tuned  # noqa: F401


def test_sums_take_parts_one_at_a_time() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def parts() -> Iterator[dict[str, Tensor]]:
        for i in range(4):
            assert not [r for r in seen if r() is not None]
            fresh = torch.full((3,), float(i))
            seen.append(weakref.ref(fresh))
            part = {"a": fresh}
            del fresh
            yield part
            del part

    assert made.merged(parts())["a"].tolist() == [6.0] * 3 and len(seen) == 4


@pytest.mark.parametrize("strategy", ["kfac", "ekfac"])
def test_a_fit_holds_one_shard_at_a_time(
    strategy: str,
    tuned: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, task = tuned
    alive: dict[str, list[weakref.ref[Tensor]]] = {"covariance": [], "moments": []}
    most = dict.fromkeys(alive, 0)
    real = tree.load

    def load(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
        kind = path.name.split("-")[0]
        if kind in alive:
            most[kind] = max(most[kind], len({id(t) for r in alive[kind] if (t := r()) is not None}))
        found, facts = real(path, device)
        if kind in alive:
            alive[kind].append(weakref.ref(next(t for t in found.values() if t.dim() == 2)))
        return found, facts

    monkeypatch.setattr(method.tree, "load", load)
    run("influence fit", model, task, {"threads": 1, "strategy": (strategy,), "shard_rows": 3, "out": tmp_path / "f"})
    assert len(alive["covariance"]) == 8 and len(alive["moments"]) == (8 if strategy == "ekfac" else 0)
    assert most == {"covariance": 0, "moments": 0}

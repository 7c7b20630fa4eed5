"""`budwood graft` on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from budwood.params.graft import Graft
from tests.cli.conftest import parsed

NAME = "encoder.layer.1.output.dense.weight"


@pytest.mark.parametrize(
    "verb", ["", "learn", "show", "overlap", "stitch", "subtract", "localise", "multitask", "continual"]
)
def test_help(verb: str, budwood: Callable[..., Any]) -> None:
    code, out, _ = budwood("graft", *filter(None, [verb]), "--help")
    assert code == 0 and "Usage" in out


def test_show_and_overlap(budwood: Callable[..., Any]) -> None:
    for name, places in (("a", [1, 5]), ("b", [5, 9])):
        facts = {"task": "t", "graftable": 100, "base_hash": "x"}
        Graft.cut({NAME: torch.tensor(places)}, {NAME: torch.ones(4, 5)}, manifest=facts).save(f"{name}.graft")
    code, out, _ = budwood("graft", "show", "a.graft", "--out", "figures")
    assert code == 0 and "MLP out" in out and Path("figures/map.svg").exists()
    code, out, err = budwood("graft", "overlap", "a.graft", "b.graft", "--json", "--progress", "none")
    assert code == 0, err
    found = parsed(out)
    assert found["overlap"] == [[1.0, 0.5], [0.5, 1.0]] and found["over_chance"][0][1] == 25.0


def test_a_size_that_cannot_be_is_told(budwood: Callable[..., Any], model: Path) -> None:
    for size in ("0", "101%", "many"):
        code, _, err = budwood("graft", "learn", model, model, "--task", "tiny-topic", "--size", size)
        assert code == 2 and err.startswith("budwood: --size was given") and "Traceback" not in err

"""Commands on the page about Fisher information run as they stand there, here on few rows."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from budwood.config.inject import OWN

PAGE = Path(__file__).parents[2] / "docs" / "fisher.md"
FEW = {
    "finetune": "--limit 8 --limit-eval 8 --max-steps 1 --batch-size 4",
    "fisher": "--limit 8",
    "fisher compare": "",
    "weights compare": "--points 8",
}


def test_the_page_about_fisher_runs_from_top_to_bottom(budwood: Any) -> None:
    lines = [shlex.split(x)[1:] for x in PAGE.read_text().splitlines() if x.startswith("    budwood ")]
    assert len(lines) == 6
    for words in lines:
        verb = " ".join(words[:2]) if words[1] == "compare" else words[0]
        code, _, err = budwood(*words, *FEW[verb].split(), "--threads", "1", "--progress", "none")
        assert code == 0, (words, err)


@pytest.mark.parametrize("name", OWN)
def test_the_help_of_inject_offers_nothing_that_it_refuses(budwood: Any, name: str) -> None:
    shown = budwood("inject", "--help")[1]
    assert f"--{name.replace('_', '-')} " not in shown and "--strengths" in shown

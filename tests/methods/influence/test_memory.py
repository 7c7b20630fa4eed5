"""--max-memory of scores: refused before anything is done, with a figure that is enough."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from budwood.errors import ConfigError, DataError
from budwood.methods.influence import asked, memory
from budwood.methods.influence.scores import Scores
from budwood.studies.api import run

COMMON = {"threads": 1, "damping": ("0.1mean",), "queries": ("3",)}
WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "four": {"strategy": ("ekfac", "kfac", "diagonal", "identity"), "damping": ("0.1mean", "1")},
    "summed": {"aggregate": ("query",)},
    "tokens": {"per_token": True},
    "rank": {"query_rank": 2},
    "workers": {"workers": 2},
}


def least_said(model: Any, task: Any, wish: dict[str, Any], out: Path, most: str = "1KB") -> int:
    """The megabytes that a refusal names; nothing has been written then."""
    with pytest.raises(ConfigError, match=rf"--max-memory {most} is too little for .* at least") as refusal:
        run("influence score", model, task, {**wish, "max_memory": most, "out": out})
    assert not out.exists() or not [p for p in out.rglob("*") if p.is_file()]  # as if it had never begun
    found = re.search(r"at least ([\d,]+) MB", str(refusal.value))
    assert found is not None
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize("name", WISHES)
def test_the_least_memory_that_is_said_is_enough_for_fit_and_scores(name: str, tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    wish = {**COMMON, **WISHES[name]}
    least = least_said(model, task, wish, tmp_path / "none")
    assert least_said(model, task, wish, tmp_path / "less", f"{least - 1}MB") == least
    tight = run("influence score", model, task, {**wish, "max_memory": f"{least}MB", "out": tmp_path / "tight"})
    usual = run("influence score", model, task, {**wish, "out": tmp_path / "usual"})
    got, want = (Scores.open(r.run).whole() for r in (tight, usual))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5 * np.abs(want).max())


def test_a_disk_that_is_too_small_for_queries_is_said_before_it_is_filled(
    tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    monkeypatch.setattr(asked, "RESIDENT", 0)
    monkeypatch.setattr(asked, "better_sided", lambda *given: False)
    monkeypatch.setattr(asked.shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"3 queries take .* GB of disk .* 0.0 GB are free. .*--query-rank 32"):
        run("influence score", model, task, {**COMMON, "out": tmp_path / "x"})
    assert not (tmp_path / "x").exists()


def test_queries_without_finite_scores_are_named(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    wish = {**COMMON, "measurement": f"{__name__}:no_number_for_one", "strategy": ("identity",), "out": tmp_path / "x"}
    with pytest.raises(DataError, match=r"1 of 3 queries have scores that are not finite \(identity\), such as 'r\d+'"):
        run("influence score", model, task, wish)
    assert not (tmp_path / "x" / "scores").exists()


def no_number_for_one(logits: torch.Tensor, targets: object) -> torch.Tensor:
    """A measurement that is no number for the query of the largest logit."""
    return torch.where(logits[:, 0] == logits[:, 0].max(), torch.nan, 1.0) * logits[:, 0]


def test_a_fit_that_takes_more_than_scores_is_told_at_once(
    tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    fitted = run("influence fit", model, task, {"threads": 1, "out": tmp_path / "fit"})
    monkeypatch.setattr(asked, "of_fit", lambda shop: memory.Need(5_000_000_000, 1))
    assert least_said(model, task, COMMON, tmp_path / "none") == 5001
    given = {**COMMON, "factors": fitted.run}  # nothing is fitted: only scores count
    least = least_said(model, task, given, tmp_path / "given")
    assert least < 5000
    run("influence score", model, task, {**given, "max_memory": f"{least}MB", "out": tmp_path / "tight"})


def test_more_queries_than_there_are_is_said(tuned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, task = tuned
    wish = {**COMMON, "strategy": ("identity",), "progress": "plain"}
    for count, said in (("10", False), ("11", True)):
        done = run("influence score", model, task, {**wish, "queries": (count,), "out": tmp_path / count})
        assert done.metrics["queries"] == 10 and done.metrics["overlap"] == 0
        assert ("--queries 11 was given, and the split has 10 rows" in capsys.readouterr().err) is said

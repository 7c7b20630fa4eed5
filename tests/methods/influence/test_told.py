"""What runs of influence say of the rows they were given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from budwood.config.influence import ScoreConfig
from budwood.config.options import in_words
from budwood.errors import DataError, StoreError
from budwood.methods.influence.show import Wish, show
from budwood.studies.api import run

COMMON = {"threads": 1, "damping": ("0.1mean",), "queries": ("2",), "strategy": ("identity",), "progress": "plain"}


@pytest.mark.parametrize("verb", ["fit", "score", "self", "index"])
def test_rows_that_the_model_was_not_tuned_on(
    verb: str, tuned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, task = tuned
    wish: dict[str, Any] = {"threads": 1, "progress": "plain", **({"calibration": 4} if verb == "index" else {})}
    for limit, said in ((None, False), (12, True)):
        run(f"influence {verb}", model, task, {**wish, "limit": limit, "out": tmp_path / str(limit)})
        told = "was tuned on other rows of 'toy' (limit None there, 12 here"
        assert (told in capsys.readouterr().err) is said


def test_ids_alone_are_shown_where_rows_have_changed(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    done = run("influence score", model, task, {**COMMON, "out": tmp_path / "x"}).run
    assert "text" in show(done, Wish("0"), task)["top"][0]
    shifted = lambda rows: tuple(replace(r, text=rows[i - 1].text) for i, r in enumerate(rows))  # noqa: E731
    moved = replace(task, splits={name: shifted(rows) for name, rows in task.splits.items()})
    found = show(done, Wish("0"), moved)
    assert "text" not in found["top"][0] and "an id may be that of another row now" in found["note"]


def test_sums_over_rows_have_no_rows_to_be_shown(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    done = run("influence score", model, task, {**COMMON, "aggregate": ("train",), "out": tmp_path / "x"}).run
    with pytest.raises(StoreError, match="sums over training rows, no rows to be shown"):
        show(done, Wish("0"), task)


def test_strategies_without_layers_are_told_from_those_with(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    wish = {**COMMON, "strategy": ("identity", "bm25"), "per_layer": True, "out": tmp_path / "x"}
    done = run("influence score", model, task, wish).run
    with pytest.raises(StoreError, match="Scores of bm25 in .* have no parts by layer or module. Those of identity do"):
        show(done, Wish("0", strategy="bm25", layers=(1,)), task)


def test_a_run_that_is_not_finished_and_one_of_another_verb_are_told(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "run.json").write_text('{"verb": "influence score", "status": "running"}')
    with pytest.raises(StoreError, match="It is not finished: give the command that began it again"):
        show(tmp_path / "x", Wish("0"), task)
    done = run("influence self", model, task, {"threads": 1, "out": tmp_path / "self"}).run
    with pytest.raises(StoreError, match="their texts in `budwood report"):
        show(done, Wish("0"), task)


def test_ids_of_queries_are_told(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    with pytest.raises(DataError, match="has no row '1'.* such as 'r24'; --queries 8 asks about its first 8"):
        run("influence score", model, task, {**COMMON, "queries": ("1", "2"), "out": tmp_path / "x"})


def test_numbers_of_python_are_words_where_words_are_meant() -> None:
    given = {"queries": [1, "2,3"], "damping": 1e-8, "limit": 5, "workers": 2, "skip_nan": True, "per_layer": False}
    words = in_words(ScoreConfig, given)
    assert words == {**given, "queries": ["1", "2,3"], "damping": "1e-08"}
    built = ScoreConfig(task="toy", **words)
    assert built.queries == ("1", "2", "3") and built.damping == ("1e-08",) and built.limit == 5

"""Removal: targets, baselines from the training rows, upward and halving search, Wilson intervals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from budwood.errors import ConfigError
from budwood.evaluation.counterfactual import RANDOM, Study, removals, same_label
from budwood.evaluation.retrain import Outcome
from budwood.linalg.metrics import accuracy_interval
from budwood.store.progress import Progress
from tests.evaluation.conftest import Place


def test_random_rows_are_training_rows_of_the_label() -> None:
    labels_N = np.array(["0", "1"] * 50)
    order = same_label(labels_N, "1", 50, seed=0, query="q")
    assert set(labels_N[order]) == {"1"} and len(set(order.tolist())) == 50
    assert np.array_equal(
        order[:20], same_label(labels_N, "1", 20, seed=0, query="q")
    )  # larger removals contain smaller
    assert not np.array_equal(order, same_label(labels_N, "1", 50, seed=0, query="p"))
    assert len(same_label(labels_N, "1", 70, seed=0, query="q")) == 70


def test_removals_that_leave_nothing_are_refused() -> None:
    assert removals(["2%", "10%"], 512) == [10, 51]
    with pytest.raises(ConfigError, match="leaves nothing of 100"):
        removals([], 100)


class Pretended(Study):
    """A study whose retrains are pretended: target t flips from its own threshold on."""

    def _ask(self, asked: Any, bar: Any) -> None:
        for (way, t), at in asked.items():
            self.retrained += 1
            self._flips[(way, t, at)] = self.counts[at] >= (10, 35, 1000)[t]


@pytest.mark.parametrize("bisect", [False, True])
def test_both_searches_find_the_smallest_removal(bisect: bool, tmp_path: Path) -> None:
    session: Any = SimpleNamespace(cfg=SimpleNamespace(bisect=bisect, repeats=1), progress=Progress())
    nothing = np.zeros((3, 1), int)
    counts = [10, 20, 30, 40, 50, 60, 70, 80]
    study = Pretended(session, None, counts, [0, 1, 2], {"a": nothing}, {}, np.zeros(3), 1.0)  # type: ignore[arg-type]
    assert study.search() == {"a": [10, 40, None]}
    assert study.retrained <= 12 if bisect else study.retrained == 1 + 4 + 8


class PretendedFleet:
    """Retrains whose outcomes are given by how many rows were removed: right, wrong, or diverged (None)."""

    recipe = SimpleNamespace(queries=("q0", "q1"))
    train_ids = tuple(map(str, range(10)))

    def __init__(self, answers: dict[int, list[bool | None]]) -> None:
        self.answers, self.rounds = answers, 0

    def wanted(self, kept_N: np.ndarray, repeat: int, kind: str) -> Any:
        return SimpleNamespace(output=(kept_N.tobytes(), repeat), gone=int((~kept_N).sum()), repeat=repeat, done=False)

    def run(self, jobs: Any, finished: Any) -> None:
        self.rounds += 1

    def outcomes(self, jobs: Any) -> list[Outcome]:
        said = [self.answers[j.gone][j.repeat] for j in jobs]
        margin = {None: np.nan, True: 1.0, False: -1.0}
        return [Outcome(np.full(2, margin[a]), np.full(2, a is True), None) for a in said]


def test_diverged_retrains_neither_flip_nor_hide() -> None:
    cfg = SimpleNamespace(bisect=False, repeats=3)
    session: Any = SimpleNamespace(cfg=cfg, progress=Progress())
    fleet: Any = PretendedFleet({2: [None, False, None], 4: [False, None, False]})
    order = np.arange(10)
    study = Study(session, fleet, [2, 4], [1], {"a": order[None]}, {"a": order}, np.ones(2), 1.0, ["base model 1"], 3)
    assert study.search() == {"a": [4]}  # one wrong of one answer is no majority of three
    facts = study.facts()
    assert facts["undecided"] == [{"scores": "a", "target": "q1", "k": 2}]
    assert facts["diverged"] == 4 and facts["retrains"] == 3 + 6
    lost = [f"without {k} rows of a for q1, retrain {r}" for k, r in ((2, 0), (2, 2), (4, 1))]
    assert facts["diverged_names"] == ["base model 1", *lost]
    before = fleet.rounds
    assert [row["margin_drop"] for row in study.group()] == [2.0, 2.0]
    assert fleet.rounds == before + 1  # all removals at once
    assert study.facts()["diverged"] == 4 + 3 and study.facts()["retrains"] == 9 + 6


@pytest.mark.parametrize(
    ("answers", "flips", "spent"),
    [
        ([True, True, True, False, False], False, 3),
        ([True, False, True, False, False], True, 5),
        ([False, False, False, True, True], True, 3),
        ([None, False, False, True, False], True, 5),
        ([True, True, False, False], False, 2),  # a tie is no flip
        ([True, False, False, True], False, 4),
        ([True, False], False, 1),
        ([False, False], True, 2),
    ],
)
def test_retrains_that_could_change_nothing_are_spared(answers: list[bool | None], flips: bool, spent: int) -> None:
    session: Any = SimpleNamespace(cfg=SimpleNamespace(bisect=False, repeats=len(answers)), progress=Progress())
    order = np.arange(10)[None]
    study = Study(session, PretendedFleet({2: answers}), [2], [0], {"a": order}, {}, np.ones(2), 1.0)  # type: ignore[arg-type]
    assert study.search() == {"a": [2 if flips else None]} and study.retrained == spent


class Told:
    """A bar that keeps what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def advance(self, count: int, note: str) -> None:
        self.notes.append(note)


class Telling(PretendedFleet):
    """The same, telling of every retrain that is not there yet."""

    def run(self, jobs: Any, finished: Any) -> None:
        for job in jobs:
            if not job.done:
                job.done = True
                finished(job)


def test_flipped_targets_are_told_once_and_those_of_a_run_that_goes_on_too() -> None:
    session: Any = SimpleNamespace(cfg=SimpleNamespace(repeats=1))
    fleet = Telling({2: [True], 4: [False], 6: [False]})
    ways = {"a": np.arange(10)[None], "b": np.arange(10)[None, ::-1]}
    study = Study(session, fleet, [2, 4, 6], [1], ways, {}, np.ones(2), 1.0)  # type: ignore[arg-type]
    bar, wanted = Told(), fleet.wanted
    fleet.wanted = lambda kept_N, r, kind: SimpleNamespace(**{**vars(wanted(kept_N, r, kind)), "done": bool(kept_N[0])})  # type: ignore[method-assign]
    study._ask({("a", 0): 1, ("b", 0): 1}, bar)  # of b's way the files are there: it keeps row 0
    assert bar.notes == ["of 1 targets flipped: 1 by a, 1 by b"]
    study._ask({("a", 0): 2, ("b", 0): 0}, bar)  # as halving asks: a target is still one target
    assert bar.notes[-1] == "of 1 targets flipped: 1 by a, 1 by b"


def test_counterfactual_and_brittleness_end_to_end(tuned: Place, tmp_path: Path, budwood: Callable[..., Any]) -> None:
    scores = tuned.scores(tmp_path / "s")
    few = ["--remove", "20%,60%", "--targets", 2, "--base-seeds", 2, "--repeats", 1, "--scores", scores]
    code, out, err = budwood("validate", "counterfactual", *tuned.words, *few, "--together", "--json")
    assert code == 0, err
    found = json.loads(out)
    rows = len(tuned.train_ids)
    assert [(r["scores"], r["k"]) for r in found["results"]] == [
        (way, round(share * rows)) for way in ("ekfac", RANDOM) for share in (0.2, 0.6)
    ]
    for r in found["results"]:
        assert r["targets"] == 2 and [r["low"], r["high"]] == list(accuracy_interval(r["flipped"], 2))
    assert found["results"][0]["flipped"] <= found["results"][1]["flipped"]  # a smaller removal counts for larger ones
    assert {g["scores"] for g in found["group"]} == {"ekfac", "random rows"}
    assert found["undecided"] == found["diverged_names"] == [] and found["retrains"] >= 2 + 2 * 2 * 2
    assert (Path(found["run"]) / "figures" / "flips.png").exists()
    code, out, err = budwood("validate", "brittleness", *tuned.words, *few, "--bisect")
    assert code == 0 and "never" in out and RANDOM in out, err


def test_dry_run_tells_what_is_expected_and_the_most(tuned: Place, tmp_path: Path, budwood: Callable[..., Any]) -> None:
    few = ["--remove", "5,10,15,20", "--targets", 2, "--base-seeds", 2, "--repeats", 1, "--dry-run", "--json"]
    words = ["validate", "counterfactual", *tuned.words, *few, "--scores", tuned.scores(tmp_path / "s")]
    code, out, err = budwood(*words)
    assert code == 0, err
    found = json.loads(out)
    likely, most = 2 + 2 * (2.5 + 4), 2 + 2 * (4 + 4)  # base models, two targets by scores and at random
    assert (found["retrains"], found["retrains_at_most"]) == (likely, most)
    more = found["seconds_at_most"] - found["seconds"]
    assert more == pytest.approx((most - likely) * found["seconds_each"], abs=0.11)  # both are rounded to a tenth
    halving = json.loads(budwood(*words, "--bisect")[1])
    assert halving["retrains"] == halving["retrains_at_most"] == 2 + 2 * 2 * 3
    three = json.loads(budwood(*words, "--bisect", "--repeats", 3)[1])
    assert (three["retrains"], three["retrains_at_most"]) == (2 + 2 * 2 * 2 * 3, 2 + 3 * 2 * 2 * 3)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--remove", "5"], "--scores is missing"),
        (["--remove", "-3", "--scores", "s"], "no number of rows"),
        (["--remove", "150%", "--scores", "s"], "no number of rows"),
        (["--remove", "5000", "--scores", "s"], "leaves nothing"),
    ],
)
def test_bad_input(tuned: Place, tmp_path: Path, budwood: Callable[..., Any], words: list[str], says: str) -> None:
    tuned.scores(tmp_path / "s")
    code, _, err = budwood("validate", "counterfactual", *tuned.words, *words)
    assert code == 2 and says in err


def test_other_task_than_the_runs_own(tuned: Place, tmp_path: Path, budwood: Callable[..., Any]) -> None:
    words = [tuned.run, "--task", "tiny-topic", "--scores", tuned.scores(tmp_path / "s")]
    code, _, err = budwood("validate", "counterfactual", *words)
    assert code == 2 and "was trained on" in err

"""Questions that take a pass over the rows: one at a time, none in vain, and anew where a run was made anew."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from budwood.methods.influence import masked
from budwood.methods.influence.scores import Scores
from budwood.models.reference import resolve, stamp
from budwood.report import asking
from tests.report import runs_for_tests as made

pytest.importorskip("uvicorn")
from tests.report.test_view import Served  # noqa: E402


class Counter:
    """Stands for the pass over the rows: counts how often it was made."""

    def __init__(self, warning: str = "") -> None:
        self.times, self.warning = 0, warning

    def __call__(self, *given: Any) -> tuple[np.ndarray, str]:
        self.times += 1
        return np.random.default_rng(self.times).normal(size=60), self.warning


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made.influence(tmp_path / "runs" / "influence", made.write_reviews(tmp_path / "data", hostile=False))
    made.graft(tmp_path / "runs" / "graft", {})
    (tmp_path / "runs" / "graft" / "reviews.graft").write_bytes(b"a graft")
    return tmp_path / "runs"


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    monkeypatch.setattr(masked, "graft_scores", counter)
    return counter


PATH = "/api/query?key=influence&q=4&strategy=ekfac"
GRAFT = f"{PATH}&graft=graft"


def test_a_question_during_another_is_turned_away_soon(
    home: Path, passes: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "PATIENCE", 0.05)
    served = Served(home)
    try:
        with asking.ONE:
            code, _, body = served.get(GRAFT)
            assert code == 503 and "busy counting another query. Try again" in json.loads(body)["error"]
            assert served.get(PATH)[0] == 200 and served.get("/api/runs")[0] == 200  # what needs no pass goes on
        assert passes.times == 0 and served.get(GRAFT)[0] == 200 and passes.times == 1
        with asking.ONE:
            assert served.get(GRAFT)[0] == 200  # known already
    finally:
        served.close()


def test_a_head_makes_no_pass(home: Path, passes: Counter) -> None:
    asked: list[str] = []
    (home / "influence" / "index").mkdir()
    (home / "influence" / "index" / "index.json").write_text("{}")
    served = Served(home, ask=lambda room, text: asked.append(text) or {"rows": [], "said": ""})
    try:
        for path in (GRAFT, "/api/ask?key=influence&text=hello"):
            assert served.get(path, "HEAD")[0] == 200
        assert passes.times == 0 and not asked
        assert served.get("/api/ask?key=influence&text=hello")[0] == 200 and asked == ["hello"]
    finally:
        served.close()


@pytest.mark.parametrize(
    ("site", "code"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_pages_of_other_sites_start_nothing(home: Path, passes: Counter, site: str, code: int) -> None:
    served = Served(home)
    try:
        assert served.get(GRAFT, more=f"Sec-Fetch-Site: {site}\r\n")[0] == code
        assert passes.times == (code == 200)
        assert served.get("/", more=f"Sec-Fetch-Site: {site}\r\n")[0] == 200  # a link to the page itself is fine
    finally:
        served.close()


def test_numbers_of_all_weights_are_not_mixed_in(home: Path, passes: Counter) -> None:
    passes.warning = f"x.graft was cut from {home.resolve()}/skill, and these scores are of another model"
    served = Served(home)
    try:
        answer = served.json(GRAFT)["answer"]
        assert "inner" not in answer and "inner" in served.json(PATH)["answer"]
        assert answer["note"].startswith("x.graft was cut from runs/skill")
    finally:
        served.close()


def test_a_run_made_anew_is_answered_anew(home: Path, passes: Counter) -> None:
    run, graft = home / "influence", home / "graft" / "reviews.graft"

    def asked() -> int:
        scores = Scores.open(run)
        asking.in_graft(run, scores, 0, scores.find("ekfac"), graft)
        return passes.times

    def touched(file: Path) -> int:
        later = file.stat().st_mtime_ns + 1_000_000
        os.utime(file, ns=(later, later))
        return asked()

    assert asked() == asked() == 1
    assert touched(run / "run.json") == 2
    assert touched(run / "scores" / "index.json") == 3
    assert touched(graft) == 4 == asked()


def test_a_model_made_anew_is_known_by_its_files(home: Path, passes: Counter, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve("tiny-bert").source, model)
    made.write_run(home / "influence", "influence score", {"strategies": ["ekfac"], "models": [str(model)]})
    scores = Scores.open(home / "influence")
    graft = home / "graft" / "reviews.graft"
    for times in (1, 1):
        asking.in_graft(home / "influence", scores, 0, scores.find("ekfac"), graft)
        assert passes.times == times
    before = stamp(resolve(str(model)))
    time.sleep(0.01)
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    assert stamp(resolve(str(model))) != before
    asking.in_graft(home / "influence", scores, 0, scores.find("ekfac"), graft)
    assert passes.times == 2

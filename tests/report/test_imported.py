"""Scores of other tools on pages: imported, their rows are ranked and told as our own are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from budwood.cli.main import main
from budwood.report.page import WEB, scoped
from tests.report import runs_for_tests as made

VALUES = np.random.default_rng(5).normal(size=(24, 60)).astype(np.float32)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run of `influence import`, made by the verb itself."""
    place = tmp_path_factory.mktemp("imported")
    given = made.write_reviews(place / "data", hostile=False)
    np.save(place / "theirs.npy", VALUES)
    files = ["--train-file", given["train_file"], "--test-file", given["test_file"], "--task", given["task"]]
    words = ["influence", "import", str(place / "theirs.npy"), *files, "--name", "theirs", "--progress", "none"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--threads", "1", "--out", str(place / "runs" / "theirs")])
    assert end.value.code == 0
    return place / "runs"


def test_a_report_tells_the_rows_of_imported_scores(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["report", str(runs), "--out", str(tmp_path / "page.html")])
    assert end.value.code == 0
    page = (tmp_path / "page.html").read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    told = json.loads(data[1])
    (run,) = told["runs"]
    assert (run["key"], run["verb"], run["problems"]) == ("theirs", "influence import", [])
    detail = told["details"]["theirs"]
    assert detail["of"] == {"train": 60, "queries": 24} and detail["measurement"] == "" and not detail["missing"]
    for query, (top, row) in enumerate(zip(detail["tops"]["theirs"], VALUES)):
        order = np.argsort(-row, kind="stable")
        assert top["rows"] == [*order[:20], *order[-20:]], query
        np.testing.assert_allclose(top["scores"], row[top["rows"]], rtol=1e-3)
    best = detail["train"][str(VALUES[3].argmax())]
    assert told["texts"][best["text"]].startswith(f"train review number {VALUES[3].argmax()}:")
    assert "20 most helpful carry" in detail["claim"] and "theirs, 24 queries" in detail["claim"]


def test_view_answers_queries_of_imported_scores(runs: Path) -> None:
    pytest.importorskip("uvicorn")
    from tests.report.test_view import Served

    served = Served(runs)
    try:
        reply = served.json("/api/query?key=theirs&q=7&strategy=theirs")
        top, order = reply["answer"]["top"], np.argsort(-VALUES[7], kind="stable")
        assert top["rows"] == [*order[:20], *order[-20:]]
        np.testing.assert_allclose(top["scores"], VALUES[7][top["rows"]], rtol=1e-3)
        first = reply["answer"]["train"][str(order[0])]
        assert reply["texts"][first["text"]].startswith(f"train review number {order[0]}:")
        detail = served.json("/api/run?key=theirs")["detail"]
        assert detail["strategies"][0]["name"] == "theirs" and len(detail["queries"]) == 24
        assert served.get("/api/query?key=theirs&q=7&strategy=ekfac")[0] == 404
    finally:
        served.close()


@pytest.mark.skipif(not shutil.which("node"), reason="there is no node to run the page's script with")
def test_a_page_says_what_a_score_measures_only_where_it_is_known() -> None:
    text = (WEB / "influence.js").read_text(encoding="utf-8")
    others = "".join(f"const ${name} = {{}};" for name in re.findall(r'from "\./(\w+)\.js"', text))
    asked = [None, "margin", "loss", "own.module:value", ""]
    tell = f"console.log(JSON.stringify({json.dumps(asked)}.map($influence.meaning)))"
    code = f"{others}{scoped('influence', text)}{tell}"
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    said: list[Any] = json.loads(done.stdout)
    assert said[0] == said[1] and "the margin of the query's right answer would rise" in said[1]
    assert "the loss of the query's right answer would fall" in said[2]
    assert "the own.module:value of" in said[3]
    assert "scale is as imported" in said[4] and "margin" not in said[4] and "trained weights" not in said[4]
    assert all(s.endswith("`validate` checks it by retraining.") for s in said)

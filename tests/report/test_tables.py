"""What pages are made of: every number as the artefact has it, every damaged run with what is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from budwood.errors import BudwoodError
from budwood.methods.influence.scores import Scores
from budwood.report.limits import Limits
from budwood.report.page import WEB, page, rooms_of, script, write_report
from budwood.report.room import Room
from budwood.report.tables import detail, dumped, entry, payload
from budwood.report.texts import Texts
from tests.report import runs_for_tests as made


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made.one_of_each(tmp_path_factory.mktemp("report") / "runs")


@pytest.fixture(scope="module")
def whole(runs: dict[str, Path]) -> dict[str, Any]:
    return payload([Room.open(p) for p in runs.values()])


def metrics(path: Path) -> dict[str, Any]:
    return json.loads((path / "metrics.json").read_text())  # type: ignore[no-any-return]


def test_every_run_has_an_entry_and_no_good_run_a_problem(runs: dict[str, Path], whole: dict[str, Any]) -> None:
    assert [r["key"] for r in whole["runs"]] == list(runs)
    damaged = {"cut", "list", "binary", "other-format", "no-metrics", "failed"}
    assert {r["key"] for r in whole["runs"] if r["problems"]} == damaged
    assert whole["left_out"] == [] and json.loads(dumped(whole)) == whole


@pytest.mark.parametrize(
    ("name", "status", "told"),
    [
        ("cut", "broken", "run.json cannot be read"),
        ("list", "broken", "holds no JSON object"),
        ("binary", "broken", "cannot be read"),
        ("other-format", "done", "format 99"),
        ("no-metrics", "broken", "metrics.json is missing"),
        ("failed", "failed", "the disk was full"),
        ("stopped", "stopped", ""),
        ("limited", "done", ""),
    ],
)
def test_damaged_runs_say_what_is_wrong(runs: dict[str, Path], name: str, status: str, told: str) -> None:
    found = entry(Room.open(runs[name]), name)
    assert found["status"] == status
    assert told in " ".join(found["problems"])
    assert bool(found["limited"]) == (name == "limited")


def test_an_empty_file_of_metrics_is_no_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from budwood.cli.main import main

    path = made.write_run(tmp_path / "r", "finetune", {"metric": "accuracy", "score": 0.5})
    (path / "metrics.json").write_text("{}")
    assert Room.open(path).status == "broken" and "metrics.json is empty" in Room.open(path).problems[0]
    with pytest.raises(SystemExit) as end:
        main(["report", str(path), str(path), "-o", str(tmp_path / "p.html")])
    assert end.value.code == 0 and capsys.readouterr().err.count("r is broken: the run is marked done") == 1


def test_views_without_their_artefacts_say_so(whole: dict[str, Any]) -> None:
    assert "do not hold what this view needs" in whole["details"]["odd"]["problem"]
    assert (
        "ids.json" in whole["details"]["no-scores"]["problem"] or "missing" in whole["details"]["no-scores"]["problem"]
    )
    assert "nothing to draw" in whole["details"]["stopped"]["problem"]


def test_a_running_run_is_told_from_a_stopped_one(tmp_path: Path) -> None:
    import socket

    path = made.write_run(tmp_path / "r", "finetune", {}, status="running")
    (path / "metrics.json").unlink()
    (path / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}, started now\n")
    (path / "progress.jsonl").write_text('{"stage": "train", "done": 3, "total": 9}\n{"stage": "tr')
    room = Room.open(path)
    assert room.status == "running" and room.progress()["done"] == 3
    (path / ".lock").write_text(f"process 999999999 on {socket.gethostname()}, started now\n")
    assert Room.open(path).status == "stopped"


def test_numbers_are_those_of_the_artefacts(runs: dict[str, Path], whole: dict[str, Any]) -> None:
    d = whole["details"]
    assert d["tuned"]["score"] == metrics(runs["tuned"])["score"]
    assert d["tuned"]["baselines"] == {"majority": 0.5, "zero_shot": 0.625}
    for mine, theirs in zip(d["probe"]["models"], metrics(runs["probe"])["results"], strict=True):
        assert mine["layers"] == theirs["layers"] and mine["best_layer"] == theirs["best_layer"]
    assert d["linear"]["results"] == metrics(runs["linear"])["results"]
    assert d["graft"]["curve"] == metrics(runs["graft"])["curve"] and len(d["graft"]["map"]) == 28
    assert d["overlap"]["matrices"][0]["values"] == metrics(runs["overlap"])["jaccard"]
    assert d["lds"]["results"] == metrics(runs["lds"])["results"] and d["lds"]["ceiling"] == 0.55
    for mine, theirs in zip(d["inject"]["cells"], metrics(runs["inject"])["cells"], strict=True):
        assert mine["new"] == theirs["new"] and mine["kept"] == theirs["kept"]
    assert d["inject"]["fisher"]["tiny-text"] == {f"block.{i}": 1.0 + i for i in range(made.LAYERS)}


def test_influence_lists_are_the_extremes_of_the_matrix(runs: dict[str, Path], whole: dict[str, Any]) -> None:
    scores = Scores.open(runs["influence"])
    d = whole["details"]["influence"]
    for strategy in ("ekfac", "identity"):
        matrix = scores.find(strategy)
        for q in range(24):
            top = d["tops"][strategy][q]
            row = scores.row(q, matrix)
            order = np.argsort(-row, kind="stable")
            assert top["rows"] == [*order[:20].tolist(), *order[-20:].tolist()]
            np.testing.assert_allclose(top["scores"], row[top["rows"]], rtol=1e-5)
    n = d["tops"]["ekfac"][3]["rows"][0]
    strip = d["inner"][3]["layers"][str(n)]
    np.testing.assert_allclose(sum(strip), d["tops"]["ekfac"][3]["scores"][0], rtol=1e-4)
    words, values = d["inner"][3]["tokens"][str(n)]
    assert words == ["", f"w{n}", "the", "story"] and len(values) == 4
    assert d["queries"][0]["correct"] is True and d["queries"][3]["correct"] is False
    assert d["train"][str(n)]["label"] == ["bad", "good"][n % 2]


def test_rows_that_a_layer_is_the_first_to_solve(whole: dict[str, Any]) -> None:
    d = whole["details"]["probe"]["solved"]
    for model in (0, 1):
        for layer in range(2, made.LAYERS + 1):
            right = [[(i * 7 + n + model) % 5 < n for i in range(24)] for n in (layer - 1, layer)]
            new = [f"reviews/test/test-{i}" for i in range(24) if right[1][i] and not right[0][i]]
            lost = sum(a and not b for a, b in zip(*right))
            assert [r["id"] for r in d[str(model)][str(layer)]["items"]] == new[:20]
            assert d[str(model)][str(layer)]["lost"] == lost


def test_every_view_has_one_claim(whole: dict[str, Any]) -> None:
    for name in ("tuned", "probe", "linear", "fisher", "graft", "influence", "self", "inject", "lds", "mislabel"):
        said = whole["details"][name]["claim"]
        assert said.endswith(".") and len(said) > 30, name
    assert "layer 3 of tiny-bert: 0.73" in whole["details"]["probe"]["claim"]
    assert (
        "rank correlation 0.41 (0.36 to 0.46); next comes kfac with 0.37 (0.32 to 0.42) (not told apart from it)"
        in whole["details"]["lds"]["claim"]
    )
    assert "movement" in whole["details"]["graft"]["claim"] and "replay" in whole["details"]["inject"]["claim"]


def test_texts_are_kept_once_and_cut(runs: dict[str, Path], whole: dict[str, Any]) -> None:
    assert len(set(whole["texts"])) == len(whole["texts"])
    assert max(map(len, whole["texts"])) < 1300
    assert any("998,800 more characters" in t for t in whole["texts"])


def test_nothing_in_the_data_can_end_the_script(runs: dict[str, Path]) -> None:
    text = page([Room.open(p) for p in runs.values()]).decode()
    inside = text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert "<" not in inside and ">" not in inside and "\u2028" not in inside
    assert made.HOSTILE[0] in json.loads(inside)["texts"]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy and "unsafe" not in policy[1] and policy[1].startswith("default-src 'none'")
    assert (
        text.count("<script") == 2
        and " style=" not in text
        and "http" not in re.sub(r'"http-equiv|http-equiv=|http://www.w3.org/2000/svg|http://example.com', "", text)
    )


def test_a_page_that_is_too_large_says_what_was_left_out(runs: dict[str, Path]) -> None:
    rooms = [Room.open(runs[n]) for n in ("influence", "tuned")]
    size = len(dumped(payload(rooms)))
    small = payload(rooms, most=size // 3)
    assert len(dumped(small)) <= size // 3
    assert any("token" in t for t in small["left_out"])
    least = payload(rooms, most=10)
    assert len(least["runs"]) == 2 and least["left_out"]


def test_scripts_do_without_markup_and_network() -> None:
    text = script()
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "http://",
        "https://",
        "import(",
    ):
        assert word not in text.replace("http://www.w3.org/2000/svg", ""), word
    assert sum(p.stat().st_size for p in WEB.iterdir()) < 200_000


def test_a_report_needs_no_torch(runs: dict[str, Path], tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from budwood.report.page import rooms_of, write_report;"
        f"write_report(rooms_of([Path({str(runs['influence'])!r}), Path({str(runs['tuned'])!r})]), "
        f"Path({str(tmp_path / 'r.html')!r}));"
        "import budwood.report.view; print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_folders_and_bad_places(runs: dict[str, Path], tmp_path: Path) -> None:
    out = write_report(rooms_of([runs["tuned"].parent]), tmp_path / "all.html")
    assert out.stat().st_size > 100_000
    (tmp_path / "empty").mkdir()
    for given, words in ((tmp_path / "empty", "budwood demo"), (tmp_path / "absent", "no run")):
        with pytest.raises(BudwoodError, match=words):
            write_report(rooms_of([given]), tmp_path / "x.html")
    with pytest.raises(BudwoodError, match="is a directory"):
        write_report(rooms_of([runs["tuned"]]), tmp_path)


def test_links_out_of_a_run_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("step,loss\n1,2\n")
    path = made.tuned(tmp_path / "runs" / "a", {"task": "reviews"})
    (path / "figures" / "loss.csv").unlink()
    (path / "figures" / "loss.csv").symlink_to(tmp_path / "secret.csv")
    assert detail(Room.open(path), Texts(), Limits())["loss"] == []
    (path / "run.json").unlink()
    (path / "run.json").symlink_to(tmp_path / "secret.csv")
    assert "leads out" in Room.open(path).problems[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["here/nope"], "There is no run 'here/nope'. 'here' holds first, second."),
        (["here/secnd"], "Did you mean 'second'?"),
        (["nope"], "There is no run 'nope', and no directory 'runs' to look for it in."),
        ([], "There is no directory 'runs', so there are no runs to report. Make one:"),
    ],
)
def test_what_a_report_cannot_find(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    from budwood.cli.main import main

    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        made.write_run(tmp_path / "here" / name, "finetune", {"metric": "accuracy", "score": 0.5})
    with pytest.raises(SystemExit) as end:
        main(["report", *words])
    assert end.value.code != 0 and told in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_is_made_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from budwood.cli.main import main

    monkeypatch.chdir(tmp_path)
    made.write_run(tmp_path / "runs" / "a", "finetune", {"metric": "accuracy", "score": 0.5})
    said = []
    for _ in range(2):
        with pytest.raises(SystemExit):
            main(["report", "-o", "new/deep/page.html"])
        said.append(capsys.readouterr().err)
    assert "made the folder new/deep" in said[0] and said[1] == ""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("stopped", "nothing to draw yet. The same command carries on."),
        ("failed", "The run failed, so there is nothing to draw."),
        ("no-metrics", "damaged or half-written, so it cannot be drawn."),
    ],
)
def test_why_there_is_no_figure(tmp_path: Path, name: str, told: str) -> None:
    runs = made.broken(tmp_path / "runs")
    (runs["failed"] / "metrics.json").unlink()
    assert detail(Room.open(runs[name]), Texts(), Limits())["problem"].endswith(told)

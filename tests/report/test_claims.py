"""What a page dares to say: sentences as strong as the intervals, one number for one run, no place of the machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from budwood.report.limits import Limits
from budwood.report.page import page
from budwood.report.room import Room
from budwood.report.tables import detail, entry, full
from budwood.report.texts import Texts
from tests.report import runs_for_tests as made


def told(path: Path) -> dict[str, Any]:
    return detail(Room.open(path), Texts(), Limits())


def probe_run(path: Path, scores: list[float], n: int, half: float, majority: float = 0.5) -> str:
    layers = [{"layer": i, "score": s, "low": s - half, "high": s + half} for i, s in enumerate(scores)]
    best = max(range(len(scores)), key=lambda i: scores[i])
    results = [{"model": "tiny-bert", "layers": layers, "best_layer": best}]
    metrics = {"metric": "accuracy", "n": n, "results": results, "baselines": {"majority": majority}}
    return str(told(made.write_run(path, "probe", metrics))["claim"])


def test_a_probe_that_reads_nothing_is_not_called_legible(tmp_path: Path) -> None:
    said = probe_run(tmp_path / "a", [0.495, 0.52, 0.535, 0.51], 400, 0.049)
    assert said.startswith("No layer of tiny-bert reads reviews clearly better than always naming the commonest label")
    assert "layer 2, has 0.535" in said and "most legible" not in said


def test_layers_that_are_not_told_apart_are_named(tmp_path: Path) -> None:
    assert "No layer of tiny-bert is clearly ahead" in probe_run(tmp_path / "a", [0.70, 0.72, 0.73], 400, 0.045)
    said = probe_run(tmp_path / "b", [0.5, 0.62, 0.80, 0.83], 400, 0.045)
    assert "most legible in layer 3" in said and "0.5 at the embeddings; layer 2 is not told apart from it." in said
    assert probe_run(tmp_path / "c", [0.5, 0.9], 400, 0.03).endswith("0.5 at the embeddings.")


def test_without_intervals_the_number_of_rows_speaks(tmp_path: Path) -> None:
    layers = [{"layer": i, "score": s} for i, s in enumerate((0.5, 0.54))]
    few, many = (
        told(
            made.write_run(
                tmp_path / str(n),
                "probe",
                {
                    "metric": "accuracy",
                    "n": n,
                    "results": [{"model": "m", "layers": layers, "best_layer": 1}],
                    "baselines": {"majority": 0.5},
                },
            )
        )["claim"]
        for n in (100, 100_000)
    )
    assert few.startswith("No layer of m reads") and "most legible in layer 1 of m: 0.54" in many


def graft_run(path: Path, scores: tuple[float, float, float], n: int) -> dict[str, Any]:
    base, tuned, graft = scores
    metrics = {
        "metric": "accuracy",
        "n": n,
        "size": 1000,
        "fraction": 0.05,
        "graftable": 20_000,
        "base": {"score": base, "ece": 0.1},
        "tuned": {"score": tuned, "ece": 0.1},
        "graft": {"score": graft, "ece": 0.1},
        "recovered": (graft - base) / (tuned - base),
    }
    return told(made.write_run(path, "graft learn", metrics))


def test_no_share_of_a_gain_that_chance_may_make(tmp_path: Path) -> None:
    few = graft_run(tmp_path / "few", (0.885, 0.905, 0.925), 400)
    assert "+2 points (+8 of 400 rows), and chance alone may make 4.25 points: too little" in few["claim"]
    assert "200 %" not in few["claim"] and few["recovery"]["clear"] is False
    much = graft_run(tmp_path / "much", (0.5, 0.9, 0.8), 400)
    assert "recover 75 % of what tuning on reviews gained (95 % interval 63 % to 87 %)" in much["claim"]


def test_the_interval_of_a_share_holds_in_a_simulation() -> None:
    import numpy as np

    from budwood.report.views.chance import recovery

    rng = np.random.default_rng(0)
    held, rounds, n = 0, 400, 500
    for base, tuned, graft in (rng.binomial(n, (0.5, 0.9, 0.8)) / n for _ in range(rounds)):
        states = {k: {"score": float(v)} for k, v in (("base", base), ("tuned", tuned), ("graft", graft))}
        sure = recovery({"metric": "accuracy", "n": n, **states})
        assert sure is not None
        held += sure["low"] <= 0.75 <= sure["high"]
    assert 0.92 < held / rounds < 0.98


ANYWHERE = re.compile(r'(?<![\w.~/:<\\])/(?:tmp|home|root|work|usr|var|Users|etc)\b[^"]*')


def test_no_place_of_the_machine_is_on_a_page(tmp_path: Path) -> None:
    """Models, parents, settings, command, files and errors with absolute paths: the page names them in short."""
    runs = tmp_path / "runs"
    tuned = made.tuned(runs / "tuned", made.write_reviews(tmp_path / "data", hostile=False))
    strange = "/usr/local/share/elsewhere/bert"
    models = [str(tuned), strange, f"tiny-bert+{runs}/g/topic.graft"]
    scored = [{"layer": 0, "score": 0.5, "low": 0.4, "high": 0.6}]
    results = [{"model": m, "layers": scored, "best_layer": 0} for m in models]
    more = {
        "parents": [str(tuned)],
        "settings": {"data_dir": [str(tmp_path / "data")], "masks": "/etc/hidden/masks.yaml"},
        "command": [f"{tmp_path}/bin/budwood", "probe", *models, "--data-dir", str(tmp_path / "data")],
        "notes": {"texts": f"read from {tmp_path}/data/train.csv"},
    }
    metrics = {"metric": "accuracy", "n": 24, "models": models, "results": results, "file": str(runs / "probe" / "x")}
    probe = made.write_run(runs / "probe", "probe", metrics, **more)
    lost = made.tuned(runs / "lost", {"task": "reviews", "train_file": str(tmp_path / "gone" / "train.csv")})
    names = [str(runs / n / "a.graft") for n in "xy"]
    both = made.write_run(runs / "both", "graft overlap", {"names": names, "jaccard": [[1, 0.5], [0.5, 1]]})
    failed = made.write_run(runs / "failed", "probe", {}, status="failed", error=f"no file {strange}/config.json")
    text = page([Room.open(p) for p in (tuned, probe, lost, both, failed)]).decode()
    inside = text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert str(tmp_path) not in text and not ANYWHERE.findall(inside), ANYWHERE.findall(inside)
    data = json.loads(inside)
    mine = next(r for r in data["runs"] if r["key"] == "probe")
    assert mine["models"] == ["tuned", "bert", "tiny-bert+topic"] and mine["place"] == "runs/probe"
    assert mine["command"] == [
        *("budwood", "probe", "runs/tuned", "…/bert", "tiny-bert+runs/g/topic.graft", "--data-dir", "data")
    ]
    assert mine["settings"] == {"data_dir": ["data"], "masks": "…/masks.yaml"}
    assert [m["model"] for m in data["details"]["probe"]["models"]] == mine["models"]
    assert "No layer of tuned" in data["details"]["probe"]["claim"] or "of tuned" in data["details"]["probe"]["claim"]


def test_texts_of_a_data_set_keep_their_slashes(tmp_path: Path) -> None:
    given = made.write_reviews(tmp_path / "data", hostile=False)
    file = Path(given["test_file"])
    file.write_text(file.read_text().replace("test review", "see /etc/passwd/x: test review"))
    texts = Texts()
    detail(Room.open(made.tuned(tmp_path / "runs" / "a", given)), texts, Limits())
    assert texts.kept and all(t.startswith("see /etc/passwd/x: test review") for t in texts.kept)


@pytest.mark.parametrize("name", ["linear", "mislabel", "lds"])
def test_the_sentence_and_the_list_name_the_same_number(tmp_path: Path, name: str) -> None:
    path = {"linear": made.linear, "mislabel": made.mislabel, "lds": made.lds}[name](
        tmp_path / "r", {"task": "reviews"}
    )
    metrics = json.loads((path / "metrics.json").read_text())
    first = metrics["results"][0]
    key = next(k for k in ("test", "auc", "lds") if k in first)
    metrics["results"].append(
        {**metrics["results"][-1], "features": "p", "scores": "self:identity", key: first[key] + 0.2}
    )
    (path / "metrics.json").write_text(json.dumps({**metrics, "metric": key, "score": first[key]}))
    said = told(path)["claim"]
    assert f"{entry(Room.open(path), 'r')['score']:.3g}" in said.split(";")[0].split(". ")[0]
    assert f"{first[key] + 0.2:.3g}" in said


def test_what_makes_a_run_again_is_what_people_type(tmp_path: Path) -> None:
    path = made.write_run(tmp_path / "r", "probe", {}, command=["/x/y/budwood/__main__.py", "demo"])
    assert full(Room.open(path), "r")["command"] == ["budwood", "demo"]

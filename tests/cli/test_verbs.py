"""What a person types and what comes back."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import parsed

KEYS = {
    "verb",
    "budwood",
    "task",
    "models",
    "seed",
    "n",
    "limited",
    "split",
    "metric",
    "score",
    "accuracy",
    "ece",
    "loss",
}
COSTS = {"seconds", "cpu_seconds", "phase_seconds", "peak_rss_mb", "run"}


def test_finetune_then_nothing_then_refusal(budwood: Any, settings: list[str]) -> None:
    code, out, err = budwood(*settings, "--json", "--out", "r")
    assert code == 0, err
    result = parsed(out)
    assert result.keys() >= KEYS | COSTS
    assert result["score"] == result["accuracy"] and result["n"] == 12
    for name in ("run.json", "metrics.json", "cost.json", "records.parquet", "model/config.json", "model/README.md"):
        assert (Path("r") / name).exists(), name
    assert {p.name for p in Path("r/figures").iterdir()} >= {"loss.svg", "loss.png", "loss.csv", "calibration.svg"}
    assert not Path("r/state.safetensors").exists()
    before = {p: p.read_bytes() for p in Path("r").rglob("*") if p.is_file() and p.name != ".lock"}

    code, out, err = budwood(*settings, "--json", "--out", "r")
    assert code == 0 and "Nothing to do" in err and parsed(out)["score"] == result["score"]
    assert {p: p.read_bytes() for p in before} == before

    code, _, err = budwood(*settings, "--out", "r", "--lr", "0.5")
    assert code == 2 and "learning_rate: None there, 0.5 now" in err and "--overwrite" in err
    code, out, err = budwood(*settings, "--out", "r", "--lr", "0.5", "--overwrite", "--json")
    assert code == 0 and parsed(out)["learning_rate"] == 0.5


def test_a_run_is_a_model_for_the_next_verb(budwood: Any, settings: list[str], reviews: Path) -> None:
    _, out, _ = budwood(*settings, "--json", "--out", "r")
    tuned = parsed(out)
    task = ["--task", str(reviews), "--text", "body", "--label", "stars", "--threads", "1", "--progress", "none"]
    code, out, err = budwood("evaluate", "r", *task, "--json")
    assert code == 0, err
    scored = parsed(out)
    assert scored["accuracy"] == tuned["accuracy"] and scored["loss"] == pytest.approx(tuned["loss"], abs=1e-6)
    code, _, err = budwood("evaluate", settings[1], *task)
    assert code == 2 and "no trained head" in err
    code, out, _ = budwood("runs")
    assert code == 0 and out.startswith("No runs in runs") is False
    code, out, _ = budwood("runs", ".", "--json")
    assert [r["status"] for r in json.loads(out)] == ["done", "done"]  # the refused one left nothing
    code, out, _ = budwood("compare", "r", scored["run"], "--json")
    assert code == 0 and {d["metric"] for d in json.loads(out)["metrics"]} >= {"verb", "steps"}


@pytest.mark.parametrize("more", [[], ["--seeds", "1,2"]])
def test_a_refused_command_leaves_its_place_free(budwood: Any, settings: list[str], more: list[str]) -> None:
    code, _, err = budwood(*settings, *more, "--out", "r", "--ewc", "nowhere", "--ewc-strength", "1")
    assert code == 2 and "no Fisher file 'nowhere'" in err and not Path("r").exists()
    code, _, err = budwood(*settings, *more, "--out", "r")
    assert code == 0, err


def test_seeds_make_children_and_their_mean(budwood: Any, settings: list[str]) -> None:
    code, out, err = budwood(*settings, "--json", "--seeds", "1,2", "--out", "both")
    assert code == 0, err
    result = parsed(out)
    children = [json.loads((Path("both/seeds") / s / "metrics.json").read_text()) for s in ("1", "2")]
    assert result["seed"] == [1, 2]
    assert result["loss"] == pytest.approx(sum(c["loss"] for c in children) / 2)
    assert children[0]["loss"] != children[1]["loss"] and result["sd"]["loss"] > 0
    assert "Nothing to do" in budwood(*settings, "--seeds", "1,2", "--out", "both")[2]
    code, out, _ = budwood("runs", ".", "--group", "--json")
    assert [r["runs"] for r in json.loads(out)] == [2]


def test_yaml_settings_and_their_overrides(budwood: Any, settings: list[str]) -> None:
    code, out, _ = budwood(*settings, "--print-config")
    assert code == 0
    Path("all.yaml").write_text(out)
    Path("few.yaml").write_text("max_steps: 3\nlr: 0.25\nseeds: [4]\n")
    assert budwood("finetune", settings[1], "--config", "all.yaml", "--print-config")[1] == out
    _, out, _ = budwood("finetune", settings[1], "--task", "x", "--config", "few.yaml", "--lr", "0.5", "--print-config")
    assert "learning_rate: 0.5" in out and "max_steps: 3" in out
    Path("bad.yaml").write_text("learnin_rate: 1\n")
    code, _, err = budwood("finetune", "m", "--task", "x", "--config", "bad.yaml")
    assert code == 2 and "'learnin_rate' in bad.yaml" in err and "'learning_rate'" in err
    for name, content, word in (
        ("no.yaml", None, "no file"),
        ("l.yaml", "- 1", "holds a list"),
        ("x.yaml", "a: [", "not YAML"),
    ):
        if content is not None:
            Path(name).write_text(content)
        code, _, err = budwood("finetune", "m", "--task", "x", "--config", name)
        assert code == 2 and word in err


def test_dry_run_runs_nothing(budwood: Any, settings: list[str]) -> None:
    code, out, err = budwood(*settings, "--dry-run", "--json")
    assert code == 0, err
    figures = parsed(out)
    assert figures["updates"] == 6 and figures["parameters"] > 1000 and figures["seconds"] > 0 and figures["flops"] > 0
    assert not Path("runs").exists()


def test_recipe_steps_name_each_other(budwood: Any, settings: list[str], reviews: Path) -> None:
    Path("two.yaml").write_text(
        f"about: two steps\ndefaults: {{task: '{reviews}', text: body, label: stars, threads: 1, progress: none}}\n"
        "steps:\n"
        f"  - {{id: tuned, verb: finetune, model: '{settings[1]}', max_steps: 4, small: {{max_steps: 2}}}}\n"
        "  - {id: scored, verb: evaluate, model: '{tuned}'}\n"
    )
    code, out, _ = budwood("recipe", "two.yaml", "--dry-run")
    assert code == 0 and "budwood evaluate runs/recipe-two/tuned" in out and "--max-steps 4" in out
    code, out, err = budwood("recipe", "two.yaml", "--small", "--json")
    assert code == 0, err
    steps = parsed(out)["steps"]
    assert [s["step"] for s in steps] == ["tuned", "scored"] and steps[0]["score"] == steps[1]["score"]
    assert steps[0]["metrics"]["steps"] == 2
    stamp = Path(steps[0]["run"], "metrics.json").stat().st_mtime_ns
    budwood("recipe", "two.yaml", "--small")
    assert Path(steps[0]["run"], "metrics.json").stat().st_mtime_ns == stamp
    for change, word in (
        ("verb: finetunes", "Did you mean 'finetune'"),
        ("verb: finetune, lrr: 1", "no setting 'lrr'"),
    ):
        Path("bad.yaml").write_text(f"steps: [{{id: a, {change}, model: m, task: t}}]")
        code, _, err = budwood("recipe", "bad.yaml")
        assert code == 2 and word in err
    Path("bad.yaml").write_text("steps: [{id: a, verb: evaluate, model: '{b}', task: t}]")
    assert "no earlier step" in budwood("recipe", "bad.yaml")[2]
    assert "Did you mean 'demo'" in budwood("recipe", "dem")[2]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["finetun"], "Did you mean 'finetune'"),
        (["finetune", "tiny-bert", "--task", "tiny-sentment"], "Did you mean 'tiny-sentiment'"),
        (["finetune", "tiny-bret", "--task", "tiny-topic"], "tiny-bert"),
        (["finetune", "tiny-bert", "--task", "tiny-topic", "--lrr", "1"], "--lr"),
        (["finetune", "tiny-bert", "--task", "tiny-topic", "--lr", "-1"], "greater than 0"),
        (["finetune", "tiny-bert", "--task", "tiny-topic", "--mode", "haed"], "Did you mean 'head'"),
        (["finetune", "tiny-bert", "--task", "tiny-topic", "--device", "abacus"], "--device abacus"),
        (["finetune", "tiny-bert"], "--task"),
        (["compare", "a", "b"], "No run 'a'"),
        (["finetune", ".", "--task", "tiny-topic"], "config.json is missing"),
        (["finetune", "some-org/some-model", "--task", "tiny-topic"], "hf download some-org/some-model"),
        (["finetune", "tiny-bert", "--task", "tiny-topic", "--freeze", "encodr.*"], "encodr"),
        (["finetune", "tiny-bert", "--task", "tiny-topic", "--mode", "causal"], "both directions"),
        (["finetune", "tiny-bert", "--task", "tiny-topic", "--mode", "span"], "does not fit"),
    ],
)
def test_mistakes_are_told_in_one_paragraph(budwood: Any, words: list[str], expected: str) -> None:
    began = time.perf_counter()
    code, out, err = budwood(*words)
    assert code == 2 and out == ""
    told = [line for line in err.splitlines() if line]
    assert len(told) == 1 and told[0].startswith("budwood: ") and expected in told[0], err
    assert "Traceback" not in err and time.perf_counter() - began < 30


def test_bug_is_exit_one(budwood: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("budwood.cli.main._dispatch", lambda words: 1 / 0)
    code, _, err = budwood("runs")
    assert code == 1 and "bug in budwood: ZeroDivisionError" in err


def test_help_is_cheap_and_without_torch() -> None:
    code = (
        "import sys; sys.argv=['budwood','--help']\nfrom budwood.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules and 'cyclopts' not in sys.modules"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.4
    assert "finetune" in done.stdout


def test_importing_budwood_and_wrong_names_do_without_torch() -> None:
    code = (
        "import sys, budwood\nassert 'torch' not in sys.modules\nfrom budwood.cli.main import main\n"
        "try: main(['finetune', 'tiny-bert', '--task', 'tiny-sentment'])\nexcept SystemExit as e: assert e.code == 2\n"
        "assert 'torch' not in sys.modules, 'torch was imported before a wrong name was told'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_completion_knows_the_verbs(budwood: Any) -> None:
    code, out, _ = budwood("completion", "bash")
    assert code == 0 and "finetune" in out and "--learning-rate" in out


def test_killed_at_random_moments_ends_with_the_same_bytes(tmp_path: Path, settings: list[str]) -> None:
    """kill -9 now and then, the same command again: weights and metrics as if nothing had happened."""
    command = [sys.executable, "-m", "budwood", *settings, "--max-steps", "60", "--save-steps", "20"]
    environment = {**os.environ, "BUDWOOD_SAVE_SECONDS": "0.01", "OMP_NUM_THREADS": "1"}
    whole = subprocess.run(
        [*command, "--out", "whole"], cwd=tmp_path, capture_output=True, env=environment, check=False
    )
    assert whole.returncode == 0, whole.stderr
    seconds = json.loads((tmp_path / "whole" / "cost.json").read_text())["seconds"]
    kills = 0
    for attempt in range(12):
        process = subprocess.Popen(
            [*command, "--out", "cut"],
            cwd=tmp_path,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        if attempt < 4:
            log = tmp_path / "cut" / "progress.jsonl"
            size = log.stat().st_size if log.exists() else 0
            limit = time.monotonic() + 60
            while (
                process.poll() is None and (not log.exists() or log.stat().st_size <= size) and time.monotonic() < limit
            ):
                time.sleep(0.005)
            time.sleep(seconds * (attempt + 0.5) / 8)
            process.send_signal(signal.SIGKILL)
        process.wait()
        kills += process.returncode == -signal.SIGKILL
        if process.returncode == 0:
            break
    assert process.returncode == 0 and kills >= 2
    for name in ("metrics.json", "model/model.safetensors", "records.parquet", "figures/loss.csv", "figures/loss.svg"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes(), name

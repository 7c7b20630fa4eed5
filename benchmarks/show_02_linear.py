"""Bars of `linear`, one function per group; `show_02.py` runs them with those of `probe`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from linear import measured
from show import SHARED, Show, run

ORDER = ("f", "phi-p", "subset", "class")


def shipped(show: Show, work: Path) -> None:
    """The order of families on the shipped decoder."""
    found = run(
        *("linear", "tiny-gpt", "--task", "tiny-sentiment", "--features", "f,phi-p,subset,class,p", "--prompt"),
        cwd=work,
    )
    test = {r["features"]: r["test"] for r in found["results"]}
    steps = all(test[a] >= test[b] - 0.01 for a, b in zip(ORDER, ORDER[1:]))
    told = ", ".join(f"{k} {v:.4f}" for k, v in test.items())
    beside = ", ".join(f"{k} {v:.4f}" for k, v in found["baselines"].items())
    show.bar(
        "linear tiny-gpt: f >= phi-p >= subset >= class (1 point of slack) > majority",
        steps
        and test["class"] > found["baselines"]["majority"]
        and "p" in test
        and "bag_of_words" in found["baselines"],
        f"{told}; {beside}",
    )


def real(show: Show, work: Path) -> None:
    """Real weights and data."""
    models, data = SHARED / "models", ("--data-dir", SHARED / "data")
    sst2 = ("--task", "sst2", *data)
    mini = run("linear", models / "all-MiniLM-L6-v2", *sst2, "--features", "f", "--limit", 20000, cwd=work)
    show.bar("linear MiniLM on SST-2 >= 0.80", mini["score"] >= 0.80, _told(mini))
    stories = run("linear", models / "stories260K", *sst2, "--features", "f,phi-p,p", "--limit", 2000, cwd=work)
    show.bar("linear stories260K: f, phi-p, p, none under majority", _above(stories, 0.0), _told(stories))
    masked = run("linear", models / "minilm-l6-mlm", *sst2, "--features", "f", "--prompt", "--limit", 2000, cwd=work)
    show.bar("linear minilm-l6-mlm: f of the MLM transform with prompt", _above(masked, 0.05), _told(masked))


def _above(found: dict, by: float) -> bool:
    return all(r["test"] >= found["baselines"]["majority"] + by for r in found["results"])


def _told(found: dict) -> str:
    rows = ", ".join(f"{r['features']} {r['test']:.4f}" for r in found["results"])
    return f"{rows}; majority {found['baselines']['majority']:.4f}, words {found['baselines']['bag_of_words']:.4f}"


def cost(show: Show, work: Path) -> None:
    """Memory and time over a vocabulary of GPT-2's size."""
    mean = measured("phi-p")
    show.bar(
        "phi-p, N = 2,000, V = 50,257: < 300 MB above baseline",
        mean["mb_above_baseline"] < 300,
        f"{mean['mb_above_baseline']:.0f} MB, {mean['seconds']:.0f} s",
    )
    whole = measured("p")
    show.bar(
        "p, N = 4,000, V = 50,257, full CV: < 1.5 GB and <= 10 min",
        whole["peak_mb"] < 1500 and whole["seconds"] <= 600,
        f"{whole['peak_mb']:.0f} MB, {whole['seconds']:.0f} s ({whole['cpu']:.0f} s CPU)",
    )


def refused(show: Show, work: Path) -> None:
    """Bad input: exit code 2 and the name of what is wrong."""
    base = ("--task", "tiny-sentiment", "--limit", 200, "--limit-eval", 100)
    made = run("linear", "tiny-gpt", *base, "--features", "f", "--prompt", cwd=work)["run"]
    again = ("--features", "f", "--prompt", "--features-from", made)
    cases = {
        "a word of several tokens": (
            ("linear", "tiny-gpt", *base, "--features", "subset", "--subset-words", "great,unfathomable"),
            "The word 'unfathomable' of --subset-words is",
        ),
        "fewer rows than folds": (
            ("linear", "tiny-gpt", "--task", "tiny-sentiment", "--limit", 6, "--k-fold", 8),
            "6 training rows for 8 folds",
        ),
        "a task without labels": (("linear", "tiny-gpt", "--task", "tiny-text"), "carry no class label"),
        "features of another model": (("linear", "tiny-bert", *base, *again), "another model"),
        "features of another prompt": (
            ("linear", "tiny-gpt", *base, *again, "--prompt-text", "I say it was"),
            "another prompt",
        ),
    }
    for name, (words, told) in cases.items():
        error = run(*words, cwd=work, code=2)["stderr"]
        plain = " ".join(error.split())
        show.bar(f"refused: {name}", told in plain and "Traceback" not in plain, plain[:160])


def sections(show: Show, work: Path) -> None:
    """Every group of bars of `linear`."""
    show.section("linear: shipped", lambda: shipped(show, work))
    show.section("linear: real data", lambda: real(show, work), needs=SHARED / "models")
    show.section("linear: memory and time", lambda: cost(show, work))
    show.section("linear: bad input", lambda: refused(show, work))


if __name__ == "__main__":
    here = Show()
    sections(here, Path(tempfile.mkdtemp(prefix="budwood-show-")))
    here.end()

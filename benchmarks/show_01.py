"""The foundation's bars: set-up, shipped skills, real files, metrics, kills, speed, bad input.

make show-01
"""

from __future__ import annotations

import csv
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from show import BUDWOOD, ROOT, SHARED, Show, run

show = Show()
work = Path(tempfile.mkdtemp(prefix="budwood-show-"))


def setup() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*BUDWOOD, "--help"], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    code = "import sys, budwood.cli.main as m; m.overview(); print('torch' in sys.modules)"
    torch = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    show.bar(
        "budwood --help <= 0.4 s CPU, no torch",
        cpu <= 0.4 and torch == "False",
        f"{cpu:.2f} s, torch imported: {torch}",
    )
    began = time.perf_counter()
    done = subprocess.run([*BUDWOOD, "demo", "--out", str(work / "demo")], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    report = (work / "demo" / "report.html").exists()
    show.bar(
        "demo <= 180 s, ends with a report", done.returncode == 0 and seconds <= 180 and report, f"{seconds:.0f} s"
    )


def bag_of_words(task: str) -> float:
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    from budwood.data import world

    rows = world.load(task)
    texts = {s: [f"{r.text} {r.pair or ''}" for r in rows.rows(s)] for s in ("train", "test")}
    count = CountVectorizer()
    model = LogisticRegression(max_iter=2000).fit(
        count.fit_transform(texts["train"]), [r.label for r in rows.rows("train")]
    )
    return float(model.score(count.transform(texts["test"]), [r.label for r in rows.rows("test")]))


def skills() -> None:
    few = run(
        "finetune", "tiny-bert", "--task", "tiny-sentiment", "--mode", "prompt", "--shots", 16, "--seed", 1, cwd=work
    )
    show.bar("prompt, 16 shots, accuracy >= 0.80", few["accuracy"] >= 0.80, f"{few['accuracy']:.3f}")
    show.bar("zero-shot >= 0.60", few["zero_shot"] >= 0.60, f"{few['zero_shot']:.3f}")
    for task, least, most in (
        ("tiny-sentiment", 0.92, 0.80),
        ("tiny-entail", 0.85, 0.62),
        ("tiny-grammar", 0.80, 0.62),
    ):
        full = run("finetune", "tiny-bert", "--task", task, "--mode", "head", cwd=work)["accuracy"]
        words = bag_of_words(task)
        show.bar(f"{task}: head on the full train split >= {least}", full >= least, f"{full:.3f}")
        show.bar(f"{task}: bag of words <= {most}", words <= most, f"{words:.3f}")
    same = ("--task", "tiny-sentiment", "--mode", "head", "--shots", 64, "--seed", 1)
    start = {
        init: run("finetune", "tiny-bert", *same, "--init", init, cwd=work)["accuracy"]
        for init in ("pretrained", "random")
    }
    gap = start["pretrained"] - start["random"]
    show.bar(
        "K=64: random weights >= 5 points worse",
        gap >= 0.05,
        f"{start['pretrained']:.3f} against {start['random']:.3f}",
    )
    causal = run("finetune", "tiny-gpt", "--task", "tiny-sentiment", "--mode", "causal", cwd=work)["accuracy"]
    show.bar("tiny-gpt causal on full tiny-sentiment >= 0.85", causal >= 0.85, f"{causal:.3f}")
    qa = run("finetune", "tiny-bert", "--task", "tiny-qa", "--mode", "span", cwd=work)
    both = qa["HasAns_f1"] >= 80 and qa["NoAns_f1"] >= 80
    show.bar("tiny-qa: HasAns F1 and NoAns >= 80", both, f"{qa['HasAns_f1']:.1f} and {qa['NoAns_f1']:.1f}")


def real_files() -> None:
    from budwood.config.data import DataConfig
    from budwood.data.source import load_task

    model, data = SHARED / "models" / "all-MiniLM-L6-v2", SHARED / "data"
    public = run("finetune", model, "--task", "sst2", "--data-dir", data, "--limit", 2000, "--epochs", 2, cwd=work)
    show.bar(
        "MiniLM on 2,000 rows of SST-2 >= 0.82",
        public["accuracy"] >= 0.82,
        f"{public['accuracy']:.4f} ({public['split']})",
    )
    task = load_task(DataConfig(task="sst2", data_dir=(data,)))
    for split in ("train", "validation"):
        with (work / f"{split}.csv").open("w", newline="", encoding="utf-8") as f:
            csv.writer(f).writerows([("sentence", "label"), *((r.text, r.label) for r in task.rows(split))])
    files = (
        "--train-file",
        "train.csv",
        "--validation-file",
        "validation.csv",
        "--text",
        "sentence",
        "--label",
        "label",
    )
    own = run("finetune", model, "--task", "sst2", *files, "--limit", 2000, "--epochs", 2, cwd=work)
    keys = ("accuracy", "f1", "mcc", "ece", "loss", "n")
    equal = all(public[k] == own[k] for k in keys)
    show.bar(
        "the same rows as a user's CSV: same metrics",
        equal,
        f"{own['accuracy']:.4f}, loss {own['loss']:.6f} and {public['loss']:.6f}",
    )
    words = ("--task", "sst2", "--data-dir", data, "--mode", "prompt", "--shots", 64)
    prompt = run("finetune", SHARED / "models" / "minilm-l6-mlm", *words, cwd=work)
    better = prompt["accuracy"] > prompt["zero_shot"]
    show.bar(
        "minilm-l6-mlm, 64 shots beats its zero-shot score",
        better,
        f"{prompt['accuracy']:.4f} against {prompt['zero_shot']:.4f}",
    )


def metrics() -> None:
    from budwood.config.data import DataConfig
    from budwood.data.arithmetic import problem_of, score_numbers
    from budwood.data.readers.passages import squad_rows
    from budwood.data.source import load_task
    from budwood.data.squad import squad_scores

    rows = squad_rows(SHARED / "data" / "squad2-minggg" / "dev-v2.0.json")
    golden = {
        "all empty": ({r.id: "" for r in rows}, 52.122408687068116, 52.122408687068116),
        "first gold answer": ({r.id: r.answers[0][0] if r.answers else "" for r in rows}, 100.0, 100.0),
        "first word": ({r.id: (r.pair or "").split()[0] for r in rows}, 15.02138861467588, 15.911506759483046),
    }
    for name, (predictions, exact, f1) in golden.items():
        found = squad_scores(rows, predictions)
        error = max(abs(found["exact"] - exact), abs(found["f1"] - f1))
        show.bar(f"SQuAD golden row, {name}", error <= 1e-9, f"error {error:.1e}")
    test = load_task(DataConfig(task="arithmetic-published", data_dir=(SHARED / "data",))).rows("test")
    gold = [int(r.label) for r in test]  # type: ignore[arg-type]
    largest = [max(problem_of(r)[0], problem_of(r)[2]) for r in test]
    for name, given, wanted in (("constant 190", [190] * len(gold), 1.984), ("copy-max", largest, 0.829)):
        rmsle = score_numbers(given, gold)["rmsle"]
        show.bar(f"arithmetic, {name}: RMSLE {wanted} +- 0.001", abs(rmsle - wanted) <= 0.001, f"{rmsle:.4f}")


def kills() -> None:
    settings = [
        "finetune",
        "tiny-bert",
        "--task",
        "tiny-sentiment",
        "--limit",
        "1500",
        "--epochs",
        "2",
        "--save-steps",
        "50",
    ]
    command = [*BUDWOOD, *settings, "--progress", "none"]
    environment = {**os.environ, "BUDWOOD_SAVE_SECONDS": "0.5"}
    subprocess.run([*command, "--out", "whole"], cwd=work, env=environment, capture_output=True, check=True)
    seconds = json.loads((work / "whole" / "cost.json").read_text())["seconds"]
    draw = random.Random(0)
    done = 0
    for _ in range(10):
        process = subprocess.Popen(
            [*command, "--out", "cut"], cwd=work, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(3 + draw.random() * seconds * 0.6)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done += process.returncode == -signal.SIGKILL
        if process.returncode == 0:
            shutil.rmtree(work / "cut")  # it was quicker than the kill: begin again
    subprocess.run([*command, "--out", "cut"], cwd=work, env=environment, capture_output=True, check=True)
    names = ("metrics.json", "model/model.safetensors")
    same = all((work / "whole" / n).read_bytes() == (work / "cut" / n).read_bytes() for n in names)
    show.bar(
        "kill -9 at ten random moments: same weights and metrics",
        same and done >= 7,
        f"{done} kills, bit-identical: {same}",
    )
    again = subprocess.run([*command, "--out", "cut"], cwd=work, capture_output=True, text=True, check=True)
    show.bar("the same command again does nothing", "Nothing to do" in again.stderr, again.stderr.strip()[:80])


def speed() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "finetune.py")], capture_output=True, text=True, check=True
    )
    print(done.stdout)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    show.bar(">= 1.3x HF Trainer with dynamic padding", found["over_dynamic"] >= 1.3, f"{found['over_dynamic']:.2f}x")
    show.bar(">= 2x HF Trainer padded to 128", found["over_padded_128"] >= 2, f"{found['over_padded_128']:.2f}x")
    losses = found["losses"]
    apart = abs(losses["ours"] - losses["trainer, dynamic padding"])
    show.bar(
        "final loss equal within noise (0.05)",
        apart <= 0.05,
        f"{losses['ours']:.3f} and {losses['trainer, dynamic padding']:.3f}",
    )


def bad_input() -> None:
    (work / "latin.csv").write_bytes(b"text,label\ncaf\xe9,1\nx,0\n")
    (work / "empty.csv").write_text("text,label\n")
    (work / "rows.csv").write_text("text,label\n" + "".join(f"row {i},{i % 2}\n" for i in range(40)))
    (work / "dev.csv").write_text("text,label\nrow,7\n")
    (work / "data.pkl").write_bytes(b"\x80\x04N.")
    (work / "nomodel").mkdir(exist_ok=True)
    (work / "key.yaml").write_text("learnin_rate: 1\n")
    bert = ("finetune", "tiny-bert", "--task")
    cases = {
        "unknown task": (*bert, "tiny-sentment"),
        "unknown model": ("finetune", "tiny-bret", "--task", "tiny-topic"),
        "unknown flag": (*bert, "tiny-topic", "--lrr", "1"),
        "unknown YAML key": (*bert, "tiny-topic", "--config", "key.yaml"),
        "missing column": (*bert, "rows.csv", "--text", "txt"),
        "empty split": (*bert, "empty.csv"),
        "label never seen in train": (*bert, "x", "--train-file", "rows.csv", "--validation-file", "dev.csv"),
        "label words of several tokens": (
            *bert,
            "tiny-sentiment",
            "--mode",
            "prompt",
            "--label-words",
            "antidisestablishment,great",
        ),
        "non-UTF-8 file": (*bert, "latin.csv"),
        "hub unreachable": ("finetune", "some-org/some-model", "--task", "tiny-topic"),
        "a directory that is no model": ("finetune", "nomodel", "--task", "tiny-topic"),
        "pickled data": (*bert, "data.pkl"),
    }
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    for name, words in cases.items():
        began = time.perf_counter()
        done = subprocess.run(
            [*BUDWOOD, *words], cwd=work, capture_output=True, text=True, check=False, env=environment
        )
        seconds = time.perf_counter() - began
        told = [line for line in done.stderr.splitlines() if line.startswith("budwood: ")]
        fine = done.returncode == 2 and len(told) == 1 and "Traceback" not in done.stderr
        quick = name != "hub unreachable" or seconds <= 3.5  # two seconds for the hub, the rest to start Python
        show.bar(
            f"bad input, {name}", fine and quick, f"exit {done.returncode}, {seconds:.1f} s: {' '.join(told)[:110]}"
        )
    long = work / "long.csv"
    long.write_text("text,label\n" + "".join(f"{'a very long film ' * 400}{i},{i % 2}\n" for i in range(40)))
    found = run(*bert, "long.csv", "--max-steps", 2, "--batch-size", 4, cwd=work)
    show.bar(
        "a text longer than the model: cut and counted",
        found.get("truncated", 0) > 0,
        f"truncated {found.get('truncated')}",
    )
    full_disk()


def full_disk() -> None:
    """A run on a file system of its own that is too small (needs the right to mount; otherwise a stand-in error)."""
    small = work / "small"
    small.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        show.bar("bad input, disk full", None, "no right to mount a small file system")
        return
    try:
        words = ("finetune", "tiny-bert", "--task", "tiny-topic", "--max-steps", 2, "--out", small / "r")
        told = run(*words, cwd=work, code=2)["stderr"]
        show.bar("bad input, disk full", "No space left" in told, told.strip().splitlines()[-1][:110])
    finally:
        subprocess.run(["umount", str(small)], check=False)


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    show.section("set-up", setup)
    show.section("shipped skills", skills)
    show.section("metrics", metrics, SHARED / "data")
    show.section("bad input", bad_input)
    show.section("kills", kills)
    show.section("real files", real_files, SHARED / "models")
    show.section("speed", speed, SHARED / "models")
    shutil.rmtree(work, ignore_errors=True)
    show.end()


if __name__ == "__main__":
    main()

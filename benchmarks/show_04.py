"""The bars of grafts: exact masks and files, recovery by size, order of rules, overlap, stitching, forgetting, real
models, cost, bad input.

make show-04
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from show import BUDWOOD, ROOT, SHARED, Show, run

show = Show()
work = Path(tempfile.mkdtemp(prefix="budwood-show-"))
SHOTS = ("--shots", 64)
FROZEN = ("--freeze", "embeddings,head", "--mode", "prompt")
TASKS = ("tiny-sentiment", "tiny-topic", "tiny-grammar", "tiny-entail")
BERT = "tiny-bert"


def tuned(task: str, optimizer: str, seed: int = 0, **more: Any) -> dict[str, Any]:
    words = [w for k, v in more.items() for w in ("--" + k.replace("_", "-"), v)]
    return run(
        "finetune", BERT, "--task", task, *SHOTS, *FROZEN, "--optimizer", optimizer, "--seed", seed, *words, cwd=work
    )


def graft(task: str, tuned_run: str, size: str, select: str, seed: int = 0, *more: object) -> dict[str, Any]:
    words = ("--task", task, *SHOTS, "--size", size, "--select", select, "--seed", seed, *more)
    return run("graft", "learn", BERT, tuned_run, *words, cwd=work)


def exact() -> None:
    names = ("tests/params/test_mask.py", "tests/params/test_graft.py", "tests/methods/test_graft.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    last = done.stdout.strip().splitlines()[-1]
    show.bar("whole = tuned, empty = base, complement, exact sizes, reload, 10 kB", done.returncode == 0, last)


def the_task() -> tuple[str, dict[str, Any]]:
    """The first shipped task that tuning with SGD improves by 15 points."""
    for task in TASKS:
        found = tuned(task, "sgd")
        gain = found["score"] - found["zero_shot"]
        print(f"       {task}, SGD: {found['zero_shot']:.3f} -> {found['score']:.3f}", flush=True)
        if gain >= 0.15:
            show.bar("a shipped task with a gain of 15 points (SGD, K=64)", True, f"{task}, {gain:.3f}")
            return task, found
    show.bar("a shipped task with a gain of 15 points (SGD, K=64)", False, f"last: {task}, {gain:.3f}")
    return TASKS[0], tuned(TASKS[0], "sgd")


def recovery() -> None:
    task, sgd = the_task()
    for size, least in (("5%", 0.95), ("1%", 0.75)):
        best = {s: graft(task, sgd["run"], size, s)["recovered"] for s in ("first-order", "learned")}
        show.bar(f"{task}, SGD, {size}: >= {least:.0%} of the gain", max(best.values()) >= least, str(best))
    chance = graft(task, sgd["run"], "5%", "random")["recovered"]
    show.bar("random 5% < 10% of the gain", chance < 0.10, f"{chance:.3f}")
    one = graft(task, sgd["run"], "5%", "learned", 0, "--off-task", "tiny-text", "--limit-eval", 600)
    harm = one["off_task"]["tiny-text"]
    share = harm["graft_harm"] / harm["tuned_harm"]
    show.bar("language-loss rise of the graft <= 60% of the tuned model's", share <= 0.6, f"{share:.2f}: {harm}")
    order(task)
    overlaps(task)


def order(task: str) -> None:
    rules = ("learned", "fisher", "movement", "random")
    runs = [tuned(task, "adamw", seed)["run"] for seed in (0, 1, 2)]
    for size in ("1%", "2%", "5%"):
        scores = {r: median(graft(task, x, size, r, s)["score"] for s, x in enumerate(runs)) for r in rules}
        pairs = zip(rules, rules[1:])
        fine = all(scores[a] >= scores[b] - 0.01 for a, b in pairs) and scores["movement"] > scores["random"] - 0.01
        show.bar(f"AdamW, {size}: learned >= fisher >= movement > random (1 point slack)", fine, str(scores))
    best = median(graft(task, x, "2%", "learned", s)["recovered"] for s, x in enumerate(runs))
    show.bar("AdamW: learned needs <= 2% for 95% of the gain", best >= 0.95, f"{best:.3f} at 2%")
    a, b = (
        min(graft(task, runs[0], "1%", "learned", 0, "--estimator", e)["score"] for _ in (0,))
        for e in ("straight-through", "annealed")
    )
    print(f"       learned at 1%: straight-through {a:.3f}, annealed {b:.3f}", flush=True)


def overlaps(task: str) -> None:
    others = [t for t in TASKS if t != task][:2]
    made = [graft(task, tuned(task, "adamw", s)["run"], "5%", "fisher", s)["file"] for s in (0, 7)]
    made += [graft(t, tuned(t, "adamw")["run"], "5%", "fisher")["file"] for t in others]
    found = run("graft", "overlap", *made, cwd=work)["over_chance"]
    show.bar("the same task on other rows and seed >= 3x chance", found[0][1] >= 3, f"{found[0][1]:.2f}x")
    worst = max(found[0][2:])
    show.bar("unrelated tasks <= 2x chance", worst <= 2, f"{[round(x, 2) for x in found[0][2:]]}")


def stitching() -> None:
    tasks = TASKS[:2]
    runs = {t: tuned(t, "sgd")["run"] for t in tasks}
    small = [graft(t, runs[t], "5%", "learned")["file"] for t in tasks]
    whole = [graft(t, runs[t], "100%", "movement", 0, "--name", "whole")["file"] for t in tasks]
    text = ("--off-task", "tiny-text", "--limit-eval", 600)
    ours = run("graft", "stitch", BERT, *small, *text, cwd=work)
    turned = run("graft", "stitch", BERT, *small[::-1], *text, cwd=work)
    rival = run("graft", "stitch", BERT, *whole, "--method", "arithmetic", *text, cwd=work)
    kept = {r["task"]: r["kept"] for r in ours["results"]}
    show.bar("two stitched grafts keep >= 60% of each gain", min(x or 0 for x in kept.values()) >= 0.6, str(kept))
    loss = [x["off_task"]["tiny-text"]["stitched"] for x in (ours, rival)]
    show.bar("with a lower language loss than task arithmetic", loss[0] < loss[1], f"{loss[0]:.3f} and {loss[1]:.3f}")
    files = [Path(x["run"]) / "model" / "model.safetensors" for x in (ours, turned)]
    show.bar("order does not matter", files[0].read_bytes() == files[1].read_bytes(), "same bytes")


def forgetting() -> None:
    tasks = "tiny-sentiment,tiny-topic,tiny-grammar"
    found = run("graft", "continual", BERT, "--tasks", tasks, "--limit-eval", 600, cwd=work)
    lost = {k: found[f"forgotten_{k}"] for k in ("sequential", "known", "stitched")}
    show.bar("sequential fine-tuning forgets >= 20 points", lost["sequential"] >= 0.20, f"{lost['sequential']:.3f}")
    show.bar("grafts with known task forget 0", lost["known"] == 0, f"{lost['known']}; unknown {lost['stitched']:.3f}")


def real() -> None:
    data = ("--data-dir", SHARED / "data", "--limit-eval", 600)
    prompt, head = SHARED / "models" / "minilm-l6-mlm", SHARED / "models" / "all-MiniLM-L6-v2"
    cases = [(prompt, t, o, "prompt") for t in ("sst2", "cr") for o in ("sgd", "adamw")]
    cases += [(head, t, "adamw", "head") for t in ("sst2", "cola")]
    for model, task, optimizer, mode in cases:
        rows = SHOTS if mode == "prompt" else ("--limit", 1000)
        frozen = "embeddings,head" if mode == "prompt" else "embeddings"
        made = run(
            *("finetune", model, "--task", task, *data, *rows, "--mode", mode),
            *("--optimizer", optimizer, "--freeze", frozen),
            cwd=work,
        )
        ood = ("--ood", {"sst2": "cr", "cr": "sst2"}[task]) if task in ("sst2", "cr") else ()
        curve = ("--curve", "--curve-sizes", "0.0001,0.001,0.01,0.05", "--mask-steps", 20)
        words = ("graft", "learn", model, made["run"], "--task", task, *data, *rows, *curve, *ood)
        found = run(*words, cwd=work)
        fresh = run("evaluate", f"{model}+{found['file']}", "--task", task, *data, cwd=work)
        same = fresh["score"] == found["graft"]["score"] and fresh["ece"] == found["graft"]["ece"]
        ece = {k: round(found[k]["ece"], 3) for k in ("base", "tuned", "graft")}
        shift = {k: {c: round(v[c]["score"], 3) for c in ece} for k, v in found.get("ood", {}).items()}
        name = f"{model.name}, {task}, {optimizer}"
        show.bar(f"{name}: the file from a fresh process", same, f"{found['answer']} ECE {ece}; shifted {shift}")


def cost() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "graft.py")], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    show.bar(
        "mask step <= 1.3x training step", found["mask_over_training"] <= 1.3, f"{found['mask_over_training']:.2f}x"
    )
    show.bar("<= 4 copies of the weights", found["copies_of_graftable"] <= 4, f"{found['copies_of_graftable']:.2f}")
    show.bar("applying 0.1% <= 5% of loading", found["apply_over_load"] <= 0.05, f"{found['apply_over_load']:.2%}")


def bad_input() -> None:
    made = run("finetune", BERT, "--task", "tiny-sentiment", "--max-steps", 2, *SHOTS, *FROZEN, cwd=work)["run"]
    head = run("finetune", BERT, "--task", "tiny-sentiment", "--max-steps", 2, "--mode", "head", cwd=work)["run"]
    good = graft("tiny-sentiment", made, "1%", "movement")["file"]
    (work / "cut.graft").write_bytes(Path(good).read_bytes()[:-9])
    broken = bytearray(Path(good).read_bytes())
    broken[-5] ^= 4
    (work / "broken.graft").write_bytes(bytes(broken))
    learn = ("graft", "learn", BERT, made, "--task", "tiny-sentiment")
    cases = {
        "another architecture": ("graft", "learn", "tiny-gpt", made, "--task", "tiny-sentiment"),
        "another head": ("graft", "learn", BERT, head, "--task", "tiny-sentiment", "--mode", "prompt"),
        "size 0": (*learn, "--size", "0"),
        "size above 100%": (*learn, "--size", "101%"),
        "more than the graftable set": (*learn, "--size", "99999999"),
        "a truncated file": ("evaluate", f"{BERT}+cut.graft", "--task", "tiny-sentiment"),
        "a corrupted file": ("evaluate", f"{BERT}+broken.graft", "--task", "tiny-sentiment"),
        "another base": ("evaluate", f"{made}+{good}", "--task", "tiny-sentiment"),
    }
    for name, words in cases.items():
        done = subprocess.run([*BUDWOOD, *map(str, words)], cwd=work, capture_output=True, text=True, check=False)
        told = [line for line in done.stderr.splitlines() if line.startswith("budwood: ")]
        show.bar(f"bad input, {name}", done.returncode == 2 and len(told) == 1, " ".join(told)[:110])


if __name__ == "__main__":
    wanted = sys.argv[1:]
    parts = {
        "exact": (exact, None),
        "recovery": (recovery, None),
        "stitching": (stitching, None),
        "forgetting": (forgetting, None),
        "real": (real, SHARED / "models"),
        "cost": (cost, None),
        "bad_input": (bad_input, None),
    }
    for name, (part, needs) in parts.items():
        if not wanted or name in wanted:
            show.section(name, part, needs)
    show.end()

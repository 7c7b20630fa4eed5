"""Bars of checking by retraining: oracles, fleets, Ray, quality of EKFAC, removal, mislabels, bad input.

make show-06        # about 80 minutes on two cores; `--fast` leaves the long fleets out, `--keep` takes runs of before
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from show import BUDWOOD, ROOT, Show, run

show = Show()
work = ROOT / "runs" / "show-06"
if "--keep" not in sys.argv:  # else sections go on with what earlier ones made, which may be another commit's
    shutil.rmtree(work, ignore_errors=True)
work.mkdir(parents=True, exist_ok=True)
FAST = "--fast" in sys.argv
PLANTED = work / "planted"  # tiny-sentiment with one label in ten flipped
TASK = PLANTED / "noisy" / "task.yaml"
SIDES = {"train": "train", "queries": "query"}  # kronfluence_scores.py's word for a side, ours
RECIPE = ("--epochs", 6, "--batch-size", 32, "--lr", 5e-4, "--threads", 1)


def tests(name: str, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    show.bar(name, done.returncode == 0, done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output")


def oracles() -> None:
    sys.path.insert(0, str(ROOT))
    from scipy.stats import spearmanr

    from budwood.evaluation import lds
    from budwood.evaluation.truth import Truth

    rng = np.random.default_rng(0)
    mask_SN = np.stack([rng.permutation(400) < 200 for _ in range(100)])
    effect_QN = rng.normal(size=(64, 400))
    clean = Truth(mask_SN, (mask_SN @ effect_QN.T)[:, None])
    one = float(lds.lds_by_query(clean, effect_QN).mean())
    show.bar("a linear world gives 1", abs(one - 1) < 1e-12, f"{one:.15f}")
    noisy = Truth(mask_SN, clean.margin_SRQ + 20 * rng.normal(size=(100, 5, 64)))
    mean, _ = lds.random_line(noisy, effect_QN)
    show.bar("20 shuffled matrices: |mean| <= 0.03", abs(mean) <= 0.03, f"{mean:+.4f}")
    score_QN = effect_QN + rng.normal(size=effect_QN.shape)
    pred, margins = mask_SN @ score_QN.T, noisy.margin_SRQ.mean(1)
    published = np.mean([spearmanr(pred[:, j], margins[:, j]).statistic for j in range(64)])
    gap = abs(published - lds.lds_by_query(noisy, score_QN).mean())
    show.bar("equals the published formula to 1e-12", gap <= 1e-12, f"{gap:.1e}")
    tests("leave-one-out of logistic regression >= 0.99", "tests/evaluation/test_lds.py", "-k", "leave_one_out")


def engines() -> None:
    tests("local: kill, resume, same files", "tests/engine/test_local.py", "tests/evaluation/test_datamodel.py")
    try:
        import ray  # noqa: F401
    except ImportError:
        show.bar("Ray: same files, worker, node and driver lost", None, "Ray is not installed (make ray)")
        return
    tests("Ray: same files, worker, node and driver lost", "tests/engine/test_ray.py")
    began = time.perf_counter()
    hole = socket.create_server(("127.0.0.1", 0))  # takes calls and never says a word
    env = {**os.environ, "RAY_ADDRESS": f"127.0.0.1:{hole.getsockname()[1]}"}
    words = [
        *BUDWOOD,
        "fisher",
        "tiny-bert",
        "--task",
        "tiny-text",
        "--mode",
        "mlm",
        "--engine",
        "ray",
        "--limit",
        "64",
    ]
    done = subprocess.run(words, cwd=work, env=env, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    hole.close()
    good = done.returncode == 2 and "RAY_ADDRESS" in done.stderr
    said = "" if good else f", {done.stderr.strip()[-160:]}"
    show.bar("Ray address that does not answer: told within 10 s", good and seconds <= 10, f"{seconds:.1f} s{said}")


def speed() -> None:
    command = [sys.executable, "benchmarks/fleet.py", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    show.bar("two workers >= 1.7 x one", found["two_over_one"] >= 1.7, f"{found['two_over_one']}")
    rates, parts = json.dumps(found["retrains_per_hour"]), json.dumps(found["one_retrain_s"])
    machine, core = found["machine_over_trainer"], found["one_over_trainer"]
    show.bar("retrains per hour of this machine >= 2 x a loop over HF Trainer", machine >= 2, f"{machine}: {rates}")
    show.bar("the same of one core, one thread each, >= 2 x", core >= 2, f"{core}; {parts}")


def peer_scores() -> Path | None:
    """A run of kronfluence's own scores of the first model, if it is installed here or in BUDWOOD_PEER_PYTHON."""
    import budwood as bw

    data, place = bw.task(str(TASK)), work / "scored-0" / "scores"
    known = {r.id: [r.text, r.pair, r.label] for split in data.splits.values() for r in split}
    rows = {k: [known[i] for i in json.loads((place / f"{n}_ids.json").read_text())] for k, n in SIDES.items()}
    file, out, brought = work / "rows.json", work / "kronfluence.safetensors", work / "scored-kronfluence"
    file.write_text(json.dumps(rows))
    python = os.environ.get("BUDWOOD_PEER_PYTHON", sys.executable)
    words = [python, str(ROOT / "benchmarks" / "kronfluence_scores.py"), str(work / "tuned-0" / "model")]
    done = subprocess.run([*words, str(file), str(out)], capture_output=True, text=True, check=False)
    if done.returncode:
        show.bar("kronfluence's own scores", None, done.stderr.strip()[-160:])
        return None
    run("influence", "import", out, "--task", TASK, "--name", "kronfluence", "--out", brought, cwd=work)
    return brought


def quality() -> None:
    """EKFAC against identity, random and kronfluence's defaults on one ground truth; five checkpoints against one."""
    scored = []
    for seed in range(5):
        tuned = work / f"tuned-{seed}"
        made = run(
            "finetune", "tiny-bert", "--task", TASK, *RECIPE, "--seed", seed, "--data-seed", 0, "--out", tuned, cwd=work
        )
        if seed == 0:
            good = 0.75 <= made["accuracy"] <= 0.97
            show.bar("base accuracy between .75 and .97", good, f"{made['accuracy']:.3f}")
        words = ("--task", TASK, "--queries", 64, "--strategy", "ekfac,identity")
        run("influence", "score", tuned, *words, "--threads", 1, "--out", work / f"scored-{seed}", cwd=work)
        scored.append(str(work / f"scored-{seed}"))
    peer = peer_scores()
    judged = ",".join([scored[0], *([str(peer)] if peer else [])])
    base = ("--task", TASK, "--subsets", 100, "--repeats", 3, "--workers", 2)
    plan = run("validate", "lds", work / "tuned-0", *base, "--scores", scored[0], "--dry-run", cwd=work)
    found = run("validate", "lds", work / "tuned-0", *base, "--scores", judged, "--out", work / "lds", cwd=work)
    # two workers of one thread: half of the processor's time is what two free cores take; beside other work the clock
    # on the wall tells of that work
    minutes, wall = found["cpu_seconds"] / 120, found["seconds"] / 60
    told = f"{minutes:.1f} min of two processors, {wall:.1f} min on the wall"
    show.bar("ground truth, 300 retrains on two cores, <= 30 min", minutes <= 30, told)
    ratio = plan["seconds"] / (minutes * 60)
    show.bar("--dry-run within 2 x", 0.5 <= ratio <= 2, f"predicted / measured {ratio:.2f}")
    rows = {r["scores"]: r for r in found["results"]}
    text = "; ".join(f"{n} {r['lds']:.3f} [{r['low']:.3f}, {r['high']:.3f}]" for n, r in rows.items())
    show.bar(
        "EKFAC above random, lower bound > 0",
        rows["ekfac"]["above_random_low"] > 0,
        f"{text}; ceiling {found['ceiling']}",
    )
    for d in found["differences"]:
        if d["second"] == "identity":
            show.bar(
                "EKFAC - identity, lower bound > -0.02", d["low"] > -0.02, f"{d['value']:+.3f}, low {d['low']:+.3f}"
            )
        if "kronfluence" in d["second"]:
            show.bar("EKFAC - kronfluence's, lower bound > 0", d["low"] > 0, f"{d['value']:+.3f}, low {d['low']:+.3f}")
    words = ("--task", TASK, "--truth", work / "lds", "--scores", ",".join(scored), "--only", "ekfac", "--ensemble")
    many = run("validate", "lds", work / "tuned-0", *words, "--out", work / "ensemble", cwd=work)["results"]
    single = float(np.mean([r["lds"] for r in many[:-1]]))
    show.bar(
        "five checkpoints >= single + 0.03", many[-1]["lds"] >= single + 0.03, f"{many[-1]['lds']:.3f} vs {single:.3f}"
    )


def removal() -> None:
    """Flips without the tenth of the rows that EKFAC names, against a random tenth of the label.

    The case was fixed before it was run: the 128 queries after the 64 that `quality` asks about, one share, no choice
    among targets but the verb's own (right under five base seeds).
    """
    import budwood as bw

    data = bw.task(str(TASK))
    asked = [f"id:{r.id}" for r in data.rows(data.reported)[64:192]]
    if len(asked) != 128:
        raise RuntimeError(f"the case is of 128 queries, and there are {len(asked)}")
    scored = work / "scored-removal"
    words = ("--task", TASK, "--queries", ",".join(asked), "--threads", 1, "--out", scored)
    run("influence", "score", work / "tuned-0", *words, cwd=work)
    words = ("--task", TASK, "--scores", scored, "--remove", "10%", "--targets", len(asked), "--workers", 2)
    found = run("validate", "counterfactual", work / "tuned-0", *words, "--out", work / "removal", cwd=work)
    last = {r["scores"]: r for r in found["results"] if r["k"] == found["removed"][-1]}
    ours, random = last["ekfac"], next(r for n, r in last.items() if n.startswith("random"))
    told = f"{ours['flipped']} [{ours['low']:.3f}, {ours['high']:.3f}] vs {random['flipped']} [{random['low']:.3f}, "
    told += f"{random['high']:.3f}] of {found['targets']} targets right under all base seeds ({found['asked']} asked)"
    good = ours["flipped"] >= 2 * random["flipped"] and ours["flipped"] > 0
    show.bar("10 % removed: EKFAC flips >= 2 x random rows of the label", good, told)


def mislabel() -> None:
    words = ("--task", "tiny-sentiment", "--limit", 1024, *RECIPE, "--flip", 0.1, "--workers", 2)
    found = run("validate", "mislabel", "tiny-bert", *words, "--out", PLANTED, cwd=work)["results"]
    best = next(r for r in found if r["scores"] == "self:ekfac")
    text = "; ".join(f"{r['scores']} AUC {r['auc']:.3f}, top 20 % {r['found_in_top_20']:.2f}" for r in found)
    show.bar(
        "10 % flipped: >= 80 % in the top 20 %, AUC >= 0.85",
        best["found_in_top_20"] >= 0.8 and best["auc"] >= 0.85,
        text,
    )


def bad_input() -> None:
    tests("bad input lines", "tests/evaluation", "-k", "bad_input or refused or diverge or other")


if __name__ == "__main__":
    show.section("oracles", oracles)
    show.section("bad input", bad_input)
    show.section("engines", engines)
    if not FAST:
        show.section("speed", speed)
        show.section("mislabel", mislabel)  # makes the task of the next two
        show.section("quality", quality)
        show.section("removal", removal)
    show.end()

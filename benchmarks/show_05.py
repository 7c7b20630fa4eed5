"""Bars of influence: exactness, speed against other tools, growth with rows and queries, the index, kills, bad input.

make show-05                                      about two hours on two cores
python benchmarks/show_05.py SECTION... [--small] [--full] [--keep]

Sections: checks reference speed shapes peers growth sample memory index kills input. Kronfluence and the others may
live in a Python of their own, named by BUDWOOD_PEER_PYTHON. But for `speed` they see PEER_ROWS of the rows, scaled up
to all (--full: all of them). --small tries every section on a few rows; its figures mean nothing. --keep takes runs of
before, maybe another commit's. Ratios are of processor seconds, two at a time.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from influence import alone, model_in, rows_file
from influence_peers import peers
from show import BUDWOOD, ROOT, SHARED, Show, run

show = Show()
work = ROOT / "runs" / "show-05"
if "--keep" not in sys.argv:
    shutil.rmtree(work, ignore_errors=True)
work.mkdir(parents=True, exist_ok=True)
SMALL, FULL = "--small" in sys.argv, "--full" in sys.argv
MINILM, GLUE = SHARED / "models" / "all-MiniLM-L6-v2", SHARED / "data" / "glue"
PEER_PYTHON = os.environ.get("BUDWOOD_PEER_PYTHON", sys.executable)
ROWS, QUERIES, PEER_ROWS = (40, 8, 20) if SMALL else (1000, 64, None if FULL else 128)
FOUR = "ekfac,kfac,diagonal,identity"
LOCK = Lock()


def at_least(name: str, value: float, bar: float, more: str = "") -> None:
    show.bar(f"{name} >= {bar:g}", value >= bar, f"{value:.4g}{more}")


def at_most(name: str, value: float, bar: float, more: str = "") -> None:
    show.bar(f"{name} <= {bar:g}", value <= bar, f"{value:.4g}{more}")


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Processes of one thread each, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return [f.result() for f in [pool.submit(job) for job in jobs]]


def tests(name: str, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    show.bar(name, done.returncode == 0, done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output")


def checks() -> None:
    """Gradients, factors, scores and sums against slow oracles; stored kronfluence scores; leave-one-out."""
    here = "tests/methods/influence"
    tests("per-example gradients, inverses, labels, orders, shared weights, attention", f"{here}/test_core.py")
    tests("kronfluence's float64 scores and factors (stored)", "tests/golden/test_kronfluence.py")
    tests("parts add up, self = diagonal, runs repeat, leave-one-out", f"{here}/test_runs.py")
    loo = f"{here}/test_runs.py::test_leave_one_out_retraining_of_logistic_regression"
    tests("leave-one-out of an L2 logistic regression >= 0.999 (bar 0.99)", loo)
    tests("files of other tools", f"{here}/test_foreign.py")
    tests("per-example gradients of every family and type", "tests/capture/test_gradients.py")
    more = ("exact", "labels", "thin", "sided", "score", "memory", "evidence", "adapter", "given", "skipped")
    tests("labels, outer products, memory, damping, what is refused", *(f"{here}/test_{n}.py" for n in more))
    more = ("index", "scores", "show", "masked", "baselines", "answer", "factor_files")
    tests("index, scores on disk, show, masks, baselines", *(f"{here}/test_{n}.py" for n in more))
    tests("published masks and margins: LDS to 1e-12", "tests/evaluation/test_lds.py")


def reference() -> None:
    """Kronfluence itself, run now, against our scores of the same weights and rows."""
    from safetensors.numpy import load_file

    from budwood.linalg.ranking import spearman_by_row

    file = work / "reference.safetensors"
    done = subprocess.run(
        [PEER_PYTHON, str(ROOT / "benchmarks" / "kronfluence_reference.py"), str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        show.bar("kronfluence run now", None, done.stderr.strip()[-200:])
        return
    now, stored = load_file(file), load_file(ROOT / "tests" / "golden" / "kronfluence.safetensors")
    for key in sorted(k for k in stored if k.startswith("scores/")):
        worst = float(spearman_by_row(now[key], stored[key]).min())
        at_least(f"kronfluence now = the reference the tests hold us to, {key.removeprefix('scores/')}", worst, 0.9999)
    for line in done.stdout.splitlines():
        if "seed against seed" in line:  # no other tool's draws can agree better with it
            print(f"       kronfluence's sampled labels, {line}")


@cache
def model_of(wish: str) -> str:
    return model_in(wish, work)


@cache
def _rows(model: str, task: str, rows: int, queries: int, seen: int | None = PEER_ROWS) -> Path:
    place = work / f"rows-{Path(model).name}-{seen or 'all'}"
    place.mkdir(exist_ok=True)
    return rows_file(model_of(model), task, rows, queries, place, seen)


def rows_of(*asked: Any) -> Path:
    """The file of these rows, written once: another process may be reading it."""
    with LOCK:
        return _rows(*asked)


def ours(model: str, task: str, rows: int, queries: int = QUERIES, strategies: str = "ekfac") -> dict[str, Any]:
    return alone(model_of(model), rows_of(model, task, rows, queries), strategies)


def theirs(model: str, task: str, tool: str, seen: int | None = PEER_ROWS) -> dict[str, Any]:
    return peers(model_of(model), rows_of(model, task, ROWS, QUERIES, seen), (tool,), 1, PEER_PYTHON)[0]


def faster(name: str, own: dict[str, Any], other: dict[str, Any], bar: float) -> bool:
    """A bar on how much faster ours is; says why where the peer could not run."""
    if "error" in other:
        show.bar(f"{name} >= {bar:g}x", None, other["error"])
        return False
    figure = f"x: {own['cpu_seconds']:.0f} s against {other['cpu_seconds']:.0f} s (from {other['rows']} rows)"
    at_least(f"{name}, times faster", other["cpu_seconds"] / own["cpu_seconds"], bar, figure)
    return True


def speed() -> None:
    """Factors and scores, exact mode, against kronfluence on all rows, and one strategy against four, on rows of RTE's
    lengths.
    """
    mini, seen = str(MINILM), PEER_ROWS if SMALL else None
    model_of(mini)
    own, padded, dynamic, four = together(
        lambda: ours(mini, "rte", ROWS),
        lambda: theirs(mini, "rte", "kronfluence-padded", seen),
        lambda: theirs(mini, "rte", "kronfluence-dynamic", seen),
        lambda: ours(mini, "rte", ROWS, strategies=FOUR),
    )
    if faster("6 x 384, RTE rows, kronfluence padded to 128", own, padded, 3.5):
        at_least("Λ phase, times faster", padded["cpu"]["lambda"] / own["cpu"]["lambda"], 4)
        more = f" ({own['peak_rss_mb']:.0f} MB against {padded['peak_rss_mb']:.0f} MB; query blocks lie in a file)"
        at_most("peak RSS, share of kronfluence's", own["peak_rss_mb"] / padded["peak_rss_mb"], 0.5, more)
    faster("6 x 384, RTE rows, kronfluence with dynamic padding", own, dynamic, 2.7)
    at_most("four strategies against EKFAC alone, RTE lengths", four["cpu_seconds"] / own["cpu_seconds"], 1.35)
    phases(own)
    phases(four)


def shapes() -> None:
    """The same on short rows and on other models; the multiple of a plain pass."""
    mini = str(MINILM)
    for wish in (mini, "4x256", "2x768"):
        model_of(wish)
    single, short, short_four, short_padded, narrow, narrow_padded, wide, wide_padded = together(
        lambda: ours(mini, "sst2", ROWS),
        lambda: ours(mini, "sst2", 2 * ROWS),
        lambda: ours(mini, "sst2", 2 * ROWS, strategies=FOUR),
        lambda: theirs(mini, "sst2", "kronfluence-padded"),
        lambda: ours("4x256", "rte", ROWS),
        lambda: theirs("4x256", "rte", "kronfluence-padded"),
        lambda: ours("2x768", "rte", ROWS),
        lambda: theirs("2x768", "rte", "kronfluence-padded"),
    )
    faster("4 x 256, RTE rows, padded", narrow, narrow_padded, 3)
    faster("2 x 768, RTE rows, padded", wide, wide_padded, 5)
    faster("6 x 384, SST-2 rows, padded", single, short_padded, 8)
    at_most("four strategies against EKFAC alone, SST-2", short_four["cpu_seconds"] / short["cpu_seconds"], 1.8)
    auto = f" (--damping auto adds {short['cpu'].get('damping', 0) / short['floor']:.2f})"
    at_most(f"multiple of a plain pass, SST-2, {short['rows']} rows", short["times_floor"], 8, auto)
    phases(short)
    phases(short_four)


def phases(found: dict[str, Any]) -> None:
    print(
        f"       {found['tool']}, {found['rows']} rows: " + ", ".join(f"{k} {v:.1f}" for k, v in found["cpu"].items())
    )


def others() -> None:
    """The same table for TRAK, dattri and bergson; nothing is asked of them."""
    model = "4x256"
    model_of(model)
    tools = ("trak", "dattri", "bergson")
    own, *found = together(lambda: ours(model, "rte", ROWS), *(lambda t=t: theirs(model, "rte", t) for t in tools))  # type: ignore[misc]
    for tool, other in zip(tools, found):
        told = other.get("error") or (
            f"{other['cpu_seconds']:.0f} s (from {other['rows']} rows), ours {own['cpu_seconds']:.0f} s, "
            f"peak {other['peak_rss_mb']:.0f} MB, ours {own['peak_rss_mb']:.0f} MB"
        )
        show.bar(f"{tool} on the same rows (reported)", None if "error" in other else True, told)


def growth() -> None:
    """Cost against rows and queries on RTE lengths, and the multiple of a plain pass at 2,000 rows and more."""
    model = "4x256"
    model_of(model)
    sizes = (24, 48, 96) if SMALL else (1000, 2000, 4000)
    one, two, four, many, large = together(
        *(lambda n=n: ours(model, "rte", n) for n in sizes),  # type: ignore[misc]
        lambda: ours(model, "rte", sizes[1], 40 if SMALL else 300),
        lambda: ours(str(MINILM), "rte", sizes[1]),
    )
    passes = [sum(r["cpu"][k] for k in ("covariance", "lambda", "scores")) for r in (one, two, four)]
    told = ", ".join(f"{n:,} rows {s:.1f} s" for n, s in zip(sizes, passes))
    at_most("4,000 rows cost, times 1,000 rows", passes[2] / passes[0], 4.4, f" ({told})")
    at_most(
        f"{40 if SMALL else 300} queries against {QUERIES} at {sizes[1]:,} rows",
        many["cpu_seconds"] / two["cpu_seconds"],
        1.6,
        f" ({two['cpu_seconds']:.0f} s -> {many['cpu_seconds']:.0f} s)",
    )
    at_most(
        f"multiple of a plain pass, 6 x 384, RTE, {large['rows']} rows",
        large["times_floor"],
        6,
        f" (--damping auto adds {large['cpu'].get('damping', 0) / large['floor']:.2f})",
    )
    phases(large)


def tuned(task: str, rows: int, steps: int) -> Path:
    out = work / f"tuned-{task}-{rows}"
    run(
        *("finetune", MINILM, "--task", task, "--data-dir", GLUE, "--limit", rows, "--limit-eval", 64),
        *("--max-steps", steps, "--threads", 2, "--out", out),
        cwd=work,
    )
    return out


def sample() -> None:
    """--fit-rows auto on 20,000 SST-2 rows: time, and ranks against the exact mode."""
    from budwood.linalg.ranking import spearman_by_row
    from budwood.methods.influence.scores import Scores

    rows, queries = (64, 4) if SMALL else (20_000, QUERIES)
    model = tuned("sst2", rows, 2 if SMALL else 150)
    same = ("influence", "score", model, "--task", "sst2", "--data-dir", GLUE, "--limit", rows, "--limit-eval", 64)
    same = (*same, "--queries", queries, "--threads", 1)
    exact, auto = together(
        lambda: run(*same, "--out", work / f"exact-{rows}", cwd=work),
        lambda: run(*same, "--fit-rows", "auto", "--out", work / f"auto-{rows}", cwd=work),
    )
    del exact
    found = [Scores.open(work / f"{name}-{rows}").whole() for name in ("exact", "auto")]
    by_query = spearman_by_row(*found)
    least = f" (least of {len(by_query)} queries {by_query.min():.4f})"
    at_least("--fit-rows auto, Spearman with exact mode by query, mean", float(by_query.mean()), 0.98, least)
    cost = {n: json.loads((work / f"{n}-{rows}" / "cost.json").read_text())["cpu_seconds"] for n in ("exact", "auto")}
    other = theirs(str(MINILM), "sst2", "kronfluence-padded")
    used = f"factors from {auto['fit_rows']:,} rows; exact mode {cost['exact']:.0f} s"
    if "error" in other:
        show.bar("--fit-rows auto >= 10x kronfluence", None, f"{other['error']}; {used}")
        return
    eigen = other["cpu"]["eigen"]
    whole = (other["cpu_seconds"] - eigen) * rows / ROWS + eigen  # its queries' own passes count some 6 % too often
    at_least(
        "--fit-rows auto, times faster than kronfluence padded", whole / cost["auto"], 10,
        f"x: {cost['auto']:.0f} s against {whole:.0f} s (from {other['rows']} rows); {used}",
    )  # fmt: skip


def index() -> None:
    """Held-out queries by the index against full EKFAC; milliseconds of a question."""

    def measured(*words: object) -> dict[str, Any]:
        command = [sys.executable, str(ROOT / "benchmarks" / "influence_index.py"), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-400:])
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    rows = 64 if SMALL else 2400
    few = ("--epochs", 0.1) if SMALL else ()
    tiny, products, plain = together(
        lambda: measured("--rows", rows, "--coordinates", "3%,10%", *few),
        lambda: measured("--rows", rows, "--coordinates", "3%,10%", "--entry", "products", *few),
        lambda: measured("--rows", rows, "--coordinates", "3%,10%", "--bits", 16, *few),
    )
    mini = measured(  # alone and on all cores, as whoever asks has it
        *("--model", MINILM, "--task", "rte", "--data-dir", GLUE, "--rows", rows, "--coordinates", "65536"),
        *("--fit-rows", rows // 4, "--epochs", 0.1 if SMALL else 1, "--bits", 16, "--threads", os.cpu_count()),
    )
    for found, bar in zip(plain["results"], (0.95, 0.995)):
        at_least(f"tiny-entail, {found['share']:.1%} of coordinates, 16 bits, Spearman", found["spearman"], bar)
    for found, bar in zip(products["results"], (0.95, 0.995)):
        more = f" (worst {found['worst']:.3f}, top 10 {found['top10']:.2f}, {found['ms_beyond_backward']:.1f} ms)"
        said = f"tiny-entail, products of {found['share']:.1%} as many numbers, 16 bits, Spearman"
        at_least(said, found["spearman"], bar, more)
    for found, bar in zip(tiny["results"], (0.95, 0.995)):
        more = f" (worst {found['worst']:.3f}, top 10 {found['top10']:.2f}, {found['ms_beyond_backward']:.1f} ms)"
        kept = f"{found['share_of_coordinates']:.0%} of coordinates in {found['bits']} bits"
        size = f"bytes of {found['share']:.1%} in 16 bits"
        at_least(f"tiny-entail, {kept} = {size}, Spearman", found["spearman"], bar, more)
    found = mini["results"][0]
    show.bar(
        f"MiniLM, {found['coordinates']:,} coordinates (reported)",
        True,
        f"Spearman {found['spearman']:.4f}, top 10 {found['top10']:.2f}, {found['mb']:.0f} MB",
    )
    more = f" on {os.cpu_count()} threads ({found['ms_on_one_thread']:.1f} on one)"
    at_most(f"query, ms beyond its backward pass at {found['train']} rows", found["ms_beyond_backward"], 50, more)


def kills() -> None:
    """fit, score and index killed at random moments and begun again."""
    model = work / "kill-model"
    same = ("--task", "tiny-entail", "--limit", 48 if SMALL else 300, "--limit-eval", 40, "--threads", 1)
    run("finetune", "tiny-bert", *same, "--max-steps", 5, "--out", model, cwd=work)
    draw = random.Random(0)
    for verb, file, more in (
        ("fit", "factors", ()),
        ("score", "scores", ("--queries", 8)),
        ("index", "index", ("--calibration", 8)),
    ):
        command = [*BUDWOOD, "influence", verb, str(model), *map(str, (*same, *more)), "--shard-rows", "24"]
        whole, cut = work / f"{verb}-whole", work / f"{verb}-cut"
        began = time.perf_counter()
        subprocess.run([*command, "--out", str(whole)], cwd=work, capture_output=True, check=True)
        seconds = time.perf_counter() - began
        killed = 0
        for _ in range(4 if SMALL else 8):
            if killed == (2 if SMALL else 4):
                break
            process = subprocess.Popen(
                [*command, "--out", str(cut)], cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            began = time.perf_counter()
            try:
                process.wait(seconds * (0.4 + 0.5 * draw.random()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                killed += 1
            else:  # done before it could be killed (the machine was busier when it was timed): again, by this time
                shutil.rmtree(cut)
                seconds, killed = time.perf_counter() - began, 0
        subprocess.run([*command, "--out", str(cut)], cwd=work, capture_output=True, check=True)
        names = ["metrics.json", *sorted(f"{file}/{p.name}" for p in (whole / file).iterdir())]
        # an index names the place of its factors
        there = [(whole / n).read_bytes().replace(bytes(whole), bytes(cut)) for n in names]
        same_bytes = there == [(cut / n).read_bytes() for n in names]
        show.bar(f"kill -9 during {verb}: rerun bit-identical", same_bytes and killed > 0, f"{killed} kills, {names}")


def memory() -> None:
    """The whole of a run under --max-memory: factors and scores of MiniLM on SST-2 rows, four strategies."""
    model = tuned("sst2", 64 if SMALL else 2000, 2)
    same = ("influence", "score", model, "--task", "sst2", "--data-dir", GLUE, "--limit", 64 if SMALL else 2000)
    same = (*same, "--limit-eval", 64, "--queries", 64, "--threads", 1, "--strategy", FOUR, "--out", work / "within")
    done = run(*same, "--max-memory", "2200MB", cwd=work)
    at_most("peak RSS in MB under --max-memory 2200MB", done["peak_rss_mb"] * 1024**2 / 1e6, 2200)


def bad_input() -> None:
    model = work / "kill-model"
    same = ("--task", "tiny-entail", "--limit", 48 if SMALL else 300, "--limit-eval", 40, "--threads", 1)
    run("finetune", "tiny-bert", *same, "--max-steps", 5, "--out", model, cwd=work)
    other = ("--task", "tiny-entail", "--limit", 40, "--limit-eval", 40, "--threads", 1)
    run("influence", "fit", model, *other, "--out", work / "other-factors", cwd=work)
    score = ("influence", "score", model, *same)
    cases = {
        "factors of other rows": ((*score, "--factors", work / "other-factors"), "not those of this command"),
        "memory for less than one tile": ((*score, "--max-memory", "1MB"), "at least"),
        "a query id that is not there": ((*score, "--queries", "nobody,x"), "no row 'nobody'"),
        "no supported module": ((*score, "--modules", "nothing.*"), "nothing.*"),
        "a strategy misspelt": ((*score, "--strategy", "ekfak"), "Did you mean 'ekfac'"),
        "a damping that is none": ((*score, "--damping", "lots"), "not 'lots'"),
        "no trained head": (("influence", "score", "tiny-bert", *same), "no trained head"),
    }
    for name, (words, said) in cases.items():
        told = run(*words, cwd=work, code=2)["stderr"].strip()
        show.bar(name, said in told, " ".join(told[-200:].split()))
    words = ["influence", "score", model, *same, "--queries", 3, "--query-split", "train", "--out", work / "overlap"]
    done = subprocess.run([*BUDWOOD, *map(str, words)], cwd=work, capture_output=True, text=True, check=False)
    told = [line for line in done.stderr.splitlines() if "training rows too" in line]
    show.bar("queries among the training rows are named", bool(told), told[0][:160] if told else done.stderr[-160:])
    tests("a row whose loss is NaN is named, and skipped on demand", "tests/methods/influence/test_core.py", "-k", "finite")  # fmt: skip  # noqa: E501


SECTIONS: dict[str, tuple[Callable[[], None], Path | None]] = {
    "checks": (checks, None),
    "reference": (reference, None),
    "kills": (kills, None),
    "input": (bad_input, None),
    "index": (index, MINILM),
    "speed": (speed, MINILM),
    "shapes": (shapes, MINILM),
    "growth": (growth, MINILM),
    "peers": (others, MINILM),
    "sample": (sample, MINILM),
    "memory": (memory, MINILM),
}


def main() -> None:
    chosen = {w for w in sys.argv[1:] if not w.startswith("--")}
    if unknown := chosen - set(SECTIONS):
        sys.exit(f"no section '{min(unknown)}': {', '.join(SECTIONS)}")
    for name, (section, needs) in SECTIONS.items():
        if not chosen or name in chosen:
            show.section(name, section, needs)
    show.end()


if __name__ == "__main__":
    main()

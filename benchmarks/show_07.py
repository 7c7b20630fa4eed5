"""The pages' bars: browser, hostile input, size and speed, exact numbers, bad input.

make show-07
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median

import numpy as np
from show import BUDWOOD, ROOT, Show

sys.path.insert(0, str(ROOT))
from tests.report import runs_for_tests as made  # noqa: E402

from budwood.methods.influence.scores import Matrix, writing_scores  # noqa: E402
from budwood.report.page import rooms_of, write_report  # noqa: E402
from budwood.report.shelf import Shelf  # noqa: E402
from budwood.store.memory import peak_mb  # noqa: E402

show = Show()
work = Path(tempfile.mkdtemp(prefix="budwood-show-"))
CHROMIUM = os.environ.get("BUDWOOD_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
CLICK = """async (q) => {
  const began = performance.now();
  document.querySelector(`[role=option][data-q='${q}']`).click();
  while (!document.querySelector(`article[data-q='${q}']`)) await new Promise((r) => setTimeout(r, 1));
  document.body.getBoundingClientRect();
  return performance.now() - began;
}"""


def tests(name: str, *words: str) -> None:
    """A group of the project's own tests as one bar."""
    pictures = {"BUDWOOD_PICTURES": str(work / "pictures")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **pictures}, check=False
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
    counted = re.search(r"\d+ passed.*", done.stdout)
    show.bar(name, done.returncode == 0, f"{counted[0] if counted else last} ({time.perf_counter() - began:.0f} s)")


def browser() -> None:
    if not CHROMIUM:
        show.bar("every view in Chromium, from a file and from the server", None, "there is no chromium here")
        return
    tests("every view in Chromium, from a file and from the server", "tests/report/test_browser.py")
    taken = sorted((work / "pictures").glob("*.png"))
    show.bar("pictures: light, dark, narrow, print", len(taken) >= 36, f"{len(taken)} in {work / 'pictures'}")


def demo() -> None:
    """The demo's report, every view, from a file and from the server."""
    began = time.perf_counter()
    done = subprocess.run([*BUDWOOD, "demo", "--out", str(work / "demo")], capture_output=True, text=True, check=False)
    report = work / "demo" / "report.html"
    size = report.stat().st_size / 1e6 if report.exists() else 0.0
    show.bar("demo ends with this report", report.exists(), f"{size:.2f} MB, {time.perf_counter() - began:.0f} s")
    if not CHROMIUM or done.returncode:
        return
    from playwright.sync_api import sync_playwright
    from tests.report.test_browser import Tab
    from tests.report.test_view import Served

    server = Served(work / "demo")
    with sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, home in (("file", report.as_uri()), ("server", server.url)):
            tab = Tab(chromium, home)
            for view in ("story", "runs", "skill", "probe", "features", "graft", "influence", "forgetting", "quality"):
                tab.go(f"view={view}")
            tab.close()
            show.bar(
                f"demo report from {name}: no console error, no foreign request", True, f"{len(tab.asked)} requests"
            )
        chromium.close()
    server.close()


def influence(queries: int, train: int) -> Path:
    given = made.write_reviews(work / f"data-{queries}", train, queries, hostile=False)
    path = made.write_run(
        work / f"influence-{queries}" / "big", "influence score", {"strategies": ["ekfac"]}, given=given
    )
    ids = [f"reviews/test/test-{i}" for i in range(queries)], [f"reviews/train/train-{i}" for i in range(train)]
    rng = np.random.default_rng(0)
    with writing_scores(path / "scores", *ids, {"query_split": "test", "train_split": "train"}) as desk:
        desk.put(Matrix("ekfac", main=True), slice(None), slice(None), rng.normal(size=(queries, train)))
    return path


def size_and_speed() -> None:
    page = write_report(rooms_of([influence(900, 2490)]), work / "big.html")
    size = page.stat().st_size / 1e6
    show.bar("900 queries x 40 rows <= 2.5 MB", size <= 2.5, f"{size:.2f} MB")
    if not CHROMIUM:
        return
    from playwright.sync_api import sync_playwright

    paints, clicks = [], []
    with sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for _ in range(5):
            tab = chromium.new_context().new_page()
            tab.goto(f"{page.as_uri()}#view=influence")
            tab.wait_for_selector(".card")
            paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            paints.append(tab.evaluate(paint))
            clicks += [tab.evaluate(CLICK, q) for q in (17, 300, 5)]
            tab.context.close()
        chromium.close()
    load = f"machine load {os.getloadavg()[0]:.1f}"
    show.bar(
        "first paint <= 0.5 s",
        median(paints) <= 500,
        f"median {median(paints):.0f} ms, least {min(paints):.0f} ({load})",
    )
    show.bar(
        "click <= 100 ms", median(clicks) <= 100, f"median {median(clicks):.0f} ms, most {max(clicks):.0f} ({load})"
    )


def many_runs() -> None:
    for i in range(1000):
        made.write_run(work / "many" / f"run-{i:04d}", "finetune", {"metric": "accuracy", "score": i / 1000, "n": 10})
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        assert len(Shelf(work / "many").refresh()) == 1000
        seconds.append(time.perf_counter() - began)
    server = subprocess.Popen([*BUDWOOD, "view", str(work / "many"), "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = server.stdout.readline().split()[0]
        began = time.perf_counter()
        listed = json.load(urllib.request.urlopen(f"{url}api/runs"))
        first = time.perf_counter() - began
        began = time.perf_counter()
        urllib.request.urlopen(f"{url}api/runs").read()
        again = time.perf_counter() - began
        status = Path(f"/proc/{server.pid}/status").read_text()
        held = int(re.search(r"VmRSS:\s*(\d+)", status)[1]) / 1024  # type: ignore[index]
    finally:
        server.terminate()
        server.wait()
    show.bar(
        "view over 1,000 runs lists in <= 1 s",
        len(listed["runs"]) == 1000 and min(first, *seconds) <= 1,
        f"cold {first:.2f} s, again {again:.2f} s over HTTP; {min(seconds):.2f} s without it",
    )
    show.bar("view over 1,000 runs holds <= 150 MB", held <= 150, f"{held:.0f} MB")


def large_matrix() -> None:
    tests("a 200 MB score matrix is read by row", "tests/report/test_view.py", "-k", "large_matrix")


def safety() -> None:
    words = "foreign or nowhere or reading or links or malformed or policy or token"
    tests("foreign hosts, traversal, writes, links, 300 malformed requests", "tests/report/test_view.py", "-k", words)
    tests("hostile texts stay text", "tests/report/test_tables.py", "-k", "script or markup or cut")


def honesty() -> None:
    words = "artefacts or extremes or first_to_solve or read"
    tests("numbers equal the artefacts'", "tests/report/test_tables.py", "-k", words)
    tests(
        "damaged, stopped, failed and limited runs are marked",
        "tests/report/test_tables.py",
        "-k",
        "damaged or views or stopped",
    )
    tests("port taken, no runs", "tests/report/test_view.py", "-k", "served or make_one")


if __name__ == "__main__":
    for name, part in (
        ("size and speed", size_and_speed),
        ("many runs", many_runs),
        ("large matrix", large_matrix),
        ("safety", safety),
        ("honesty", honesty),
        ("browser", browser),
        ("demo", demo),
    ):
        show.section(name, part)
    peak = peak_mb()
    print(f"       (peak of this process: {peak:.0f} MB)")
    show.end()

"""The pages in a real Chromium: from a file and from the server. Pictures go to the directory $BUDWOOD_PICTURES."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from budwood.methods.influence.scores import Matrix, Scores, writing_scores
from budwood.report.page import rooms_of, write_report
from budwood.report.tables import Story
from tests.report import runs_for_tests as made
from tests.report.test_view import Served

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("BUDWOOD_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium: apt-get install chromium")

VIEWS = ("runs", "skill", "probe", "features", "graft", "influence", "forgetting", "quality")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made.one_of_each(tmp_path_factory.mktemp("browser") / "runs")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def file(runs: dict[str, Path]) -> str:
    good = ("tuned", "probe", "linear", "graft", "influence", "inject", "lds")
    story = Story("Where does it live?", "One skill, seven answers.", tuple((n, f"Step {n}.", runs[n]) for n in good))
    return write_report(rooms_of([runs["tuned"].parent]), runs["tuned"].parents[1] / "report.html", story).as_uri()


@pytest.fixture(scope="module")
def server(runs: dict[str, Path]) -> Iterator[str]:
    served = Served(runs["tuned"].parent)
    yield served.url
    served.close()


class Tab:
    """A page that notes everything it should not do."""

    def __init__(self, browser: Any, home: str, **context: Any) -> None:
        self.home, self.faults, self.asked = home, [], []
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **context})
        self.context.set_default_timeout(60_000)  # machines may be busy; what is awaited comes at once on others
        self.page = self.context.new_page()
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.faults.append(str(e)))
        self.page.on("request", lambda r: self.asked.append(r.url))

    def go(self, state: str) -> Any:
        if self.page.url.split("#")[0] == self.home:
            self.page.evaluate("s => { location.hash = s }", state)
        else:
            self.page.goto(f"{self.home}#{state}")
        self.page.wait_for_selector("html[data-ready]", state="attached")
        self.until("!document.querySelector('.body:empty')")
        return self.page

    def until(self, expression: str) -> None:
        """Wait in Python: polling inside the page would need a policy that allows eval."""
        end = time.monotonic() + 60
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, expression
            self.page.wait_for_timeout(20)

    def close(self) -> None:
        foreign = [u for u in self.asked if not u.startswith((self.home.rsplit("/", 1)[0], "data:", "blob:"))]
        self.context.close()
        assert not self.faults, self.faults
        assert not foreign, foreign


@pytest.fixture(params=["file", "server"])
def tab(request: pytest.FixtureRequest, browser: Any) -> Iterator[Tab]:
    tab = Tab(browser, request.getfixturevalue(request.param))
    yield tab
    tab.close()


def picture(tab: Tab, name: str) -> None:
    folder = os.environ.get("BUDWOOD_PICTURES")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tab.page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def test_every_view_is_drawn(tab: Tab) -> None:
    for view in VIEWS:
        page = tab.go(f"view={view}")
        assert page.locator("h2").count() == 1 and page.locator(".claim").first.inner_text().strip()
        assert page.locator("nav [aria-current=page]").inner_text()
        if view not in ("runs", "influence"):
            page.wait_for_selector("figure.chart svg")
            assert page.locator("figure.chart svg").first.get_attribute("aria-label")
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), view


def test_the_story_is_read_top_to_bottom(browser: Any, file: str) -> None:
    tab = Tab(browser, file)
    page = tab.go("")
    tab.until("document.querySelectorAll('.chapter .claim').length === 7")
    tab.until("document.querySelectorAll('.chapter figure svg').length >= 6")
    moved = page.evaluate(SHIFTS)
    assert moved < 0.1, moved
    page.locator(".chapter .cross").nth(1).click()
    assert "view=probe" in page.url
    tab.close()


def test_a_click_on_a_probe_cell(tab: Tab, runs: dict[str, Path]) -> None:
    page = tab.go("view=probe")
    page.locator("[data-mark='1-3']").click()
    page.wait_for_selector(".panel h3")
    cell = json.loads((runs["probe"] / "metrics.json").read_text())["results"][1]["layers"][3]
    assert float(page.locator("[data-mark='1-3']").get_attribute("data-value")) == cell["score"]
    shown = [float(x) for x in page.locator(".panel > p .num").evaluate_all("xs => xs.map(x => x.dataset.value)")]
    assert shown[:5] == [cell[k] for k in ("score", "low", "high", "selectivity", "compression")]
    right = [[(i * 7 + n + 1) % 5 < n for i in range(24)] for n in (2, 3)]
    assert shown[5] == sum(b and not a for a, b in zip(*right))
    assert page.locator(".panel ol li").count() == shown[5]
    page.get_by_label("Show").select_option("difference")
    value = page.locator("[data-mark='0-3']").get_attribute("data-value")
    first = json.loads((runs["probe"] / "metrics.json").read_text())["results"][0]["layers"][3]
    assert float(value) == pytest.approx(cell["score"] - first["score"])
    page.locator(".panel .cross").click()
    page.wait_for_selector(".answer .note")
    assert "layer 3 alone" in page.locator(".answer .note").inner_text()


def test_a_query_shows_the_rows_of_the_matrix(tab: Tab, runs: dict[str, Path]) -> None:
    page = tab.go("view=influence&run=influence")
    page.wait_for_selector(".card")
    scores = Scores.open(runs["influence"])
    page.locator("[role=option][data-q='5']").click()
    page.wait_for_selector("article[data-q='5']")
    for strategy in ("ekfac", "identity"):
        if strategy == "identity":
            page.get_by_label("Strategy").select_option("identity")
        row = scores.row(5, scores.find(strategy))
        best = int(row.argmax())
        page.wait_for_selector(f".side:first-child .card:first-child[data-n='{best}']")
        shown = page.locator(".side:first-child .card .cardhead .num").evaluate_all(
            "xs => xs.map(x => +x.dataset.value)"
        )
        np.testing.assert_allclose(shown, np.sort(row)[::-1][:20], rtol=1e-5)
        worst = page.locator(".side:last-child .card .cardhead .num").evaluate_all(
            "xs => xs.map(x => +x.dataset.value)"
        )
        np.testing.assert_allclose(worst, np.sort(row)[:20], rtol=1e-5)
    page.get_by_label("Side by side").check()
    page.wait_for_selector(".columns ol")
    page.get_by_label("Answered").select_option("wrong")
    assert page.locator("[role=option]").count() == 3
    page.get_by_label("Find").fill("number 11")
    assert page.locator("[role=option]").count() == 1


def test_no_row_that_helps_is_said_to_harm(browser: Any, tmp_path: Path) -> None:
    home = tmp_path / "runs"
    scored = made.influence(home / "influence", made.write_reviews(tmp_path / "data", hostile=False), least=0.25)
    story = Story("Where?", "One answer.", (("influence", "A step.", scored),))
    tab = Tab(browser, write_report(rooms_of([home]), tmp_path / "r.html", story).as_uri())
    page = tab.go("view=influence&run=influence&q=0")
    page.wait_for_selector(".side:first-child .card")
    assert page.locator(".side:last-child .card").count() == 0
    assert "None of the rows at this end." in page.locator(".side:last-child").inner_text()
    words = tab.go("view=story").locator("main").inner_text()
    assert "Helped least:" in words and "Harmed most:" not in words
    tab.close()


def test_the_slider_tells_what_each_rule_recovers(tab: Tab, runs: dict[str, Path]) -> None:
    page = tab.go("view=graft&run=graft")
    slider = page.locator("input[type=range]")
    slider.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    curve = json.loads((runs["graft"] / "metrics.json").read_text())["curve"]
    at = sorted((r for r in curve if r["fraction"] == 1e-4), key=lambda r: -r["recovered"])
    tab.until("document.querySelector('.atsize strong').textContent === '0.01 %'")
    shown = page.locator(".atsize .num").evaluate_all("xs => xs.map(x => +x.dataset.value)")
    assert shown == [v for r in at for v in (r["recovered"], r["score"])]
    page.get_by_label("Beside it").select_option("fisher")
    page.wait_for_selector("text=Grey bars")
    assert "all graftable" in page.locator("main").inner_text()  # what a graft can carry, where more moved


def test_points_bars_and_tables(tab: Tab, runs: dict[str, Path]) -> None:
    page = tab.go("view=forgetting")
    page.locator("[data-mark='point-2'] .tile").click()
    page.wait_for_selector(".panel table")
    assert "EWC at strength 10" in page.locator(".panel h3").inner_text()
    page = tab.go("view=quality&run=lds")
    results = json.loads((runs["lds"] / "metrics.json").read_text())["results"]
    page.wait_for_selector("figure [data-mark^=bar]", state="attached")
    shown = page.locator("figure").first.locator("[data-mark^=bar]").evaluate_all("xs => xs.map(x => +x.dataset.value)")
    assert shown == [r["lds"] for r in results]
    page.locator("figure").first.get_by_role("button", name="Table").click()
    cells = page.locator("figure").first.locator(".behind td .num").evaluate_all("xs => xs.map(x => +x.dataset.value)")
    assert cells == [r[k] for r in results for k in ("lds", "low", "high")]


def test_from_a_graft_to_the_rows_behind_its_weights(
    browser: Any, server: str, file: str, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server counts the mask itself; a file links to whole layers, says so, and names the command for it."""
    from budwood.methods.influence import masked

    (runs["graft"] / "reviews.graft").write_bytes(b"a graft")
    counted = np.random.default_rng(4).normal(size=60)
    monkeypatch.setattr(masked, "graft_scores", lambda *given: (counted, ""))
    tab = Tab(browser, server)
    page = tab.go("view=graft&run=graft")
    page.locator("a.cross", has_text="in this graft's weights alone").click()
    page.wait_for_selector(f".side:first-child .card:first-child[data-n='{int(counted.argmax())}']")
    assert "Counted in the weights of graft alone." in page.locator(".answer .note").inner_text()
    page.get_by_role("button", name="Count all weights").click()
    scores = Scores.open(runs["influence"])
    best = int(scores.row(0, scores.find("ekfac")).argmax())
    page.wait_for_selector(f".side:first-child .card:first-child[data-n='{best}']")
    tab.close()
    tab = Tab(browser, file)
    page = tab.go("view=graft&run=graft")
    words = page.locator("main").inner_text()
    assert "The link counts whole layers." in words
    assert "budwood influence show runs/influence --query 0 --graft runs/graft/reviews.graft" in words
    tab.close()


@pytest.mark.parametrize("how", ["file", "server"])
def test_scores_of_another_model_are_no_way_from_a_graft(browser: Any, tmp_path: Path, how: str) -> None:
    """A run of the same name and task whose files are others is not linked; the page says why and what to type."""
    home = tmp_path / "runs"
    made.tuned(home / "tuned", {})
    scored = made.influence(home / "influence", made.write_reviews(tmp_path / "data", hostile=False))
    cut = made.graft(home / "graft", {})

    def tell(run: Path, models: list[str]) -> None:
        manifest = json.loads((run / "run.json").read_text())
        manifest["settings"] |= {"models": models, "shots": 64}
        (run / "run.json").write_text(json.dumps(manifest))

    tell(cut, ["aa", "bb"])
    for content, linked in (("cc", False), ("bb", True)):
        tell(scored, [content])
        served = Served(home) if how == "server" else None
        tab = Tab(browser, served.url if served else write_report(rooms_of([home]), tmp_path / "r.html").as_uri())
        page = tab.go("view=graft&run=graft")
        if linked:
            assert page.locator("main a.cross").get_attribute("href").startswith("#view=influence&run=influence")
        else:
            tab.until("document.querySelector('main').innerText.includes('budwood influence score')")
            words = page.locator("main").inner_text()
            assert "No run here has scored tuned, the model that this graft was cut from (influence scored" in words
            assert "budwood influence score runs/tuned --task reviews --shots 64 --per-layer" in words
            assert page.locator("main a.cross").count() == 0
        tab.close()
        if served:
            served.close()


BESIDE = """() => [...document.querySelectorAll('figure [data-rule]')].map((t) => {
  const all = [...t.closest('svg').querySelectorAll('line[data-value]')];
  const lines = all.map((x) => x.getBoundingClientRect());
  const b = t.getBoundingClientRect();
  const own = lines[all.findIndex((x) => x.dataset.value === t.dataset.rule)];
  const crossed = lines.filter((l) => l !== own && l.left > b.left + 1 && l.left < b.right - 1 && l.top < b.bottom - 2);
  return { name: t.textContent, gap: Math.min(Math.abs(own.left - b.right), Math.abs(own.left - b.left)),
    reaches: own.top <= b.bottom && own.bottom > b.bottom,
    crossed: crossed.length, inside: b.right <= t.closest('svg').getBoundingClientRect().right + 1 };
})"""


@pytest.mark.parametrize("width", [1200, 320])
def test_names_of_lines_stand_at_their_lines(browser: Any, file: str, width: int) -> None:
    tab = Tab(browser, file, viewport={"width": width, "height": 900})
    for state in ("view=features", "view=quality&run=lds"):
        page = tab.go(state)
        page.wait_for_selector("[data-rule]")
        found = page.evaluate(BESIDE)
        assert len(found) == 2 and all(f["gap"] < 9 and f["reaches"] and not f["crossed"] for f in found), found
        assert all(f["inside"] for f in found), found
    tab.close()


OVERLAPS = """() => [...document.querySelectorAll('figure svg')].flatMap((page) => {
  const boxes = [...page.querySelectorAll('text')].filter((t) => t.textContent && !t.getAttribute('transform'))
    .map((t) => [t.textContent, t.getBoundingClientRect()]);
  return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([, q]) =>
    p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 3 && q.top < p.bottom - 3)
    .map(([b]) => `${a} | ${b}`));
})"""
LOOKS = """() => [...document.querySelectorAll('[data-key]')].map((key) => [...key.children].slice(0, -1).map((c) =>
  ['stroke-dasharray', 'stroke', 'fill'].map((a) => c.getAttribute(a)).join() + c.tagName
  + (c.getAttribute('d') || '').replace(/^M[^hl]*/, '')).join())"""


@pytest.mark.parametrize("width", [1200, 320])
def test_no_words_lie_on_others_and_no_two_lines_look_alike(browser: Any, file: str, width: int) -> None:
    tab = Tab(browser, file, viewport={"width": width, "height": 900})
    for state in ("view=probe", "view=features", "view=forgetting", "view=quality&run=lds"):
        page = tab.go(state)
        page.wait_for_selector("figure svg")
        assert page.evaluate(OVERLAPS) == [], state
    page = tab.go("view=probe")
    looks = page.evaluate(LOOKS)
    assert len(looks) == 7 and len(set(looks)) == 7, looks
    tab.close()


@pytest.mark.parametrize("width", [1200, 900, 320])
def test_the_table_of_runs_is_not_cut(browser: Any, file: str, width: int) -> None:
    tab = Tab(browser, file, viewport={"width": width, "height": 900})
    page = tab.go("view=runs")
    box = page.locator("[role=region][aria-label=Runs]")
    wide, room, reach = box.evaluate("b => [b.scrollWidth, b.clientWidth, getComputedStyle(b).overflowX]")
    assert reach == "auto" and (wide <= room or width < 1200), (wide, room)
    page.locator("th", has_text="started").scroll_into_view_if_needed()
    right = page.locator("th", has_text="started").evaluate("t => t.getBoundingClientRect().right")
    assert right <= width
    if wide > room:
        assert page.locator(".aside").is_visible()
    assert "limited: made on a sample of the rows" in page.locator("main").inner_text()
    tab.close()


def test_paper_is_light_and_holds_the_whole_table(browser: Any, file: str) -> None:
    """Printed on A4 from a dark screen, chosen or by system: light, nothing to scroll, no word about scrolling."""
    tab = Tab(browser, file, viewport={"width": 718, "height": 1000}, color_scheme="dark")
    page = tab.go("view=runs")
    assert page.locator(".aside").is_visible()
    page.emulate_media(media="print", color_scheme="dark")
    for theme in ("", "dark"):
        page.evaluate("t => { if (t) document.documentElement.dataset.theme = t; }", theme)
        paper, ink, good = page.evaluate(PAPER)
        assert (paper, ink, good) == ("rgb(255, 255, 255)", "rgb(0, 0, 0)", "#2c6e3f")
    box = page.locator("[role=region][aria-label=Runs]")
    reach, right = box.evaluate("b => [getComputedStyle(b).overflowX, b.firstChild.getBoundingClientRect().right]")
    assert reach == "visible" and right <= 718, (reach, right)
    assert not page.locator(".aside").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    picture(tab, "print-dark-runs")
    tab.close()


PAPER = """() => { const of = getComputedStyle(document.body);
  return [of.backgroundColor, of.color, getComputedStyle(document.documentElement).getPropertyValue('--good')]; }"""


def test_clicking_through_queries_of_a_graft_asks_for_the_last(
    browser: Any, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass for many clicks; a busy server is told in its own words, with a button that asks again."""
    from budwood.methods.influence import masked
    from budwood.report import asking

    (runs["graft"] / "reviews.graft").write_bytes(b"a graft")
    asked: list[int] = []

    def count(run: Path, scores: Scores, query: int, *rest: Any) -> tuple[np.ndarray, str]:
        asked.append(query)
        return np.random.default_rng(query).normal(size=60), "a warning"

    monkeypatch.setattr(masked, "graft_scores", count)
    monkeypatch.setattr(asking, "PATIENCE", 0.05)
    monkeypatch.setattr(asking, "_inside", {})
    served = Served(runs["tuned"].parent)
    tab = Tab(browser, served.url)
    page = tab.go("view=influence&run=influence&q=0&graft=graft")
    page.wait_for_selector(".card")
    assert asked == [0] and "a warning" in page.locator(".answer .note").inner_text()
    assert page.locator(".strip, .tokens").count() == 0  # shares of all weights are not shown beside the graft's
    page.evaluate("[3, 4, 5, 6].forEach((q) => document.querySelector(`[role=option][data-q='${q}']`).click())")
    page.wait_for_selector("article[data-q='6']")
    assert asked == [0, 6]
    with asking.ONE:
        page.locator("[role=option][data-q='7']").click()
        button = page.get_by_role("button", name="Try again")
        button.wait_for()
        assert "busy counting another query" in page.locator(".answer .note").inner_text()
    button.click()
    page.wait_for_selector("article[data-q='7']")
    assert asked == [0, 6, 7] and all("503" in f for f in tab.faults)
    tab.faults.clear()  # the browser notes every answer that is no 200
    tab.close()
    served.close()


def test_frozen_features_and_ways_have_one_name(browser: Any, tmp_path: Path) -> None:
    """Ways are called in the figure as in the sentence; the label words of an untrained model are not "before"."""
    path = made.linear(tmp_path / "runs" / "linear", {})
    m = json.loads((path / "metrics.json").read_text())
    m["baselines"] |= {"zero_shot": 0.6}
    (path / "metrics.json").write_text(json.dumps(m))
    made.inject(tmp_path / "runs" / "inject", {})
    tab = Tab(browser, write_report(rooms_of([tmp_path / "runs"]), tmp_path / "r.html").as_uri())
    page = tab.go("view=features")
    page.wait_for_selector("figure svg")
    assert "label words, no training" in page.locator("figure").first.inner_text()
    page = tab.go("view=forgetting")
    page.wait_for_selector("figure svg")
    keys = page.locator("[data-name$=-front] [data-key]").all_text_contents()
    assert keys == ["plain training", "EWC", "L2 to base", "replay"]
    tab.close()


def test_forgetting_promises_what_it_draws(browser: Any, tmp_path: Path) -> None:
    """One seed, no area, a trivial answer: no bars are promised, none is drawn, and the line is named."""
    path = made.inject(tmp_path / "runs" / "one", {})
    m = json.loads((path / "metrics.json").read_text())
    m["cells"] = [c for c in m["cells"] if c["seed"] == 0]
    m |= {"hypervolume": {k: {"0": 0.0} for k in m["hypervolume"]}}
    m |= {"reference": {"new_error": 0.12, "kept_error": 5.0, "is": "copying the larger operand"}}
    (path / "metrics.json").write_text(json.dumps(m))
    tab = Tab(browser, write_report(rooms_of([path]), tmp_path / "r.html").as_uri())
    page = tab.go("view=forgetting")
    page.wait_for_selector("figure svg")
    words = page.locator("main").inner_text()
    assert "One seed: no bars." in words and "Median over seeds; bars" not in words
    assert "No area to draw (hypervolume 0 for all)" in words and page.locator("[data-name$=-area]").count() == 0
    chart = page.locator("[data-name$=-front]")
    assert chart.locator("line[data-value='0.12']").count() == 1
    assert "copying the larger operand 0.12" in chart.inner_text() and "strength 10" in chart.inner_text()
    assert "logarithmic error (RMSLE, lower is better)" in chart.inner_text()
    assert chart.locator("[data-key] line").count() == 0 and chart.locator("[data-key]").count() == 4
    assert page.evaluate(OVERLAPS) == []
    tab.close()


def test_layers_have_one_number_in_all_views(browser: Any, file: str) -> None:
    tab = Tab(browser, file)
    page = tab.go("view=probe")
    assert page.locator("figure").first.locator("text").all_text_contents()[:5] == ["emb", "1", "2", "3", "4"]
    names = [f"layer {i}" for i in range(1, made.LAYERS + 1)]
    page = tab.go("view=graft&run=graft")
    page.wait_for_selector("[role=rowheader]")
    assert page.locator("[role=rowheader]").evaluate_all("xs => xs.map(x => x.firstChild.textContent)") == names
    link = page.locator("a.cross", has_text="Influence counted in the layers")
    assert "(2, 3, 4)" in link.inner_text()
    link.click()
    page.wait_for_selector(".answer .note")
    assert page.locator(".answer .note").inner_text().startswith("Counted in layer 2, layer 3, layer 4 alone")
    page = tab.go("view=graft&run=fisher")
    page.wait_for_selector("[data-mark=bar-0]")
    bars = page.locator("[data-mark^=bar] text:first-of-type").all_text_contents()
    assert bars[: made.LAYERS + 2] == ["emb", *names, "head"]
    tab.close()


def test_downloads(tab: Tab, runs: dict[str, Path]) -> None:
    page = tab.go("view=quality&run=lds")
    figure = page.locator("figure").first
    got = {}
    for kind in ("CSV", "SVG", "PNG"):
        with page.expect_download() as waiting:
            figure.get_by_role("button", name=kind).click()
        got[kind] = Path(waiting.value.path()).read_bytes()
    rows = list(csv.DictReader(io.StringIO(got["CSV"].decode())))
    results = json.loads((runs["lds"] / "metrics.json").read_text())["results"]
    assert [float(r["lds"]) for r in rows] == [r["lds"] for r in results]
    assert got["SVG"].startswith(b"<svg") and got["PNG"].startswith(b"\x89PNG")


def test_runs_are_sorted_filtered_and_compared(tab: Tab) -> None:
    page = tab.go("view=runs")
    assert page.locator("tbody tr").count() == 22
    text = page.locator(".claim").inner_text()
    assert "1 failed" in text and "4 broken" in text and "1 stopped" in text and "1 on a sample" in text
    page.get_by_role("button", name="score", exact=True).click()
    first = page.locator("tbody tr").first
    assert first.get_attribute("data-run") == "tuned"
    page.get_by_label("Find").fill("graft learn")
    assert page.locator("tbody tr").count() == 1
    page.get_by_label("Find").fill("")
    page.get_by_label("compare tuned").click()
    page.get_by_label("compare limited").click()
    page.wait_for_selector(".diff")
    assert "b − a in accuracy" in page.locator(".panel").inner_text()
    page = tab.go("view=runs&open=failed")
    page.wait_for_selector(".panel .trouble")
    assert "the disk was full" in page.locator(".panel .trouble").inner_text()
    assert "budwood probe tiny-bert --task reviews" in page.locator(".command").inner_text()


def test_everything_by_keyboard(browser: Any, file: str) -> None:
    tab = Tab(browser, file)
    page = tab.go("view=runs")
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.textContent.trim()"))
    assert seen[0].startswith("Skip") and {"budwood", "Runs", "Probe map", "Influence"} <= set(seen)
    page.locator("nav a", has_text="Probe map").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-mark='0-0']")
    page.locator("[data-mark='0-0']").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.dataset.mark") == "1-1"
    assert "layer 1" in page.locator(".readout").first.inner_text()
    page.keyboard.press("Enter")
    page.wait_for_selector(".panel h3")
    assert "layer=1" in page.url and page.evaluate("document.activeElement.dataset.mark") == "1-1"
    page = tab.go("view=influence&run=influence&q=0")
    page.wait_for_selector(".card")
    page.locator("[role=listbox]").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("article[data-q='2']")
    assert "q=2" in page.url and page.locator("[role=option][aria-selected=true]").get_attribute("data-q") == "2"
    reachable = page.evaluate(
        "[...document.querySelectorAll('button, select, input, a[href], [role=listbox]')].every(x => x.tabIndex >= 0)"
    )
    assert reachable
    tab.close()


def test_hostile_texts_are_inert_and_legible(tab: Tab) -> None:
    page = tab.go("view=influence&run=influence&q=0")
    page.wait_for_selector(".card")
    assert "</script><img src=x onerror=" in page.locator("article.query").inner_text()
    assert page.locator("main img, main script, main iframe").count() == 0
    assert "owned" not in page.title()
    for q, words in (
        (1, "⟨U+202E⟩gnp.exe⟨U+202C⟩"),
        (2, "⟨U+0001⟩"),
        (3, "👩‍👩‍👧"),
        (4, "more characters"),
        (5, "${7*7}"),
    ):
        page.locator(f"[role=option][data-q='{q}']").click()
        page.wait_for_selector(f"article[data-q='{q}']")
        assert words in page.locator("article.query").inner_text(), q


@pytest.mark.parametrize("how", ["light", "dark", "narrow", "print"])
def test_dark_narrow_and_paper(browser: Any, file: str, how: str) -> None:
    size = {"width": 320 if how == "narrow" else 1200, "height": 800}
    tab = Tab(browser, file, viewport=size, color_scheme="dark" if how == "dark" else "light")
    for view in ("story", *VIEWS):
        page = tab.go(f"view={view}")
        if how == "print":
            page.emulate_media(media="print")
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), view
        picture(tab, f"{how}-{view}")
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert (ink, paper) != ("", "") and (paper == "rgb(20, 23, 28)") == (how == "dark")
    tab.close()


def test_running_jobs_are_followed(browser: Any, tmp_path: Path) -> None:
    path = made.write_run(tmp_path / "runs" / "busy", "finetune", {}, status="running")
    (path / "metrics.json").unlink()
    (path / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}, started now\n")
    served = Served(tmp_path / "runs")
    tab = Tab(browser, served.url)
    page = tab.go("view=runs")
    (path / "progress.jsonl").write_text('{"stage": "train", "done": 3, "total": 9, "left": 4.0}\n')
    tab.until("document.querySelector('.live')?.textContent.includes('train 3 of 9')")
    made.write_run(tmp_path / "runs" / "busy", "finetune", {"metric": "accuracy", "score": 0.75, "n": 4})
    tab.until("document.querySelector('.claim').textContent.includes('1 finished')")
    assert page.locator("tbody .n .num").first.get_attribute("data-value") == "0.75"
    tab.close()
    served.close()


def test_large_pages_are_quick(browser: Any, tmp_path: Path) -> None:
    """900 queries x 40 rows: the page's size; times are printed by benchmarks/show_07.py, here only bounded widely."""
    queries, train = 900, 2490
    given = made.write_reviews(tmp_path / "data", train, queries, hostile=False)
    path = made.write_run(tmp_path / "runs" / "big", "influence score", {"strategies": ["ekfac"]}, given=given)
    ids = [f"reviews/test/test-{i}" for i in range(queries)], [f"reviews/train/train-{i}" for i in range(train)]
    with writing_scores(path / "scores", *ids, {"query_split": "test", "train_split": "train"}) as desk:
        desk.put(
            Matrix("ekfac", main=True), slice(None), slice(None), np.random.default_rng(0).normal(size=(queries, train))
        )
    out = write_report(rooms_of([path]), tmp_path / "big.html")
    assert out.stat().st_size <= 2.5e6
    tab = Tab(browser, out.as_uri())
    page = tab.go("view=influence")
    page.wait_for_selector(".card")
    assert min(page.evaluate(CLICK, q) for q in (17, 300, 5, 44)) < 1000
    tab.close()


SHIFTS = """() => new Promise((done) => {
  let sum = 0;
  new PerformanceObserver((list) => list.getEntries().forEach((e) => { if (!e.hadRecentInput) sum += e.value; }))
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done(sum), 100);
})"""
CLICK = """async (q) => {
  const began = performance.now();
  document.querySelector(`[role=option][data-q='${q}']`).click();
  while (!document.querySelector(`article[data-q='${q}']`)) await new Promise((r) => setTimeout(r, 1));
  document.body.getBoundingClientRect();
  return performance.now() - began;
}"""

"""What `influence show` tells: texts and labels, shares of layers and tokens, restriction, every form."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import budwood as bw
from budwood.errors import StoreError
from budwood.methods.influence.page import blocks, page
from budwood.methods.influence.scores import Matrix, Tokens, writing_scores
from budwood.methods.influence.show import Wish, show
from budwood.store.files import write_json
from tests.cli.conftest import budwood  # noqa: F401

MODULES = ("encoder.layer.0.output.dense", "encoder.layer.1.output.dense", "head.classifier")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scores of made-up numbers over rows of a shipped task."""
    task = bw.task("tiny-entail", limit=20, limit_eval=6)
    train, queries = task.rows("train"), task.rows("validation")
    path = tmp_path_factory.mktemp("runs") / "score"
    rng = np.random.default_rng(0)
    by_module = rng.normal(size=(3, len(queries), len(train)))
    words = Tokens(tuple(tuple(r.text.split()) for r in train))
    width = int(words.offsets_N1[-1])
    facts = {"measurement": "margin", "query_split": "validation", "train_split": "train", "scale": "divided by 20"}
    with writing_scores(path / "scores", [r.id for r in queries], [r.id for r in train], facts, words) as desk:
        desk.put(Matrix("ekfac", "auto", main=True), slice(None), slice(None), by_module.sum(0))
        desk.put(Matrix("ekfac", "auto", "tokens"), slice(None), slice(None), rng.normal(size=(len(queries), width)))
        for name, value in zip(MODULES, by_module):
            desk.put(Matrix("ekfac", "auto", name), slice(None), slice(None), value)
        desk.put(Matrix("bm25", main=True), slice(None), slice(None), -by_module.sum(0))
    write_json(path / "run.json", {"given": {"task": "tiny-entail", "limit": 20, "limit_eval": 6, "seed": 0}})
    return path


def test_best_and_worst_rows_come_with_their_words(run: Path) -> None:
    task = bw.task("tiny-entail", limit=20, limit_eval=6)
    found = show(run, Wish("2", top=3, bottom=2))
    scores = np.load(run / "scores" / "ekfac.npy")[2]
    order = np.argsort(-scores)
    rows = task.rows("train")
    assert [r["id"] for r in found["top"]] == [rows[n].id for n in order[:3]]
    assert [r["id"] for r in found["bottom"]] == [rows[n].id for n in order[::-1][:2]]
    best = rows[order[0]]
    told = found["top"][0]
    assert (told["text"], told["pair"], told["label"]) == (best.text, best.pair, task.labels[best.label])  # type: ignore[index]
    assert found["query"]["text"] == task.rows("validation")[2].text
    assert sum(told["layers"].values()) == pytest.approx(told["score"], rel=1e-4)
    assert list(told["layers"]) == ["layer.0", "layer.1", "head"]
    assert [w for w, _ in told["tokens"]] == ["", *best.text.split()]


def test_only_some_of_the_model_may_count(run: Path) -> None:
    by_layer = show(run, Wish("0", top=20, bottom=0, layers=(1,)))["top"]
    by_module = show(run, Wish("0", top=20, bottom=0, modules=("*layer.1*",)))["top"]
    alone = np.load(run / "scores" / f"ekfac@auto.{MODULES[1]}.npy")[0]
    assert [r["number"] for r in by_layer] == [r["number"] for r in by_module] == np.argsort(-alone).tolist()
    assert show(run, Wish("0", strategy="bm25"))["top"][0]["id"] == show(run, Wish("0"))["bottom"][0]["id"]
    with pytest.raises(StoreError, match="no layer 7"):
        show(run, Wish("0", layers=(7,)))


def test_rows_that_are_gone_are_counted(run: Path, tmp_path: Path) -> None:
    import shutil

    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    write_json(moved / "run.json", {"given": {"task": "tiny-topic", "seed": 0}})
    found = show(moved, Wish("0"))
    assert "20 of 20 training rows are no longer in the task" in found["note"] and "text" not in found["top"][0]
    (moved / "run.json").unlink()
    assert "Only ids can be shown" in show(moved, Wish("0"))["note"]


class Words(HTMLParser):
    """Checks that tags close and gathers the text."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.open: list[str] = []
        self.sections: list[tuple[str, list[str]]] = []  # headings, and the classes of the articles beneath them

    @property
    def headings(self) -> list[str]:
        return [title for title, _ in self.sections]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "h2":
            self.sections.append(("", []))
        elif tag == "article" and self.sections:
            self.sections[-1][1].append(dict(attrs)["class"])
        if tag not in ("meta", "html"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == "html" or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] == "h2":
            self.sections[-1] = (data, self.sections[-1][1])


@pytest.mark.parametrize(
    ("top", "bottom", "want"),
    [
        ((2.0, 1.0), (-3.0, 0.5), [("help most", 2), ("hurt most", 1), ("help least", 1)]),
        ((3.0, 2.0), (0.0, 1.0), [("help most", 2), ("help least", 2)]),
        ((-1.0,), (-3.0, -2.0), [("hurt least", 1), ("hurt most", 2)]),
        ((2.0, -1.0), (), [("help most", 1), ("hurt least", 1)]),
    ],
)
def test_a_page_says_by_its_sign_what_a_row_does(top: Any, bottom: Any, want: Any) -> None:
    listed = lambda scores: [{"number": i, "id": f"r{i}", "score": s, "text": "x"} for i, s in enumerate(scores)]
    found = dict.fromkeys(("strategy", "damping", "within", "sign", "scale", "note"), "") | {"train": 9}
    found |= {"query": {"number": 0, "id": "q", "text": "x"}, "top": listed(top), "bottom": listed(bottom)}
    reader = Words()
    reader.feed(page(found))
    assert not reader.open
    assert reader.sections == [(f"Training rows that {does}", [f"{does.split()[0]}s"] * n) for does, n in want]
    said = blocks(found)
    assert all(said.count(does.replace(" ", "s ")) == n for does, n in want)  # a terminal says the same


def test_every_form_on_the_command_line(run: Path, budwood: Callable[..., Any], tmp_path: Path) -> None:  # noqa: F811
    code, out, _ = budwood("influence", "show", run, "--query", "1", "--top", "2", "--bottom", "1")
    assert code == 0 and "helps most 2" in out and "hurts most 1" in out and "positive =" in out
    code, out, _ = budwood("influence", "show", run, "--query", 1, "--json", "--top", 2)
    assert len(json.loads(out)["top"]) == 2
    code, out, _ = budwood("influence", "show", run, "--format", "table", "--layers", "0,1")
    assert out.splitlines()[0].split() == ["rank", "score", "id", "label", "text"] and len(out.splitlines()) == 11
    code, out, _ = budwood("influence", "show", run, "--format", "table", "--top", 2, "--bottom", 1)
    assert out.splitlines()[0].split() == ["rank", "score", "id", "label", "layer", "token", "text"]
    for line, row in zip(out.splitlines()[1:], [*(found := show(run, Wish("0", 2, 1)))["top"], *found["bottom"]]):
        for parts in (row["layers"].items(), row["tokens"][1:]):
            name, value = max(parts, key=lambda p: abs(p[1]))
            assert f"  {name} {value:+.2g}  " in line
    code, out, _ = budwood("influence", "show", run, "--format", "html", "--out", tmp_path / "page.html")
    reader = Words()
    reader.feed((tmp_path / "page.html").read_text())
    assert not reader.open and reader.headings == ["Training rows that help most", "Training rows that hurt most"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--query", "99"], "There is no query '99'"),
        (["--strategy", "bm52"], "Did you mean 'bm25'"),
        (["--damping", "3"], "no scores of ekfac at damping '3'"),
        (["--damping", "lots"], "give a number >= 0"),
        (["--modules", "*leyer*"], "matches none of the 3 modules"),
        (["--layers", "x"], "give numbers of layers"),
        (["--strategy", "bm25", "--layers", "0"], "Those of ekfac do"),
        (["--top", "-1"], "0 or more"),
    ],
)
def test_wrong_wishes_are_explained(run: Path, budwood: Callable[..., Any], words: list[str], said: str) -> None:  # noqa: F811
    code, _, err = budwood("influence", "show", run, *words)
    assert code == 2 and said in err


def test_a_run_without_scores_says_what_to_give(budwood: Callable[..., Any], tmp_path: Path) -> None:  # noqa: F811
    code, _, err = budwood("influence", "show", tmp_path)
    assert code == 2 and "influence score" in err

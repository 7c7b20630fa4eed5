"""`influence score --per-token` and `influence show` as they are typed, in every mode: tokens add up to their rows."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from budwood.data.task import Row
from budwood.methods.influence.scores import Scores
from budwood.methods.influence.show import task_of
from tests.cli.conftest import budwood, model  # noqa: F401

FEW = "--limit 6 --limit-eval 4 --threads 1 --progress none"


def figures(path: Path) -> Path:
    """Texts whose label is a number."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["id", "text", "label"])
        for n in range(20):
            words = [f"w{i}" for i in rng.choice(np.arange(8, 40), rng.integers(3, 9))]
            writer.writerow([f"r{n}", " ".join(words), round(float(rng.uniform(0, 5)), 2)])
    return path


def label(row: Row, names: tuple[str, ...]) -> Any:
    """What is shown as a row's label: names of classes, numbers as they are, the first answer to a question."""
    if row.answers is not None:
        return row.answers[0][0] if row.answers else "(no answer)"
    if isinstance(row.label, tuple):
        return " ".join(names[i] for i in row.label)
    return names[row.label] if names and row.label is not None else row.label  # type: ignore[index]


@pytest.mark.parametrize(
    ("start", "task", "mode"),
    [
        ("tiny-bert", "tiny-qa", ""),
        ("tiny-bert", "tiny-tags", ""),
        ("tiny-bert", "tiny-sentiment", "prompt"),
        ("tiny-gpt", "tiny-sentiment", "causal"),
        ("small", "figures.csv", ""),
        ("tiny-gpt", "arithmetic", ""),
    ],
)
def test_tokens_add_up_to_what_is_shown(
    start: str,
    task: str,
    mode: str,
    budwood: Callable[..., Any],  # noqa: F811
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    figures(tmp_path / "figures.csv")
    data = ["--task", task, *FEW.split()]
    read = ["--mode", mode] if mode else []
    first = str(model) if start == "small" else start
    code, _, err = budwood("finetune", first, *data, *read, "--max-steps", 2, "--batch-size", 4, "--out", "tuned")
    assert code == 0, err
    wish = "--queries 2 --damping 0.1mean --strategy ekfac,identity --per-token --per-layer --out scored"
    code, _, err = budwood("influence", "score", "tuned", *data, *wish.split())
    assert code == 0, err
    scores, made = Scores.open(tmp_path / "scored"), task_of(tmp_path / "scored")
    rows, labels = made.rows("train"), made.labels
    assert scores.train_ids == tuple(r.id for r in rows) and len(scores.query_ids) == 2
    for strategy in ("ekfac", "identity"):
        matrix = scores.find(strategy)
        whole = scores.whole(matrix)
        near = 1e-4 * float(np.abs(whole).max())
        assert near > 0
        by_row = [[scores.token_row(q, n, matrix)[1].sum() for n in range(len(rows))] for q in range(2)]
        np.testing.assert_allclose(by_row, whole, rtol=1e-3, atol=near)
        code, out, err = budwood("influence", "show", "scored", "--query", 1, "--strategy", strategy, "--json")
        assert code == 0, err
        found = json.loads(out)
        shown = sorted([*found["top"], *found["bottom"]], key=lambda r: r["number"])
        assert {r["number"] for r in shown} == set(range(len(rows)))  # five of six at either end
        for row in shown:
            own = rows[row["number"]]
            assert row["score"] == pytest.approx(whole[1, row["number"]]) and row["text"]
            assert row["text"] == (own.text or " ".join(own.words or ())) and row.get("label") == label(own, labels)
            assert sum(v != 0 for _, v in row["tokens"]) > 2
            for parts in (row["layers"].values(), [v for _, v in row["tokens"]]):
                assert sum(parts) == pytest.approx(row["score"], rel=1e-3, abs=near)
    code, out, err = budwood("influence", "show", "scored", "--query", 1, "--top", 1, "--bottom", 0)
    assert code == 0 and "helps most 1" in out and "layers" in out and "tokens" in out, err


def test_json_has_the_keys_that_are_promised(
    budwood: Callable[..., Any],  # noqa: F811
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """One object on stdout, whatever is said on stderr, for `fit` as for `score`."""
    figures(tmp_path / "figures.csv")
    data = ["--task", "figures.csv", "--limit", 6, "--limit-eval", 4, "--threads", 1]
    start = ["--max-steps", 2, "--batch-size", 4, "--progress", "none", "--out", "tuned"]
    code, _, err = budwood("finetune", model, *data, *start)
    assert code == 0, err
    common = {"budwood": version("budwood"), "task": "figures", "seed": 3, "models": ["tuned"], "limited": True}
    wish = ["--seed", 3, "--progress", "plain", "--json"]
    code, out, err = budwood("influence", "fit", "tuned", *data, *wish, "--strategy", "ekfac,diagonal", "--out", "fit")
    assert code == 0 and "--damping auto, ekfac" in err
    found = json.loads(out)
    told = {**common, "verb": "influence fit", "strategies": ["diagonal", "ekfac"], "train": 6, "n": 6}
    assert {k: found[k] for k in told} == told
    assert set(found["damping"]) == {"ekfac", "diagonal"} and found["damping"]["ekfac"]["best"] in (10, 30, 100)
    given = ["--factors", "fit", "--queries", 1, "--damping", "0.1mean,1e-4", "--strategy", "ekfac,identity,bm25"]
    code, out, err = budwood("influence", "score", "tuned", *data, *wish, *given, "--out", "scored")
    assert code == 0, err
    found = json.loads(out)
    told = {**common, "verb": "influence score", "strategies": ["ekfac", "identity", "bm25"], "queries": 1, "train": 6}
    told |= {"n": 6, "damping": ["0.1mean", "0.0001"]}
    assert {k: found[k] for k in told} == told
    assert found["run"] == str(tmp_path / "scored") and found["seconds"] > 0
    assert json.loads((tmp_path / "scored" / "metrics.json").read_text()) == {
        k: v for k, v in found.items() if k not in json.loads((tmp_path / "scored" / "cost.json").read_text())
    }

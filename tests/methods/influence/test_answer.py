"""What `bw.influence` gives back in Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import budwood as bw
from budwood.errors import StoreError


@pytest.fixture(scope="module")
def answer(tuned: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, task = tuned
    place = tmp_path_factory.mktemp("answer")
    settings = {"strategy": ("ekfac", "identity"), "damping": 0.001, "queries": 3, "per_layer": True}
    return bw.influence(model, task, **settings, threads=1, out=place / "run")


def test_scores_top_and_bottom_are_those_of_the_matrix(answer: Any, tuned: Any) -> None:
    _, task = tuned
    scores_QN = answer.scores.whole()
    assert answer.metrics["damping"] == ["0.001"]
    assert scores_QN.shape == (3, 24)
    order = np.argsort(-scores_QN[1], kind="stable")
    top, bottom = answer.top(query=1, k=3), answer.bottom(query=1, k=2)
    ids = answer.scores.train_ids
    assert list(top["id"]) == [ids[n] for n in order[:3]] and list(bottom["id"]) == [ids[order[-1]], ids[order[-2]]]
    np.testing.assert_allclose(top["score"], scores_QN[1][order[:3]], rtol=1e-6)
    text = {r.id: (r.text, task.labels[r.label]) for r in task.rows("train")}
    assert list(zip(top["text"], top["label"])) == [text[i] for i in top["id"]]
    by_id = answer.top(query=answer.scores.query_ids[1], k=3)
    assert by_id.equals(top)
    plain = answer.top(query=1, k=24, strategy="identity")["score"]
    np.testing.assert_allclose(plain, np.sort(answer.scores.whole(answer.scores.find("identity"))[1])[::-1], rtol=1e-6)
    assert not answer.top(query=1, k=24, layers=(0,))["score"].equals(answer.top(query=1, k=24)["score"])


def test_a_picture_has_one_bar_per_row_and_its_words(answer: Any) -> None:
    from matplotlib import pyplot

    axes = answer.plot(query=2, k=4)
    want = [*answer.top(2, 4)["score"], *answer.bottom(2, 4)["score"][::-1]]
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], want, rtol=1e-6)
    names = [t.get_text() for t in axes.get_yticklabels()]
    assert names[0].startswith(answer.top(2, 1)["text"][0])
    assert "query 2" in axes.figure.get_suptitle()
    assert str(answer).endswith("3 queries x 24 rows, ekfac, identity")
    whole = answer.plot(query=2, k=20)  # 24 rows: none is drawn twice
    assert len(whole.patches) == 24
    pyplot.close("all")


def test_wishes_are_given_as_python_has_them(answer: Any) -> None:
    want = answer.top(query=1, k=24)
    assert answer.top(query=1, k=24, damping=1e-3).equals(want) and answer.top(1, 24, damping="1e-3").equals(want)
    assert answer.top(1, 24, layers=0).equals(answer.top(1, 24, layers=(0,)))
    assert len(repr(answer)) < 2000  # without the rows of the task


def test_one_run_per_seed_is_told(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    wish = {"strategy": "identity", "queries": 2, "threads": 1, "progress": "none"}
    both = bw.influence(model, task, **wish, seeds=(1, 2), out=tmp_path / "x")
    assert "2 queries x 24 rows" in str(both)
    with pytest.raises(StoreError, match="one run per seed, each with scores of its own: .*seeds/1, .*seeds/2"):
        both.top(query=0)


def test_what_there_is_to_note_is_warned_of(answer: Any, tuned: Any) -> None:
    _, task = tuned
    fewer = replace(answer, task=replace(task, splits={**task.splits, "train": task.splits["train"][4:]}))
    with pytest.warns(UserWarning, match="Only ids can be shown: the rows of 'toy' have changed"):
        found = fewer.top(query=0)
    assert list(found["id"]) == list(answer.top(query=0)["id"]) and "text" not in found


def test_the_weights_of_a_graft(answer: Any, tuned: Any, tmp_path: Path) -> None:
    """All weights of a model as a graft: what they wrote is all that was scored."""
    import torch

    from budwood.config.influence import ScoreConfig
    from budwood.methods.influence.workshop import open_shop, settings_for
    from budwood.params.graft import Graft
    from budwood.params.tree import named

    model, task = tuned
    shop = open_shop(settings_for(ScoreConfig(task="toy"), str(model.run)), task)
    weights = {n: p.detach() for n, p in named(shop.model).items() if n in shop.parameters}
    every = {n: torch.arange(p.numel(), dtype=torch.int64) for n, p in weights.items()}
    Graft.cut(every, weights, manifest={"task": "toy"}).save(tmp_path / "x.graft")
    found = answer.top(query=1, k=24, graft=str(tmp_path / "x.graft"))
    np.testing.assert_allclose(found["score"], answer.top(query=1, k=24)["score"], rtol=1e-3, atol=1e-4)


def test_what_is_not_there_is_said(answer: Any, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no query '9'"):
        answer.top(query=9)
    with pytest.raises(StoreError, match="no setting 'layer' here. There are: strategy, .*layers"):
        answer.top(query=0, layer=1)

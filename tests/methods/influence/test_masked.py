"""Scores over some weights alone: all weights give the whole score, two halves add up to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from budwood.config.influence import ScoreConfig
from budwood.data.task import Row, Task
from budwood.errors import StoreError
from budwood.methods.influence.factors import Setting
from budwood.methods.influence.masked import _query, belongs, graft_scores, mask_of, masked_scores, query_weights
from budwood.methods.influence.scores import Matrix, Scores
from budwood.methods.influence.workshop import open_shop, settings_for
from budwood.params.graft import Graft, backbone_hash
from budwood.params.tree import named
from budwood.store.files import read_json, write_json
from tests.cli.conftest import budwood, model, reviews  # noqa: F401
from tests.methods.influence.toys import fit, scores, toy

CFG = SimpleNamespace(measurement="margin")


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_masks_add_up(family: str, tmp_path: Path) -> None:
    _, shop = toy(family)
    factors = fit(shop, tmp_path)
    settings = [Setting("identity"), Setting("diagonal", "0.1mean"), Setting("ekfac", "0.0001")]
    whole = scores(shop, factors, settings, np.array([2]))
    parameters = named(shop.model)
    rng = torch.Generator().manual_seed(0)
    first, second = {}, {}
    for name in shop.parameters:
        half = torch.rand(parameters[name].numel(), generator=rng) < 0.5
        first[name], second[name] = half.nonzero()[:, 0], (~half).nonzero()[:, 0]
    query = shop.train.take([2])
    for setting, want in zip(settings, whole):
        parts = []
        for index in (first, second):
            mask = mask_of(shop.maps, index)
            asked = query_weights(shop, factors, setting, query, mask, CFG)
            parts.append(masked_scores(shop, asked, mask))
        assert np.abs(parts[0]).max() > 0
        np.testing.assert_allclose(parts[0] + parts[1], want[0], rtol=1e-7, atol=1e-9 * np.abs(want).max())


def test_a_graft_of_another_model_is_told_and_one_that_does_not_fit_refused() -> None:
    _, shop = toy("bert")
    name = shop.parameters[0]
    whole = named(shop.model)[name].detach()
    facts = {"tuned": "runs/skill", "task": "reviews", "tuned_hash": backbone_hash(shop.model)}
    cut = lambda delta, **more: Graft.cut({name: torch.tensor([0])}, {name: delta}, manifest=facts | more)  # noqa: E731
    file = Path("x.graft")
    assert belongs(cut(whole), file, shop.model, "runs/full") == ""
    said = belongs(cut(whole, tuned_hash="0" * 32), file, shop.model, "runs/full")
    assert "x.graft was cut from runs/skill, and these scores are of runs/full" in said
    with pytest.raises(StoreError, match=r"cut from runs/skill .* the scored model runs/full has it in shape"):
        belongs(cut(torch.zeros(3, 5)), file, shop.model, "runs/full")
    stranger = Graft.cut({"encoder.none.weight": torch.tensor([0])}, {"encoder.none.weight": whole}, manifest=facts)
    with pytest.raises(StoreError, match=r"runs/full lacks it.*budwood influence score runs/skill --task reviews"):
        belongs(stranger, file, shop.model, "runs/full")


def halves(run: Path, path: Path) -> None:
    """whole.graft with every weight that a run scored, first.graft and second.graft with half of them each."""
    found = read_json(run / "run.json")
    shop = open_shop(settings_for(ScoreConfig(**found["given"]), found["models"][0]))
    weights = {n: w.detach() for n, w in named(shop.model).items() if n in shop.parameters}
    rng = torch.Generator().manual_seed(0)
    taken = {n: torch.rand(w.numel(), generator=rng) < 0.5 for n, w in weights.items()}
    chosen = {"whole": {n: half | ~half for n, half in taken.items()}, "first": taken}
    chosen["second"] = {n: ~half for n, half in taken.items()}
    facts = {"tuned": str(found["models"][0]), "task": "reviews", "tuned_hash": backbone_hash(shop.model)}
    for name, mask in chosen.items():
        index = {n: at.nonzero()[:, 0] for n, at in mask.items()}
        Graft.cut(index, weights, manifest=facts).save(path / f"{name}.graft")


def test_rows_that_wrote_a_graft_are_shown(
    model: Path,  # noqa: F811
    reviews: Path,  # noqa: F811
    budwood: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    rows = ["--task", reviews, "--text", "body", "--label", "stars", "--limit", 20]
    data = [*rows, "--threads", 1, "--progress", "none"]
    code, _, err = budwood("finetune", model, *data, "--max-steps", 6, "--batch-size", 8, "--out", "tuned")
    assert code == 0, err
    wish = "--queries 3 --strategy ekfac,identity --damping 0.1mean,0.01 --out scored"
    code, _, err = budwood("influence", "score", "tuned", *data, *wish.split())
    assert code == 0, err
    halves(tmp_path / "scored", tmp_path)
    kept = Scores.open(tmp_path / "scored")
    show = ["influence", "show", "scored", "--query", 2, "--top", 20, "--bottom", 0]
    for strategy, damping in (("ekfac", "0.1mean"), ("ekfac", "0.01"), ("identity", None)):
        want = kept.row(2, kept.find(strategy, damping))
        near = 1e-5 * float(np.abs(want).max())
        part = {}
        for name in ("whole", "first", "second"):
            asked = ["--strategy", strategy, *(["--damping", damping] if damping else []), "--json"]
            code, out, err = budwood(*show, *asked, "--graft", f"{name}.graft")
            assert code == 0, err
            found = json.loads(out)
            assert found["within"] == f"the weights of {name}.graft" and found["note"] == ""
            ranked = [r["score"] for r in found["top"]]
            assert ranked == sorted(ranked, reverse=True) and all("text" in r for r in found["top"])
            part[name] = np.zeros(20)
            part[name][[r["number"] for r in found["top"]]] = ranked
        np.testing.assert_allclose(part["whole"], want, rtol=1e-3, atol=near)
        np.testing.assert_allclose(part["first"] + part["second"], want, rtol=1e-3, atol=near)
        assert all(np.abs(part[n] - want).max() > 100 * near for n in ("first", "second"))
    code, out, err = budwood(*show[:-4], "--top", 1, "--graft", "first.graft")
    assert code == 0 and "counting only the weights of first.graft" in out, err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"aggregate": ("query",)}, "sums over rows. Score without --aggregate query"),
        ({"aggregate": ("query", "train")}, "without --aggregate query,train"),
        ({"checkpoints": ("a", "b")}, "averaged over 3 checkpoints. Score without --checkpoints"),
    ],
)
def test_a_graft_is_not_looked_for_in_sums_and_means(
    more: dict[str, tuple[str, ...]], told: str, tmp_path: Path
) -> None:
    given = ScoreConfig(task="toy", **more).model_dump(mode="json")
    write_json(tmp_path / "run.json", {"given": given, "models": ["m"]})
    with pytest.raises(StoreError, match=told):
        graft_scores(tmp_path, SimpleNamespace(), 0, Matrix("ekfac", "auto"), tmp_path / "x.graft")  # type: ignore[arg-type]


def test_a_query_whose_row_is_gone_is_named() -> None:
    task = Task("toy", "label", {"train": (Row("a", "w5", None, 0),), "test": (Row("b", "w6", None, 0),)}, ("x", "y"))
    assert _query(task, "b").text == "w6"
    with pytest.raises(StoreError, match="'c' is no row of 'toy' any more"):
        _query(task, "c")

"""Queries as few outer products: whole rank is the dense score, few rank nearly alike, too much memory is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import budwood as bw
from budwood.config.influence import FitConfig, ScoreConfig
from budwood.errors import ConfigError
from budwood.evaluation import matrices
from budwood.linalg.ranking import spearman_by_row
from budwood.methods.influence import asked
from budwood.methods.influence.factors import Factors, Setting
from budwood.methods.influence.precondition import Work, precondition
from budwood.methods.influence.scores import Scores
from budwood.methods.influence.thin import Thin, thin_numbers, whole
from budwood.studies.api import run
from tests.methods.influence.toys import ALL, fit, gradients, scores, toy, wide

ASKED = np.array([4, 0, 2])
SETTINGS = [Setting(s, "" if s == "identity" else "0.1mean") for s in ALL]


@pytest.mark.parametrize("hidden,inner,rank", [(48, 64, 10), (14, 14, 6)])  # by a search, and by a whole decomposition
def test_as_many_outer_products_as_tokens_are_the_dense_score(
    hidden: int, inner: int, rank: int, tmp_path: Path
) -> None:
    """Gradients are taken apart, since that takes less room, and put together again without a loss."""
    lengths = (rank, 5, rank - 1, 12, rank - 2, 9)
    _, shop = wide(lengths, hidden, inner)
    made = fit(shop, tmp_path)
    queries = np.array([4, 0, 2])
    want = scores(shop, made, SETTINGS, queries, "turn")
    cut, fewer = (Thin(3, shop.like, r) for r in (rank, rank // 2))
    got = scores(shop, made, SETTINGS, queries, "turn", blocks=cut)
    small = {m.name for m in shop.maps if whole(rank, m.out, m.into)}
    assert small == {"head.classifier"}
    apart = {key for key, sides in cut.tensors.items() if len(sides) == 2}
    assert apart == {(m.name, b) for m in shop.maps if m.name not in small for b in ("raw", "turned")} & set(
        cut.tensors
    )
    assert len(apart) >= 2 * len(shop.maps) - 3  # of the pooler and the last layer little may be left
    for mine, dense in zip(got, want):
        assert np.abs(mine - dense).max() <= 1e-9 * np.abs(dense).max()
    for mine, dense in zip(scores(shop, made, SETTINGS, queries, "turn", blocks=fewer), want):
        assert np.abs(mine - dense).max() > 1e-6 * np.abs(dense).max()


def test_thirty_two_outer_products_rank_nearly_as_gradients_of_a_higher_rank(
    tmp_path: Path, record_property: Any
) -> None:
    """Where queries have three times as many tokens; with little damping, so that four are far too few."""
    c, shop = wide(range(90, 114), 80, 96)
    made = fit(shop, tmp_path)
    queries, settings = np.array([4, 0, 23, 9]), [Setting(s, "" if s == "identity" else "0.0001mean") for s in ALL]
    grads = gradients(c, shop)
    rank = {m.name: min(int(torch.linalg.matrix_rank(grads[m.name][q])) for q in queries) for m in shop.maps}
    assert sum(rank[m.name] > 40 and not whole(32, m.out, m.columns) for m in shop.maps) >= 6
    want = scores(shop, made, settings, queries, "turn")
    near = {}
    for r in (4, 32):
        got = scores(shop, made, settings, queries, "turn", blocks=Thin(4, shop.like, r))
        near[r] = {s.strategy: float(spearman_by_row(g, w).mean()) for s, g, w in zip(settings, got, want)}
        record_property(f"spearman of rank {r}", near[r])
        for mine, dense in zip(got, want):
            assert np.abs(mine - dense).max() > 1e-6 * np.abs(dense).max()  # something is left out
    assert min(near[32].values()) >= 0.94  # the field's reference on a much larger model: 0.94
    assert near[4]["ekfac"] < 0.94


@pytest.mark.parametrize("way", ["turn", "back"])
def test_a_rank_that_saves_no_room_keeps_whole_gradients(way: str, tmp_path: Path) -> None:
    _, shop = toy("bert")
    made = fit(shop, tmp_path)
    want = scores(shop, made, SETTINGS, ASKED, way)
    most = max(max(m.out, m.columns) for m in shop.maps)
    got = scores(shop, made, SETTINGS, ASKED, way, blocks=Thin(3, shop.like, most))
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11 * np.abs(want).max())
    few = scores(shop, made, SETTINGS, ASKED, way, blocks=Thin(3, shop.like, 1))
    assert np.abs(few - want).max() > 1e-3 * np.abs(want).max()  # one outer product leaves something out


def test_memory_is_that_of_the_outer_products_or_of_the_gradient(tmp_path: Path) -> None:
    _, shop = toy("bert")
    made = fit(shop, tmp_path)
    ready = precondition(made, SETTINGS, Work(3, 6, 8.0), "turn")
    for rank in (2, 1000):
        blocks = Thin(3, shop.like, rank)
        scores(shop, made, SETTINGS, ASKED, "turn", blocks=blocks)
        held = sum(side.numel() for sides in blocks.tensors.values() for side in sides)
        assert held == 3 * thin_numbers(shop.maps, rank, ready)
    assert held == 3 * ready.numbers  # never more than whole gradients


def test_gradients_without_outer_products_are_refused_by_module(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="queries in 'dense'.*--query-rank"):
        Thin(1, torch.zeros(1), 1).put("dense", "raw", np.array([0]), torch.full((1, 20, 20), float("nan")))


@pytest.fixture(scope="module")
def entailed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """tiny-bert after a few steps of tiny-entail, and what every score of it is told."""
    common = {"task": "tiny-entail", "limit": 64, "limit_eval": 16, "threads": 1, "progress": "none"}
    out = tmp_path_factory.mktemp("thin") / "tuned"
    bw.finetune("tiny-bert", max_steps=4, out=out, **common)
    return str(out), common


def test_thirty_two_outer_products_rank_as_whole_gradients(
    entailed: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    model, common = entailed
    from budwood.studies.verbs import run_verb

    def scored(name: str, **more: Any) -> Any:
        cfg = ScoreConfig(**common, queries=("8",), out=tmp_path / name, **more)
        return run_verb("influence score", cfg, [model])

    dense = Scores.open(scored("whole").run).whole()
    given = {"factors": tmp_path / "whole"}
    found = {r: Scores.open(scored(f"rank{r}", query_rank=r, **given).run).whole() for r in (1, 4, 32, 512)}
    near = {r: float(spearman_by_row(s, dense).mean()) for r, s in found.items()}
    maps = Factors.open(tmp_path / "whole").maps  # of all but the classifier gradients are taken apart
    assert [m.name for m in maps if whole(32, m.out, m.into)] == ["head.classifier"]
    assert np.abs(found[4] - dense).max() > 1e-3 * np.abs(dense).max()
    np.testing.assert_allclose(found[32], dense, rtol=0, atol=1e-5 * np.abs(dense).max())
    assert near[1] < near[4] < near[32] and near[32] >= 0.94  # the field's reference on a much larger model: 0.94
    assert near[32] >= 0.99999 and near[512] >= 0.99999  # no query has more positions: nothing is left out


def test_a_query_is_kept_alike_alone_among_others_and_in_every_worker(
    entailed: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    model, common = entailed
    from budwood.studies.verbs import run_verb

    fitted = run_verb("influence fit", FitConfig(**common, out=tmp_path / "fit"), [model]).run
    same = {**common, "factors": fitted, "query_rank": 2, "shard_rows": 40}

    def scored(name: str, **more: Any) -> Scores:
        cfg = ScoreConfig(**{**same, **more}, out=tmp_path / name)
        return Scores.open(run_verb("influence score", cfg, [model]).run)

    few = scored("few", queries=("1",), damping=("0.1mean",))
    many = scored("many", queries=("8",), damping=("0.1mean", "1mean", "10mean", "1e-4"))
    np.testing.assert_allclose(few.whole()[0], many.whole()[0], rtol=1e-3, atol=1e-4 * np.abs(few.whole()).max())
    assert matrices.open_scores((tmp_path / "few",), ())[0].name == "ekfac (rank 2)"
    files = [scored(f"w{n}", queries=("3",), workers=n, threads=2).path / "ekfac.npy" for n in (1, 2)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_does_not_fit_is_refused(
    entailed: tuple[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, common = entailed
    with pytest.raises(ValueError, match="leave one away"):
        ScoreConfig(task="tiny-entail", query_rank=4, aggregate=("query",))
    with pytest.raises(ValueError, match="needs whole gradients"):
        ScoreConfig(task="tiny-entail", query_rank=4, per_token=True)
    with pytest.raises(ValueError, match="no effect on bm25"):
        ScoreConfig(task="tiny-entail", query_rank=4, strategy=("bm25",))
    monkeypatch.setattr(asked, "room", lambda a, also=0: 1000)
    wish = {**common, "queries": ("2",), "strategy": ("identity",), "query_rank": 8, "out": tmp_path / "x"}
    with pytest.raises(ConfigError, match="--query-rank 8 take"):
        run("influence score", model, wish.pop("task"), wish)

"""Factors and scores against loops over single rows and dense inverses, in float64, and what must not change them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from budwood.capture.coverage import cover
from budwood.capture.gradients import Question, per_example_grads
from budwood.capture.stream import PEEK, Map, Sides
from budwood.config.influence import FitConfig
from budwood.errors import ConfigError, ModelError
from budwood.linalg.kron import (
    SOLVED_BY_TORCH,
    EigenError,
    eigenbasis,
    gram_,
    inverse,
    mirrored,
    reliability,
    rotate_first,
    square_sum_,
)
from budwood.linalg.ranking import spearman_by_row
from budwood.methods.influence import coordinates, evidence, moments, pairs
from budwood.methods.influence.by_token import token_scores
from budwood.methods.influence.coordinates import Kept, Spread, choose, coordinates_of, turns_of
from budwood.methods.influence.evidence import RELIABLE, SHARES, weigh
from budwood.methods.influence.factors import Factors, Setting, settings_of
from budwood.methods.influence.itself import self_influence
from budwood.methods.influence.moments import covariances, second_moments, with_one
from budwood.methods.influence.pairs import OnDisk, Resident
from budwood.methods.influence.precondition import Work, live_shares, measurement, precondition, query_blocks
from budwood.methods.influence.sided import Sided, sided_bytes
from budwood.methods.influence.workshop import Shop, memory_budget, shop_of, sweep
from tests.cases import Case, case
from tests.methods.influence import toys
from tests.methods.influence.toys import (
    ALL,
    dense_queries,
    dense_scores,
    fit,
    gradients,
    positions,
    reading_of,
    scores,
    toy,
)
from tests.oracles import grads_by_loop, relative_error

EXACT = 1e-9
QUERIES = np.array([4, 0, 2])
SETTINGS = [Setting("identity")] + [Setting(s, d) for s in ALL[1:] for d in ("1e-08", "0.0001", "0.1mean")]


def close(got: np.ndarray, want: np.ndarray, tolerance: float = EXACT) -> bool:
    return float(np.abs(got - want).max()) <= tolerance * float(np.abs(want).max())


@pytest.mark.parametrize("family", ["bert", "albert", "gpt2", "distilbert", "llama"])
@pytest.mark.parametrize("way", ["turn", "back"])
def test_scores_equal_the_dense_inverse(family: str, way: str, tmp_path: Path) -> None:
    c, shop = toy(family)
    factors = fit(shop, tmp_path)
    train = gradients(c, shop)
    measured = gradients(c, shop, lambda z, t: -c.objective.margin(z, t))
    query = {k: v[QUERIES] for k, v in measured.items()}
    got = scores(shop, factors, SETTINGS, QUERIES, way)
    for i, setting in enumerate(SETTINGS):
        # a damping of 1e-8 under eigenvalues of order 1 leaves fewer exact digits in the dense inverse
        tolerance = 1e-6 if setting.damping == "1e-08" else EXACT
        assert close(got[i], dense_scores(query, train, factors, setting), tolerance), setting


@pytest.mark.parametrize("family,way", [("bert", "turn"), ("gpt2", "back"), ("llama", "turn")])
def test_embeddings_and_norms_have_a_diagonal_on_demand(family: str, way: str, tmp_path: Path) -> None:
    both = ("embedding", "layernorm")
    c, shop = toy(family, diagonal_for=both)
    assert {m.kind for m in shop.maps} >= {"embedding", "rmsnorm" if family == "llama" else "layernorm"}
    assert not set(shop.left.values()) & {"an embedding", "a norm", "a layernorm", "a rmsnorm"}
    factors = fit(shop, tmp_path)
    train = gradients(c, shop)
    for m in shop.maps:
        if m.diagonal:
            assert relative_error(factors.tensor(f"diagonal/{m.name}"), train[m.name].square().mean(0)) < EXACT
    measured = gradients(c, shop, lambda z, t: -c.objective.margin(z, t))
    few = [Setting("identity"), Setting("diagonal", "0.0001"), Setting("kfac", "0.1mean"), Setting("ekfac", "0.1mean")]
    got = scores(shop, factors, few, QUERIES, way)
    itself = self_influence(shop, precondition(factors, few, Work(1, 1, 1.0), "turn"), np.arange(6))
    for i, setting in enumerate(few):
        both = {k: torch.cat([v[QUERIES], train[k]]) for k, v in measured.items()}  # queries, then the rows themselves
        want = dense_scores(both, train, factors, setting)
        assert close(got[i], want[:3]), setting
        assert close(itself[i], np.diagonal(want[3:])), setting


@pytest.mark.parametrize(
    "family,objective",
    [("bert", "lm"), ("gpt2", "lm"), ("bert", "span"), ("bert", "tokens"), ("bert", "words"), ("gpt2", "words")],
)
def test_other_objectives(family: str, objective: str, tmp_path: Path) -> None:
    c, shop = toy(family, objective)
    factors = fit(shop, tmp_path)
    train = gradients(c, shop)
    got = scores(shop, factors, SETTINGS[:4:3], QUERIES, question="loss")
    for i, setting in enumerate(SETTINGS[:4:3]):
        want = dense_scores({k: v[QUERIES] for k, v in train.items()}, train, factors, setting)
        assert close(got[i], want), setting


@pytest.mark.parametrize(
    "family,objective,single",
    [
        ("bert", "head", {"pooler.dense", "head.classifier"}),
        ("albert", "head", {"pooler", "head.classifier"}),  # every map at work in all layers
        ("gpt2", "lm", set()),
    ],
)
def test_scores_of_tokens_equal_a_loop_over_positions(
    family: str, objective: str, single: set[str], tmp_path: Path
) -> None:
    """g_t' V a_t of every token, V being the query's gradient times the dense inverse; what maps of a single position
    give stands in a column before the tokens, alone.
    """
    c, shop = toy(family, objective)
    assert single <= {m.name for m in shop.maps}
    factors = fit(shop, tmp_path)
    few = [Setting("identity"), *(Setting(s, "0.1mean") for s in ALL[1:])]
    ready = precondition(factors, few, Work(3, 6, 8.0), "back")
    blocks = Resident(3, shop.like)
    asked = "margin" if objective == "head" else "loss"
    query_blocks(shop, ready, shop.train, QUERIES, measurement(shop.read.objective, asked), blocks.put)
    order = np.array([3, 0, 5, 1, 2, 4])
    got = token_scores(shop, ready, blocks, 3, order)
    train = gradients(c, shop)
    measured = gradients(c, shop, lambda z, t: -c.objective.margin(z, t)) if asked == "margin" else train
    seen = [positions(c, shop, int(n)) for n in order]
    for setting, mine in zip(few, got):
        solved = dense_queries({k: v[QUERIES] for k, v in measured.items()}, train, factors, setting)
        rows = []
        for n, uses in zip(order, seen):
            row = np.zeros((3, 1 + int(shop.train.lengths_N[n])))
            for name, v_QOI in solved.items():
                for a_TI, g_TO in uses[name]:
                    assert len(a_TI) == (1 if name in single else row.shape[1] - 1)
                    for t, (a_I, g_O) in enumerate(zip(a_TI, g_TO)):
                        row[:, 0 if name in single else 1 + t] += ((v_QOI @ a_I) @ g_O).numpy()
            rows.append(row)
        assert close(mine, np.concatenate(rows, 1)), setting
        # nothing that would look the same the other way round or elsewhere
        turned = np.concatenate([np.concatenate([r[:, :1], r[:, :0:-1]], 1) for r in rows], 1)
        assert not close(mine, turned, 0.1) and bool(single) == any(r[:, 0].any() for r in rows)


def test_covariances_and_their_counts() -> None:
    c, shop = toy("bert")
    sums = covariances(shop, np.arange(6))
    positions = sum(int(n) for n in shop.train.lengths_N)
    for m in shop.maps:
        single = m.name in ("pooler.dense", "head.classifier")
        assert sums[f"nG/{m.name}"] == (6 if single else positions)
        if m.bias:
            assert sums[f"A/{m.source}"][-1, -1] == (6 if single else positions)
    assert {m.source for m in shop.maps if ".attention.self." in m.name} == {
        f"encoder.layer.{i}.attention.self.query" for i in range(3)
    }
    parts = [covariances(shop, np.array(i)) for i in ([0, 3], [5], [1, 2, 4])]
    for key, value in sums.items():
        assert relative_error(sum(p[key] for p in parts), value) < EXACT


@pytest.mark.parametrize("family", ["bert", "albert", "gpt2"])
def test_inputs_of_an_exact_fit_count_by_their_output_gradients(family: str) -> None:
    """Against a loop over labels, rows, maps and positions, each at its chance."""
    c, shop = toy(family, fisher="exact")
    sums = covariances(shop, np.arange(6))
    want = {k: torch.zeros_like(v) for k, v in sums.items() if k.startswith(("A/", "nA/"))}
    for k in range(3):

        def use(_: int, m: Map, s: Sides, k: int = k) -> None:
            for a_I, g_O in zip(with_one(s.a_BTI, m)[0], s.g_BTO[0]):
                want[f"A/{m.source}"] += g_O @ g_O * torch.outer(a_I, a_I)  # noqa: B023
                want[f"nA/{m.source}"] += g_O @ g_O  # noqa: B023

        for n in range(6):
            chance = c.objective.logits(c.model, c.batch([n])).softmax(1)[0, k].item()
            root = Question(value=lambda z, t, k=k, w=chance**0.5: w * z.log_softmax(1)[:, k])
            sweep(shop, shop.train, np.array([n]), lambda batch, root=root: (root,), use)
    for key, value in want.items():
        assert relative_error(sums[key], value) <= 1e-12, key


def test_exact_labels_equal_enumeration(tmp_path: Path) -> None:
    c, shop = toy("bert", fisher="exact")
    factors = fit(shop, tmp_path)
    want = {m.name: 0.0 for m in shop.maps}
    for k in range(3):
        grads = gradients(c, shop, lambda z, t, k=k: z.log_softmax(1)[:, k])
        chance = torch.cat([c.objective.logits(c.model, c.batch([i])).softmax(1)[:, k] for i in range(6)]).detach()
        for m in shop.maps:
            b = factors.basis(m.name)
            want[m.name] = want[m.name] + ((b.q_OO.T @ grads[m.name] @ b.q_II).square() * chance[:, None, None]).mean(0)
    for m in shop.maps:
        assert relative_error(factors.tensor(f"ekfac/{m.name}"), want[m.name]) <= 1e-12
    again = second_moments(shop, np.arange(6), factors.bases, True)
    assert all(torch.equal(again[f"ekfac/{m.name}"] / 6, factors.tensor(f"ekfac/{m.name}")) for m in shop.maps)


@pytest.mark.parametrize("family", ["bert", "albert", "gpt2"])
def test_output_gradients_of_exact_labels_equal_enumeration(family: str, tmp_path: Path) -> None:
    """Their covariance, against a loop over labels, rows and positions that plain hooks see."""
    c, shop = toy(family, fisher="exact")
    factors = fit(shop, tmp_path)
    want = {m.name: torch.zeros(m.out, m.out, dtype=torch.float64) for m in shop.maps}
    count = dict.fromkeys(want, 0)
    for n in range(6):
        with torch.no_grad():
            chance_K = c.objective.logits(c.model, c.batch([n])).softmax(1)[0].tolist()
        for k, chance in enumerate(chance_K):
            for name, uses in positions(c, shop, n, lambda z, t, k=k: z.log_softmax(1)[:, k]).items():
                for _, g_TO in uses:
                    for g_O in g_TO:
                        want[name] += chance * torch.outer(g_O, g_O)
                    count[name] += len(g_TO) if k == 0 else 0  # a position is one, whatever its labels
    for name, total in want.items():
        assert relative_error(factors.tensor(f"G/{name}"), total / count[name]) <= 1e-12, name


def test_mean_of_second_moments_does_not_depend_on_the_basis(tmp_path: Path) -> None:
    factors = fit(toy("gpt2")[1], tmp_path)
    for m in factors.maps:
        means = [float(factors.tensor(f"{k}/{m.name}").mean()) for k in ("ekfac", "diagonal")]
        assert means[0] == pytest.approx(means[1], rel=1e-10)
        b = factors.basis(m.name)
        for q, values, whole in ((b.q_II, b.l_I, f"A/{m.source}"), (b.q_OO, b.l_O, f"G/{m.name}")):
            assert relative_error(q @ values.diag() @ q.T, factors.tensor(whole)) <= 1e-10


def test_batch_size_order_and_file_change_nothing(tmp_path: Path) -> None:
    _, shop = toy("bert")
    factors = fit(shop, tmp_path)
    want = scores(shop, factors, SETTINGS, QUERIES)
    assert close(scores(shop, factors, SETTINGS, QUERIES, most=1), want)
    assert close(scores(shop, factors, SETTINGS, QUERIES[::-1].copy())[:, ::-1], want)
    work = Work(3, len(shop.train), 8.0)
    disk = OnDisk.at(tmp_path / "blocks.bin", precondition(factors, SETTINGS, work), 3, shop.like)
    assert np.array_equal(scores(shop, factors, SETTINGS, QUERIES, blocks=disk), want)


def test_padding_changes_nothing_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors and scores of rows of 5 to 28 tokens: all padded to the longest, in buckets, and one by one."""
    real = Shop.batches
    cuts: dict[str, Callable[..., list[np.ndarray]]] = {
        "padded": lambda shop, features, order, *_, **__: [order],
        "bucketed": lambda shop, features, order, *_, **__: real(shop, features, order, tokens=100),
        "single": lambda shop, features, order, *_, **__: [order[[i]] for i in range(len(order))],
    }
    c, shop = toy("bert", rows=24)
    c.model.float()
    found = {}
    for cut, batches in cuts.items():
        monkeypatch.setattr(Shop, "batches", batches)
        found[cut] = scores(shop, fit(shop, tmp_path / cut), SETTINGS, np.array([4, 0, 2, 9, 17]))
    assert 1 < len(cuts["bucketed"](shop, shop.train, np.arange(24))) < 24
    for cut in ("bucketed", "single"):
        for setting, got, want in zip(SETTINGS, found[cut], found["padded"]):
            assert spearman_by_row(got, want).min() >= 0.9999, (cut, setting)
            assert close(got, want, 1e-4), (cut, setting)


@pytest.mark.parametrize("family", ["bert", "albert", "gpt2", "llama"])
@pytest.mark.parametrize("way", ["turn", "back"])
def test_queries_kept_as_their_sides_score_alike(family: str, way: str, tmp_path: Path) -> None:
    _, shop = toy(family, diagonal_for=("layernorm",))
    factors = fit(shop, tmp_path)
    want = scores(shop, factors, SETTINGS, QUERIES, way)
    for most in (256, 2):  # more rows than queries, and fewer
        sided = Sided(len(QUERIES), shop.like)
        assert close(scores(shop, factors, SETTINGS, QUERIES, way, most=most, blocks=sided), want)
        assert {block for _, block in sided.sides} >= {"raw"} | ({"turned"} if way == "turn" else set())
        assert not set(sided.sides) & set(sided.tensors)
        if way == "back":
            assert any(block.startswith("back") for _, block in sided.tensors)


def test_sides_are_counted_by_the_positions_that_are_there(tmp_path: Path) -> None:
    _, shop = toy("albert")
    factors = fit(shop, tmp_path)
    live = live_shares(shop)
    assert max(live.values()) > 1  # one map at work in several layers
    work = Work(len(shop.train), len(shop.train), 8.0, live)
    ready = precondition(factors, SETTINGS, work, "turn")
    sided = Sided(len(shop.train), shop.like)
    every, question = np.arange(len(shop.train)), measurement(shop.read.objective, "margin")
    query_blocks(shop, ready, shop.train, every, question, sided.put, put_sides=sided.put_sides)
    numbers = sum(t.numel() for each in sided.sides.values() for pair in each if pair for t in pair)
    counted = sided_bytes(ready, shop.train)
    assert counted is not None
    assert 0.8 < numbers / (counted / 4) < 1.25
    longer = dataclasses.replace(ready, live={name: 48 * share for name, share in live.items()})
    assert sided_bytes(longer, shop.train) is None


def test_a_map_without_a_gradient_has_no_sides_and_scores_nothing() -> None:
    sided = Sided(2, torch.zeros(0))
    sided.put_sides("m", "raw", np.array([1]), torch.ones(1, 3, 2), torch.arange(12.0).view(1, 3, 4))
    made_QOI = sided.rows("m", "raw", 0, 2).view(2, 2, 4)
    assert not made_QOI[0].any()
    assert torch.equal(made_QOI[1], torch.tensor([12.0, 15.0, 18.0, 21.0]).expand(2, 4))
    assert torch.equal(sided.rows("m", "raw", 1, 2, slice(1, 2)), made_QOI[1:, 1])


def test_rows_of_one_position_are_scored_without_their_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shop = toy("bert")
    factors = fit(shop, tmp_path)
    single: list[str] = []
    real = pairs.Meeting._meet_single
    monkeypatch.setattr(
        pairs.Meeting, "_meet_single", lambda self, m, *rest: single.append(m.name) or real(self, m, *rest)
    )
    got = scores(shop, factors, SETTINGS, QUERIES)
    assert single and all("layer.0" not in name for name in single)
    met = len(single)
    want = scores(shop, factors, SETTINGS, QUERIES, most=2)  # fewer rows than queries: gradients are made
    assert len(single) == met
    assert close(got, want)


@pytest.mark.parametrize("held,together", [(1, {1}), (1 << 30, {4, 2})])
def test_batches_that_wait_for_the_queries_change_nothing(
    held: int, together: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shop = toy("bert")
    factors = fit(shop, tmp_path)
    want = scores(shop, factors, SETTINGS, QUERIES)
    met: list[int] = []
    real = pairs.Meeting._meet

    def meet(self: Any, m: Any, terms: Any, sides: Any) -> Any:
        met.append(sum(len(g_BTO) for g_BTO, _ in sides))
        return real(self, m, terms, sides)

    monkeypatch.setattr(pairs.Meeting, "_meet", meet)
    monkeypatch.setattr(toys, "Meeting", functools.partial(pairs.Meeting, held=held))
    monkeypatch.setattr(Shop, "batches", lambda self, features, order, most: [order[[i]] for i in range(len(order))])
    assert close(scores(shop, factors, SETTINGS, QUERIES, most=4), want)
    assert set(met) == together


def test_one_token_that_is_read_leaves_the_last_block_little_to_turn(tmp_path: Path) -> None:
    _, shop = toy("bert")
    shares = live_shares(shop)
    length = float(shop.train.lengths_N.mean())
    last = max(int(n.split(".")[2]) for n in shares if n.startswith("encoder.layer"))
    assert shares["encoder.layer.0.intermediate.dense"] == 1
    assert shares[f"encoder.layer.{last}.output.dense"] < 0.5
    factors = fit(shop, tmp_path)
    one = [Setting("ekfac", "0.1mean")]
    terms = precondition(factors, one, Work(3, 9, length, shares)).terms
    assert not terms["encoder.layer.0.intermediate.dense"][0].turned
    assert terms[f"encoder.layer.{last}.output.dense"][0].turned


def test_self_influence_is_the_diagonal(tmp_path: Path) -> None:
    _, shop = toy("albert")
    factors = fit(shop, tmp_path)
    every = np.arange(len(shop.train))
    ready = precondition(factors, SETTINGS, Work(1, 1, 1.0), "turn")
    for question in ("loss", "margin"):
        pairs = scores(shop, factors, SETTINGS, every, question=question)
        got = self_influence(shop, ready, every, question)
        assert close(got, np.stack([np.diagonal(p) for p in pairs]))


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("positions", [1, 3, 9, 64])
def test_every_order_of_contraction_gives_the_same(positions: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    g, a = (torch.randn(4, positions, n, dtype=torch.float64) for n in (48, 65))
    q_g, q_a = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0] for n in (48, 65))
    want = (q_g.T @ torch.einsum("bto,bti->boi", g, a) @ q_a).square().sum(0)
    g, a, q_g, q_a = (x.to(dtype) for x in (g, a, q_g, q_a))
    first, last = torch.zeros(2, 48, 65, dtype=dtype)
    square_sum_(first, g @ q_g, a @ q_a)
    square_sum_(last, g, a, (q_g, q_a))
    assert relative_error(first, last) <= tolerance
    assert relative_error(first, want) <= tolerance and relative_error(last, want) <= tolerance


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_second_moments_of_a_model_are_the_same_by_either_order(
    dtype: torch.dtype, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, shop = toy("bert")
    c.model.to(dtype)
    bases, found = fit(shop, tmp_path).bases, []
    for first in (True, False):
        monkeypatch.setattr(moments, "rotate_first", lambda *sizes, first=first: first)
        found.append(second_moments(shop, np.arange(6), bases, False))
    assert all(relative_error(found[0][k], found[1][k]) <= tolerance for k in found[0])
    assert any(not torch.equal(found[0][k], found[1][k]) for k in found[0])  # there were two orders


def test_the_cheaper_order_changes_at_the_break_even() -> None:
    border = 768 * 769 * (768 + 769) / (768**2 + 769**2)
    assert rotate_first(int(border) - 1, 768, 769) and not rotate_first(int(border) + 1, 768, 769)


def test_symmetric_products() -> None:
    for columns in (1, 95, 200, 700):
        x, total = torch.randn(9, columns, dtype=torch.float64), torch.zeros(columns, columns, dtype=torch.float64)
        gram_(total, x)
        gram_(total, 2 * x)
        assert relative_error(mirrored(total), 5 * x.T @ x) < 1e-12


def test_eigenbasis_names_what_is_not_finite() -> None:
    with pytest.raises(EigenError, match="layer.7.*1 entries"):
        eigenbasis(torch.tensor([[1.0, 0.0], [0.0, float("nan")]]), "layer.7")
    vectors, values = eigenbasis(torch.zeros(3, 3), "flat")
    assert torch.equal(values, torch.zeros(3, dtype=torch.float64)) and vectors.shape == (3, 3)
    assert float(inverse(torch.zeros(1), 0.0)) == 0


@pytest.mark.parametrize("wide", [SOLVED_BY_TORCH, SOLVED_BY_TORCH + 1])
def test_either_solver_gives_an_orthogonal_basis(wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.randn(wide, wide // 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix, asked, real = half @ half.T, [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda x: asked.append(x) or real(x))
    vectors, values = eigenbasis(matrix, "wide")
    assert bool(asked) == (wide <= SOLVED_BY_TORCH)
    assert relative_error(vectors @ values.diag() @ vectors.T, matrix) < 1e-12
    assert relative_error(vectors.T @ vectors, torch.eye(wide, dtype=torch.float64)) < 1e-12
    assert relative_error(values, real(matrix)[0].clamp_min(0)) < 1e-12


def test_a_wide_factor_that_is_not_solved_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import scipy.linalg

    real, given = scipy.linalg.eigh, []

    def eigh(x: np.ndarray, **settings: Any) -> Any:
        given.append(x)
        if len(given) == 1:
            raise np.linalg.LinAlgError("no convergence")
        return real(x, **settings)

    monkeypatch.setattr(scipy.linalg, "eigh", eigh)
    matrix = torch.eye(SOLVED_BY_TORCH + 1, dtype=torch.float64)
    _, values = eigenbasis(matrix, "wide")
    assert len(given) == 2 and np.diag(given[1]).min() > 1
    assert relative_error(values, torch.ones(len(matrix), dtype=torch.float64)) < 1e-9


def test_a_solver_that_fails_is_tried_again_with_more_on_the_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix, real, given = half @ half.T, torch.linalg.eigh, []

    def solve(fails: int) -> Callable[[Tensor], Any]:
        def eigh(x: Tensor) -> Any:
            given.append(x)
            if len(given) <= fails:
                raise torch.linalg.LinAlgError("no convergence")
            return real(x)

        return eigh

    monkeypatch.setattr(torch.linalg, "eigh", solve(1))
    vectors, values = eigenbasis(matrix, "layer.7")
    assert len(given) == 2 and torch.equal(given[0], matrix) and (given[1] - matrix).diagonal().min() > 0
    assert relative_error(vectors @ values.diag() @ vectors.T, matrix) < 1e-6
    monkeypatch.setattr(torch.linalg, "eigh", solve(100))
    given.clear()
    with pytest.raises(EigenError, match=r"layer\.7"):
        eigenbasis(matrix, "layer.7")


class Attention(nn.Module):
    """A classifier around `nn.MultiheadAttention`, which applies its matrices without calling their modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.classifier = nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> object:
        x = self.embed(input_ids)
        padding = None if attention_mask is None else attention_mask == 0
        mixed, _ = self.attend(x, x, x, key_padding_mask=padding, need_weights=False)
        return type("Out", (), {"logits": self.classifier(mixed[:, 0])})()


def by_hand(model: Attention, ids_T: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Logits of one row, and (input, output) of the three matrices, with attention written out."""
    attend, x = model.attend, model.embed(ids_T)
    inside = nn.functional.linear(x, attend.in_proj_weight, attend.in_proj_bias)
    q, k, v = (part.view(len(x), 2, -1).transpose(0, 1) for part in inside.chunk(3, 1))
    mixed = ((q @ k.transpose(1, 2) / q.shape[2] ** 0.5).softmax(2) @ v).transpose(0, 1).reshape(x.shape)
    out = nn.functional.linear(mixed, attend.out_proj.weight, attend.out_proj.bias)
    logits = model.classifier(out[:1])
    seen = {"attend.in_proj_weight": (x, inside), "attend.out_proj": (mixed, out), "classifier": (out[:1], logits)}
    return logits, seen


class Pictures(nn.Module):
    """A classifier that looks at words through a Conv2d; what lies behind the end of a row is 0 and has no part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 6)
        self.look = nn.Conv2d(1, 5, kernel_size=(3, 6), padding=(1, 0))
        self.classifier = nn.Linear(5, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> object:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        seen = self.look((self.embed(input_ids) * mask[..., None])[:, None])[..., 0]
        seen = torch.tanh(seen) * mask[:, None]
        return type("Out", (), {"logits": self.classifier(seen.sum(2))})()


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "make,weights", [(Attention, {"attend.out_proj.weight", "attend.in_proj_weight"}), (Pictures, {"look.weight"})]
)
def test_gradients_of_attention_and_convolutions_equal_the_loop(
    make: Any, weights: set[str], dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    c = dataclasses.replace(case("bert", "head", rows=5), model=make().to(dtype))
    coverage = cover(c.model, c.objective, c.batch())
    assert weights <= set(coverage.hooked)
    want = grads_by_loop(c, range(4))
    got = per_example_grads(c.model, c.objective, c.batch(list(range(4))), coverage=coverage)
    assert got.keys() == want.keys()
    assert all(relative_error(got[n], want[n]) <= tolerance for n in got)


class Patched(nn.Module):
    """A classifier with a linear layer for LoRA to wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 6)
        self.inner = nn.Linear(6, 5)
        self.classifier = nn.Linear(5, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> object:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        seen = torch.tanh(self.inner(self.embed(input_ids))) * mask[..., None]
        return type("Out", (), {"logits": self.classifier(seen.sum(1))})()


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    model = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["inner"]), Patched())
    for p in model.parameters():
        p.requires_grad_(True)
    nn.init.normal_(model.inner.lora_B["default"].weight)  # 0 at first: no gradient would reach the other half
    return model


def toy_around(model: nn.Module, fisher: str = "empirical") -> tuple[Case, Shop]:
    """A classifier's case and shop."""
    c = dataclasses.replace(case("bert", "head", rows=6), model=model.double())
    settings = FitConfig(task="toy", fisher=fisher, strategy=ALL)
    return c, shop_of(reading_of(model, c.objective, ("a", "b", "c")), c.features, settings)


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_factors_of_attention_equal_attention_written_out(fisher: str, tmp_path: Path) -> None:
    """Covariances and second moments of matrices that `nn.MultiheadAttention` applies without calling a module."""
    torch.manual_seed(0)
    model = Attention()
    c, shop = toy_around(model, fisher)
    factors = fit(shop, tmp_path)
    names = {"attend.in_proj_weight", "attend.out_proj", "classifier"}
    assert {m.name for m in factors.maps} == names and all(m.bias for m in factors.maps)
    sums = {f"{part}/{name}": 0.0 for part in ("A", "nA", "G", "nG", "ekfac", "diagonal") for name in names}
    for n in range(6):
        ids_T, label = torch.as_tensor(shop.train.piece("input_ids", n)).long(), int(shop.train.fixed["label"][n])
        logits, seen = by_hand(model, ids_T)
        assert relative_error(logits.detach(), c.objective.logits(model, c.batch([n])).detach()) < 1e-14
        surprise_K = -logits.log_softmax(1)[0]
        chances = dict(enumerate((-surprise_K).exp().tolist())) if fisher == "exact" else {label: 1.0}
        for k, chance in chances.items():
            grads = torch.autograd.grad(surprise_K[k], [out for _, out in seen.values()], retain_graph=True)
            for (name, (x_TI, _)), g_TO in zip(seen.items(), grads):
                a_TI = torch.cat([x_TI.detach(), x_TI.new_ones(len(x_TI), 1)], 1)
                # what `covariances` says: inputs of exact labels count by their output gradients
                weight_T = g_TO.square().sum(1) * chance if fisher == "exact" else a_TI.new_ones(len(a_TI))
                sums[f"A/{name}"] += (a_TI * weight_T[:, None]).T @ a_TI
                sums[f"nA/{name}"] += float(weight_T.sum())
                sums[f"G/{name}"] += chance * g_TO.T @ g_TO
                sums[f"nG/{name}"] += chance * len(g_TO)
                b = factors.basis(name)
                sums[f"ekfac/{name}"] += chance * (b.q_OO.T @ g_TO.T @ a_TI @ b.q_II).square() / 6
                sums[f"diagonal/{name}"] += chance * (g_TO.T @ a_TI).square() / 6
    for name in names:
        for part in ("A", "G"):
            want = sums[f"{part}/{name}"] / sums[f"n{part}/{name}"]
            assert relative_error(factors.tensor(f"{part}/{name}"), want) < 1e-12, (part, name)
        for part in ("ekfac", "diagonal"):
            assert relative_error(factors.tensor(f"{part}/{name}"), sums[f"{part}/{name}"]) < 1e-12, (part, name)


@pytest.mark.parametrize("make,count", [(Attention, 3), (Pictures, 2), (lora, 4)])
def test_attention_convolutions_and_lora_equal_the_dense_inverse(make: Any, count: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    c, shop = toy_around(make())
    assert len(shop.maps) == count
    factors = fit(shop, tmp_path)
    train = gradients(c, shop)
    query = {k: v[QUERIES] for k, v in gradients(c, shop, lambda z, t: -c.objective.margin(z, t)).items()}
    chosen = [Setting("identity"), *(Setting(s, "0.1mean") for s in ALL[1:])]
    for way in ("turn", "back"):
        got = scores(shop, factors, chosen, QUERIES, way)
        for i, setting in enumerate(chosen):
            assert close(got[i], dense_scores(query, train, factors, setting)), (way, setting)


def test_tokens_of_attention_equal_attention_written_out(tmp_path: Path) -> None:
    """Attention has its positions first and its rows second: what a token gives stands at its place all the same."""
    torch.manual_seed(0)
    c, shop = toy_around(Attention())
    factors = fit(shop, tmp_path)
    few = [Setting("identity"), Setting("ekfac", "0.1mean")]
    ready = precondition(factors, few, Work(3, 6, 8.0), "back")
    blocks = Resident(3, shop.like)
    query_blocks(shop, ready, shop.train, QUERIES, measurement(shop.read.objective, "loss"), blocks.put)
    got = token_scores(shop, ready, blocks, 3, np.arange(6))
    train = gradients(c, shop)
    for setting, mine in zip(few, got):
        solved = dense_queries({k: v[QUERIES] for k, v in train.items()}, train, factors, setting)
        rows = []
        for n in range(6):
            ids_T, label = torch.as_tensor(shop.train.piece("input_ids", n)).long(), int(shop.train.fixed["label"][n])
            logits, seen = by_hand(c.model, ids_T)
            grads = torch.autograd.grad(-logits.log_softmax(1)[0, label], [out for _, out in seen.values()])
            rows.append(np.zeros((3, 1 + len(ids_T))))
            for (name, (x_TI, _)), g_TO in zip(seen.items(), grads):
                a_TI = torch.cat([x_TI.detach(), x_TI.new_ones(len(x_TI), 1)], 1)
                at = slice(0, 1) if name == "classifier" else slice(1, None)
                rows[-1][:, at] += torch.einsum("qoi,ti,to->qt", solved[name], a_TI, g_TO).numpy()
        assert close(mine, np.concatenate(rows, 1)), setting


def test_settings_and_dampings(tmp_path: Path) -> None:
    _, shop = toy("bert")
    factors = fit(shop, tmp_path)
    assert [s.text for s in settings_of(("ekfac", "identity"), ("auto", "0.1"))] == [
        "ekfac@auto",
        "ekfac@0.1",
        "identity",
    ]
    name = shop.maps[0].name
    mean = float(factors.tensor(f"ekfac/{name}").mean())
    assert factors.damping(Setting("ekfac", "auto"), name) == pytest.approx(10 * mean)
    assert factors.damping(Setting("ekfac", "0.1mean"), name) == pytest.approx(0.1 * mean)
    assert factors.damping(Setting("ekfac", "0.001"), name) == 0.001
    with pytest.raises(ConfigError, match="model_hash.*other.*now"):
        factors.check({"model_hash": "other"})


def test_evidence_asks_for_damping_where_halves_differ() -> None:
    torch.manual_seed(0)
    one, other = (torch.distributions.Chi2(0.2).sample((50, 80)).double() for _ in range(2))
    found = weigh([(one, other)])
    agreements = [x["agreement"] for x in found["sweep"]]
    assert agreements == sorted(agreements) and [x["share"] for x in found["sweep"]] == list(SHARES)
    assert found["best"] > SHARES[0] and agreements[0] < RELIABLE < max(agreements)
    same = torch.logspace(-3, 3, 4000).double().view(50, 80)
    assert weigh([(same, same)])["best"] == SHARES[0]  # halves agree: the least is enough


def test_evidence_wants_agreement_at_all_larger_shares_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agreement falls and rises again on real models: a share that agrees below others that do not is not taken."""
    known = {10.0: 0.97, 30.0: 0.90, 100.0: 0.96}
    monkeypatch.setattr(evidence, "reliability", lambda a, b, damping: (known[damping], 1.0, 1.0))
    ones = torch.ones(2, 4)
    assert weigh([(ones, ones)])["best"] == 100
    known[30.0] = 0.95
    assert weigh([(ones, ones)])["best"] == 10
    known[100.0] = 0.90
    assert weigh([(ones, ones)])["best"] == 100  # none agrees: the most there is


def test_damping_agrees_only_where_it_is_large_enough() -> None:
    torch.manual_seed(0)
    one, other = (torch.distributions.Chi2(1.0).sample((4000,)).double() for _ in range(2))
    agreement = lambda c, a, b: c / (a * b) ** 0.5
    assert agreement(*reliability(one, other, 1e9)) == pytest.approx(1.0)
    assert agreement(*reliability(one, other, 1e-3)) < 0.5


def test_rows_without_a_finite_loss_are_named_and_left_out_on_demand() -> None:
    c, shop = toy("bert")
    word = int(shop.train.piece("input_ids", 3)[1])
    broken = [n for n in range(6) if word in shop.train.piece("input_ids", n)]
    sound = np.array([n for n in range(6) if n not in broken])
    assert broken and len(sound)
    want = covariances(shop, sound)
    with torch.no_grad():
        c.model.get_input_embeddings().weight[word] = float("nan")
    with pytest.raises(ModelError) as told:
        covariances(shop, np.arange(6))
    assert [n for n in range(6) if f"'{shop.train.ids[n]}'" in str(told.value)] == broken
    _, kept = toy("bert", skip_nan=True)
    with torch.no_grad():
        kept.model.get_input_embeddings().weight[word] = float("nan")
    got = covariances(kept, np.arange(6))
    assert got.keys() == want.keys() and all(relative_error(got[k], want[k]) < EXACT for k in want)
    assert kept.skipped == {shop.train.ids[n] for n in broken}


def test_memory_and_missing_factors(tmp_path: Path) -> None:
    assert memory_budget("800MB") == 800_000_000
    with pytest.raises(ConfigError, match="lots"):
        memory_budget("lots")
    from budwood.errors import StoreError

    with pytest.raises(StoreError, match="influence fit"):
        Factors.open(tmp_path)


def test_positions_without_gradient_are_left_out_and_no_others() -> None:
    generator = torch.Generator().manual_seed(0)
    a_BTI, g_BTO = torch.randn(3, 8, 4, generator=generator), torch.randn(3, 8, 20, generator=generator)
    hidden = g_BTO.clone()
    hidden[..., :PEEK] = 0  # what is seen at first glance is not all there is
    for g in (g_BTO, hidden):
        assert Sides(a_BTI, g, None).live()[0] is g
        few = g.clone()
        few[:, 2:] = 0
        few[1, 0] = 0
        left_BTO, right_BTI = Sides(a_BTI, few, None).live()
        assert left_BTO.shape == (3, 2, 20)
        want = torch.einsum("bto,bti->boi", few, a_BTI)
        assert torch.allclose(torch.einsum("bto,bti->boi", left_BTO, right_BTI), want, atol=1e-6)


def test_embeddings_and_norms_by_token_and_by_coordinate(tmp_path: Path) -> None:
    c, shop = toy("bert", diagonal_for=("embedding", "layernorm"))
    factors = fit(shop, tmp_path)
    setting = Setting("ekfac", "0.1mean")
    ready = precondition(factors, [setting], Work(3, 6, 8.0), "back")
    blocks = Resident(3, shop.like)
    query_blocks(shop, ready, shop.train, QUERIES, measurement(shop.read.objective, "margin"), blocks.put)
    found = token_scores(shop, ready, blocks, 3, np.arange(6))[0]
    ends = np.cumsum(shop.train.lengths_N + 1)
    by_row = np.stack([part.sum(1) for part in np.split(found, ends[:-1], axis=1)], 1)
    assert close(by_row, scores(shop, factors, [setting], QUERIES)[0])
    kept = {}
    for m in shop.maps:
        some = torch.arange(0, m.out * m.columns, 3)
        kept[m.name] = Kept(some, torch.ones(len(some)), torch.ones(len(some)), m.columns)
    got = coordinates_of(shop, shop.train, np.arange(1), Question(), turns_of(shop.maps, factors.bases, kept), kept)
    whole = gradients(c, shop)
    want = []
    for m in shop.maps:
        one = whole[m.name][0]
        if not m.diagonal:
            one = factors.bases[m.name].q_OO.T @ one @ factors.bases[m.name].q_II
        want.append(one.flatten()[::3])
    assert relative_error(got[0].double(), torch.cat(want)) < 1e-6


def test_coordinates_that_need_an_eigenvector_for_themselves_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three columns, and a diagonal of a little more than the third that would need two vectors for every number."""
    monkeypatch.setattr(coordinates, "SPARED", 0.02)
    energy = torch.zeros(40, 30)
    energy[:20, :2] = torch.linspace(2, 1, 20)[:, None]
    energy[:20, 2] = 0.01
    energy[0, 2] = 5
    energy[20:, 3:23] = 0.02 * torch.eye(20)
    ones = torch.ones_like(energy)
    spread = Spread({"m": energy.sqrt()}, {"m": ones})
    kept, share = choose(spread, spread, {"m": ones}, 60, {"m"})
    rows, columns = kept["m"].flat_K // 30, kept["m"].flat_K % 30
    assert set(rows.tolist()) == set(range(20)) and set(columns.tolist()) == {0, 1, 2}
    most = float(energy.flatten().topk(60).values.sum() / energy.sum())
    assert most - 0.02 < share < most
    assert len(choose(spread, spread, {"m": ones}, energy.numel(), {"m"})[0]["m"].flat_K.unique()) == energy.numel()
    words, _ = choose(spread, spread, {"m": ones}, 60, ())  # rows of an embedding are no eigenvectors: none is saved
    assert set(words["m"].flat_K.tolist()) == set(energy.flatten().topk(60).indices.tolist())

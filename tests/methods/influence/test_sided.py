"""Queries kept as their sides: where nothing is there, how many threads made them, and when they are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from budwood.errors import ConfigError
from budwood.methods.influence import asked, workshop
from budwood.methods.influence.factors import Setting
from budwood.methods.influence.moments import covariances
from budwood.methods.influence.pairs import OnDisk, Resident, joined
from budwood.methods.influence.precondition import Work, measurement, precondition, query_blocks
from budwood.methods.influence.scores import Scores
from budwood.methods.influence.sided import Sided, sided_bytes
from budwood.methods.influence.thin import Thin
from budwood.studies.api import run
from tests.cases import Case
from tests.methods.influence.toys import fit, toy


def rows_that_break(c: Case) -> list[int]:
    """The rows that hold a word which is no number from now on."""
    word = int(c.features.piece("input_ids", 3)[1])
    with torch.no_grad():
        c.model.get_input_embeddings().weight[word] = float("nan")
    return [n for n in range(len(c.features)) if word in c.features.piece("input_ids", n)]


def test_queries_that_do_not_reach_a_map_are_zeros_wherever_blocks_lie(tmp_path: Path) -> None:
    _, shop = toy("bert", rows=3)
    ready = precondition(fit(shop, tmp_path), [Setting("identity")], Work(3, 3, 8.0))
    m = shop.maps[0]
    kept, held = Sided(3, shop.like), Resident(3, shop.like)
    left_QTO, right_QTI = (torch.ones(1, 4, n, dtype=shop.like.dtype) for n in (m.out, m.into))
    kept.put_sides(m.name, "raw", np.array([2]), left_QTO, right_QTI)
    file = OnDisk.at(tmp_path / "blocks.bin", ready, 3, shop.like)
    last = shop.maps[-1]
    file.put(last.name, "raw", np.array([0]), torch.ones(1, last.out, last.into, dtype=shop.like.dtype))
    for blocks in (kept, held, file, Thin(3, shop.like, 2)):
        whole = joined(blocks, m, "raw", slice(0, 2))  # type: ignore[arg-type]
        assert whole.shape == (2, m.out, m.columns) and not whole.any(), type(blocks).__name__
        room = torch.full((2 * m.out * m.into,), 7.0, dtype=shop.like.dtype)
        found = blocks.rows(m.name, "raw", 0, m.out, slice(0, 2), room)
        assert found.shape == (2, m.out * m.into) and not found.any(), type(blocks).__name__
    assert (kept.rows(m.name, "raw", 0, m.out, slice(2, 3)) == 4).all()


def test_biases_are_kept_once(tmp_path: Path) -> None:
    _, shop = toy("bert")
    ready = precondition(fit(shop, tmp_path), [Setting("identity")], Work(6, 6, 8.0))
    kept, held = Sided(6, shop.like), Resident(6, shop.like)
    question, every = measurement(shop.read.objective, "margin"), np.arange(6)
    query_blocks(shop, ready, shop.train, every, question, held.put)
    query_blocks(shop, ready, shop.train, every, question, kept.put, put_sides=kept.put_sides)
    biases = [m.name for m in shop.maps if m.bias]
    assert {name for name, block in kept.tensors} == set(biases) and {block for _, block in kept.sides} == {"raw"}
    for name in biases:
        torch.testing.assert_close(kept.tensors[name, "raw.bias"], held.tensors[name, "raw.bias"])


@pytest.mark.parametrize("kept", ["held", "sided", "file"])
def test_queries_are_made_on_one_thread(kept: str, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As shards are, by whichever process: on several threads sums have other last bits."""
    threads: list[int] = []
    real = asked.query_blocks
    monkeypatch.setattr(asked, "query_blocks", lambda *a: threads.append(torch.get_num_threads()) or real(*a))
    monkeypatch.setattr(asked, "better_sided", lambda *a: kept == "sided")
    if kept == "file":
        monkeypatch.setattr(asked, "RESIDENT", 0)
    model, task = tuned
    before = torch.get_num_threads()
    run("influence score", model, task, {"threads": 2, "queries": ("2",), "out": tmp_path / "x"})
    torch.set_num_threads(before)
    assert threads == [1]


@pytest.mark.slow
def test_workers_make_the_same_sides(tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a --max-memory that holds the sides of the queries and not their blocks: workers are told nothing else."""
    model, task = tuned
    before, seen = torch.get_num_threads(), []
    real = asked.Asked.settle
    monkeypatch.setattr(asked.Asked, "settle", lambda self: seen.append(self) or real(self))
    wish = {"threads": 2, "shard_rows": 12, "queries": ("4",)}
    run("influence score", model, task, {**wish, "max_memory": "2GB", "out": tmp_path / "x"})
    (first,) = seen
    assert not first.sided
    need, whole = sided_bytes(first.ready, first.queries), asked.bytes_needed(first.ready, first.rows)
    assert need is not None and need < whole
    left = asked.SPARE * (need + whole) / 2
    fixed = 2_000_000_000 - asked.room(first) - asked.held_bytes(first)
    most = (fixed + left) * asked.WAITING / (asked.WAITING - 1)  # rows wait in an eighth of it
    assert most / asked.WAITING < asked.held_bytes(first)
    wish["max_memory"] = f"{most / 1e9:.9f}GB"
    done = [run("influence score", model, task, {**wish, "workers": n, "out": tmp_path / str(n)}).run for n in (1, 2)]
    torch.set_num_threads(before)
    assert [a.sided for a in seen] == [False, True, True]
    assert np.array_equal(*(Scores.open(r).whole() for r in done))


def test_sides_are_kept_where_blocks_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, shop = toy("bert")
    ready = precondition(fit(shop, tmp_path), [Setting("ekfac", "0.1mean")], Work(6, 6, 8.0), "turn")
    need, whole = sided_bytes(ready, shop.train), asked.bytes_needed(ready, len(shop.train))
    assert need is not None and need < whole
    usual = []
    for most in (whole - 1, whole):
        monkeypatch.setattr(asked, "RESIDENT", most)
        usual.append(asked.better_sided(ready, shop.train))
    assert usual == [True, False]
    within = [asked.better_sided(ready, shop.train, int(asked.SPARE * n) + 1) for n in (need - 1, need, whole)]
    assert within == [False, True, False]  # too little for either, for whole blocks, enough for them
    monkeypatch.setattr(asked, "RESIDENT", 0)
    monkeypatch.setattr(asked, "SIDES", need - 1)
    assert not asked.better_sided(ready, shop.train)


def test_a_query_without_a_finite_loss_is_named(tmp_path: Path) -> None:
    c, shop = toy("bert", skip_nan=True)
    ready = precondition(fit(shop, tmp_path), [Setting("identity")], Work(6, 6, 8.0))
    broken = rows_that_break(c)
    assert 0 < len(broken) < 5  # what is left is a batch of several
    every, blocks = np.arange(6), Resident(6, shop.like)
    question = measurement(shop.read.objective, "margin")
    with pytest.raises(ConfigError, match="no finite loss"):
        query_blocks(shop, ready, shop.train, every, question, blocks.put)


def test_rows_beside_a_broken_one_go_through_as_if_it_had_been_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that is carried on, which knows it, would end with other last bits."""
    passes: list[bool] = []
    real = workshop.spared
    monkeypatch.setattr(workshop, "spared", lambda model, first: passes.append(bool(first)) or real(model, first))
    sums = []
    for known in (False, True):
        c, shop = toy("bert", skip_nan=True, fisher="exact")
        assert shop.first
        broken = rows_that_break(c)
        assert 0 < len(broken) < 5
        if known:
            shop.skipped.update(shop.train.ids[n] for n in broken)
        passes.clear()
        sums.append(covariances(shop, np.arange(6)))
        assert passes[-1], passes
    assert all(torch.equal(sums[0][k], sums[1][k]) for k in sums[0])

"""`influence score`: models made anew, texts in pieces, empty queries, ensembles by token, tiles and memory."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from budwood.config.influence import ScoreConfig
from budwood.data.batch import IGNORE
from budwood.data.task import Row, Task
from budwood.errors import ConfigError, DataError, StoreError
from budwood.linalg.ranking import spearman_by_row
from budwood.methods.influence import asked, by_token, factors, pairs, sided
from budwood.methods.influence import precondition as preparing
from budwood.methods.influence import score as method
from budwood.methods.influence.factors import Setting
from budwood.methods.influence.pairs import OnDisk, Resident
from budwood.methods.influence.precondition import Work, measurement, precondition, query_blocks
from budwood.methods.influence.queries import query_rows
from budwood.methods.influence.scores import Scores
from budwood.methods.influence.workshop import open_shop, settings_for
from budwood.store.files import read_json
from budwood.studies.api import run
from tests.cases import write_model
from tests.methods.influence.toys import fit, scores, toy

COMMON = {"threads": 1, "damping": ("0.1mean",)}


def words(count: int, start: int) -> str:
    return " ".join(f"w{10 + (start * 7 + i * i) % 28}" for i in range(count))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Task]:
    """A masked language model and texts of which some are cut into pieces of eight."""
    place = tmp_path_factory.mktemp("texts")
    write_model(place / "m", "bert", "lm")
    train = tuple(Row(f"t{i}", words(4 + 5 * i, i)) for i in range(5))
    asked = (Row("short", words(5, 9)), Row("none", ""), Row("long", words(17, 3)))
    return str(place / "m"), Task("toy-text", "text", {"train": train, "validation": asked})


def test_a_model_trained_again_in_its_place_is_scored_again(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    place = tmp_path / "ft"
    shutil.copytree(model.run, place)
    wish = {**COMMON, "strategy": ("identity",), "queries": ("3",), "overwrite": True, "out": tmp_path / "scored"}
    before = Scores.open(run("influence score", str(place), task, wish).run).whole()
    weights = load_file(place / "model" / "model.safetensors")
    for name in weights:
        if "dense.weight" in name:
            weights[name] = weights[name] + 0.05
    save_file(weights, place / "model" / "model.safetensors", {"format": "pt"})
    again = Scores.open(run("influence score", str(place), task, wish).run).whole()
    other = tmp_path / "copy"
    shutil.copytree(place, other)
    fresh = Scores.open(run("influence score", str(other), task, {**wish, "out": tmp_path / "fresh"}).run).whole()
    assert not np.allclose(before, again)
    assert np.array_equal(again, fresh)


def test_rows_of_another_task_object_are_read_anew(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    fewer = Task(task.name, "label", {**task.splits, "train": task.splits["train"][:9]}, task.labels)
    wish = {**COMMON, "strategy": ("identity",), "queries": ("2",), "overwrite": True, "out": tmp_path / "same"}
    sizes = [Scores.open(run("influence score", model, t, wish).run).whole().shape for t in (task, fewer)]
    assert sizes == [(2, 24), (2, 9)]


@pytest.mark.parametrize("queries", [("short", "none"), ()])
def test_queries_with_nothing_to_ask_are_refused_by_name(texts: Any, queries: Any, tmp_path: Path) -> None:
    model, task = texts
    wish = {**COMMON, "max_length": 8, "strategy": ("ekfac",), "queries": queries, "out": tmp_path / "x"}
    with pytest.raises(DataError, match="1 of . queries have no text .*'none'.*--queries"):
        run("influence score", model, task, wish)
    assert not (tmp_path / "x" / "factors").exists()  # before the work


def test_tokens_of_texts_in_pieces_belong_to_their_row(texts: Any, tmp_path: Path) -> None:
    model, task = texts
    wish = {**COMMON, "max_length": 8, "strategy": ("ekfac", "identity"), "queries": ("long", "short")}
    found = Scores.open(run("influence score", model, task, {**wish, "per_token": True, "out": tmp_path / "a"}).run)
    assert found.query_ids == ("long", "short") and found.train_ids == tuple(f"t{i}" for i in range(5))
    for strategy in ("ekfac", "identity"):
        main = found.find(strategy)
        whole = found.whole(main)
        by_row = np.array([[found.token_row(q, n, main)[1].sum() for n in range(5)] for q in range(2)])
        np.testing.assert_allclose(by_row, whole, rtol=1e-3, atol=1e-4 * np.abs(whole).max())
    spelled, _ = found.token_row(0, 3)
    assert [w for w in spelled if w.startswith("w")] == task.rows("train")[3].text.split()
    one = Scores.open(run("influence score", model, task, {**wish, "queries": ("long",), "out": tmp_path / "b"}).run)
    assert one.whole().shape == (1, 5)
    np.testing.assert_allclose(one.row(0), found.row(0), rtol=2e-3, atol=1e-4 * np.abs(found.row(0)).max())


@pytest.mark.parametrize("shard_rows", [1, 4, 256])
def test_a_text_in_pieces_explains_itself_as_a_whole(shard_rows: int, tmp_path: Path) -> None:
    """The diagonal of all pairs, whichever shards its pieces would have been in."""
    write_model(tmp_path / "m", "gpt2", "lm")
    train = tuple(Row(f"t{i}", words(4 + 5 * i, i)) for i in range(5))
    task = Task("toy-text", "text", {"train": train, "validation": train[:1]})
    wish = {**COMMON, "max_length": 8, "strategy": ("ekfac", "diagonal", "identity"), "measurement": "loss"}
    every = {"query_split": "train", "scale": "sum", "out": tmp_path / "pairs"}
    pairs = Scores.open(run("influence score", str(tmp_path / "m"), task, {**wish, **every}).run)
    own = {**wish, "shard_rows": shard_rows, "out": tmp_path / "self"}
    table = run("influence self", str(tmp_path / "m"), task, own).table
    assert list(table["id"]) == [r.id for r in train]
    for strategy in wish["strategy"]:
        whole = pairs.whole(pairs.find(strategy))  # type: ignore[arg-type]
        got = table[next(c for c in table if c.startswith(f"self:{strategy}"))].to_numpy()
        np.testing.assert_allclose(got, np.diagonal(whole), rtol=1e-3, atol=1e-4 * np.abs(whole).max())


def twice(logits: torch.Tensor, targets: Any) -> torch.Tensor:
    """A user's measurement: two margins of two classes."""
    sign = 2.0 * targets.label_M - 1
    return 2 * sign * (logits[:, 1] - logits[:, 0])


def test_a_measurement_of_one_s_own(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    found = []
    for name in ("margin", f"{__name__}:twice"):
        wish = {**COMMON, "strategy": ("ekfac",), "queries": ("3",), "measurement": name}
        found.append(
            Scores.open(run("influence score", model, task, {**wish, "out": tmp_path / name[-5:]}).run).whole()
        )
    np.testing.assert_allclose(found[1], 2 * found[0], rtol=1e-4, atol=1e-5 * np.abs(found[1]).max())
    for name, told in (
        ("twice", "Give margin, loss or"),
        ("nowhere:twice", "cannot be imported"),
        (f"{__name__}:no", "PYTHONPATH"),
    ):
        with pytest.raises(ConfigError, match=told):
            run("influence score", model, task, {**COMMON, "measurement": name, "out": tmp_path / told[:4]})
        assert not (tmp_path / told[:4] / "factors").exists()  # before the work


def test_batches_given_by_hand_are_kept_to_and_change_nothing(
    tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    wish = {**COMMON, "queries": ("5",)}
    took: dict[str, list[int]] = {}

    def noting(name: str, real: Any, mine: Callable[..., bool], size: Callable[..., int]) -> Any:
        return lambda *given, **more: (took[name].append(size(*given)) if mine(*given) else None, real(*given, **more))[
            1
        ]

    rows = lambda shop, features, index, *rest: len(index)
    trained = noting("through", pairs.sweep, lambda shop, features, *rest: features is shop.train, rows)
    asked_ = noting("asked", preparing.sweep, lambda shop, features, *rest: features is not shop.train, rows)
    sides = lambda meeting, m, terms, sides: sum(len(g_BTO) for g_BTO, _ in sides)
    met = noting("met", pairs.Meeting._meet, lambda *given: True, sides)
    for place, name, spy in ((pairs, "sweep", trained), (preparing, "sweep", asked_), (pairs.Meeting, "_meet", met)):
        monkeypatch.setattr(place, name, spy)
    found, sizes = {}, {}
    for name, more in {"usual": {}, "small": {"train_batch": 3, "query_batch": 2}}.items():
        took.update(through=[], asked=[], met=[])
        made = run("influence score", model, task, {**wish, **more, "out": tmp_path / name})
        found[name], sizes[name] = Scores.open(made.run).whole(), dict(took)
    assert sum(sizes["usual"]["through"]) == sum(sizes["small"]["through"]) == 24
    assert set(sizes["usual"]["met"]) == {24} and sizes["usual"]["asked"] == [5]
    assert max(sizes["small"]["through"]) == 3 and max(sizes["small"]["met"]) == 3
    assert sum(sizes["small"]["asked"]) == 5 and max(sizes["small"]["asked"]) == 2
    np.testing.assert_allclose(found["small"], found["usual"], rtol=1e-4, atol=1e-5 * np.abs(found["usual"]).max())


@pytest.mark.parametrize(
    "more",
    [
        {"queries": ("short", "long")},
        {"queries": ("long",)},
        {"queries": ("long", "short"), "query_batch": 1},
        {"queries": ("long",), "query_split": "other"},
    ],
)
def test_a_masked_query_scores_the_same_alone_and_among_others(texts: Any, more: Any, tmp_path: Path) -> None:
    model, task = texts
    short, _, long = task.splits["validation"]
    task = Task("toy-text", "text", {**task.splits, "other": (Row("first", words(9, 4)), short, long)})
    wish = {**COMMON, "max_length": 8, "strategy": ("identity", "tracin"), "measurement": "loss"}
    want, got = (
        Scores.open(run("influence score", model, task, {**wish, **m, "out": tmp_path / n}).run)
        for n, m in (("all", {"queries": ("long", "short")}), ("more", more))
    )
    for strategy in ("identity", "tracin"):
        row, mine = want.row(0, want.find(strategy)), got.row(got.query_ids.index("long"), got.find(strategy))
        np.testing.assert_allclose(mine, row, rtol=1e-3, atol=1e-5 * np.abs(row).max())


def test_the_loss_is_reduced_as_the_model_was_tuned(texts: Any, tmp_path: Path) -> None:
    model, task = texts
    task = Task("toy-text", "text", {**task.splits, "validation": task.splits["validation"][::2]}, metric="lm_loss")
    recipe = {"mode": "mlm", "max_length": 32, "reduce": "sum", "max_steps": 2, "threads": 1, "out": tmp_path / "ft"}
    tuned = run("finetune", model, task, recipe)
    wish = {**COMMON, "strategy": ("identity",), "scale": "sum"}
    own, mean = (
        Scores.open(run("influence score", tuned, task, {**wish, **more, "out": tmp_path / n}).run).whole()
        for n, more in (("own", {}), ("mean", {"reduce": "mean"}))
    )
    shop = open_shop(settings_for(ScoreConfig(task="toy-text", **wish), str(tuned.run)), task)
    assert shop.read.objective.reduce == "sum" and len(shop.train) == 5  # type: ignore[attr-defined]
    batch = shop.read.feed(shop.train)(np.arange(5), 0)
    count_N = (batch.targets["target"] != IGNORE).sum(1).numpy()
    assert len(set(count_N)) > 1
    np.testing.assert_allclose(own, mean * count_N, rtol=1e-3, atol=1e-5 * np.abs(own).max())
    fitted = run("influence fit", tuned, task, {"threads": 1, "reduce": "mean", "out": tmp_path / "fit"})
    with pytest.raises(ConfigError, match="reduce: 'mean' there, 'sum' now"):
        run("influence score", tuned, task, {**COMMON, "factors": fitted.run, "out": tmp_path / "x"})


def test_tokens_of_a_sum_over_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="--per-token.*--aggregate train"):
        ScoreConfig(task="toy", aggregate=("train",), per_token=True)


def test_one_column_is_the_sum_over_training_rows(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    wish = {**COMMON, "strategy": ("ekfac", "bm25"), "queries": ("3",)}
    for scale in ("mean", "sum"):
        one, every = (
            Scores.open(
                run("influence score", model, task, {**wish, "scale": scale, **more, "out": tmp_path / (scale + n)}).run
            )
            for n, more in (("one", {"aggregate": ("train",)}), ("all", {}))
        )
        for strategy in ("ekfac", "bm25"):
            whole = every.whole(every.find(strategy))
            got = one.whole(one.find(strategy))
            assert got.shape == (3, 1) and one.train_ids == ("all",)
            np.testing.assert_allclose(got[:, 0], whole.sum(1), rtol=1e-4, atol=1e-5 * np.abs(whole).max())


def test_two_classes_rank_alike_by_loss_and_margin(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    wish = {**COMMON, "queries": ("4",)}
    loss, margin = (
        Scores.open(run("influence score", model, task, {**wish, "measurement": m, "out": tmp_path / m}).run).whole()
        for m in ("loss", "margin")
    )
    for a, b in zip(loss, margin):  # the gradient of the loss is (1 - p) times that of minus the margin
        ratio = float(a @ b / (b @ b))
        assert 0 < ratio < 1
        np.testing.assert_allclose(a, ratio * b, rtol=1e-3, atol=1e-5 * np.abs(a).max())


def test_tokens_of_an_ensemble_add_up(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    other = run("finetune", str(model.run), task, {"max_steps": 2, "seed": 5, "threads": 1, "out": tmp_path / "other"})
    wish = {**COMMON, "queries": ("2",), "per_token": True, "checkpoints": (str(other.run),), "out": tmp_path / "both"}
    found = Scores.open(run("influence score", model, task, wish).run)
    whole = found.whole()
    by_row = np.array([[found.token_row(q, n)[1].sum() for n in range(24)] for q in range(2)])
    np.testing.assert_allclose(by_row, whole, rtol=1e-3, atol=1e-4 * np.abs(whole).max())


@pytest.mark.parametrize("tile,queries", [(1 << 22, 40), (60, 1 << 24), (60, 40)])
def test_tiles_do_not_change_scores(tile: int, queries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, shop = toy("bert")
    made = fit(shop, tmp_path)
    settings = [Setting("identity"), Setting("diagonal", "0.1mean"), Setting("ekfac", "0.1mean")]
    asked = np.array([4, 0, 2])
    tokens = lambda: _by_token(shop, made, settings, asked)
    want, by_word = scores(shop, made, settings, asked), tokens()
    monkeypatch.setattr(pairs, "TILE", tile)
    monkeypatch.setattr(pairs, "QUERY_TILE", queries)
    monkeypatch.setattr(by_token, "QUERY_TILE", queries)
    got = scores(shop, made, settings, asked)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11 * np.abs(want).max())
    disk = OnDisk.at(tmp_path / "b.bin", precondition(made, settings, Work(3, len(shop.train), 8.0)), 3, shop.like)
    assert np.array_equal(scores(shop, made, settings, asked, blocks=disk), got)
    fewer = scores(shop, made, settings, asked, blocks=disk, most=2)  # rows than queries
    np.testing.assert_allclose(fewer, want, rtol=1e-9, atol=1e-11 * np.abs(want).max())
    assert np.array_equal(tokens(), by_word)


def _by_token(shop: Any, made: Any, settings: list[Setting], asked: np.ndarray) -> np.ndarray:
    ready = precondition(made, settings, Work(3, 6, 8.0), "back")
    blocks = Resident(3, shop.like)
    query_blocks(shop, ready, shop.train, asked, measurement(shop.read.objective, "margin"), blocks.put)
    return by_token.token_scores(shop, ready, blocks, 3, np.arange(len(shop.train)))


def test_queries_too_large_to_be_held_lie_in_a_file_and_score_alike(
    tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    wish = {**COMMON, "queries": ("3",)}
    held = run("influence score", model, task, {**wish, "out": tmp_path / "held"})
    monkeypatch.setattr(asked, "RESIDENT", 0)
    monkeypatch.setattr(asked, "better_sided", lambda *given: False)  # nor as their sides
    opened = []
    real = pairs.OnDisk.rows
    monkeypatch.setattr(pairs.OnDisk, "rows", lambda self, *a: opened.append(self.path) or real(self, *a))
    read = run("influence score", model, task, {**wish, "out": tmp_path / "read"})
    assert opened and not opened[0].exists()
    assert np.array_equal(Scores.open(held.run).whole(), Scores.open(read.run).whole())


@pytest.mark.parametrize("memory", [None, "4GB"])
def test_short_queries_too_large_to_be_held_are_kept_as_their_sides(
    memory: str | None, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    wish = {**COMMON, "queries": ("3",), "strategy": ("identity", "ekfac"), "max_memory": memory}
    held = run("influence score", model, task, {**wish, "out": tmp_path / "held"})
    monkeypatch.setattr(asked, "better_sided", lambda *given: True)
    kept: list[str] = []
    real = sided.Sided.put_sides
    monkeypatch.setattr(sided.Sided, "put_sides", lambda self, *a: kept.append(a[1]) or real(self, *a))
    own = run("influence score", model, task, {**wish, "out": tmp_path / "sided"})
    assert kept
    want, got = (Scores.open(r.run).whole() for r in (held, own))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5 * np.abs(want).max())
    again = run("influence score", model, task, {**wish, "out": tmp_path / "again", "shard_rows": 3})
    np.testing.assert_allclose(Scores.open(again.run).whole(), got, rtol=1e-3, atol=1e-5 * np.abs(want).max())


def test_sides_are_kept_where_blocks_are_too_large_and_they_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shop = toy("bert")
    made = fit(shop, tmp_path)
    ready = precondition(made, [Setting("ekfac", "0.1mean")], Work(6, 6, 8.0), "turn")
    need, whole = sided.sided_bytes(ready, shop.train), asked.bytes_needed(ready, len(shop.train))
    assert need is not None and need < whole
    chosen = []
    for most in (need - 1, need, whole - 1, whole):
        monkeypatch.setattr(asked, "RESIDENT", most)
        monkeypatch.setattr(asked, "SIDES", most, raising=False)
        chosen.append(asked.better_sided(ready, shop.train))
    assert chosen == [False, True, True, False]


def test_blocks_of_another_layout_have_another_file_and_one_cut_short_is_refused(tmp_path: Path) -> None:
    _, shop = toy("bert", rows=4)
    made = fit(shop, tmp_path)
    names = set()
    for way in ("turn", "back"):
        ready = precondition(made, [Setting("ekfac", "0.1mean")], Work(2, 4, 8.0), way)
        cfg = SimpleNamespace(aggregate=())
        names.add(asked.Asked(shop, ready, shop.train, cfg, {"place": ""}).file.name)  # type: ignore[arg-type]
    assert len(names) == 2
    disk = OnDisk.at(tmp_path / "b.bin", ready, 2, shop.like)
    query_blocks(shop, ready, shop.train, np.arange(2), measurement(shop.read.objective, "margin"), disk.put)
    *_, (name, part) = disk.places
    disk.rows(name, part, 0, 1)
    few = OnDisk.at(tmp_path / "few.bin", ready, 2, shop.like)  # a map without a gradient is put nowhere, and is 0
    few.put(*next(iter(few.places)), np.arange(1), disk.rows(*next(iter(few.places)), 0, 1)[:1, None])
    assert not few.rows(name, part, 0, few.places[name, part][1]).any()
    with disk.path.open("r+b") as f:
        f.truncate(disk.path.stat().st_size - 8)
    with pytest.raises(StoreError, match=r"b\.bin is cut short"):
        disk.rows(name, part, 0, disk.places[name, part][1])


def test_no_tile_outgrows_its_size() -> None:
    for out, into in ((384, 1536), (1536, 384), (2, 768), (3072, 768)):
        m = pairs.Map("m", "m.weight", "m.bias", out, into, "m")
        for count in (1, 7, 256):
            for queries in (1, 64, 2000, 100_000):
                high, wide = pairs.tile(m, count, queries)
                assert 1 <= high <= out and 1 <= wide <= queries
                assert high * wide * m.columns <= pairs.QUERY_TILE and count * high * m.columns <= pairs.TILE


def test_memory_is_asked_of_sums_too_and_free_memory_is_shared_by_workers(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    wish = {**COMMON, "queries": ("3",)}
    with pytest.raises(ConfigError, match="at least"):
        run(
            "influence score",
            model,
            task,
            {**wish, "aggregate": ("query",), "max_memory": "1KB", "out": tmp_path / "x"},
        )
    enough = {**wish, "strategy": ("identity",), "max_memory": "800MB"}
    run("influence score", model, task, {**enough, "out": tmp_path / "y"})
    train = type("Rows", (list,), {"lengths_N": np.full(9, 5)})(range(9))
    small = pairs.Map("m", "weight", "bias", 1, 1, "m")
    shop = SimpleNamespace(like=torch.zeros(1), model=torch.nn.Linear(1, 1), maps=(small,), train=train)
    left = {}
    for most in (None, "1GB"):
        for workers in (1, 4):
            cfg = SimpleNamespace(max_memory=most, workers=workers, per_token=False, shard_rows=4, train_batch=None)
            ready = SimpleNamespace(settings=(), numbers=0, bases={}, weights={})
            own = {"cfg": cfg, "shop": shop, "queries": train, "ready": ready, "rows": 1, "groups": ()}
            here = SimpleNamespace(**own, summed=False, thin_bytes=0, given={"held": pairs.MOST_HELD})
            left[most, workers] = asked.room(here)  # type: ignore[arg-type]
    assert left["1GB", 1] == left["1GB", 4]  # no batch depends on how many work
    here.ready.numbers = 1 << 31  # more to read, more rows wait for it, within their part of --max-memory
    assert asked.held_bytes(here) == 10**9 // 8 and asked.room(here) == left["1GB", 4]  # type: ignore[arg-type]
    here.cfg.max_memory = None
    assert asked.held_bytes(here) == pairs.MOST_HELD > pairs.HELD  # type: ignore[arg-type]
    here.given["held"] = 1 << 30  # as much as the machine that began the run had for it
    assert asked.held_bytes(here) == 1 << 30  # type: ignore[arg-type]
    here.given["held"] = pairs.MOST_HELD
    assert left[None, 4] < left[None, 1] / 3


def test_queries_on_disk_give_the_same_bytes(tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, task = tuned
    wish = {**COMMON, "queries": ("3",), "per_token": True, "shard_rows": 9}
    one = run("influence score", model, task, {**wish, "out": tmp_path / "one"}).run
    monkeypatch.setattr(asked, "room", lambda a, also=0: 0)
    two = run("influence score", model, task, {**wish, "out": tmp_path / "two"}).run
    for file in sorted((one / "scores").iterdir()):
        assert file.read_bytes() == (two / "scores" / file.name).read_bytes(), file.name


def test_curvature_is_read_once_for_all_modules(tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, task = tuned
    fitted = run("influence fit", model, task, {"threads": 1, "out": tmp_path / "fit"})
    wish = {**COMMON, "queries": ("2",), "factors": fitted.run}
    counts = []
    plain = factors.Factors.damping
    for n, per in enumerate((False, True)):
        seen = []
        monkeypatch.setattr(factors.Factors, "damping", lambda *a, seen=seen: (seen.append(1), plain(*a))[1])
        run("influence score", model, task, {**wish, "per_module": per, "out": tmp_path / str(n)})
        counts.append(len(seen))
    assert counts[0] == counts[1]


def test_a_number_counts_rows_and_an_id_names_one() -> None:
    rows = tuple(Row(str(i), "x", None, 0) for i in (7, 3, 2))
    task = Task("toy", "label", {"train": rows, "validation": rows}, ("a", "b"))
    asked = lambda *q: [r.id for r in query_rows(task, SimpleNamespace(query_split=None, queries=q))]
    assert asked() == ["7", "3", "2"] and asked("2") == ["7", "3"]
    assert asked("id:2") == ["2"] and asked("2", "7") == ["2", "7"] and asked("id:3", "7") == ["3", "7"]
    for wrong in ("id:9", "0"):
        with pytest.raises(DataError, match="no row '9'|asks about nothing"):
            asked(wrong)


@pytest.mark.parametrize("verb,phase", [("fit", "moments"), ("score", "scores"), ("self", "self"), ("index", "index")])
def test_a_profile_counts_jobs_and_is_printed(
    verb: str, phase: str, tuned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every phase with its calls, loading and saving among them; means times calls are totals, shares add up."""
    model, task = tuned
    wish = {"threads": 1, "shard_rows": 5, "profile": True, "progress": "plain", "out": tmp_path / "run"}
    capsys.readouterr()
    made = run(f"influence {verb}", model, task, wish)
    lines = capsys.readouterr().err.splitlines()
    stored = read_json(made.run / "profile.json")
    table = {r["phase"]: r for r in stored}
    # 24 rows in fives: two halves of twelve in three each for factors, five for the rest; three files of factors
    want = {"load": 1, "covariance": 6, "eigen": 4, "moments": 6, phase: 6 if verb == "fit" else 5}
    assert {k: table[k]["calls"] for k in want} == want
    assert table["save"]["calls"] == (3 if verb == "fit" else 4)
    whole = sum(r["total"] for r in stored)
    rounding = 0.0005 + 1e-9
    for r in stored:
        assert abs(r["mean"] * r["calls"] - r["total"]) <= rounding * (r["calls"] + 1)
        assert r["percent"] == pytest.approx(100 * r["total"] / whole, abs=0.1 + 100 * rounding * len(stored) / whole)
        line = rf"{r['phase']} +{r['calls']} calls? +{r['mean']:.3f} s mean +{r['total']:.3f} s +{r['percent']:.1f} %"
        assert len([x for x in lines if re.fullmatch(line, x)]) == 1, (line, lines)
    assert abs(sum(r["percent"] for r in stored) - 100) <= 0.05 * len(stored) + 1e-9
    assert read_json(made.run / "cost.json")["phase_seconds"].keys() == table.keys()
    assert "profile" not in made.metrics  # which are the same on every machine


@pytest.mark.slow
@pytest.mark.parametrize("verb,made", [("score", "scores"), ("fit", "factors"), ("self", "self"), ("index", "index")])
def test_workers_do_not_change_the_bytes(verb: str, made: str, tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    wish = {"threads": 1, "shard_rows": 12}
    if verb == "score":
        wish |= {**COMMON, "strategy": ("identity",), "queries": ("3",), "per_layer": True}
    one, two = (
        run(f"influence {verb}", model, task, {**wish, "workers": n, "out": tmp_path / str(n)}).run for n in (1, 2)
    )
    for file in sorted((one / made).iterdir()):
        assert file.read_bytes() == (two / made / file.name).read_bytes(), file.name


@pytest.mark.parametrize("more", [{}, {"aggregate": ("query",)}])
def test_bf16_is_compared_with_float32_computed_as_such(
    more: Any, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    wish = {**COMMON, "strategy": ("ekfac", "identity"), **more}
    exact = Scores.open(run("influence score", model, task, {**wish, "out": tmp_path / "exact"}).run)
    monkeypatch.setattr(method, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(asked, "CHECKED", 4)
    made = run("influence score", model, task, {**wish, "dtype": "bf16", "out": tmp_path / "half"})
    half = Scores.open(made.run)
    for setting, strategy in (("ekfac@0.1mean", "ekfac"), ("identity", "identity")):
        got, want = half.whole(half.find(strategy)), exact.whole(exact.find(strategy))
        agreed = spearman_by_row(got, want)[:: 1 if more else 3]  # four of ten queries
        told = made.metrics["agreement"][setting]
        assert told["queries"] == len(agreed) and told["least"] == pytest.approx(agreed.min(), abs=1e-9)
        assert told["mean"] == pytest.approx(agreed.mean(), abs=1e-9)
        assert not np.array_equal(got, want)


@pytest.mark.parametrize(("scale", "told"), [("mean", "divided by the 24 training rows"), ("sum", "not divided")])
def test_sign_and_scale_are_printed(
    scale: str, told: str, tuned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, task = tuned
    wish = {**COMMON, "strategy": ("identity",), "queries": ("2",), "scale": scale, "progress": "plain"}
    run("influence score", model, task, {**wish, "out": tmp_path / "run"})
    lines = capsys.readouterr().err.splitlines()
    assert f"scores: positive = the training row helps the query; {told}." in lines
    assert not any("Spearman" in line for line in lines)  # float32 has nothing to be compared with


@pytest.mark.parametrize("computes", [False, True])
def test_how_near_bf16_is_is_printed(
    computes: bool, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line per setting, of what is stored against scores of a run in float32."""
    model, task = tuned
    wish = {**COMMON, "strategy": ("ekfac", "identity"), "damping": ("0.1mean", "1"), "queries": ("4",)}
    exact = Scores.open(run("influence score", model, task, {**wish, "out": tmp_path / "exact"}).run)
    monkeypatch.setattr(method, "multiplies_bf16", lambda: computes)
    capsys.readouterr()
    half = run("influence score", model, task, {**wish, "dtype": "bf16", "progress": "plain", "out": tmp_path / "half"})
    lines = capsys.readouterr().err.splitlines()
    stored, want = Scores.open(half.run), []
    for name in ("ekfac@0.1mean", "ekfac@1", "identity"):
        strategy, _, damping = name.partition("@")
        found = spearman_by_row(*(s.whole(s.find(strategy, damping or None)) for s in (stored, exact)))
        told = f"mean {found.mean():.5f}, least {found.min():.5f} of 4"
        want.append(f"{name}: Spearman of bf16 against float32 by query: {told}")
    assert [line for line in lines if "Spearman" in line] == want


def _counting(sweep: Any, seen: list[int]) -> Any:
    """A sweep that notes which training rows it takes."""

    def counted(shop: Any, features: Any, index: np.ndarray, *rest: Any) -> Any:
        seen.extend(index.tolist() if features is shop.train else ())
        return sweep(shop, features, index, *rest)

    return counted


def test_one_pass_over_the_training_rows_serves_all_queries_and_settings(
    tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    every = ("ekfac", "kfac", "diagonal", "identity")
    fitted = run("influence fit", model, task, {"threads": 1, "strategy": every, "out": tmp_path / "fit"})
    met: list[int] = []  # training rows that went through the model to meet queries
    prepared: list[int] = []  # and those that did so for any other reason
    for module, seen in ((pairs, met), (preparing, prepared)):
        monkeypatch.setattr(module, "sweep", _counting(module.sweep, seen))
    monkeypatch.setattr(pairs, "QUERY_TILE", 500)  # many tiles: queries are never all in one product
    wish = {"threads": 1, "factors": fitted.run, "shard_rows": 9}
    before = []
    for queries in ("2", "10"):
        for strategies, dampings in ((every[:1], ("0.1mean",)), (every, ("0.1mean", "0.01", "1"))):
            met.clear()
            prepared.clear()
            own = {"queries": (queries,), "strategy": strategies, "damping": dampings}
            made = run("influence score", model, task, {**wish, **own, "out": tmp_path / f"{queries}{len(strategies)}"})
            found = Scores.open(made.run)
            assert len(found.matrices) == (1 if len(strategies) == 1 else 3 * 3 + 1)
            assert found.whole().shape == (int(queries), 24)
            assert sorted(met) == list(range(24))
            before.append(sorted(prepared))
    assert all(x == before[0] for x in before) and len(before[0]) < 24  # a few rows, whatever is asked


def test_fp16_keeps_small_scores(tuned: Any, tmp_path: Path) -> None:
    model, task = tuned
    wish = {**COMMON, "strategy": ("ekfac", "tracin"), "damping": ("1e9",), "queries": ("2",), "per_token": True}
    want, got = (
        Scores.open(run("influence score", model, task, {**wish, "dtype": d, "out": tmp_path / d}).run)
        for d in ("float32", "fp16")
    )
    for strategy in ("ekfac", "tracin"):
        plain, kept = (x.whole(x.find(strategy)) for x in (want, got))
        np.testing.assert_allclose(kept, plain, rtol=1e-3, atol=1e-6 * np.abs(plain).max())
    assert np.abs(want.row(0)).max() < 6e-8  # below what float16 can hold without a scale
    np.testing.assert_allclose(got.token_row(0, 3)[1], want.token_row(0, 3)[1], rtol=1e-3, atol=1e-14)

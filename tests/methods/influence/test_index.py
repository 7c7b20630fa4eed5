"""The index against full EKFAC scores, its promises on disk, and questions on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import budwood as bw
from budwood.config.influence import IndexConfig, QueryConfig
from budwood.data.task import Row, Task
from budwood.errors import ConfigError, DataError
from budwood.linalg.ranking import spearman_by_row
from budwood.methods.influence import entries
from budwood.methods.influence import index as made
from budwood.methods.influence.coordinates import wanted
from budwood.methods.influence.index import Index, calibration_rows
from budwood.methods.influence.query import question_row
from budwood.methods.influence.scores import Scores
from budwood.methods.influence.workshop import open_shop, settings_for
from tests.cli.conftest import budwood, model, reviews  # noqa: F401
from tests.interrupt import interrupted

COMMON = ["--threads", "1", "--progress", "none"]
FEW, MANY = "3% products", "100% products"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, model: Path, reviews: Path) -> Path:  # noqa: F811
    """A model that has learned the reviews a little."""
    out = tmp_path_factory.mktemp("tuned") / "run"
    bw.finetune(
        str(model), str(reviews), text="body", label="stars", max_steps=40, batch_size=16, lr=3e-3, out=out, threads=1
    )
    return out


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tuned: Path, reviews: Path) -> Path:  # noqa: F811
    """Scores of all validation rows, and an index with every coordinate."""
    from budwood.studies.verbs import run_verb

    path = tmp_path_factory.mktemp("index")
    common = {"task": str(reviews), "text": "body", "label": "stars", "threads": 1, "progress": "none"}
    from budwood.config.influence import ScoreConfig

    run_verb("influence score", ScoreConfig(**common, query_split="validation", out=path / "score"), [str(tuned)])
    for share, bits in (("100%", 16), ("10%", 16), ("2.5%", 4), ("30%", 4)):
        cfg = IndexConfig(**common, coordinates=share, bits=bits, calibration=6, shard_rows=40, out=path / share)
        run_verb("influence index", cfg, [str(tuned)])
    for share, calibration in ((FEW, 6), (MANY, 1)):
        kind = {"coordinates": share.split()[0], "entry": "products", "calibration": calibration, "shard_rows": 40}
        run_verb("influence index", IndexConfig(**common, **kind, out=path / share), [str(tuned)])
    return path


def opened(place: Path, tuned: Path, share: str) -> tuple[Index, Any]:
    from budwood.store.files import read_json

    given = read_json(place / share / "run.json")["given"]
    cfg = IndexConfig(**given)
    shop = open_shop(settings_for(cfg, str(tuned)))
    return Index.open(place / share, shop), shop


def asked(place: Path, tuned: Path, share: str, most: int | None) -> tuple[np.ndarray, np.ndarray]:
    index, shop = opened(place, tuned, share)
    rows = shop.read.task.rows("validation")
    ours = np.stack([index.ask(shop.read.encode([r]), most) for r in rows])
    return ours, Scores.open(place / "score").whole()


def test_with_every_coordinate_the_index_is_full_ekfac(place: Path, tuned: Path) -> None:
    ours, full = asked(place, tuned, "100%", None)
    np.testing.assert_allclose(ours, full, atol=2e-3 * np.abs(full).max())
    assert spearman_by_row(ours, full).min() > 0.999


def test_a_tenth_of_the_coordinates_ranks_alike_on_held_out_queries(place: Path, tuned: Path) -> None:
    ours, full = asked(place, tuned, "10%", None)
    task = opened(place, tuned, "10%")[1].read.task
    held = [i for i in range(len(full)) if i not in calibration_rows(task, 6, 0)]
    assert spearman_by_row(ours[held], full[held]).mean() > 0.95
    few, _ = asked(place, tuned, "10%", 500)  # only the strongest coordinates of each question
    assert spearman_by_row(few, ours).mean() > 0.9


def test_with_every_coordinate_in_four_bits_ranks_are_those_of_full_ekfac(place: Path, tuned: Path) -> None:
    ours, full = asked(place, tuned, "30%", None)
    parameters = sum(m.out * m.columns for m in opened(place, tuned, "30%")[1].maps)
    assert len(opened(place, tuned, "30%")[0].stored.table) == parameters  # a quarter of the bytes holds all of them
    assert spearman_by_row(ours, full).min() > 0.98


def test_as_many_coordinates_in_a_quarter_of_the_bytes_rank_as_well(place: Path, tuned: Path) -> None:
    small, large = opened(place, tuned, "2.5%")[0], opened(place, tuned, "10%")[0]
    assert abs(len(small.stored.table) - len(large.stored.table)) < 4
    assert small.stored.table.nbytes < 0.3 * large.stored.table.nbytes
    ours, full = asked(place, tuned, "2.5%", None)
    whole, _ = asked(place, tuned, "10%", None)
    assert spearman_by_row(ours, full).mean() > spearman_by_row(whole, full).mean() - 0.01


def test_with_every_product_the_index_is_full_ekfac(place: Path, tuned: Path) -> None:
    ours, full = asked(place, tuned, MANY, None)
    np.testing.assert_allclose(ours, full, atol=2e-3 * np.abs(full).max())
    assert spearman_by_row(ours, full).min() > 0.999


def test_few_products_rank_held_out_queries_and_calibration_tells_of_the_rest(place: Path, tuned: Path) -> None:
    ours, full = asked(place, tuned, FEW, None)
    index, shop = opened(place, tuned, FEW)
    calibrated = calibration_rows(shop.read.task, 6, 0)
    held = [i for i in range(len(full)) if i not in calibrated]
    agreed = spearman_by_row(ours[held], full[held]).mean()
    rows, bare = shop.read.task.rows("validation"), Index.open(place / FEW, shop)
    bare.__dict__["rest_CN"] = torch.zeros_like(index.rest_CN)  # as if nothing were known of what is left out
    alone = np.stack([bare.ask(shop.read.encode([rows[i]])) for i in held])
    assert agreed > 0.9 and agreed > spearman_by_row(alone, full[held]).mean()
    parameters = sum(m.out * m.columns for m in shop.maps)
    per_row = np.bincount(
        np.concatenate([index.products.small[f"row/{n}"] for n in index.products.shapes]),
        np.concatenate(
            [np.full(len(index.products.small[f"row/{n}"]), o + i + 4) for n, (o, i) in index.products.shapes.items()]
        ),
    )
    assert per_row[: len(shop.train)].max() + 2 * len(index.rest_CN) <= 0.03 * parameters + 1
    np.testing.assert_allclose(ours[calibrated], full[calibrated], atol=0.02 * np.abs(full).max())  # the rest is known
    np.testing.assert_allclose(index.norms, opened(place, tuned, "10%")[0].norms, rtol=1e-5)


def test_some_rows_can_be_scored_exactly_again(place: Path, tuned: Path) -> None:
    index, shop = opened(place, tuned, "10%")
    full = Scores.open(place / "score").whole()
    wanted_rows = np.array([3, 17, 5])
    query = shop.read.encode([shop.read.task.rows("validation")[1]])
    np.testing.assert_allclose(index.exact(query, wanted_rows), full[1, wanted_rows], atol=2e-5 * np.abs(full[1]).max())


def test_norms_are_exact_self_influence(place: Path, tuned: Path) -> None:
    all_rows, some = opened(place, tuned, "100%")[0], opened(place, tuned, "10%")[0]
    np.testing.assert_allclose(all_rows.norms, some.norms, rtol=1e-5)  # they do not depend on what is kept
    scale = np.concatenate([(k.weight_K * k.spread_K**2).numpy() for k in all_rows.kept.values()])
    stored = all_rows.stored.values().astype(np.float64)
    np.testing.assert_allclose((scale[:, None] * stored**2).sum(0), 1, rtol=1e-2)  # rows are stored at unit length


@pytest.mark.parametrize("share", ["10%", "2.5%", FEW])
def test_a_killed_index_ends_with_the_same_bytes(place: Path, tuned: Path, share: str) -> None:
    from budwood.store.files import read_json
    from budwood.studies.verbs import run_verb

    given = read_json(place / share / "run.json")["given"]
    out = place / f"killed {share}"
    products = share == FEW
    with interrupted(entries, "products_shard", 2) if products else interrupted(made, "index_shard", 2):
        run_verb("influence index", IndexConfig(**{**given, "out": out}), [str(tuned)])
    run_verb("influence index", IndexConfig(**{**given, "out": out}), [str(tuned)])
    names = (
        ("products.npy", "products.safetensors", "rest.npy") if products else ("rows.npy", "coordinates.safetensors")
    )
    for name in ("norms.npy", *names):
        assert (out / "index" / name).read_bytes() == (place / share / "index" / name).read_bytes()


def test_questions_on_the_command_line(tuned: Path, budwood: Callable[..., Any], tmp_path: Path) -> None:  # noqa: F811
    words = ["influence", "query", tuned, "--coordinates", "10%", "--calibration", 6, "--out", tmp_path / "i", *COMMON]
    code, out, err = budwood(*words, "--text", "w9 w7 w12", "--json", "--exact", 3)
    assert code == 0, err
    found = json.loads(out)
    assert found["query"]["label"].endswith("(the model's answer)") and len(found["top"]) == 5
    code, out, err = budwood(*words, "--text", "w9 w7 w12", "--label", "bad", "--top", 2)
    assert code == 0 and "helps most 2" in out and "-> bad" in out and "ms the backward pass" in out
    code, _, err = budwood(*words, "--text", "w9", "--label", "goood")
    assert code == 2 and "Did you mean 'good'" in err
    code, _, err = budwood(*words, "--text", " ")
    assert code == 2 and "--text is empty" in err


@pytest.mark.parametrize(
    ("given", "told"),
    [(None, "give the text's own .*--label 3.5"), ("warm", "--label was given 'warm'"), ("nan", "'nan'")],
)
def test_a_task_of_numbers_needs_the_number_of_a_text(given: str | None, told: str) -> None:
    task = Task("warmth", "regression", {"train": (Row("r", "w9", None, 0.5),)})
    index = SimpleNamespace(shop=SimpleNamespace(cfg=SimpleNamespace(train_split="train")))
    with pytest.raises(DataError, match=told):
        question_row(QueryConfig(asked_text="w9", asked_label=given), task, index)  # type: ignore[arg-type]
    row, said = question_row(QueryConfig(asked_text="w9", asked_label="2"), task, index)  # type: ignore[arg-type]
    assert row.label == said["label"] == 2.0


def test_bits_are_given_on_the_command_line(tuned: Path, budwood: Callable[..., Any], tmp_path: Path) -> None:  # noqa: F811
    words = ["influence", "index", tuned, "--task", "tiny-topic", *COMMON, "--print-config"]
    code, out, err = budwood(*words, "--bits", 16)
    assert code == 0 and "bits: 16" in out, err
    code, out, err = budwood(*words, "--bits", 5)
    assert code == 2 and "4 or 16" in err
    assert IndexConfig(task="t", entry="products").number_bits == 16 and IndexConfig(task="t").number_bits == 4


def test_a_question_to_products(tuned: Path, budwood: Callable[..., Any], tmp_path: Path) -> None:  # noqa: F811
    words = ["influence", "query", tuned, "--entry", "products", "--calibration", 6, *COMMON, "--json"]
    words += ["--text", "w9 w7 w12", "--exact", 3, "--out", tmp_path / "i"]
    code, out, err = budwood(*words, "--coordinates", "10")
    assert code == 2 and "an entry 10 numbers, and outer products of this model need" in err
    code, out, err = budwood(*words, "--coordinates", "10%")
    assert code == 0, err
    found = json.loads(out)
    assert len(found["top"]) == 5 and found["note"].startswith("the 3 best and worst rows were scored again")
    told = json.loads((tmp_path / "i" / "metrics.json").read_text())
    assert told["entry"] == "products" and told["bits"] == 16 and 0.5 < told["share_of_energy"] <= 1


def test_wrong_shares_are_refused() -> None:
    for text in ("0", "-3", "3x", "101%"):
        with pytest.raises(ConfigError, match="--coordinates was given"):
            wanted(text, 1000)


def test_rows_cut_into_pieces_are_divided_as_scores_are(tmp_path: Path) -> None:
    from budwood.data.task import Row, Task
    from budwood.studies.api import run
    from tests.cases import write_model

    name = str(write_model(tmp_path / "m", "gpt2", "lm"))
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in rng.choice(np.arange(8, 40), 5 + 3 * (n % 5))) for n in range(12)]
    rows = tuple(Row(f"t{n}", text) for n, text in enumerate(texts))
    task = Task("texts", "text", {"train": rows[:9], "validation": rows[9:]})
    common = {"threads": 1, "max_length": 8, "damping": ("0.1mean",)}
    whole = run("influence score", name, task, {**common, "query_split": "validation", "out": tmp_path / "s"})
    made = run(
        "influence index",
        name,
        task,
        {**common, "coordinates": "100%", "bits": 16, "calibration": 3, "out": tmp_path / "i"},
    )
    given = json.loads((made.run / "run.json").read_text())["given"]
    shop = open_shop(settings_for(IndexConfig(**given), name), task)
    index = Index.open(made.run, shop)
    assert len(shop.train) > len(index.ids) == 9 == made.metrics["n"] == made.metrics["train"]
    full = Scores.open(whole.run).whole()
    for n, row in enumerate(rows[9:]):
        asked_row = shop.read.encode([row])
        np.testing.assert_allclose(index.ask(asked_row), full[n], atol=2e-3 * np.abs(full).max())
        again = index.by_row(index.exact(asked_row, np.arange(len(shop.train))))
        np.testing.assert_allclose(again, full[n], atol=2e-5 * np.abs(full).max())


def test_coordinates_that_a_question_leaves_out_are_told(
    tuned: Path,
    budwood: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from budwood.methods.influence import stored

    words = ["influence", "query", tuned, "--coordinates", "10%", "--calibration", 6, "--out", tmp_path / "i", *COMMON]
    code, out, err = budwood(*words, "--text", "w9 w7 w12", "--json")
    assert code == 0 and json.loads(out)["note"] == "", err
    kept = json.loads((tmp_path / "i" / "metrics.json").read_text())
    assert kept["answered_with"] == kept["coordinates"] > 500
    monkeypatch.setattr(stored, "NUMBERS", 1)
    monkeypatch.setattr(stored, "MOST", 500)
    code, out, err = budwood(*words, "--text", "w9 w7 w12", "--exact", 2)
    said = f"answered with the 500 of {kept['coordinates']:,} coordinates that weigh most for this text; the 2 best"
    assert code == 0 and said in " ".join(out.split()), out

"""Score matrices on disk: tiles in any order, rows without the whole, ids checked, 16 bits, modules and tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from budwood.errors import StoreError
from budwood.linalg.ranking import spearman_by_row
from budwood.methods.influence.scores import (
    Matrix,
    Scores,
    Tokens,
    pack,
    replace_module,
    unit_for,
    unpack,
    writing_scores,
)
from budwood.store.files import read_json, write_json

Q, N = 3, 7
QUERIES, TRAIN = [f"v{i}" for i in range(Q)], [f"t{i}" for i in range(N)]
VALUES = np.random.default_rng(0).normal(size=(Q, N)).astype(np.float32)
MAIN = Matrix("ekfac", "1e-08", main=True)


PARTS = (("", 1.0), ("layer.0", 1e-5), ("layer.1", 1e5))


def written(path: Path, **changes: object) -> Scores:
    with writing_scores(path / "scores", QUERIES, TRAIN, {"measurement": "margin"}) as desk:
        for q in (slice(2, 3), slice(0, 2)):
            for n in (np.array([5, 0, 3]), np.array([1, 2, 4, 6])):
                desk.put(MAIN, q, n, VALUES[q][:, n])
        for module, share in (("layer.0.dense", 0.25), ("layer.1.dense", 0.5), ("head.classifier", 0.25)):
            desk.put(Matrix("ekfac", "1e-08", module), slice(None), slice(None), share * VALUES)
        desk.put(Matrix("bm25", main=True), np.arange(Q), np.arange(N), np.abs(VALUES))
    return Scores.open(path)


def test_tiles_become_rows(tmp_path: Path) -> None:
    scores = written(tmp_path)
    assert sorted(p.name for p in (tmp_path / "scores").iterdir()) == [
        "bm25.npy",
        "ekfac.npy",
        "ekfac@1e-08.head.classifier.npy",
        "ekfac@1e-08.layer.0.dense.npy",
        "ekfac@1e-08.layer.1.dense.npy",
        "index.json",
        "query_ids.json",
        "train_ids.json",
    ]
    np.testing.assert_array_equal(scores.row(1), VALUES[1])
    np.testing.assert_array_equal(np.load(tmp_path / "scores" / "ekfac.npy"), VALUES)
    assert scores.strategies == ("ekfac", "bm25") and scores.facts["measurement"] == "margin"
    order = np.argsort(-VALUES[2])
    assert [n for n, _ in scores.top(2, 3)] == order[:3].tolist()
    assert [n for n, _ in scores.bottom(2, 2)] == order[::-1][:2].tolist()
    assert scores.bottom(2, 1)[0][1] == pytest.approx(float(VALUES[2].min()))
    assert scores.query("v1") == scores.query(1) == 1
    assert isinstance(scores.memmap(), np.memmap)


def test_modules_add_up_and_can_be_chosen(tmp_path: Path) -> None:
    scores = written(tmp_path)
    np.testing.assert_allclose(scores.within(0, ["*"]), VALUES[0], rtol=1e-6)
    np.testing.assert_allclose(scores.within(0, ["layer.*"]), 0.75 * VALUES[0], rtol=1e-6)
    with pytest.raises(StoreError, match="matches none of the 3 modules"):
        scores.within(0, ["leyer.*"])
    with pytest.raises(StoreError, match="--per-module"):
        scores.within(0, ["*"], scores.find("bm25"))


def test_half_precision_keeps_the_order(tmp_path: Path) -> None:
    import torch

    wide = np.random.default_rng(1).normal(size=(4, 500)).astype(np.float32)
    for dtype, least in (("float16", 0.9999), ("bfloat16", 0.999)):
        kept = unpack(pack(wide, dtype), dtype)  # type: ignore[arg-type]
        assert spearman_by_row(kept, wide).min() > least
        np.testing.assert_array_equal(kept, torch.from_numpy(wide).to(getattr(torch, dtype)).float().numpy())
    assert np.isnan(unpack(pack(np.array([np.nan], np.float32), "bfloat16"), "bfloat16"))
    with writing_scores(tmp_path / "scores", QUERIES, TRAIN) as desk:
        desk.put(Matrix("ekfac", main=True, dtype="bfloat16"), slice(None), slice(None), VALUES)
    np.testing.assert_allclose(Scores.open(tmp_path).whole(), VALUES, rtol=1 / 256)


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e9])
def test_half_precision_neither_overflows_nor_vanishes(size: float, tmp_path: Path) -> None:
    wide = (size * np.random.default_rng(1).normal(size=(Q, N))).astype(np.float32)
    parts = [Matrix("ekfac", "1", n, not n, "float16", unit=unit_for(s * wide, "float16")) for n, s in PARTS]
    with writing_scores(tmp_path / "scores", QUERIES, TRAIN) as desk:
        for matrix, (_, share) in zip(parts, PARTS):
            desk.put(matrix, slice(None), slice(None), share * wide)
    found = Scores.open(tmp_path)
    for (module, share), matrix in zip(PARTS, parts):
        # known by its name alone, as those beside the main one are
        got = found.whole(replace_module(found.find(), module))
        np.testing.assert_allclose(got, share * wide, rtol=1e-3, atol=1e-7 * share * np.abs(wide).max())
        np.testing.assert_array_equal(got, matrix.kept(share * wide))
    with pytest.raises(StoreError, match="1e\\+09 is too large for float16"):
        pack(np.array([1e9]), "float16")


def test_tokens_of_a_row(tmp_path: Path) -> None:
    words = Tokens(tuple(("a",) * (n % 3 + 1) for n in range(N)))
    width = int(words.offsets_N1[-1])
    values = np.arange(Q * width, dtype=np.float32).reshape(Q, width)
    with writing_scores(tmp_path / "scores", QUERIES, TRAIN, tokens=words) as desk:
        desk.put(MAIN, slice(None), slice(None), VALUES)
        desk.put(Matrix("ekfac", "1e-08", "tokens"), slice(None), slice(None), values)
    spelled, share = Scores.open(tmp_path).token_row(1, 2)
    assert spelled == ("", "a", "a", "a")
    np.testing.assert_array_equal(share, values[1, 5:9])


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), writing_scores(tmp_path / "scores", QUERIES, TRAIN) as desk:
        desk.put(MAIN, slice(None), slice(None), VALUES)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no scores"):
        Scores.open(tmp_path)
    with pytest.raises(StoreError, match="'a' stands for two rows"), writing_scores(tmp_path / "s", ["a", "a"], TRAIN):
        pass
    scores = written(tmp_path)
    with pytest.raises(StoreError, match="no query '3'.*numbered 0 to 2"):
        scores.query(3)
    with pytest.raises(StoreError, match="no scores of strategy 'ekfc'.*Did you mean 'ekfac'"):
        scores.find("ekfc")
    with pytest.raises(StoreError, match="damping '1'.*for damping 1e-08"):
        scores.find("ekfac", "1")
    with pytest.raises(StoreError, match="--per-token"):
        scores.token_row(0, 0)
    ids = read_json(tmp_path / "scores" / "train_ids.json")
    write_json(tmp_path / "scores" / "train_ids.json", ids[:-1])
    with pytest.raises(StoreError, match="tells of 7 train"):
        Scores.open(tmp_path)

"""Comparisons of Fishers and of weights: numbers by hand, figures, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from budwood.config.compare import FisherCompareConfig, WeightsCompareConfig
from budwood.errors import ConfigError, TreeError
from budwood.methods.fisher_compare import overlaps, read_all
from budwood.methods.weights_compare import movement, tsne
from budwood.params import tree
from budwood.studies.verbs import run_verb
from tests.cases import build, write_model


def fisher(path: Path, seed: int, **facts: Any) -> Path:
    model = build("bert", "lm", dtype=torch.float32)
    draw = torch.Generator().manual_seed(seed)
    values = {n: torch.rand(p.shape, generator=draw) for n, p in tree.named(model).items()}
    note = {"artefact": "fisher", "kind": "exact", "task": path.stem, "model_type": "bert", "tokenizer": "t", **facts}
    tree.save(path, values, note)
    return path


def test_overlap_by_hand() -> None:
    first = torch.tensor([9.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    other = torch.tensor([5.0, 1.0, 7.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    (row,) = overlaps(["a", "b"], [first, other], 1, 2)
    assert row["overlap"] == 0.5 and row["chance"] == 0.25 and row["times_chance"] == 2.0
    assert row["mean_at_top"] == 3.0 and row["mean_elsewhere"] == 2.0 and row["ratio"] == 1.5


def test_a_comparison_of_fishers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = tuple(fisher(tmp_path / f"{n}.safetensors", i) for i, n in enumerate(("one", "two", "three")))
    cfg = FisherCompareConfig(fishers=files, top=300, layers=(0, 2), out=tmp_path / "out", progress="none")
    result = run_verb("fisher compare", cfg, [])
    m = result.metrics
    assert len(m["overlap"]) == 3 * 2 and m["layers"] == [0, 2]
    assert all(0.6 < row["times_chance"] < 1.6 for row in m["overlap"])  # unrelated: about what chance gives
    for part in ("by_layer", "by_module"):
        assert sum(m["mass"]["one"][part].values()) == pytest.approx(1.0)
    assert {p.stem for p in result.figures} == {"overlap", "mass"}
    assert not run_verb("fisher compare", cfg, []).fresh


def test_fishers_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    good = fisher(tmp_path / "a.safetensors", 0)
    for facts, told in (
        ({"model_type": "electra"}, r"different models \(bert and electra\); .* Compare Fishers of one model"),
        ({"tokenizer": "u"}, r"different tokenizers \(t and u\); .* Compare Fishers of one model"),
        ({"kind": "batched"}, r"different kinds \(sampled and batched\); .* again with the other's --kind"),
        ({"artefact": "graft"}, "is no Fisher file"),
    ):
        with pytest.raises(TreeError, match=told):
            read_all([good, fisher(tmp_path / "b.safetensors", 1, **facts)])
    with pytest.raises(ConfigError, match="two or more"):
        read_all([good])
    values, note = tree.load(good)
    tree.save(tmp_path / "b.safetensors", {n: v for n, v in values.items() if n != "embeddings.LayerNorm.bias"}, note)
    with pytest.raises(
        TreeError, match="a.safetensors' and .*b.safetensors' has no 'embeddings.LayerNorm.bias' .*must"
    ):
        read_all([good, tmp_path / "b.safetensors"])
    cfg = FisherCompareConfig(fishers=(good, good), layers=(7,), out=tmp_path / "x", progress="none")
    with pytest.raises(ConfigError, match="names block 7"):
        run_verb("fisher compare", cfg, [])


def test_movement_by_hand() -> None:
    base = {"encoder.layer.0.w": torch.tensor([3.0, 4.0]), "embeddings.w": torch.tensor([1.0, 0.0])}
    other = {"encoder.layer.0.w": torch.tensor([3.0, 4.0]), "embeddings.w": torch.tensor([0.0, 1.0])}
    rows = {r["layer"]: r for r in movement("m", base, other)}
    assert rows["block.0"]["moved"] == 0.0 and rows["block.0"]["cosine"] == pytest.approx(1.0)
    assert rows["embeddings"]["moved"] == pytest.approx(2**0.5) and rows["embeddings"]["cosine"] == 0.0


def test_the_map_is_seeded() -> None:
    rows = [np.random.default_rng(i).normal(size=(30, 6)) for i in range(2)]
    one, two = (tsne(rows, 10, 5.0, 3) for _ in range(2))
    assert one.shape == (2, 10, 2) and np.array_equal(one, two)


def test_a_comparison_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, form, seed in (("base", "lm", 0), ("same", "lm", 0), ("other", "head", 1)):
        write_model(tmp_path / name, "bert", form, seed)
    cfg = WeightsCompareConfig(points=12, layers=(1,), out=tmp_path / "out", progress="none")
    m = run_verb("weights compare", cfg, ["base", "same", "other"]).metrics
    by = {(r["model"], r["layer"]): r for r in m["movement"]}
    assert by["same", "block.1"]["moved"] == 0.0 and by["other", "block.1"]["moved"] > 0.5
    assert (tmp_path / "out" / "figures" / "tsne.csv").exists()
    with pytest.raises(ConfigError, match="at least one model"):
        run_verb("weights compare", cfg.model_copy(update={"out": tmp_path / "y"}), ["base"])

"""Grafts: exact values, exact files, and nothing a hostile file can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from budwood.errors import TreeError
from budwood.params import graft_file
from budwood.params import mask as masks
from budwood.params.graft import Graft, backbone_hash, hash_of, merge, together
from budwood.params.graft_file import pack, unpack
from budwood.params.tree import named, sub, take, values
from tests.cases import build, case


@pytest.fixture
def pair() -> tuple[Any, Any, dict[str, torch.Tensor]]:
    base, tuned = build("bert", seed=0), build("bert", seed=1)
    names = masks.graftable(base, embeddings=True, head=True)
    return base, tuned, sub(take(values(tuned), names), take(values(base), names))


def sizes_of(delta: dict[str, torch.Tensor]) -> dict[str, int]:
    return {n: v.numel() for n, v in delta.items()}


@pytest.mark.parametrize("index", [[], [0], [5], [0, 1, 2], [127, 128, 129, 16_000_000, 2**40], [300, 500, 70_000]])
def test_positions_survive_packing(index: list[int]) -> None:
    gaps = unpack(pack(np.array(index, dtype=np.int64)))
    assert (np.cumsum(gaps + 1) - 1).tolist() == index


def test_random_positions_survive_packing_in_few_bytes() -> None:
    index = np.sort(np.random.default_rng(0).choice(100_000, 1000, replace=False))
    stream = pack(index)
    assert np.array_equal(np.cumsum(unpack(stream) + 1) - 1, index) and len(stream) < 1400


def test_the_whole_mask_is_the_tuned_model_and_the_empty_one_the_base(pair: Any) -> None:
    base, tuned, delta = pair
    here = case("bert", "lm")
    ask = lambda model: here.objective.logits(model, here.batch()).detach()
    before, after = ask(base), ask(tuned)
    assert float((before - after).abs().max()) > 0.1
    with Graft.cut(masks.everything(sizes_of(delta)), delta, dtype=torch.float64).apply(base, force=True) as patched:
        torch.testing.assert_close(ask(patched), after, rtol=0, atol=1e-5)
    with Graft.cut({}, delta).apply(base, force=True) as patched:
        assert torch.equal(ask(patched), before)
    assert torch.equal(ask(base), before)


def test_complement_and_graft_make_the_whole_difference(pair: Any) -> None:
    _, _, delta = pair
    mask = masks.random(sizes_of(delta), 500, 0)
    parts = [Graft.cut(m, delta, dtype=torch.float64) for m in (mask, masks.complement(mask, sizes_of(delta)))]
    total = {n: torch.zeros_like(v).view(-1) for n, v in delta.items()}
    for part in parts:
        for name, index in part.index.items():
            total[name][index] += part.delta[name]
    assert all(torch.equal(total[n].view_as(v), v) for n, v in delta.items())


def test_weights_come_back_bit_by_bit_also_after_an_exception(pair: Any) -> None:
    base, _, delta = pair
    old = values(base)
    graft = Graft.cut(masks.random(sizes_of(delta), 300, 1), delta, {"head.cls.predictions.bias": torch.ones(40)})
    with pytest.raises(RuntimeError, match="stop"), graft.apply(base, force=True):
        assert sum(int((old[n] != p).sum()) for n, p in named(base).items()) >= 300
        raise RuntimeError("stop")
    assert all(torch.equal(old[n], p) for n, p in named(base).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_file_gives_the_same_graft_and_the_same_bytes(pair: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    _, _, delta = pair
    graft = Graft.cut(
        masks.random(sizes_of(delta), 777, 2), delta, {"head.w": torch.randn(2, 3)}, {"task": "t", "x": [1]}, dtype
    )
    size = graft.save(tmp_path / "a.graft")
    again = Graft.load(tmp_path / "a.graft")
    assert again.size == 777 and again.manifest == graft.manifest and size == (tmp_path / "a.graft").stat().st_size
    for name in graft.index:
        assert torch.equal(graft.index[name], again.index[name]) and torch.equal(graft.delta[name], again.delta[name])
    assert torch.equal(again.head["head.w"], graft.head["head.w"])
    again.save(tmp_path / "b.graft")
    assert (tmp_path / "a.graft").read_bytes() == (tmp_path / "b.graft").read_bytes()


def test_one_percent_of_a_100k_encoder_is_at_most_10_kb(tmp_path: Path) -> None:
    """Two layers of width 64, named as in BERT: 99,968 weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(2):
        stem = f"encoder.layer.{layer}."
        for part, (o, i) in {
            "attention.self.query": (64, 64),
            "attention.self.key": (64, 64),
            "attention.self.value": (64, 64),
            "attention.output.dense": (64, 64),
            "intermediate.dense": (256, 64),
            "output.dense": (64, 256),
        }.items():
            shapes |= {f"{stem}{part}.weight": (o, i), f"{stem}{part}.bias": (o,)}
        for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{stem}{norm}.weight": (64,), f"{stem}{norm}.bias": (64,)}
    delta = {n: torch.randn(s) for n, s in shapes.items()}
    total = sum(v.numel() for v in delta.values())
    assert total == 99_968
    graft = Graft.cut(
        masks.random(sizes_of(delta), total // 100, 0), delta, manifest={"task": "sst2", "base_hash": "0" * 32}
    )
    assert graft.save(tmp_path / "x.graft") <= 10_000


def test_several_grafts_average_where_they_overlap_in_any_order(pair: Any) -> None:
    base, _, delta = pair
    name = "encoder.layer.0.output.dense.weight"
    one = Graft.cut({name: torch.tensor([1, 2])}, {name: torch.full_like(delta[name], 2.0)})
    two = Graft.cut({name: torch.tensor([2, 3])}, {name: torch.full_like(delta[name], 4.0)})
    three = Graft.cut({name: torch.tensor([2])}, {name: torch.full_like(delta[name], 0.1)})
    index, added = together([one, two])
    assert index[name].tolist() == [1, 2, 3] and added[name].tolist() == [2.0, 3.0, 4.0]
    orders = [together(list(x))[1][name] for x in ((one, two, three), (three, one, two), (two, three, one))]
    assert torch.equal(orders[0], orders[1]) and torch.equal(orders[0], orders[2])


def test_a_wrong_base_is_refused_by_hash_and_by_shape(pair: Any) -> None:
    base, tuned, delta = pair
    graft = Graft.cut(
        masks.random(sizes_of(delta), 5, 0), delta, manifest={"base_hash": backbone_hash(base), "task": "t"}
    )
    graft.merge_into(tuned, force=True)
    with pytest.raises(TreeError, match="this model's weights are .* --force"):
        graft.merge_into(tuned)
    with graft.apply(base):
        pass
    with graft.apply(base):  # every bit is back, so the base is known again
        pass
    with pytest.raises(TreeError, match="which this model lacks|of shape"):
        graft.merge_into(build("gpt2"))
    with pytest.raises(TreeError, match="of shape"):
        merge(build("bert", hidden_size=32), [graft], force=True)


def test_a_graft_that_names_no_base_is_refused(pair: Any) -> None:
    base, _, delta = pair
    with pytest.raises(TreeError, match="does not say which weights"):
        Graft.cut(masks.random(sizes_of(delta), 5, 0), delta, manifest={"task": "t"}).merge_into(base)


def test_a_base_with_another_head_is_refused_where_the_graft_changes_it(pair: Any) -> None:
    base, _, delta = pair
    name = "head.cls.predictions.bias"
    facts = {"base_hash": backbone_hash(base), "head_hash": hash_of(named(base), [name]), "task": "t"}
    graft = Graft.cut({name: torch.tensor([1])}, delta, manifest=facts)
    with graft.apply(base):
        pass
    with torch.no_grad():
        named(base)[name].add_(1)
    with pytest.raises(TreeError, match="this model's weights are"):
        graft.merge_into(base)
    Graft.cut({"embeddings.LayerNorm.weight": torch.tensor([1])}, delta, manifest=facts).merge_into(base)


def test_the_hash_is_of_the_backbone_alone_and_follows_changes() -> None:
    model, other = build("bert"), build("bert", "head")
    first = backbone_hash(model)
    with torch.no_grad():
        named(model)["head.cls.predictions.bias"].add_(1)
    assert backbone_hash(model) == first
    with torch.no_grad():
        named(model)["embeddings.LayerNorm.weight"].add_(1)
    assert backbone_hash(model) != first and len(first) == len(backbone_hash(other))


def forged(path: Path, change: Any) -> Path:
    """A file with something changed and the checksum made to fit."""
    Graft.cut({"w": torch.tensor([1, 3])}, {"w": torch.randn(2, 3)}, manifest={"task": "t"}).save(path)
    tensors = dict(load_file(path))
    manifest = {"task": "t", "tensors": [["w", [2, 3], 2]]}
    change(tensors, manifest)
    text = json.dumps(manifest)
    save_file(tensors, path, metadata=graft_file.metadata(text, tensors))
    return path


HOSTILE = {
    "outside its tensor": (lambda t, m: t.update(indices=pack(np.array([1, 6]))), "writes outside 'w'"),
    "far outside": (lambda t, m: t.update(indices=pack(np.array([1, 2**50]))), "writes outside 'w'"),
    "a shape that is too large": (lambda t, m: m.update(tensors=[["w", [2**40, 2**40], 2]]), "no tensor"),
    "a negative shape": (lambda t, m: m.update(tensors=[["w", [-2, -3], 2]]), "no tensor"),
    "counts that do not fit": (lambda t, m: m.update(tensors=[["w", [2, 3], 1]]), "belong to no tensor"),
    "too many counts": (lambda t, m: m.update(tensors=[["w", [2, 3], 5]]), "claims 5 positions"),
    "a tensor twice": (lambda t, m: m.update(tensors=[["w", [2, 3], 1], ["w", [2, 3], 1]]), "'w' twice"),
    "no table": (lambda t, m: m.update(tensors="w"), "does not list"),
    "values that are not finite": (lambda t, m: t.update(values=np.array([1, np.nan], np.float32)), "not finite"),
    "too few values": (lambda t, m: t.update(values=np.ones(1, np.float32)), "2 positions and 1 values"),
    "whole weights as a head": (
        lambda t, m: t.update({"head:encoder.w": np.ones(2, np.float32)}),
        "'encoder.w' as a whole",
    ),
    "a stray tensor": (lambda t, m: t.update(more=np.ones(2, np.float32)), "'more' as a whole"),
    "a number cut off": (lambda t, m: t.update(indices=np.array([1, 0x81], np.uint8)), "middle of a number"),
    "an empty tensor": (lambda t, m: m.update(tensors=[["w", [2, 3], 2], ["v", [0], 0]]), "no tensor"),
    "an empty head": (lambda t, m: t.update({"head:head.w": np.ones(0, np.float32)}), "without weights"),
    "labels that are none": (lambda t, m: m.update(labels=5), "'labels' are no list"),
    "a task that is no name": (lambda t, m: m.update(task=["a"]), "'task' is no text"),
    "a count that is none": (lambda t, m: m.update(graftable="many"), "'graftable' is no count"),
    "a broken letter": (lambda t, m: m.update(task="\ud800"), "broken text"),
    "an escape": (lambda t, m: m.update(metrics={"a": ["\x1b[2J"]}), "control characters"),
    "a reading of another kind": (lambda t, m: m.update(reading={"mode": "magic"}), "'reading' has a 'mode'"),
    "a reading with more in it": (lambda t, m: m.update(reading={"data_dir": "/"}), "'reading' is not how"),
    "an endless number": (lambda t, m: t.update(indices=np.array([0xFF] * 12 + [1], np.uint8)), "longer than any"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    change, told = HOSTILE[name]
    with pytest.raises(TreeError, match=f"not to be trusted: .*{told}"):
        Graft.load(forged(tmp_path / "x.graft", change))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"tensors": [], "size": NaN}'])
def test_a_manifest_that_is_no_json_is_told_in_a_sentence(text: str, tmp_path: Path) -> None:
    path = forged(tmp_path / "x.graft", lambda t, m: None)
    tensors = dict(load_file(path))
    save_file(tensors, path, metadata=graft_file.metadata(text, tensors))
    for ask in (Graft.load, graft_file.manifest_of):
        with pytest.raises(TreeError, match="its manifest is not JSON"):
            ask(path)


def test_the_manifest_alone_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match="not to be trusted"):
        graft_file.manifest_of(forged(tmp_path / "x.graft", lambda t, m: m.update(labels=5)))


def test_an_honest_forgery_loads(tmp_path: Path) -> None:
    assert Graft.load(forged(tmp_path / "x.graft", lambda t, m: None)).size == 2


def test_a_damaged_file_is_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    path = tmp_path / "x.graft"
    Graft.cut({"w": torch.arange(50)}, {"w": torch.randn(100)}, manifest={"task": "t"}).save(path)
    whole = path.read_bytes()
    for cut in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(TreeError, match="damaged or no graft"):
            Graft.load(path)
    for place in range(len(whole) - 40, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(TreeError, match="damaged or no graft"):
            Graft.load(path)
    path.write_bytes(whole)
    assert Graft.load(path).size == 50
    save_file({"w": np.ones(2)}, path)
    with pytest.raises(TreeError, match="is no graft: its format is 'unknown'"):
        Graft.load(path)
    with pytest.raises(TreeError, match="There is no graft"):
        Graft.load(tmp_path / "none.graft")

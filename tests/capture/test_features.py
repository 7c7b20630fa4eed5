"""The feature store against states recomputed row by row; one key per wording, shards that resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from budwood.capture import features as stored
from budwood.capture.activations import collect
from budwood.capture.features import Ask, open_reading, store
from budwood.errors import DataError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BUDWOOD_CACHE", str(tmp_path))


def ask(task: str, kind: stored.FeatureKind, **more) -> Ask:
    return Ask("tiny-bert", {"task": task, "limit": 30, **more}, "train", kind)


@pytest.mark.parametrize(("task", "kind"), [("tiny-qa", "allowed"), ("tiny-tags", "target"), ("tiny-topic", "mean")])
def test_every_layer_is_that_of_a_row_by_itself(task, kind):
    want = ask(task, kind)
    found, read = store(want), open_reading(want)
    assert found.layers == 5
    for n in (0, 7):
        batch = read.feed(found.encoded)(np.array([n]))
        keep = slice(None)
        if kind != "mean":
            keep = batch.targets[kind][0] != {"allowed": 0, "target": -100}[kind]
        for number, state_BTD in enumerate(collect(read.loaded.model, batch.inputs)):
            alone = state_BTD[0][keep].mean(0, keepdim=True) if kind == "mean" else state_BTD[0][keep]
            mine = found.layer(number)[found.offsets_N1[n] : found.offsets_N1[n + 1]]
            torch.testing.assert_close(mine, alone, rtol=1e-3, atol=2e-3)  # 11 bits of the largest value


def test_shards_resume_and_another_wording_is_another_place(monkeypatch):
    whole = store(ask("tiny-topic", "cls")).layer(3)
    monkeypatch.setattr(stored, "SHARD", 8)
    first = store(ask("tiny-topic", "cls", max_length=32))
    second = sorted(first.directory.glob("0*.safetensors"))[1]
    before = second.read_bytes()
    second.unlink()
    again = store(ask("tiny-topic", "cls", max_length=32))
    assert second.read_bytes() == before and again.directory == first.directory
    torch.testing.assert_close(again.layer(3), whole, rtol=1e-3, atol=2e-3)
    prompt = store(ask("tiny-topic", "mask", mode="prompt"))
    other = store(ask("tiny-topic", "mask", mode="prompt", template="{text} about {mask} ."))
    assert len({first.directory, prompt.directory, other.directory}) == 3
    with pytest.raises(DataError, match="no layer 9"):
        again.layer(9)


def test_the_masked_lm_transform_is_what_the_head_reads():
    want = ask("tiny-topic", "mlm-mask", mode="prompt")
    found, read = store(want), open_reading(want)
    batch = read.feed(found.encoded)(np.arange(4))
    with torch.no_grad():
        logits_BK = read.objective.logits(read.loaded.model, batch)
    decoder = read.loaded.model.cls.predictions.decoder
    ids = list(read.objective.word_ids)
    mine = found.layer(0)[:4] @ decoder.weight[ids].T + decoder.bias[ids]
    torch.testing.assert_close(mine, logits_BK, rtol=1e-2, atol=2e-2)

"""The feature store against states recomputed row by row; one key per wording, shards that resume."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from budwood.capture import features as stored
from budwood.capture.activations import collect
from budwood.capture.features import Ask, open_reading, store
from budwood.data.batch import budget_batches
from budwood.errors import DataError
from budwood.linalg.folds import cross_validate, stratified_folds


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


@pytest.mark.parametrize("model", ["tiny-bert", "tiny-gpt"])
def test_a_pass_over_all_layers_is_block_after_block_and_padding_changes_nothing(model):
    """Batches of like length against single rows, and against rows padded far beyond them; each block run by itself."""
    want = Ask(model, {"task": "tiny-topic", "limit": 30}, "train", "token")
    read = open_reading(want)
    net, encoded = read.loaded.model, read.encode(read.task.rows("train"))
    feed = read.feed(encoded)
    pad = int(read.loaded.tokenizer.pad_token_id or 0)
    for chosen in budget_batches(encoded.lengths_N[:12], 128):
        together = stored.states(net, feed(chosen), "token")
        ends = np.cumsum(encoded.lengths_N[chosen])
        for i, n in enumerate(chosen):
            row = feed(np.array([n]))
            whole = {**row.inputs, "attention_mask": torch.ones_like(row.inputs["input_ids"])}
            grown = lambda name, x: torch.nn.functional.pad(x, (0, 20), value=pad * (name == "input_ids"))
            long = {k: grown(k, v) for k, v in whole.items()}
            piece = slice(ends[i] - encoded.lengths_N[n], ends[i])
            for other in (stored.states(net, row, "token"), stored.states(net, replace(row, inputs=long), "token")):
                for a, b in zip(together, other, strict=True):
                    assert float((a[piece] - b).abs().max()) <= 1e-5
    blocks = [m for m in net.modules() if type(m).__name__ in ("BertLayer", "GPT2Block")]
    row = feed(np.array([3]))
    one_pass = stored.states(net, row, "token")
    assert len(one_pass) == len(blocks) + 1
    mask_TT = torch.zeros(1, 1, len(one_pass[0]), len(one_pass[0]))
    if model == "tiny-gpt":
        mask_TT += torch.full_like(mask_TT, -torch.inf).triu(1)
    for block, before, after in zip(blocks, one_pass, one_pass[1:]):
        with torch.no_grad():
            out = block(before[None], attention_mask=mask_TT)
            out = out if isinstance(out, torch.Tensor) else out[0]
            if block is blocks[-1] and model == "tiny-gpt":
                out = net.base_model.ln_f(out)
        assert float((out[0] - after).abs().max()) <= 1e-5


def test_sixteen_bits_change_neither_loss_nor_answers():
    want = Ask("tiny-bert", {"task": "tiny-topic", "limit": 600}, "train", "cls")
    kept, read = store(want), open_reading(want)
    feed, y_N = read.feed(kept.encoded), np.array([r.label for r in read.task.rows("train")])
    exact = [torch.empty(600, kept.layer(0).shape[1]) for _ in range(kept.layers)]
    for index in budget_batches(kept.encoded.lengths_N):
        for whole, piece in zip(exact, stored.states(read.loaded.model, feed(index), "cls")):
            whole[torch.from_numpy(index)] = piece
    for layer in (1, 4):
        told = []
        for x_ND in (exact[layer], kept.layer(layer)):
            fit = cross_validate(x_ND, y_N, len(read.task.labels), (0.01,), stratified_folds(y_N, 2))
            logits_NK = fit.solution.logits(x_ND, [(0, 0)])[0]
            loss = float(torch.nn.functional.cross_entropy(logits_NK, torch.from_numpy(y_N)))
            told.append((loss, float((logits_NK.argmax(1).numpy() == y_N).mean())))
        (loss, right), (near, almost) = told
        assert abs(loss - near) < 1e-3 and abs(right - almost) <= 0.002 and right < 0.999
        assert float((exact[layer] - kept.layer(layer)).abs().max()) > 0


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

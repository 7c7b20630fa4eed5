"""Probes trained by AdamW: the batched computation against one probe at a time, saved probes, carrying on."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from budwood.capture import supply as supplies
from budwood.capture.features import Ask, Stored
from budwood.capture.supply import Kept, states_at
from budwood.config.probe import ProbeConfig
from budwood.data.batch import seed_of, training_batches
from budwood.errors import DataError
from budwood.linalg.choice import Choices, solve_choices
from budwood.linalg.softmax import Problems, solve
from budwood.methods.probe import trained
from budwood.methods.probe.descent import (
    Lesson,
    Plan,
    State,
    apply_plain,
    clip,
    initial,
    logits,
    plain,
    scale_of,
    scores,
    train,
)
from budwood.methods.probe.saved import evaluate, predict
from budwood.studies.verbs import estimate, run_verb


def lesson(span: bool, targets: int = 2, rows: int = 21, width: int = 5):
    rng = np.random.default_rng(3)
    size_N = rng.integers(2, 7, rows) if span else rng.integers(1, 3, rows)
    offsets_N1 = np.concatenate([[0], np.cumsum(size_N)])
    x_LMD = torch.from_numpy(rng.normal(1.0, 2.0, size=(3, int(offsets_N1[-1]), width))).float()
    states = int(offsets_N1[-1])
    answer = rng.integers(0, size_N, (targets, 2, rows)) if span else rng.integers(0, 3, (targets, states))
    give = lambda index: x_LMD[:, torch.from_numpy(states_at(offsets_N1, index))]  # noqa: E731
    return give, Lesson(offsets_N1, size_N, answer, 2 if span else 3, span)


def plan(**more):
    return Plan(**{"layers": (0, 1, 2), "epochs": 2, "rate": 0.01, "batch": 4, "seed": 1, "published": False, **more})


def alone(give, what, how, scale, layer, target):
    """One probe of one layer and target, by a plain loop over updates and rows."""
    first = initial(how, what, int(scale.mean_D.shape[-1]))
    params = [first[k][layer, target].clone().requires_grad_() for k in first]
    names = list(first)
    adam = torch.optim.AdamW(params, lr=how.rate, weight_decay=0.0)
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in params]
    for epoch in range(how.epochs):
        draw = torch.Generator().manual_seed(seed_of(how.seed, "dropout", epoch))
        for index in training_batches(what.lengths_N, how.batch, how.seed, epoch):
            x_mD = scale(give(index))[layer]
            x_mD = x_mD * (torch.rand(x_mD.shape, generator=draw) >= how.dropout) / (1 - how.dropout)
            named = dict(zip(names, params))
            if how.hidden:
                x_mD = (x_mD @ named["hidden.weight"].T + named["hidden.bias"]).relu()
            out_mK = x_mD @ named["weight"].T + named.get("bias", torch.zeros(()))
            at, terms = 0, []
            for n in index:
                size = int(what.offsets_N1[n + 1] - what.offsets_N1[n])
                mine = out_mK[at : at + size]
                if what.span:
                    terms += [-mine[:, k].log_softmax(0)[what.answer[target, k, n]] for k in (0, 1)]
                else:
                    gold = what.answer[target, what.offsets_N1[n] : what.offsets_N1[n + 1]]
                    terms += [-mine[i].log_softmax(0)[g] for i, g in enumerate(gold)]
                at += size
            grads = torch.autograd.grad(torch.stack(terms).mean(), params)
            heads = [slice(0, 1), slice(1, 2)] if what.span and not how.hidden else [slice(None)]
            for head in heads:
                norm = sum(float(g[head].square().sum()) for g in grads) ** 0.5
                for g in grads:
                    g[head] *= min(1.0, how.limit / (norm + 1e-6))
            if how.published:
                with torch.no_grad():
                    for p, g, (m, v) in zip(params, grads, moments):
                        m.copy_(0.9 * m + 0.1 * g)
                        v.copy_(0.999 * v + 0.001 * g * g)
                        p -= how.rate * m / (v.sqrt() + 1e-8)
            else:
                for p, g in zip(params, grads):
                    p.grad = g
                adam.step()
    return dict(zip(names, params))


@pytest.mark.parametrize("span", [False, True])
@pytest.mark.parametrize(("published", "hidden"), [(False, 0), (True, 0), (False, 4)])
def test_all_at_once_is_one_after_the_other(span, published, hidden):
    give, what = lesson(span)
    how = plan(published=published, hidden=hidden, limit=0.3)
    scale = scale_of(give, len(what.lengths_N), False)
    found = train(give, what, scale, how, None, lambda s: None)
    for layer, target in [(0, 0), (2, 1)]:
        for name, value in alone(give, what, how, scale, layer, target).items():
            torch.testing.assert_close(found.params[name][layer, target], value.detach(), atol=2e-5, rtol=1e-4)


def test_a_probe_does_not_depend_on_its_neighbours():
    give, what = lesson(True)
    _, fewer = lesson(True)
    fewer = Lesson(fewer.offsets_N1, fewer.lengths_N, fewer.answer[:1], 2, True)
    scale = scale_of(give, len(what.lengths_N), True)
    whole = train(give, what, scale, plan(mix=True), None, lambda s: None)
    one = lambda index: give(index)[2:]  # noqa: E731
    lone = train(one, fewer, scale_of(one, 21, True), plan(layers=(2,)), None, lambda s: None)
    torch.testing.assert_close(lone.params["weight"][0, 0], whole.params["weight"][2, 0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("span", [False, True])
@pytest.mark.parametrize("hidden", [0, 4])
def test_saved_probes_say_what_trained_ones_say(span, hidden):
    give, what = lesson(span)
    scale = scale_of(give, len(what.lengths_N), False)
    state = train(give, what, scale, plan(hidden=hidden, mix=True), None, lambda s: None)
    whole = scores(give, what.offsets_N1, what.lengths_N, scale, state.epochs)
    assert whole.shape[:3] == (2, 4, 2)
    x_LMD = give(np.arange(len(what.lengths_N)))
    for place in range(4):
        given = x_LMD if place == 3 else x_LMD[place : place + 1]
        again = apply_plain(plain(state.epochs[1], scale, place), given)
        gap = again - whole[1, place, 0]
        # a linear span probe has no constant: scores of a window may move together
        torch.testing.assert_close(gap - (gap[:, :1] if span else 0), torch.zeros_like(gap), atol=2e-5, rtol=0)


def test_a_mix_finds_the_layer_that_knows():
    rng = np.random.default_rng(0)
    y_M = rng.integers(0, 2, 400)
    x_LMD = torch.from_numpy(rng.normal(size=(4, 400, 6))).float()
    x_LMD[2, :, 0] += torch.from_numpy(4.0 * y_M)
    what = Lesson(np.arange(401), np.ones(400, int), y_M[None], 2, False)
    give = lambda index: x_LMD[:, torch.from_numpy(index)]  # noqa: E731
    how = plan(layers=(0, 1, 2, 3), epochs=8, mix=True, rate=0.03)
    state = train(give, what, scale_of(give, 400, False), how, None, lambda s: None)
    share_L = state.params["mix.share"][0].softmax(0)
    assert int(share_L.argmax()) == 2 and float(share_L[2]) > 0.5
    assert abs(float(share_L.sum()) - 1) < 1e-6


@pytest.mark.parametrize("span", [False, True])
def test_long_training_ends_at_the_optimum_that_newton_finds(span):
    """Without dropout and with all rows in a batch; a cost so large that the penalty is nothing."""
    give, what = lesson(span, targets=1, rows=60, width=3)
    scale = scale_of(give, 60, False)
    end = None
    for epochs, rate in ((300, 0.05), (500, 0.005)):
        how = plan(epochs=epochs, rate=rate, batch=60, dropout=0.0, limit=1e9)
        state = None if end is None else State(end.params, end.moments, end.step)
        end = train(give, what, scale, how, state, lambda state: None)
    found_GCKM = scores(give, what.offsets_N1, what.lengths_N, scale, [end.params])[0]
    x_LMD = scale(give(np.arange(60)))
    for layer, x_MD in enumerate(x_LMD):
        if span:
            gold_2W = what.answer[0] + what.offsets_N1[:-1]
            both = Choices(
                what.offsets_N1[:-1], gold_2W, np.ones((1, 60)), np.arange(2), np.zeros(2, int), np.full((1, 2), 1e9)
            )
            solved = solve_choices(x_MD, both)
            best, score_KM = float(solved.objective_SP.mean()), (solved.weight_SPD[0].float() @ x_MD.T)
        else:
            zero, label = torch.zeros(1, dtype=torch.long), torch.from_numpy(what.answer)
            one = torch.full((1, 1), 1e9, dtype=torch.float64)
            solved = solve(x_MD, Problems(label, torch.ones(1, len(x_MD)), zero, zero, one, 3))
            best, score_KM = float(solved.objective_SP[0, 0]), solved.logits(x_MD, [(0, 0)])[0].T
        assert bool(solved.converged_SP.all())
        assert best - 1e-7 <= float(end.losses[-1][layer, 0]) <= best * (1 + 1e-4)
        edges = torch.from_numpy(what.offsets_N1[1:-1])
        told, want = (
            [p.argmax() for s in x for p in s.tensor_split(edges)] if span else x.argmax(0).tolist()
            for x in (found_GCKM[layer, 0], score_KM)
        )
        assert told == want


def test_carrying_on_gives_the_same_bits():
    give, what = lesson(False)
    scale = scale_of(give, len(what.lengths_N), False)
    states: list[dict[str, torch.Tensor]] = []
    keep = lambda s: states.append({k: v.clone() for k, v in s.tensors().items()})  # noqa: E731
    whole = train(give, what, scale, plan(epochs=3, mix=True), None, keep)
    turned = dict(reversed(states[0].items()))  # files have an order of their own
    again = train(give, what, scale, plan(epochs=3, mix=True), State.of(turned), lambda s: None)
    assert whole.tensors().keys() == again.tensors().keys()
    assert all(torch.equal(v, again.tensors()[k]) for k, v in whole.tensors().items())


def test_each_probe_is_clipped_by_itself():
    grads = {"weight": torch.ones(2, 1, 2, 4)}
    grads["weight"][0, 0, 0] = 10.0
    clip(grads, 1.0, True)
    norms = grads["weight"].norm(dim=-1)
    torch.testing.assert_close(norms, torch.full((2, 1, 2), 1.0), atol=1e-5, rtol=0)


def test_first_published_step_is_longer_than_the_rate():
    give, what = lesson(True)
    how = plan(published=True, epochs=1, batch=21, rate=1e-3, dropout=0.0)
    before = initial(how, what, 5)["weight"]
    moved = train(give, what, scale_of(give, 21, True), how, None, lambda s: None).params["weight"] - before
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 1e-3 * 10**0.5), rtol=1e-3, atol=0)


def test_logits_of_a_mix_of_one_layer_are_that_layers():
    give, what = lesson(False, targets=1)
    params = initial(plan(layers=(0,), mix=True), what, 5)
    params["mix.weight"], params["mix.bias"] = params["weight"].clone(), params["bias"].clone()
    found = logits(params, give(np.arange(3))[:1])
    torch.testing.assert_close(found[0], found[1])


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("BUDWOOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def go(place, name, task, **more):
    given = {"task": task, "limit": 40, "limit_eval": 20, "threads": 1, "layers": (0, 3), "progress": "none"}
    cfg = ProbeConfig(**{**given, "solver": "adamw", "epochs": 2, "out": place / name, **more})
    return run_verb("probe", cfg, ["tiny-bert"])


@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("tiny-qa", {"parity": True}),
        ("tiny-tags", {"hidden": 6, "mix": True, "pvi": True}),
        ("tiny-entail", {"no_controls": True}),
    ],
)
def test_every_epoch_is_kept_and_can_be_used_later(place, task, more):
    result = go(place, "run", task, **more)
    (found,) = result.metrics["results"]
    kinds = [0, 3, "mix"] if "mix" in more else [0, 3]
    assert [(x["epoch"], x["layer"]) for x in found["epochs"]] == [(e, n) for e in (1, 2) for n in kinds]
    assert [x["layer"] for x in found["layers"]] == [0, 3] and found["layers"][0]["train_loss"] > 0
    lines = (result.run / "results.csv").read_text().splitlines()
    assert lines[0].startswith("model,epoch,layer,score") and len(lines) == 1 + 2 * len(kinds)
    if "mix" in more:
        assert 0 <= found["centre_of_gravity"] <= 3 and sum(found["mix"]["weights"].values()) == pytest.approx(1)
    again = predict(result.run)
    for file in (result.run / "predictions" / "0-tiny-bert").glob("epoch_*/*.json"):
        other = again / file.relative_to(result.run / "predictions")
        assert json.loads(other.read_text()) == json.loads(file.read_text())
    rows = evaluate([result.run])
    assert len(rows) == 2 * 2 * len(kinds) and {r["probes"] for r in rows} == {
        "0-tiny-bert/epoch_1",
        "0-tiny-bert/epoch_2",
    }
    assert not (result.run / "training").exists()


def test_a_killed_run_carries_on_and_online_states_are_the_stored_ones(place, monkeypatch):
    whole = go(place, "whole", "tiny-topic", no_controls=True)
    keep, calls = trained._keep, []

    def dies(session, name, state):
        keep(session, name, state)
        calls.append(name)
        raise KeyboardInterrupt

    monkeypatch.setattr(trained, "_keep", dies)
    with pytest.raises(KeyboardInterrupt):
        go(place, "killed", "tiny-topic", no_controls=True)
    monkeypatch.setattr(trained, "_keep", keep)
    again = go(place, "killed", "tiny-topic", no_controls=True)
    assert len(calls) == 1 and again.metrics["results"] == whole.metrics["results"]
    stored = sorted((place / "cache" / "features").rglob("*.safetensors"))
    online = go(place, "online", "tiny-topic", no_controls=True, online=True)
    assert sorted((place / "cache" / "features").rglob("*.safetensors")) == stored
    lost = [[x["train_loss"] for x in r.metrics["results"][0]["epochs"]] for r in (online, whole)]
    assert lost[0] == pytest.approx(lost[1], rel=2e-3)  # 16 bits


def test_size_is_told_before_anything_is_written(place):
    with pytest.raises(DataError, match=r"would take 5\.\d+e-05 GB, more than the 1e-06 GB allowed. Give --online"):
        go(place, "run", "tiny-topic", no_controls=True, feature_budget=1e-6)
    assert not (place / "cache" / "features").exists()
    given = {"task": "tiny-topic", "limit": 40, "limit_eval": 20, "no_controls": True, "threads": 1}
    kept, online = (estimate("probe", ProbeConfig(**given, **x), ["tiny-bert"]) for x in ({}, {"online": True}))
    rows = 60
    assert kept["feature_bytes"] == kept["written_bytes"] == online["feature_bytes"] == rows * 5 * 128 * 2
    assert online["written_bytes"] == 0 and online["flops"] > 2 * kept["flops"]


def test_rows_come_in_the_order_asked_for_from_several_shards(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    monkeypatch.setattr(supplies, "SHARD", 2)
    size_N = np.array([2, 1, 3, 1, 2])
    offsets_N1 = np.concatenate([[0], np.cumsum(size_N)])
    x_LMD = torch.arange(2 * 9 * 3).reshape(2, 9, 3).float()
    for s, (a, b) in enumerate([(0, 3), (3, 7), (7, 9)]):
        tensors = {f"layer.{n}": x_LMD[n, a:b].half().contiguous() for n in (0, 1)}
        save_file({**tensors, "scale": torch.tensor([1.0, 2.0])}, tmp_path / f"{s:05d}.safetensors")
    stored = Stored(Ask("m", {}, "train", "token"), tmp_path, None, offsets_N1, 2)
    expected = torch.stack([x_LMD[0], 2 * x_LMD[1]])
    for held in (supplies.HELD, 0):
        monkeypatch.setattr(supplies, "HELD", held)
        for index in ([4, 0, 2], [1, 0], [3, 4, 1, 2, 0]):
            at = np.concatenate([np.arange(offsets_N1[i], offsets_N1[i + 1]) for i in index])
            assert torch.equal(Kept(stored, [0, 1])(np.array(index)), expected[:, at])
            assert torch.equal(Kept(stored, [1])(np.array(index)), expected[1:, at])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"solver": "newton", "hidden": 4}, "--hidden belongs to --solver adamw"),
        ({"solver": None, "epochs": 2}, "--epochs belongs to --solver adamw"),
        ({"solver": "adamw", "erase": True}, "--erase belongs to --solver newton"),
        ({"solver": "adamw", "repeats": 9}, "--repeats belongs to --solver newton"),
        ({"hidden": 4, "folds": 3}, "--folds belongs to --solver newton"),
    ],
)
def test_settings_that_do_not_go_together(more, words):
    with pytest.raises(ValueError, match=words):
        ProbeConfig(task="tiny-topic", **more)

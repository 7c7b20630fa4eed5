"""The reader without a transformer: attention against loops, padding, learning, carrying on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from budwood.config.probe import ProbeConfig
from budwood.data.batch import Features
from budwood.errors import ConfigError
from budwood.methods.probe.bidaf import Reader, attended, parts, scores, trained
from budwood.methods.probe.spans import gold
from budwood.studies.verbs import run_verb


def windows(rows, seed=0):
    """[1 question 2 context 2]; the answer is the one context piece that is in the question, if any (half the rows)."""
    rng = np.random.default_rng(seed)
    ids, allowed, starts = [], [], []
    for n in range(rows):
        question = rng.choice(np.arange(10, 18), 2, replace=False)
        context = rng.choice([p for p in range(10, 18) if p not in question], rng.integers(3, 6), replace=False)
        at = int(rng.integers(len(context)))
        if n % 2:
            context[at] = question[0]
        ids.append([1, *question, 2, *context, 2])
        allowed.append([1, 0, 0, 0, *[1] * len(context), 0])
        starts.append(4 + at if n % 2 else 0)
    fixed = {"start": starts, "end": starts, "row": list(range(rows)), "first": [0] * rows}
    return Features.from_lists([str(i) for i in range(rows)], {"input_ids": ids, "allowed": allowed}, fixed)


def test_attention_is_that_of_a_loop():
    draw = torch.Generator().manual_seed(0)
    c_BCD, q_BQD = (torch.randn(2, n, 4, generator=draw, dtype=torch.float64) for n in (5, 3))
    w_3D = torch.randn(3, 4, generator=draw, dtype=torch.float64)
    size_B, asked_B = torch.tensor([5, 3]), torch.tensor([2, 3])
    found = attended(c_BCD, q_BQD, w_3D, size_B, asked_B)
    for b in range(2):
        c_CD, q_QD = c_BCD[b, : size_B[b]], q_BQD[b, : asked_B[b]]
        like = torch.stack([torch.stack([w_3D[0] @ c + w_3D[1] @ q + w_3D[2] @ (c * q) for q in q_QD]) for c in c_CD])
        summary = sum(p * c for p, c in zip(like.max(1).values.softmax(0), c_CD))
        for t, c in enumerate(c_CD):
            told = sum(p * q for p, q in zip(like[t].softmax(0), q_QD))
            torch.testing.assert_close(found[b, t], torch.cat([c, told, c * told, c * summary]))


def test_padding_and_company_change_nothing():
    encoded, reader = windows(9), Reader(20)
    together = reader(*parts(encoded, np.arange(9)))
    for n in range(9):
        (alone,) = reader(*parts(encoded, np.array([n])))
        torch.testing.assert_close(together[n, :, : alone.shape[1]], alone, atol=1e-6, rtol=1e-5)
        assert (together[n, :, alone.shape[1] :] == -torch.inf).all()


def test_it_learns_to_find_a_shared_word_and_carries_on_with_the_same_bits(tmp_path):
    train, test = windows(600), windows(100, 1)
    whole = trained(train, 20, 10, 0, tmp_path / "whole")
    found_2M = scores(whole, test)
    ends = np.cumsum((test.ragged["allowed"] != 0).reshape(-1))[test.offsets_N1[1:] - 1]
    starts = np.concatenate([[0], ends[:-1]])
    right = [found_2M[0, a:b].argmax() + a == g for a, b, g in zip(starts, ends, gold(test)[0])]
    assert np.mean(right) > 0.8
    trained(train, 20, 2, 0, tmp_path / "part")
    short = trained(train, 20, 3, 0, tmp_path / "short").state_dict()
    again = trained(train, 20, 3, 0, tmp_path / "part").state_dict()
    assert all(torch.equal(v, again[k]) for k, v in short.items())


def test_a_line_in_the_baselines(tmp_path, monkeypatch):
    monkeypatch.setenv("BUDWOOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    given = {"limit": 40, "limit_eval": 20, "layers": (0,), "costs": (0.1,), "no_controls": True, "threads": 1}
    given |= {"progress": "none", "bidaf": 1}
    result = run_verb("probe", ProbeConfig(task="tiny-qa", out=tmp_path / "run", **given), ["tiny-bert"])
    assert 0 < result.metrics["baselines"]["bidaf"] <= 100
    with pytest.raises(ConfigError, match="--bidaf reads answers to questions"):
        run_verb("probe", ProbeConfig(task="tiny-topic", out=tmp_path / "other", **given), ["tiny-bert"])

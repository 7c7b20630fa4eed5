"""Streams over the vocabulary against the whole softmax, attention and autograd, in float64."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from budwood.linalg import vocabulary as v


@pytest.fixture(params=[True, False], ids=["bias", "plain"])
def words(request: pytest.FixtureRequest) -> v.Vocabulary:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(6000, 24, generator=draw, dtype=torch.float64)
    return v.Vocabulary(weight, torch.randn(6000, generator=draw, dtype=torch.float64) if request.param else None)


@pytest.fixture
def state() -> torch.Tensor:
    return 2 * torch.randn(700, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def dense(words: v.Vocabulary, state: torch.Tensor) -> torch.Tensor:
    bias = 0 if words.bias_V is None else words.bias_V
    return (state @ words.weight_VD.T + bias).softmax(1)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v, "NUMBERS", 1 << 18)
    monkeypatch.setattr(v, "WIDE", 1 << 19)


def test_conditional_mean_is_dense_autograd_and_attention(words: v.Vocabulary, state: torch.Tensor) -> None:
    mean, logz = v.conditional_mean(words, state)
    torch.testing.assert_close(mean, dense(words, state) @ words.weight_VD, rtol=1e-11, atol=1e-11)
    leaf = state.clone().requires_grad_()
    total = (leaf @ words.weight_VD.T + (0 if words.bias_V is None else words.bias_V)).logsumexp(1)
    torch.testing.assert_close(logz, total.detach(), rtol=1e-12, atol=1e-12)
    (slope,) = torch.autograd.grad(total.sum(), leaf)
    torch.testing.assert_close(mean, slope, rtol=1e-11, atol=1e-11)
    mask = None if words.bias_V is None else words.bias_V[None].expand(len(state), -1)
    attended = F.scaled_dot_product_attention(state, words.weight_VD, words.weight_VD, attn_mask=mask, scale=1.0)
    torch.testing.assert_close(mean, attended, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(v.log_partition(words, state), logz)


def test_float32_stays_within_1e_5(words: v.Vocabulary, state: torch.Tensor) -> None:
    single = v.Vocabulary(words.weight_VD.float(), None if words.bias_V is None else words.bias_V.float())
    mean, logz = v.conditional_mean(single, state.float())
    assert float((mean - dense(words, state) @ words.weight_VD).abs().max()) < 1e-5
    total = sum(single.prob(state.float(), logz, b).sum(1) for b in v.slices(len(single), 512))
    assert float((total - 1).abs().max()) < 1e-5


PEAK = """
import pathlib, torch
from budwood.linalg.vocabulary import Vocabulary, conditional_mean
# its own peak; that of getrusage would begin with the size of the process that started this one
peak = lambda: int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
draw = torch.Generator().manual_seed(0)
words, state = Vocabulary(0.3 * torch.randn(50_257, 16, generator=draw)), torch.randn(2000, 16, generator=draw)
conditional_mean(words, state[:1])
before = peak()
streamed = conditional_mean(words, state)[0]
ours = peak() - before
whole = (state @ words.weight_VD.T).softmax(1)
theirs = peak() - before
some = (state[:50].double() @ words.weight_VD.double().T).softmax(1) @ words.weight_VD.double()
assert float((some - streamed[:50]).abs().max()) < 1e-5
print(ours, theirs)
"""


def test_a_vocabulary_of_gpt_2_s_size_is_never_held_for_all_rows() -> None:
    """Megabytes above the beginning for 2,000 rows; narrow states, because only rows x words may grow."""
    if sys.platform != "linux":
        pytest.skip("peaks are not told here")
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    ours, theirs = map(float, done.stdout.split())
    assert ours < 300 < 400 < theirs  # p of all rows alone is 402 MB


def test_any_block_size_gives_the_same(
    words: v.Vocabulary, state: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = v.conditional_mean(words, state)[0]
    monkeypatch.setattr(v, "NUMBERS", 1 << 14)
    torch.testing.assert_close(first, v.conditional_mean(words, state)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("basis", [700, 300])
def test_inner_products_and_their_features(words: v.Vocabulary, state: torch.Tensor, basis: int) -> None:
    rows = torch.arange(basis)
    logz = v.log_partition(words, state)
    p = dense(words, state)
    found = v.inner(words, state, logz, rows)
    torch.testing.assert_close(found, p @ p[:basis].T, rtol=1e-10, atol=1e-14)
    feature = v.kernel_features(found, rows, cut=1e-13)
    torch.testing.assert_close(feature[:basis] @ feature[:basis].T, p[:basis] @ p[:basis].T, rtol=1e-6, atol=1e-9)


def test_projection_equals_the_explicit_matrix(words: v.Vocabulary, state: torch.Tensor) -> None:
    logz = v.log_partition(words, state)
    found = v.projected(words, state, logz, width=16, seed=5)
    blocks = [
        np.random.default_rng([5, i]).standard_normal((16, s.stop - s.start))
        for i, s in enumerate(v.slices(6000, v.DRAWN))
    ]
    drawn = torch.from_numpy(np.concatenate(blocks, 1))
    left, _, right = torch.linalg.svd(drawn, full_matrices=False)
    explicit = left @ right  # the orthonormal rows nearest to the draw
    torch.testing.assert_close(explicit @ explicit.T, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-10)
    torch.testing.assert_close(found, dense(words, state) @ explicit.T, rtol=1e-8, atol=1e-10)


def test_top_words_and_what_is_left(words: v.Vocabulary, state: torch.Tensor) -> None:
    logz = v.log_partition(words, state)
    ids, p, rest = v.top(words, state, logz, 10)
    wanted, places = dense(words, state).topk(10, 1)
    torch.testing.assert_close(p, wanted)
    assert torch.equal(ids, places)
    torch.testing.assert_close(rest, 1 - wanted.sum(1), rtol=1e-8, atol=1e-12)


def test_moments_of_words_keep_inner_products(state: torch.Tensor) -> None:
    draw = torch.Generator().manual_seed(2)
    few = v.Vocabulary(torch.randn(50, 24, generator=draw, dtype=torch.float64))
    logz = v.log_partition(few, state)
    found = v.moment_features(few, state, logz, torch.arange(600), cut=1e-13)
    p = dense(few, state)
    torch.testing.assert_close(found @ found.T, p @ p.T, rtol=1e-8, atol=1e-10)

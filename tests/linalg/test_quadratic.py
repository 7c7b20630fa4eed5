"""Fits of phi-p and log Z on states."""

from __future__ import annotations

import torch

from budwood.linalg.quadratic import linear_r2, quadratic_r2
from budwood.linalg.vocabulary import Vocabulary, conditional_mean


def test_exact_functions_are_found_and_others_are_not() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=draw, dtype=torch.float64)
    line = x @ torch.randn(6, 3, generator=draw, dtype=torch.float64) + 2
    square = (x @ torch.randn(6, 6, generator=draw, dtype=torch.float64) * x).sum(1, keepdim=True) + 1
    cut = lambda y: ((x[:300], y[:300]), (x[300:], y[300:]))
    assert linear_r2(*cut(line)) > 0.9999
    assert quadratic_r2(*cut(square)) > 0.999
    assert linear_r2(*cut(square)) < 0.5
    assert quadratic_r2(*cut(torch.randn(400, 1, generator=draw, dtype=torch.float64))) < 0.1


def test_random_embeddings_have_a_quadratic_log_partition() -> None:
    draw = torch.Generator().manual_seed(1)
    words = Vocabulary(torch.randn(20000, 10, generator=draw, dtype=torch.float64))
    state = 0.5 * torch.randn(900, 10, generator=draw, dtype=torch.float64)
    mean, logz = conditional_mean(words, state)
    cut = lambda y: ((state[:700], y[:700]), (state[700:], y[700:]))
    assert linear_r2(*cut(mean)) >= 0.95
    assert quadratic_r2(*cut(logz[:, None])) >= 0.95

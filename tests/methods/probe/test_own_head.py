"""A converged probe against the head that was trained on the same states: it can do whatever the head does."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from budwood.capture.features import Ask, open_reading, states
from budwood.config.probe import FeatureConfig
from budwood.linalg.choice import Choices, log_chances, solve_choices
from budwood.methods.probe.labels import Scale
from budwood.methods.probe.spans import gold
from budwood.train.evaluate import evaluate


def tuned_reading(given, steps):
    """tiny-bert with a span head, both trained for some steps; the shared one is left alone."""
    read = copy.deepcopy(open_reading(Ask("tiny-bert", given, "train", "allowed")))
    model, encoded = read.loaded.model, read.encode(read.task.rows("train"))
    adam = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(steps):
        batch = read.feed(encoded)(np.arange(8 * step, 8 * step + 8) % len(encoded))
        adam.zero_grad()
        read.objective.loss(read.objective.logits(model, batch), read.objective.targets(batch)).mean().backward()
        adam.step()
    return read, encoded


def test_the_train_loss_of_the_last_layer_is_at_most_that_of_the_head(tmp_path, monkeypatch):
    monkeypatch.setenv("BUDWOOD_CACHE", str(tmp_path))
    given = {"task": "tiny-qa", "mode": "span", "limit": 60, "threads": 1}
    read, encoded = tuned_reading(given, 16)
    allowed = encoded.ragged["allowed"] != 0
    window_M = np.repeat(np.arange(len(encoded)), encoded.lengths_N)[allowed]
    starts_W, answer_2W = np.searchsorted(window_M, np.arange(len(encoded))), gold(encoded)

    def loss(score_2M):
        return -np.take_along_axis(log_chances(score_2M, starts_W), answer_2W, axis=1).mean()

    found = evaluate(read, read.task.rows("train"), FeatureConfig(**given))
    head = loss(found.ends_2M[:, allowed].astype(np.float64))
    assert head == pytest.approx(found.metrics["loss"], abs=1e-4)
    feed, model = read.feed(encoded), read.loaded.model
    x_MD = torch.cat([states(model, feed(np.array([w])), "allowed")[-1] for w in range(len(encoded))])
    weight_2D = next(m for m in model.modules() if getattr(m, "out_features", 0) == 2).weight.detach()
    assert loss((weight_2D @ x_MD.T).double().numpy()) == pytest.approx(head, abs=1e-4)  # the head is such a probe
    x_MD = Scale.of(x_MD)(x_MD)
    costs_S2 = np.array([[0.1, 0.1], [1e3, 1e3]])
    many = Choices(starts_W, answer_2W, np.ones((1, len(encoded))), np.arange(2), np.zeros(2, int), costs_S2)
    probe = loss((solve_choices(x_MD, many).weight_SPD[-1] @ x_MD.double().T).numpy())
    assert probe <= head + 1e-4
    assert head < np.log(np.diff(np.append(starts_W, len(x_MD)))).mean() - 0.5  # the head has learned something

"""Objectives: losses and margins per example against the formulas written out, and sampled labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from budwood.data.batch import IGNORE
from budwood.errors import ConfigError
from budwood.models.objective import Head, Span, Targets, Tokens, Wording, Words, make_objective, sample_labels
from budwood.models.sites import model_inputs
from tests.cases import DECODERS, FAMILIES, OBJECTIVES, case


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("family", FAMILIES)
def test_examples_do_not_depend_on_their_batch(family, objective):
    c = case(family, objective)
    whole = c.objective.logits(c.model, c.batch())
    targets = c.objective.targets(c.batch())
    loss, margin = c.objective.loss(whole, targets), c.objective.margin(whole, targets)
    assert loss.shape == margin.shape == (4,) and bool(torch.isfinite(loss).all() & torch.isfinite(margin).all())
    for i in range(4):
        one = c.batch([i])
        logits, alone = c.objective.logits(c.model, one), c.objective.targets(one)
        torch.testing.assert_close(c.objective.loss(logits, alone), loss[i : i + 1])
        torch.testing.assert_close(c.objective.margin(logits, alone), margin[i : i + 1])


def margin_written_out(logits: torch.Tensor, label: int) -> torch.Tensor:
    others = torch.cat([logits[:label], logits[label + 1 :]])
    return logits[label] - others.exp().sum().log()


def test_head_and_regression():
    logits = torch.tensor([[1.0, 2.0, -1.0], [0.0, 0.5, 3.0]])
    targets = Targets(torch.tensor([1, 0]), None, 2)
    want = torch.stack([-logits.log_softmax(1)[0, 1], -logits.log_softmax(1)[1, 0]])
    torch.testing.assert_close(Head().loss(logits, targets), want)
    margins = torch.stack([margin_written_out(logits[0], 1), margin_written_out(logits[1], 0)])
    torch.testing.assert_close(Head().margin(logits, targets), margins)
    numbers = Targets(torch.tensor([2.0, 5.0]), None, 2)
    square = Head(regression=True).loss(torch.tensor([[1.0], [5.5]]), numbers)
    torch.testing.assert_close(square, torch.tensor([1.0, 0.25]))
    torch.testing.assert_close(Head(regression=True).margin(torch.tensor([[1.0], [5.5]]), numbers), -square)


def test_words_are_the_language_models_logits_at_the_answer():
    c = case("roberta", "words")
    batch = c.batch()
    full = c.model(**model_inputs(c.model, batch.inputs)).logits
    want = torch.stack([full[b, int(batch.targets["read_at"][b])][[5, 9, 11]] for b in range(4)])
    torch.testing.assert_close(c.objective.logits(c.model, batch), want)


def test_soft_two_way_target():
    c = case("bert", "soft")
    targets = c.objective.targets(c.batch())
    torch.testing.assert_close(targets.label_M, (c.batch().targets["label"] / 5).float())
    logits = torch.tensor([[0.3, -0.2]])
    one = Targets(torch.tensor([0.25]), None, 1)
    logp = logits.log_softmax(1)[0]
    torch.testing.assert_close(c.objective.loss(logits, one), -(0.75 * logp[0] + 0.25 * logp[1])[None])
    torch.testing.assert_close(c.objective.margin(logits, one), -(logp[1].exp() - 0.25).square()[None])


def test_span_is_the_libraries_loss_where_everything_is_allowed():
    c = case("bert", "span")
    batch = c.batch([2])
    batch.targets["allowed"].fill_(1)
    out = c.model(
        **model_inputs(c.model, batch.inputs),
        start_positions=batch.targets["start"],
        end_positions=batch.targets["end"],
    )
    loss = c.objective.loss(c.objective.logits(c.model, batch), c.objective.targets(batch))
    torch.testing.assert_close(loss, out.loss[None])


def test_span_forbids_positions():
    c = case("bert", "span")
    logits = c.objective.logits(c.model, c.batch())
    assert logits.shape == (8, 8)
    assert bool((logits[:, 1] == -float("inf")).all())
    padded = c.batch().inputs["attention_mask"] == 0
    assert bool((logits[:4][padded] == -float("inf")).all() & (logits[4:][padded] == -float("inf")).all())


@pytest.mark.parametrize("family", ["bert", *DECODERS])
def test_tokens_mean_and_sum(family):
    c = case(family, "lm")
    batch = c.batch()
    full = c.model(**model_inputs(c.model, batch.inputs)).logits
    target = batch.targets["target"]
    each = F.cross_entropy(full.transpose(1, 2), target, ignore_index=IGNORE, reduction="none")
    logits = c.objective.logits(c.model, batch)
    targets = c.objective.targets(batch)
    torch.testing.assert_close(Tokens(lm=True, reduce="sum").loss(logits, targets), each.sum(1))
    torch.testing.assert_close(c.objective.loss(logits, targets), each.sum(1) / (target != IGNORE).sum(1))


def test_an_example_without_targets_has_no_loss():
    targets = Targets(torch.tensor([1, 0]), torch.tensor([2, 2]), 3)
    loss = Tokens(lm=True).loss(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), targets)
    torch.testing.assert_close(loss, torch.tensor([0.0, 0.0, np.log(2)]), check_dtype=False)


def test_which_objective_for_which_mode():
    assert make_objective("prompt", "label", Wording(word_ids=(3, 4))) == Words((3, 4))
    assert make_objective("prompt", "regression", Wording(word_ids=(3, 4), bounds=(0, 5))) == Words((3, 4), (0, 5))
    assert make_objective("span", "span") == Span()
    assert make_objective("mlm", "text").name == "mlm"
    with pytest.raises(
        ConfigError, match="--mode span does not fit a task of kind 'label'. Modes that do: head, prompt"
    ):
        make_objective("span", "label")
    with pytest.raises(ConfigError, match="exactly two label words"):
        make_objective("causal", "regression", Wording(word_ids=(3, 4, 5), bounds=(0, 5)))


def test_sampled_labels_follow_the_probabilities():
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]])).repeat(20_000, 1)
    labels = sample_labels(logits, Targets(torch.zeros(20_000), None, 20_000), range(20_000), seed=3)
    share = torch.bincount(labels, minlength=3) / 20_000
    torch.testing.assert_close(share, torch.tensor([0.2, 0.5, 0.3]), atol=0.015, rtol=0)  # 4 standard errors


def test_sampled_labels_depend_on_row_and_seed_not_on_the_batch():
    logits = torch.zeros(6, 50)
    row = torch.tensor([0, 0, 1, 1, 1, 2])
    keys = ["a", "b", "c"]
    labels = sample_labels(logits, Targets(row, row, 3), keys, seed=0)
    assert len(set(labels[:2].tolist())) + len(set(labels[2:5].tolist())) > 2  # readouts of a row differ
    turned = sample_labels(logits, Targets(row, torch.tensor([0, 1, 1, 1, 2, 2]), 3), ["c", "b", "a"], seed=0)
    assert torch.equal(turned, torch.cat([labels[5:], labels[2:5], labels[:2]]))
    assert not torch.equal(labels, sample_labels(logits, Targets(row, row, 3), keys, seed=1))


def test_impossible_labels_are_never_drawn():
    logits = torch.tensor([[0.0, -float("inf"), 0.0, -float("inf")]]).repeat(500, 1)
    labels = sample_labels(logits, Targets(torch.zeros(500), None, 500), range(500), seed=1)
    assert set(labels.tolist()) == {0, 2}

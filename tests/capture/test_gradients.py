"""Per-example gradients against a loop over single unpadded examples, for every family and objective.

In float64; in float32, which is what models run in, for a few families.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from budwood.capture.coverage import cover, take
from budwood.capture.gradients import (
    Question,
    layout_of,
    linear_io,
    outer_square_sum,
    per_example_grads,
    per_example_square_sum,
)
from budwood.errors import TreeError
from budwood.models.objective import Targets
from budwood.params.tree import named
from tests.cases import FAMILIES, OBJECTIVES, PAD, Case, case
from tests.oracles import grads_by_loop, relative_error

EXACT, ROUNDED = 1e-10, 1e-5  # float64, float32
ZERO = 1e-14  # of the largest gradient: zero but for rounding (softmax does not see a shift of all its logits)
ROUNDED_ZERO = 1e-6  # the same in float32


def worst(got: dict, want: dict, power: int = 1, zero: float = ZERO) -> float:
    """Largest relative error of any parameter; gradients that are zero by theory must be zero up to rounding."""
    zero = (zero * max(float(w.abs().max()) ** (1 / power) for w in want.values())) ** power
    assert got.keys() == want.keys()
    vanishing = [n for n in want if float(want[n].abs().max()) <= zero]
    assert all(float(got[n].abs().max()) <= zero for n in vanishing)
    return max(relative_error(got[n], want[n]) for n in want if n not in vanishing)


def squares(grads: dict) -> dict:
    return {n: g.square().sum(0) for n, g in grads.items()}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_loop(family, objective):
    c = case(family, objective)
    want = grads_by_loop(c, range(4))
    coverage = cover(c.model, c.objective, c.batch())
    assert set(coverage.names) == set(want) and len(coverage.hooked) > len(want) / 3
    assert bool(coverage.looped) == family.startswith("deberta")
    got = per_example_grads(c.model, c.objective, c.batch(), coverage=coverage)
    assert worst(got, want) < EXACT
    sums = per_example_square_sum(c.model, c.objective, c.batch(), coverage=coverage)
    assert worst(sums, squares(want), power=2) < EXACT


# with biases and a head of one token, shared layers, Conv1D, no biases, some by loop
@pytest.mark.parametrize("family", ["bert", "albert", "gpt2", "llama", "deberta-v2"])
@pytest.mark.parametrize("objective", ["head", "lm"])
def test_equal_to_the_loop_in_float32(family, objective):
    c = case(family, objective, dtype=torch.float32)
    want = grads_by_loop(c, range(4))
    got = per_example_grads(c.model, c.objective, c.batch())
    assert {g.dtype for g in got.values()} == {torch.float32}
    assert worst(got, want, zero=ROUNDED_ZERO) <= ROUNDED


@pytest.mark.parametrize("family", ["bert", "albert", "gpt2", "deberta-v2"])
@pytest.mark.parametrize("objective", ["lm", "span"])
def test_independent_of_batch_size_order_and_padding(family, objective):
    c = case(family, objective, rows=5)
    whole = per_example_grads(c.model, c.objective, c.batch())
    index = [3, 0, 4, 1, 2]
    parts = [per_example_grads(c.model, c.objective, c.batch(index[i : i + 2])) for i in (0, 2, 4)]
    pieces = {n: torch.cat([p[n] for p in parts]) for n in whole}
    assert worst(pieces, {n: g[index] for n, g in whole.items()}) < EXACT


def test_a_batch_as_long_as_the_relative_positions_is_not_mistaken_for_examples():
    c = case("deberta-v2", "head", rows=16)  # 16 relative positions as well
    want = grads_by_loop(c, range(16))
    assert worst(per_example_grads(c.model, c.objective, c.batch()), want) < EXACT


@pytest.mark.parametrize("family", ["bert", "deberta", "llama"])
def test_margin_other_targets_and_several_questions(family):
    c = case(family, "head")
    batch = c.batch()
    flipped = Targets((batch.targets["label"] + 1) % 3, None, 4)
    margins = grads_by_loop(c, range(4), c.objective.margin)
    got = per_example_grads(c.model, c.objective, batch, Question(value=c.objective.margin))
    assert worst(got, margins) < EXACT
    other = grads_by_loop(c, range(4), lambda z, t: c.objective.loss(z, Targets((t.label_M + 1) % 3, None, 1)))
    assert worst(per_example_grads(c.model, c.objective, batch, Question(targets=flipped)), other) < EXACT
    both = per_example_square_sum(
        c.model, c.objective, batch, [Question(value=c.objective.margin), Question(targets=flipped)]
    )
    assert worst(both, {n: g + squares(other)[n] for n, g in squares(margins).items()}, power=2) < EXACT


def test_other_targets_of_tokens_reach_the_looped_parameters():
    c = case("deberta-v2", "tokens")
    targets = c.objective.targets(c.batch())
    flipped = Targets((targets.label_M + 1) % 3, targets.row_M, 4)
    want = grads_by_loop(c, range(4), lambda z, t: c.objective.loss(z, Targets((t.label_M + 1) % 3, t.row_M, 1)))
    assert worst(per_example_grads(c.model, c.objective, c.batch(), Question(targets=flipped)), want) < EXACT


@pytest.mark.parametrize("family", ["bert", "albert", "deberta", "gpt2"])
def test_the_model_is_untouched(family):
    c = case(family, "lm")
    parameters = named(c.model)
    first = next(iter(parameters))
    parameters[first].requires_grad_(False)
    c.model.train()
    list(c.model.modules())[3].eval()
    for p in parameters.values():
        p.grad = torch.full_like(p, 7.0)
    modes = [m.training for m in c.model.modules()]
    before = {n: p.detach().clone() for n, p in parameters.items()}
    grads = per_example_grads(c.model, c.objective, c.batch())
    per_example_square_sum(c.model, c.objective, c.batch())
    assert first not in grads and len(grads) == len(parameters) - 1
    assert [n for n, p in parameters.items() if not p.requires_grad] == [first]
    assert [m.training for m in c.model.modules()] == modes
    assert all(torch.equal(p, before[n]) and bool((p.grad == 7).all()) for n, p in parameters.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in c.model.modules())


def test_hooks_and_flags_come_back_after_an_exception():
    c = case("bert", "head")
    layout = layout_of(c.batch(), c.objective.targets(c.batch()))
    with pytest.raises(RuntimeError, match="stop"), linear_io(c.model, None, layout):
        raise RuntimeError("stop")
    assert all(p.requires_grad for p in c.model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in c.model.modules())


def test_uses_are_given_per_parameter():
    c = case("albert", "lm")
    batch = c.batch()
    targets = c.objective.targets(batch)
    with linear_io(c.model, None, layout_of(batch, targets)) as io:
        io.backward(c.objective.loss(c.objective.logits(c.model, batch), targets).sum())
    shared = "encoder.albert_layer_groups.0.albert_layers.0.ffn.weight"
    assert [u.kind for u in io.uses(shared)] == ["linear"] * 3
    assert all(u.a.shape == (4, 8, 16) and u.g_BTO.shape == (4, 8, 24) for u in io.uses(shared))
    assert torch.equal(io.uses(shared)[0].mask_BT, batch.inputs["attention_mask"])
    tied = io.uses("embeddings.word_embeddings.weight")
    assert sorted(u.kind for u in tied) == ["embedding", "linear"]
    assert not io.uncovered


def test_padding_has_no_gradient():
    c = case("bert", "lm")
    batch = c.batch()
    targets = c.objective.targets(batch)
    with linear_io(c.model, None, layout_of(batch, targets)) as io:
        io.backward(c.objective.loss(c.objective.logits(c.model, batch), targets).sum())
    found = [u for n in named(c.model) for u in io.uses(n) if u.mask_BT is not None]
    assert len(found) > 30
    assert all(not bool(u.g_BTO[u.mask_BT == 0].any()) for u in found)


def test_only_what_was_asked_for():
    c = case("bert", "head")
    names = ("head.classifier.weight", "encoder.layer.2.output.dense.bias")
    got = per_example_grads(c.model, c.objective, c.batch(), coverage=cover(c.model, c.objective, c.batch(), names))
    want = grads_by_loop(c, range(4))
    assert worst(got, {n: want[n] for n in names}) < EXACT
    with pytest.raises(TreeError, match="no parameter 'head.classifer.weight'.*head.classifier.weight"):
        cover(c.model, c.objective, c.batch(), ("head.classifer.weight",))


class Odd(nn.Module):
    """Applies one linear layer both by its call and as a bare matrix, and has a norm that adds one to its weight."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.twice = nn.Linear(3, 3)
        self.norm = OddRMSNorm()
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, **inputs):
        out = self.inner(**inputs)
        z = self.norm(out.logits)
        out.logits = self.twice(z) + torch.tanh(z) @ self.twice.weight
        return out


class OddRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_hidden_uses_are_found_and_looped():
    inner = case("bert", "head")
    model = Odd(inner.model).double().eval()
    c = Case(model, inner.objective, inner.features)
    coverage = cover(c.model, c.objective, c.batch())
    assert set(coverage.looped) == {"twice.weight", "norm.weight"} and coverage.unused == ("never",)
    assert worst(per_example_grads(c.model, c.objective, c.batch()), grads_by_loop(c, range(4))) < EXACT


def test_lora_layers_are_covered():
    from peft import LoraConfig, get_peft_model

    c = case("bert", "head")
    torch.manual_seed(0)
    adapted = get_peft_model(copy.deepcopy(c.model), LoraConfig(r=2, target_modules=["query", "value"])).double().eval()
    with torch.no_grad():
        for n, p in adapted.named_parameters():
            if "lora_B" in n:
                p.normal_()
    lora = Case(adapted, c.objective, c.features)
    want = grads_by_loop(lora, range(4))
    coverage = cover(adapted, c.objective, c.batch())
    assert len(want) == 12 and set(coverage.hooked) == set(want)
    assert all(n.startswith("encoder.layer.") for n in want)
    assert worst(per_example_grads(adapted, c.objective, c.batch(), coverage=coverage), want) < EXACT


@pytest.mark.parametrize("times", [1, 2, 5, 6])
@pytest.mark.parametrize("block", [1, 7, 64, 10_000])
def test_blocks_do_not_change_the_square_sum(times, block):
    torch.manual_seed(1)
    left, right = torch.randn(3, times, 11, dtype=torch.float64), torch.randn(3, times, 4, dtype=torch.float64)
    want = torch.einsum("bto,bti->boi", left, right).square().sum(0)
    torch.testing.assert_close(outer_square_sum(left, right, block), want)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_padding_word_learns_nothing_from_being_read(family):
    c = case(family, "lm")
    ragged = {**c.features.ragged, "input_ids": c.features.ragged["input_ids"].copy()}
    ragged["input_ids"][[1, 7, 12]] = PAD  # inside rows, not behind them
    c = Case(c.model, c.objective, replace(c.features, ragged=ragged))
    want = grads_by_loop(c, range(4))
    assert worst(per_example_grads(c.model, c.objective, c.batch()), want) < EXACT
    assert worst(per_example_square_sum(c.model, c.objective, c.batch()), squares(want), power=2) < EXACT


def test_a_batch_of_one():
    c = case("roberta", "lm")
    want = {n: g[1:2] for n, g in grads_by_loop(c, range(4)).items()}
    assert worst(per_example_grads(c.model, c.objective, take(c.batch(), [1])), want) < EXACT

"""Penalties: value and gradient by hand and by autograd, the right Fisher taken, a wrong one refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from budwood.errors import ConfigError, TreeError
from budwood.params import tree
from budwood.params.sketch import sketch
from budwood.train.fit import trainable
from budwood.train.penalty import Absolute, Annealed, Holding, Quadratic, hold, make_penalty
from tests.cases import build


def fisher_file(path: Path, model: torch.nn.Module, **changes: Any) -> Path:
    draw = torch.Generator().manual_seed(1)
    values = {n: torch.rand(p.shape, generator=draw) for n, p in tree.named(model).items()}
    values |= changes.pop("values", {})
    for name in changes.pop("drop", ()):
        values.pop(name)
    tree.save(path, values, {"artefact": "fisher", "model": "m", "task": "t", "kind": "exact", **changes})
    return path


@pytest.fixture
def model() -> torch.nn.Module:
    return build("bert", "head", dtype=torch.float32)


def moved(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=draw))
    return {n: torch.zeros_like(p) for n, p in trainable(model).items()}


@pytest.mark.parametrize("scale", ["raw", "normalised"])
def test_value_and_gradient_are_those_of_the_formula(model: torch.nn.Module, tmp_path: Path, scale: str) -> None:
    file = fisher_file(tmp_path / "f.safetensors", model)
    penalty, facts = make_penalty(model, Holding(ewc=(file,), ewc_strength=3.0, ewc_scale=scale))
    assert penalty is not None
    anchor = {n: p.detach().clone() for n, p in tree.named(model).items()}
    zero = {n: torch.zeros_like(p) for n, p in trainable(model).items()}
    assert penalty(trainable(model), zero) == 0.0 and all(bool((g == 0).all()) for g in zero.values())
    grads = moved(model)
    value = penalty(trainable(model), grads)
    importance = tree.load(file)[0]
    mean = sum(float(v.double().sum()) for v in importance.values()) / sum(v.numel() for v in importance.values())
    factor = 3.0 if scale == "raw" else 3.0 / mean
    assert facts["ewc_effective"] == pytest.approx(factor, rel=1e-5) and facts["ewc_mean"] == pytest.approx(mean)
    wanted = sum(0.5 * factor * (importance[n] * (p - anchor[n]) ** 2).sum() for n, p in tree.named(model).items())
    assert value == pytest.approx(float(wanted.detach()), rel=1e-4)
    slopes = torch.autograd.grad(wanted, list(trainable(model).values()))
    for (name, grad), slope in zip(grads.items(), slopes):
        torch.testing.assert_close(grad, slope, rtol=1e-4, atol=1e-6, msg=name)


def test_l2_and_l1_and_their_sum(model: torch.nn.Module) -> None:
    anchor = {n: p.detach().clone() for n, p in trainable(model).items()}
    both, _ = make_penalty(model, Holding(l2_to_base=2.0, l1_to_base=0.5))
    grads, again = moved(model), {n: torch.zeros_like(p) for n, p in trainable(model).items()}
    assert both is not None
    value = both(trainable(model), grads)
    parts = [Quadratic(2.0, anchor), Absolute(0.5, anchor)]
    assert value == pytest.approx(sum(part(trainable(model), again) for part in parts))
    assert all(torch.equal(grads[n], again[n]) for n in grads)
    assert make_penalty(model, Holding())[0] is None


def test_a_classifiers_fisher_holds_the_masked_lm(tmp_path: Path, model: torch.nn.Module) -> None:
    file = fisher_file(tmp_path / "f.safetensors", model)
    lm = build("bert", "lm", dtype=torch.float32)
    penalty, facts = make_penalty(lm, Holding(ewc=(file,), ewc_strength=1.0))
    backbone = sum(p.numel() for n, p in tree.named(lm).items() if not n.startswith("head."))
    assert facts["ewc_held"] == backbone and penalty is not None
    grads = moved(lm)
    penalty(trainable(lm), grads)
    touched = {n for n, g in grads.items() if bool(g.any())}
    assert touched == {n for n in grads if n.startswith("bert.")}


def test_several_fishers_add_up_and_decay(tmp_path: Path, model: torch.nn.Module) -> None:
    one = fisher_file(tmp_path / "1.safetensors", model)
    values = tree.load(one)[0]
    two = fisher_file(tmp_path / "2.safetensors", model, values={n: 3 * v for n, v in values.items()})
    penalty, _ = make_penalty(model, Holding(ewc=(one, two), ewc_strength=1.0, ewc_scale="raw", ewc_decay=0.5))
    assert isinstance(penalty, Quadratic) and penalty.importance is not None
    name = "classifier.weight"
    torch.testing.assert_close(penalty.importance[name], 3.5 * values["head.classifier.weight"])


def test_a_wrong_fisher_is_refused_with_the_tensors_name(tmp_path: Path, model: torch.nn.Module) -> None:
    query = "encoder.layer.0.attention.self.query.weight"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"values": {query: torch.ones(3, 3)}}, f"'{query}' of shape \\(3, 3\\)"),
        ({"values": {"encoder.layer.9.x": torch.ones(2)}}, "'encoder.layer.9.x', which this model lacks"),
        ({"drop": [query]}, f"says nothing about '{query}'"),
        ({"values": {query: torch.full((16, 16), -1.0)}}, "negative or not finite"),
        ({"values": {query: torch.full((16, 16), float("nan"))}}, "negative or not finite"),
        ({"artefact": "graft"}, "is no Fisher file"),
    ]
    for i, (changes, told) in enumerate(cases):
        file = fisher_file(tmp_path / f"{i}.safetensors", model, **changes)
        with pytest.raises(TreeError, match=told):
            make_penalty(model, Holding(ewc=(file,), ewc_strength=1.0))
    with pytest.raises(TreeError, match="There is no Fisher file"):
        make_penalty(model, Holding(ewc=(tmp_path / "none",), ewc_strength=1.0))
    for half in (Holding(ewc=(tmp_path / "0.safetensors",)), Holding(ewc_strength=1.0)):
        with pytest.raises(ConfigError, match="go together"):
            make_penalty(model, half)


def test_another_tokenizer_family_or_kind_is_refused(tmp_path: Path, model: torch.nn.Module) -> None:
    one = fisher_file(tmp_path / "1.safetensors", model, tokenizer="aa", model_type="bert")
    hold(model, Holding(ewc=(one,), ewc_strength=1.0), tokenizer="aa")
    with pytest.raises(TreeError, match="another tokenizer"):
        hold(model, Holding(ewc=(one,), ewc_strength=1.0), tokenizer="bb")
    other = fisher_file(tmp_path / "2.safetensors", model, model_type="electra")
    with pytest.raises(TreeError, match="is of a electra and this model is a bert"):
        hold(model, Holding(ewc=(other,), ewc_strength=1.0))
    kind = fisher_file(tmp_path / "3.safetensors", model, kind="batched")
    with pytest.raises(TreeError, match="kind sampled.*kind batched.*measure different things"):
        hold(model, Holding(ewc=(one, kind), ewc_strength=1.0))


def test_newly_drawn_weights_are_free(tmp_path: Path, model: torch.nn.Module) -> None:
    file = fisher_file(tmp_path / "f.safetensors", model)
    fresh = ("head.classifier.weight", "head.classifier.bias")
    for holding in (Holding(ewc=(file,), ewc_strength=1.0), Holding(l2_to_base=1.0), Holding(l1_to_base=1.0)):
        penalty = hold(model, holding, fresh=fresh).penalty
        grads = moved(model)
        assert penalty is not None and penalty(trainable(model), grads) > 0
        assert not grads["classifier.weight"].any() and bool(grads["bert.pooler.dense.weight"].any())


def test_each_of_several_fishers_weighs_the_same_when_normalised(tmp_path: Path, model: torch.nn.Module) -> None:
    one = fisher_file(tmp_path / "1.safetensors", model)
    thousand = {n: 1000 * v for n, v in tree.load(one)[0].items()}
    two = fisher_file(tmp_path / "2.safetensors", model, values=thousand)
    alone, both = (hold(model, Holding(ewc=f, ewc_strength=1.0)).penalty for f in ((one,), (one, two)))
    assert isinstance(alone, Quadratic) and isinstance(both, Quadratic) and alone.importance and both.importance
    for name, value in alone.importance.items():
        torch.testing.assert_close(both.importance[name], value, rtol=1e-5, atol=0)
    total = sum(v.sum() for v in both.importance.values()) / sum(v.numel() for v in both.importance.values())
    assert float(total) == pytest.approx(1.0, rel=1e-4)


def test_annealing_hands_over_and_never_overshoots() -> None:
    anchor, weight = {"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([3.0, 3.0])}
    pull = Annealed((Quadratic(2.0, anchor, {"w": torch.tensor([1.0, 100.0])}),), 0.5, 10.0)
    shares = [pull.share(t) for t in (0, 10, 20)]
    assert shares[0] < 0.01 and shares[1] == 0.5 and shares[2] > 0.99
    pull(weight, 0.1)
    torch.testing.assert_close(weight["w"], torch.tensor([3.0 - 0.2 * 2.0, 1.0]))


def test_annealing_needs_something_to_let_go_of(model: torch.nn.Module) -> None:
    with pytest.raises(ConfigError, match="--anneal lets go"):
        hold(model, Holding(anneal=0.1))
    held = hold(model, Holding(anneal=0.1, anneal_at=0.5, l2_to_base=1.0), steps=40)
    assert held.penalty is None and held.pull is not None and held.pull.middle == 20.0


def test_the_mean_is_that_of_the_weights_held(tmp_path: Path, model: torch.nn.Module) -> None:
    """A head that is drawn anew takes no part in it, however large its Fisher information."""
    head = [n for n in tree.named(model) if n.startswith(tree.HEAD)]
    huge = {n: torch.full_like(tree.named(model)[n], 1e6).detach() for n in head}
    file = fisher_file(tmp_path / "f.safetensors", model, values=huge)
    held = hold(model, Holding(ewc=(file,), ewc_strength=1.0), fresh=head)
    assert held.penalty is not None and held.facts["ewc_mean"] < 1
    every = torch.cat([v.flatten() for v in held.penalty.importance.values()])  # type: ignore[attr-defined]
    assert float(every.mean()) == pytest.approx(1.0, rel=1e-5) and held.facts["ewc_held"] == len(every)


def test_decay_reaches_what_later_files_do_not_mention(tmp_path: Path, model: torch.nn.Module) -> None:
    head = [n for n in tree.named(model) if n.startswith(tree.HEAD)]
    one, two = fisher_file(tmp_path / "a", model), fisher_file(tmp_path / "b", model, drop=head)
    held = hold(model, Holding(ewc=(one, two), ewc_strength=1.0, ewc_scale="raw", ewc_decay=0.5))
    values, own = tree.load(one)[0], {id(p): n for n, p in trainable(model).items()}
    for name, parameter in tree.named(model).items():
        wanted = values[name] * (0.5 if name in head else 1.5)
        torch.testing.assert_close(held.penalty.importance[own[id(parameter)]], wanted)  # type: ignore[union-attr]


def test_a_fisher_of_other_weights_of_the_same_shape_is_refused(tmp_path: Path, model: torch.nn.Module) -> None:
    file = fisher_file(tmp_path / "f.safetensors", model, sketch=sketch(tree.named(model)))
    wish = Holding(ewc=(file,), ewc_strength=1.0)
    with torch.no_grad():  # training moves weights by less than their size
        for p in model.parameters():
            p.add_(0.3 * p.std().nan_to_num(0.0) * torch.randn_like(p))
    assert hold(model, wish).penalty is not None
    stranger = build("bert", "head", dtype=torch.float32, seed=5)
    with pytest.raises(TreeError, match="other weights of the same shape"):
        hold(stranger, wish)

"""Selections by pattern and preset, on every family."""

from __future__ import annotations

import pytest

from budwood.errors import TreeError
from budwood.params.select import is_bias, layer_of, matching, preset, trainable_names
from budwood.params.tree import named
from tests.cases import FAMILIES, LAYERS, build

NAMES = ("embeddings.w", "encoder.layer.0.w", "encoder.layer.0.bias", "head.w")


def test_patterns():
    assert matching(NAMES) == NAMES
    assert matching(NAMES, ["encoder.*", "head.*"], ["*.bias"]) == ("encoder.layer.0.w", "head.w")


def test_a_pattern_without_a_match_is_an_error():
    with pytest.raises(TreeError, match=r"'encodr.layer.0.w' matches none of 4.*Did you mean 'encoder.layer.0.w'"):
        matching(NAMES, ["encodr.layer.0.w"])
    with pytest.raises(TreeError, match=r"'\*.norm' matches none"):
        matching(NAMES, exclude=["*.norm"])
    with pytest.raises(TreeError, match="leave none"):
        matching(NAMES, ["head.*"], ["*.w"])


@pytest.mark.parametrize("family", FAMILIES)
def test_presets_on_every_family(family):
    names = tuple(named(build(family, "head")))
    embeddings = preset(names, "embeddings")
    assert any("word" in n or "wte" in n or "embed" in n for n in embeddings)
    assert all(n.startswith("head.") for n in preset(names, "head"))
    blocks = 1 if family == "albert" else LAYERS
    assert {layer_of(n) for n in preset(names, f"layers:{blocks}")} == set(range(blocks))
    assert not set(embeddings) & (set(preset(names, "head")) | set(preset(names, f"layers:{blocks}")))
    if family != "llama":
        assert all(is_bias(n) for n in preset(names, "bias"))
    with pytest.raises(TreeError, match=f"from 1 to {blocks}"):
        preset(names, f"layers:{blocks + 1}")


def test_a_model_without_biases_says_so():
    with pytest.raises(TreeError, match="'bias' matches no parameter"):
        preset(tuple(named(build("llama", "head"))), "bias")


def test_freezing():
    model = build("bert", "head")
    left = trainable_names(model, ["embeddings", "layers:2"])
    assert not any(n.startswith("embeddings.") or layer_of(n) in (0, 1) for n in left)
    assert {layer_of(n) for n in left} == {None, 2} and "head.classifier.weight" in left
    only = trainable_names(model, train_only=["bias", "head"])
    assert all(is_bias(n) or n.startswith("head.") for n in only) and "head.classifier.weight" in only
    with pytest.raises(TreeError, match="Nothing is left to train"):
        trainable_names(model, ["head"], ["head"])

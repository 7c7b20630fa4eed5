"""Trees: canonical names over families and heads, algebra, refusals, files."""

from __future__ import annotations

import pytest
import torch

from budwood.errors import TreeError
from budwood.params import tree
from tests.cases import FAMILIES, build


@pytest.mark.parametrize("family", FAMILIES)
def test_backbones_match_across_heads(family):
    shapes = [
        {n: p.shape for n, p in tree.named(build(family, form)).items() if not n.startswith(("head.", "pooler."))}
        for form in ("lm", "head", "tokens", "backbone")
    ]
    assert shapes[0] and all(s == shapes[0] for s in shapes[1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_once(family):
    model = build(family)
    names = tree.named(model)
    assert len({id(p) for p in names.values()}) == len(names) == len(list(model.parameters()))
    assert any(n.startswith("head.") for n in names) == (family != "gpt2")  # GPT-2's whole head is tied


def test_tied_matrix_lives_in_the_backbone():
    names = tree.named(build("bert"))
    assert "embeddings.word_embeddings.weight" in names
    assert "head.cls.predictions.bias" in names
    assert not any("decoder" in n for n in names)


def test_algebra():
    a = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([[3.0]])}
    b = {"y": torch.tensor([[5.0]]), "x": torch.tensor([0.5, 1.0])}
    torch.testing.assert_close(tree.add(a, b), {"x": torch.tensor([1.5, 3.0]), "y": torch.tensor([[8.0]])})
    torch.testing.assert_close(tree.sub(a, b), {"x": torch.tensor([0.5, 1.0]), "y": torch.tensor([[-2.0]])})
    torch.testing.assert_close(tree.times(a, b), {"x": torch.tensor([0.5, 2.0]), "y": torch.tensor([[15.0]])})
    torch.testing.assert_close(tree.scale(a, 2)["y"], torch.tensor([[6.0]]))
    assert tree.dot(a, b) == 17.5
    assert tree.norm(a) == pytest.approx(14**0.5)
    assert list(tree.take(a, ("y",))) == ["y"]


def test_trees_that_do_not_fit_are_refused_by_name():
    a = {"layer.weight": torch.ones(2)}
    with pytest.raises(TreeError, match="the second tree has no 'layer.weight'.*Did you mean 'layer.weights'"):
        tree.sub(a, {"layer.weights": torch.ones(2)})
    with pytest.raises(TreeError, match=r"'layer.weight' has shape \(2,\) in the first tree and \(1, 2\)"):
        tree.add(a, {"layer.weight": torch.ones(1, 2)})
    with pytest.raises(TreeError, match="the first tree has no 'z'"):
        tree.dot(a, {**a, "z": torch.ones(1)})
    with pytest.raises(TreeError, match="no tensor 'layer.wieght'"):
        tree.take(a, ("layer.wieght",))


def test_files_round_trip(tmp_path):
    a = {"b": torch.randn(3).t(), "a": torch.randn(2, 2).t()}
    tree.save(tmp_path / "deep" / "t.safetensors", a, {"seed": 1, "n": [1, 2]})
    again, manifest = tree.load(tmp_path / "deep" / "t.safetensors")
    assert manifest == {"seed": 1, "n": [1, 2]} and list(again) == ["a", "b"]
    torch.testing.assert_close(again["a"], a["a"], rtol=0, atol=0)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["t.safetensors"]


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(TreeError, match="no file"):
        tree.load(tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"not a tree at all")
    with pytest.raises(TreeError, match="not a readable safetensors file"):
        tree.load(tmp_path / "bad.safetensors")

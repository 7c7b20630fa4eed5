"""Masks have exactly the size asked for, whatever the scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from budwood.errors import TreeError
from budwood.params import mask as masks
from budwood.params.mask import graftable
from tests.cases import build


def slow_top(scores: dict[str, torch.Tensor], count: int) -> set[tuple[str, int]]:
    """Every weight in a list, sorted by score, earlier ones first among equals."""
    every = [(n, i, float(v)) for n, t in scores.items() for i, v in enumerate(t.flatten())]
    order = sorted(range(len(every)), key=lambda j: (-every[j][2], j))
    return {every[j][:2] for j in order[:count]}


def as_set(mask: masks.Mask) -> set[tuple[str, int]]:
    return {(n, int(i)) for n, index in mask.items() for i in index}


@pytest.mark.parametrize("count", [0, 1, 7, 30, 59, 60])
@pytest.mark.parametrize("ties", [False, True])
def test_top_is_that_of_the_sorted_list(count: int, ties: bool) -> None:
    rng = torch.Generator().manual_seed(count)
    draw = (
        (lambda *s: torch.randint(0, 3, s, generator=rng).float())
        if ties
        else (lambda *s: torch.randn(*s, generator=rng))
    )
    scores = {"a": draw(4, 5), "b": draw(10), "c": draw(3, 10)}
    found = masks.top(scores, count)
    assert masks.count(found) == count and as_set(found) == slow_top(scores, count)
    assert all(bool((i.diff() > 0).all()) for i in found.values())


def test_large_sets_are_cut_exactly_too() -> None:
    """The sample that tells where to look must not change the answer: also where the top hides from it."""
    score_P = torch.randn(400_000, generator=torch.Generator().manual_seed(0))
    score_P[1:4000:2] = 10.0  # odd places: a sample of every sixth weight never sees them
    for count in (1, 1999, 2000, 5000, 399_999):
        found = masks.top({"w": score_P}, count)["w"]
        assert len(found) == count
        wanted = torch.sort(score_P, descending=True, stable=True).indices[:count].sort().values
        assert torch.equal(found, wanted)


def test_infinite_scores_are_ranked_and_nan_is_refused() -> None:
    score_P = torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    score_P[::1000], score_P[7::1000] = float("inf"), -float("inf")
    for count in (1, 299, 300, 4000, 299_900):
        wanted = torch.sort(score_P, descending=True, stable=True).indices[:count].sort().values
        assert torch.equal(masks.highest(score_P, count), wanted)
    score_P[5] = float("nan")
    with pytest.raises(TreeError, match="NaN"):
        masks.highest(score_P, 3)


def test_per_tensor_shares_sum_to_the_count() -> None:
    scores = {"a": torch.randn(100), "b": torch.randn(33), "c": torch.randn(1)}
    for count in (0, 1, 13, 67, 134):
        found = masks.top(scores, count, per_tensor=True)
        assert masks.count(found) == count
        for name, index in found.items():
            assert as_set({name: index}) == slow_top({name: scores[name]}, len(index))


def test_random_masks_repeat_and_are_even() -> None:
    sizes = {"a": 500, "b": 1500}
    found = masks.random(sizes, 400, 3)
    assert masks.count(found) == 400 and as_set(found) == as_set(masks.random(sizes, 400, 3))
    assert as_set(found) != as_set(masks.random(sizes, 400, 4))
    share = np.mean([len(masks.random(sizes, 400, s).get("a", ())) for s in range(40)]) / 400
    assert 0.22 < share < 0.28


def test_split_join_and_complement() -> None:
    sizes = {"a": 4, "b": 3, "c": 5}
    mask = masks.split(torch.tensor([0, 3, 4, 11]), sizes)
    assert {n: i.tolist() for n, i in mask.items()} == {"a": [0, 3], "b": [0], "c": [4]}
    assert masks.join(mask, sizes).tolist() == [0, 3, 4, 11]
    rest = masks.complement(mask, sizes)
    assert as_set(rest) | as_set(mask) == as_set(masks.everything(sizes)) and masks.common(rest, mask) == 0


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(TreeError, match="A mask of 4 weights was asked for, out of 3"):
        masks.top({"a": torch.ones(3)}, 4)
    with pytest.raises(TreeError, match="NaN"):
        masks.top({"a": torch.tensor([1.0, float("nan")])}, 1)


@pytest.mark.parametrize("family", ["bert", "gpt2", "distilbert"])
def test_the_graftable_set_is_the_blocks(family: str) -> None:
    model = build(family)
    names = graftable(model)
    assert all(".0." in f".{n}" or ".1." in f".{n}" or ".2." in f".{n}" for n in names)
    assert any("bias" in n for n in names) and any("ln_" in n or "norm" in n.lower() for n in names)
    more = graftable(model, embeddings=True)
    assert set(names) < set(more) and any("embed" in n or "wte" in n for n in set(more) - set(names))
    assert set(graftable(model, embeddings=True, head=True)) == set(masks.named(model))

"""Masks: an exact number of weights out of a set of named tensors, as sorted positions per tensor.

Shapes: P weights of all tensors end to end, K chosen ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from budwood.errors import TreeError
from budwood.params.select import is_embedding, layer_of
from budwood.params.tree import Tree, named

SAMPLE, PIECE = 1 << 16, 1 << 17  # weights that are looked at first; weights looked at in one go
Mask = Mapping[str, Tensor]  # name -> sorted flat positions (int64); names without a position are left out


def graftable(model: nn.Module, embeddings: bool = False, head: bool = False) -> tuple[str, ...]:
    """Names a graft may change: all of every block, with its norms and biases; embeddings and the rest on request."""
    names = tuple(named(model))
    chosen = tuple(
        n for n in names if layer_of(n) is not None or (embeddings and is_embedding(n)) or (head and _is_rest(n, names))
    )
    if not chosen:
        raise TreeError(
            f"None of the {len(names):,} parameters of this model lies in a numbered block (such as '{names[0]}'), so "
            "there is nothing to graft. Add --embeddings or --head to take in the others."
        )
    return chosen


def _is_rest(name: str, names: Sequence[str]) -> bool:
    return layer_of(name) is None and not is_embedding(name)


def flat(tree: Tree) -> Tensor:
    """value_P: every tensor end to end, in the order of the tree."""
    return torch.cat([value.reshape(-1) for value in tree.values()])


def top(scores: Tree, count: int, per_tensor: bool = False) -> dict[str, Tensor]:
    """The mask of exactly `count` weights with the highest scores; equal scores go to the earlier weight.

    With `per_tensor` every tensor gets its share of the count by its size instead of one global ranking.

    >>> top({"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([3.0, 3.0])}, 2)
    {'a': tensor([1]), 'b': tensor([0])}
    """
    sizes = {name: value.numel() for name, value in scores.items()}
    _check_count(count, sum(sizes.values()))
    if per_tensor:
        shares = apportion(sizes, count)
        return {n: highest(scores[n].reshape(-1), k, n) for n, k in shares.items() if k}
    return split(highest(flat(scores), count), sizes)


def _check_count(count: int, total: int) -> None:
    if not 0 <= count <= total:
        raise TreeError(f"A mask of {count:,} weights was asked for, out of {total:,}. Ask for 0 to {total:,}.")


def highest(score_P: Tensor, count: int, what: str = "the scores") -> Tensor:
    """Sorted positions of the `count` highest scores; equal scores go to the earlier one.

    >>> highest(torch.tensor([1.0, 3.0, 3.0, 3.0]), 2)
    tensor([1, 2])
    """
    _check_count(count, len(score_P))
    # a sum is the fastest look for NaN; infinities of both signs also make one, so look again then
    if bool(torch.isnan(score_P.sum())) and bool(torch.isnan(score_P).any()):
        raise TreeError(f"{what} hold NaN: the weights cannot be ranked. Look for NaN in the two models.")
    if count in (0, len(score_P)):
        return torch.arange(count)
    value_P = score_P.detach().cpu().numpy()
    place_C = _candidates(value_P, count)
    value_C = value_P[place_C]
    border = np.partition(value_C, len(value_C) - count)[len(value_C) - count]
    chosen_C = value_C > border
    room = count - np.count_nonzero(chosen_C)
    chosen_C[np.flatnonzero(value_C == border)[:room]] = True
    return torch.from_numpy(place_C[chosen_C])


def _candidates(value_P: np.ndarray, count: int) -> np.ndarray:
    """Sorted places among which the `count` highest lie. A sample tells where to look, piece by piece of the cache."""
    step = len(value_P) // SAMPLE
    if step > 1:
        sample = value_P[::step]
        rank = max(0, len(sample) - 2 * (count // step) - 64)
        least = np.partition(sample, rank)[rank]
        pieces = range(0, len(value_P), PIECE)
        found = np.concatenate([np.flatnonzero(value_P[i : i + PIECE] >= least) + i for i in pieces])
        if len(found) >= count:
            return found
    return np.arange(len(value_P))


def split(index_K: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Sorted positions in tensors laid end to end, as a mask."""
    ends = torch.cumsum(torch.tensor(list(sizes.values())), 0)
    cuts = torch.searchsorted(index_K, ends).tolist()
    out: dict[str, Tensor] = {}
    for name, first, last, end in zip(sizes, [0, *cuts], cuts, ends.tolist()):
        if last > first:
            out[name] = index_K[first:last] - (end - sizes[name])
    return out


def join(mask: Mask, sizes: Mapping[str, int]) -> Tensor:
    """The other way round: one sorted list of positions in tensors laid end to end."""
    parts, start = [torch.empty(0, dtype=torch.int64)], 0
    for name, size in sizes.items():
        if name in mask:
            parts.append(mask[name] + start)
        start += size
    return torch.cat(parts)


def apportion(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Whole shares of `count` in proportion to sizes, by largest remainder; they sum to `count`.

    >>> apportion({"a": 10, "b": 10, "c": 1}, 5)
    {'a': 3, 'b': 2, 'c': 0}
    """
    total = sum(sizes.values())
    shares = {n: count * s // total for n, s in sizes.items()}
    left = count - sum(shares.values())
    for name in sorted(sizes, key=lambda n: -(count * sizes[n] % total))[:left]:
        shares[name] += 1
    return shares


def random(sizes: Mapping[str, int], count: int, seed: int) -> dict[str, Tensor]:
    """A mask of `count` weights drawn without replacement: a function of sizes, count and seed alone."""
    total = sum(sizes.values())
    _check_count(count, total)
    drawn = np.random.default_rng(seed).choice(total, count, replace=False)
    return split(torch.from_numpy(np.sort(drawn).astype(np.int64)), sizes)


def everything(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The mask of all weights."""
    return {name: torch.arange(size) for name, size in sizes.items()}


def complement(mask: Mask, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """All weights that a mask leaves out.

    >>> complement({"a": torch.tensor([1])}, {"a": 3, "b": 1})
    {'a': tensor([0, 2]), 'b': tensor([0])}
    """
    out = {}
    for name, size in sizes.items():
        free = torch.ones(size, dtype=torch.bool)
        free[mask.get(name, torch.empty(0, dtype=torch.int64))] = False
        if bool(free.any()):
            out[name] = free.nonzero()[:, 0]
    return out


def count(mask: Mask) -> int:
    """How many weights a mask holds."""
    return sum(len(v) for v in mask.values())


def common(a: Mask, b: Mask) -> int:
    """How many weights two masks share.

    >>> common({"w": torch.tensor([1, 4, 7])}, {"w": torch.tensor([4, 7, 9])})
    2
    """
    return sum(int(torch.isin(a[n], b[n], assume_unique=True).sum()) for n in a.keys() & b.keys())

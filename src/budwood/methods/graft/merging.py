"""Several grafts into one: the mean where they overlap, and the usual ways to merge task vectors beside it.

A graft of 100 % is a task vector, so every way takes grafts of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from budwood.config.graft import GraftStitchConfig
from budwood.data.batch import seed_of
from budwood.errors import ConfigError
from budwood.params.graft import Graft, together
from budwood.train.penalty import read_fisher

WEIGHTS = {"arithmetic": 0.5, "dare": 0.5, "ties": 1.0}  # ties: of a mean, the others of a sum


def merged(grafts: Sequence[Graft], cfg: GraftStitchConfig, model: nn.Module) -> Graft:
    """One graft out of several by the method asked for."""
    if cfg.method == "stitch":
        index, delta = together(grafts)
        return _graft(index, delta, grafts)
    if cfg.method == "fisher":
        return _fisher(grafts, cfg.fisher, model)
    dense = [_dense(g) for g in sorted(grafts, key=lambda g: g.identity)]
    if cfg.method == "dare":
        dense = [_dropped(d, cfg.keep, cfg.seed, place) for place, d in enumerate(dense)]
    if cfg.method == "ties":
        total = _elected([_trimmed(d, cfg.keep) for d in dense])
    else:
        names = sorted({n for d in dense for n in d})
        total = {n: sum((d[n] for d in dense if n in d), torch.zeros(())) for n in names}
    weight = cfg.weight if cfg.weight is not None else WEIGHTS[cfg.method]
    return _sparse({n: weight * v for n, v in total.items()}, grafts)


def _shapes(grafts: Sequence[Graft]) -> dict[str, tuple[int, ...]]:
    return {n: s for g in grafts for n, s in g.shape.items()}


def _graft(index: dict[str, Tensor], delta: dict[str, Tensor], grafts: Sequence[Graft]) -> Graft:
    shapes = _shapes(grafts)
    return Graft(index, delta, {n: shapes[n] for n in index}, {}, {"task": "+".join(sorted(g.task for g in grafts))})


def _sparse(total: dict[str, Tensor], grafts: Sequence[Graft]) -> Graft:
    index = {n: v.reshape(-1).nonzero()[:, 0] for n, v in total.items()}
    index = {n: i for n, i in index.items() if len(i)}
    return _graft(index, {n: total[n].reshape(-1)[i] for n, i in index.items()}, grafts)


def _dense(graft: Graft) -> dict[str, Tensor]:
    """The graft as whole tensors, zero where it changes nothing."""
    out = {}
    for name, shape in graft.shape.items():
        whole = torch.zeros(shape)
        whole.view(-1)[graft.index[name]] = graft.delta[name].float()
        out[name] = whole
    return out


def _trimmed(delta: dict[str, Tensor], keep: float) -> dict[str, Tensor]:
    """Only the largest changes, a share `keep` of those there are."""
    size = torch.cat([v.abs().reshape(-1) for v in delta.values()])
    count = max(1, round(keep * int((size > 0).sum())))
    border = size.kthvalue(len(size) - count + 1)[0] if count < len(size) else size.min()
    return {n: torch.where(v.abs() >= border, v, 0.0) for n, v in delta.items()}


def _elected(deltas: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """For every weight the sign with more mass, then the mean of the grafts that agree with it."""
    out = {}
    for name in sorted({n for d in deltas for n in d}):
        stack = torch.stack([d[name] for d in deltas if name in d])
        sign = torch.sign(stack.sum(0))
        agree = (torch.sign(stack) == sign) & (stack != 0)
        out[name] = (stack * agree).sum(0) / agree.sum(0).clamp_min(1)
    return out


def _dropped(delta: dict[str, Tensor], keep: float, seed: int, place: int) -> dict[str, Tensor]:
    """A random share `keep` of the changes, scaled up by 1 / keep; the draw is the graft's own."""
    rng = torch.Generator().manual_seed(seed_of(seed, "dare", place))
    return {n: torch.where(torch.rand(v.shape, generator=rng) < keep, v / keep, 0.0) for n, v in delta.items()}


def _fisher(grafts: Sequence[Graft], files: Sequence[Path], model: nn.Module) -> Graft:
    """Sum of Fisher x change / sum of Fisher, weight by weight; the base's own change is zero and has no vote."""
    if len(files) != len(grafts):
        raise ConfigError(
            f"--method fisher needs one --fisher per graft: {len(grafts)} grafts and {len(files)} files were given."
        )
    above: dict[str, Tensor] = {}
    below: dict[str, Tensor] = {}
    for graft, file in zip(grafts, files):
        importance, _ = read_fisher(file, model)
        for name, change in _dense(graft).items():
            mass = importance[name] if name in importance else torch.ones_like(change)
            mass = torch.where(change != 0, mass + 1e-30, 0.0).double()
            above[name] = above.get(name, torch.zeros_like(mass)) + mass * change
            below[name] = below.get(name, torch.zeros_like(mass)) + mass
    return _sparse({n: (v / below[n].clamp_min(1e-30)).float() for n, v in above.items()}, grafts)

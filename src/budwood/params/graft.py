"""A graft: what a few weights of a model have to become for a skill, and putting it on and taking it off again."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from budwood.errors import TreeError, nearest
from budwood.params import graft_file
from budwood.params.graft_file import HEADS
from budwood.params.tree import Tree, named
from budwood.store.files import digest


@dataclass(frozen=True)
class Graft:
    """Sorted positions and what is added there, per tensor; whole head tensors; where it came from.

    >>> g = Graft.cut({"w": torch.tensor([0])}, {"w": torch.tensor([[0.5, 2.0]])})
    >>> g.size, g.delta["w"]
    (1, tensor([0.5000]))
    """

    index: Mapping[str, Tensor]
    delta: Mapping[str, Tensor]
    shape: Mapping[str, tuple[int, ...]]
    head: Mapping[str, Tensor] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def cut(
        cls,
        mask: Mapping[str, Tensor],
        delta: Tree,
        head: Tree | None = None,
        manifest: Mapping[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Graft:
        """The graft of a mask out of a whole difference of two models."""
        kept = {n: i for n, i in mask.items() if len(i)}
        values = {n: delta[n].reshape(-1)[i].detach().to("cpu", dtype) for n, i in kept.items()}
        shapes = {n: tuple(delta[n].shape) for n in kept}
        heads = {n: v.detach().float().cpu().clone() for n, v in (head or {}).items()}
        return cls(kept, values, shapes, heads, dict(manifest or {}))

    @property
    def size(self) -> int:
        """How many weights it changes, the head not counted."""
        return sum(len(i) for i in self.index.values())

    @property
    def task(self) -> str:
        """The task it was made for."""
        return str(self.manifest.get("task", "?"))

    @classmethod
    def load(cls, path: Path | str) -> Graft:
        """Read a file; a damaged or hostile one is refused."""
        found = graft_file.read(Path(path))
        tensor = lambda named: {n: torch.from_numpy(np.array(v)) for n, v in named.items()}  # noqa: E731
        return cls(tensor(found.index), tensor(found.value), found.shape, tensor(found.head), found.manifest)

    def save(self, path: Path | str) -> int:
        """Write a file; returns its size in bytes."""
        array = lambda named: {n: v.detach().cpu().numpy() for n, v in named.items()}  # noqa: E731
        contents = graft_file.Contents(
            array(self.index), array(self.delta), dict(self.shape), array(self.head), dict(self.manifest)
        )
        graft_file.write(Path(path), contents)
        return Path(path).stat().st_size

    def merge_into(self, model: nn.Module, *, head: bool = True, force: bool = False) -> nn.Module:
        """Change the model's weights for good; refused where the model is not the graft's base (unless forced)."""
        merge(model, [self], head=head, force=force)
        return model

    @contextlib.contextmanager
    def apply(self, model: nn.Module, *, head: bool = True, force: bool = False) -> Iterator[nn.Module]:
        """The model with the graft on it; every weight comes back bit by bit at the end, also after an exception."""
        with grafted(model, [self], head=head, force=force) as patched:
            yield patched

    def export(self, model: Any, directory: Path | str, tokenizer: Any = None, *, force: bool = False) -> Path:
        """Write model and graft in one as a Hugging Face directory; the model itself is left as it was."""
        with self.apply(model, force=force):
            model.save_pretrained(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        return Path(directory)

    @property
    def identity(self) -> str:
        """Hash of positions and values: the order in which several grafts are summed."""
        h = hashlib.blake2b(digest_size=16)
        for name in sorted(self.index):
            h.update(name.encode() + self.index[name].numpy().tobytes() + self.delta[name].numpy().tobytes())
        return h.hexdigest()


def check(
    graft: Graft,
    model: nn.Module,
    force: bool = False,
    known_hash: str | None = None,
    parameters: Mapping[str, Tensor] | None = None,
) -> None:
    """Refuse a model that lacks the graft's tensors, or that is not the one it was cut for."""
    parameters = named(model) if parameters is None else parameters
    for name, shape in graft.shape.items():
        if name not in parameters:
            raise TreeError(
                f"The graft for '{graft.task}' changes '{name}', which this model lacks.{nearest(name, parameters)} "
                f"It was made for {graft.manifest.get('base', 'an unknown model')}."
            )
        if tuple(parameters[name].shape) != tuple(shape):
            raise TreeError(
                f"The graft for '{graft.task}' changes '{name}' of shape {tuple(shape)}; this model's has "
                f"{tuple(parameters[name].shape)}. It was made for {graft.manifest.get('base', 'an unknown model')}."
            )
    if force:
        return
    wanted, told = graft.manifest.get("base_hash"), graft.manifest.get("base", "another model")
    if not isinstance(wanted, str):
        raise TreeError(
            f"The graft for '{graft.task}' does not say which weights it was cut for. Add --force (in Python "
            "force=True) to put it on this model all the same."
        )
    pairs = [(wanted, known_hash or backbone_hash(model))]
    if heads := head_names(graft.index):
        pairs.append((str(graft.manifest.get("head_hash")), hash_of(parameters, heads)))
    for there, here in pairs:
        if here != there:
            raise TreeError(
                f"The graft for '{graft.task}' was cut for {told} (weights {there[:8]}), and this model's weights "
                f"are {here[:8]}. Give that model, or add --force (in Python force=True) to put it on this one anyway."
            )


def head_names(names: Iterable[str]) -> list[str]:
    """Those of the names that the hash of the backbone does not cover."""
    return sorted(n for n in names if n.startswith(HEADS))


def together(grafts: Sequence[Graft]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(positions, what is added) of several grafts at once; where they overlap, the mean. Order does not matter."""
    if len(grafts) == 1:
        return dict(grafts[0].index), {n: v.float() for n, v in grafts[0].delta.items()}
    ordered = sorted(grafts, key=lambda g: g.identity)
    index: dict[str, Tensor] = {}
    delta: dict[str, Tensor] = {}
    for name in sorted({n for g in ordered for n in g.index}):
        parts = [g for g in ordered if name in g.index]
        every, place, times = torch.cat([g.index[name] for g in parts]).unique(return_inverse=True, return_counts=True)
        values = torch.cat([g.delta[name].double() for g in parts])
        total = torch.zeros(len(every), dtype=torch.float64).index_add_(0, place, values)
        index[name], delta[name] = every, (total / times).float()
    return index, delta


def merge(
    model: nn.Module, grafts: Sequence[Graft], *, head: bool = True, force: bool = False, known_hash: str | None = None
) -> None:
    """Put grafts on a model for good; every graft is checked before the first weight changes."""
    parameters = named(model)
    for graft in grafts:
        check(graft, model, force, known_hash, parameters)
    index, delta = together(grafts)
    with torch.no_grad():
        for name, places in index.items():
            weights = parameters[name].view(-1)
            weights.index_add_(0, places.to(weights.device), delta[name].to(weights))
        for name, value in _heads(grafts, parameters, head).items():
            parameters[name].copy_(value)


def _heads(grafts: Sequence[Graft], parameters: Mapping[str, Tensor], wanted: bool) -> dict[str, Tensor]:
    """Head tensors that fit the model, of the last graft that has them."""
    found = {n: v for g in grafts for n, v in g.head.items()} if wanted else {}
    return {n: v for n, v in found.items() if n in parameters and parameters[n].shape == v.shape}


@contextlib.contextmanager
def grafted(
    model: nn.Module, grafts: Sequence[Graft], *, head: bool = True, force: bool = False, known_hash: str | None = None
) -> Iterator[nn.Module]:
    """The model with grafts on it inside the block."""
    parameters = named(model)
    for graft in grafts:
        check(graft, model, force, known_hash, parameters)
    index, _ = together(grafts)
    old = {n: parameters[n].detach().view(-1)[i].clone() for n, i in index.items()}
    old_head = {n: parameters[n].detach().clone() for n in _heads(grafts, parameters, head)}
    before = _HASHES.get(model, ("", ""))
    same = before[0] == _versions(model)
    merge(model, grafts, head=head, force=True)
    try:
        yield model
    finally:
        with torch.no_grad():
            for name, places in index.items():
                parameters[name].view(-1)[places] = old[name]
            for name, value in old_head.items():
                parameters[name].copy_(value)
        if same:
            _HASHES[model] = (_versions(model), before[1])  # every bit is back, so the hash holds


_HASHES: weakref.WeakKeyDictionary[nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()


def _versions(model: nn.Module) -> str:
    """Changes whenever a parameter is written to."""
    return digest([(n, p.data_ptr(), p._version) for n, p in named(model).items()])


def backbone_hash(model: nn.Module) -> str:
    """A hash of every parameter of the backbone: name, shape, float32 bytes. The same whatever head is on it.

    Kept until a parameter is written to.
    """
    now = _versions(model)
    found = _HASHES.get(model)
    if found is not None and found[0] == now:
        return found[1]
    parameters = named(model)
    value = hash_of(parameters, [n for n in parameters if not n.startswith(HEADS)])
    _HASHES[model] = (now, value)
    return value


def hash_of(parameters: Mapping[str, Tensor], names: Iterable[str]) -> str:
    """A hash of these tensors: name, shape, float32 bytes."""
    h = hashlib.blake2b(digest_size=16)
    for name in sorted(names):
        value = parameters[name].detach().to("cpu", torch.float32).contiguous()
        h.update(f"{name}\x00{tuple(value.shape)}\x00".encode())
        h.update(memoryview(value.numpy().reshape(-1).view(np.uint8)))
    return h.hexdigest()

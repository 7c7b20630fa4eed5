"""A base and its fine-tuned copy as one thing: the base ready for work, and how every graftable weight differs.

Shapes: P graftable weights end to end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from budwood.data.task import Row, Task
from budwood.errors import ConfigError, ModelError
from budwood.methods.evaluate import with_labels_of
from budwood.models.grafted import loaded_hash
from budwood.models.load import Loaded, load
from budwood.models.reading import Reading, as_tuned, head_spec, mode_for, reading
from budwood.models.reference import ModelRef
from budwood.params.graft import Graft, backbone_hash, hash_of, head_names
from budwood.params.graft_file import HEADS
from budwood.params.graft_manifest import READ_KEYS
from budwood.params.mask import Mask, graftable
from budwood.params.tree import named
from budwood.train.plan import device_for


@dataclass(frozen=True)
class Pair:
    """The base as it reads the task (with the tuned head, where the task needs one), and tuned minus base."""

    read: Reading
    cfg: Any
    task: Task
    delta_P: Tensor
    shapes: dict[str, torch.Size]
    head: dict[str, Tensor]
    base_hash: str
    tuned_hash: str
    tuned: ModelRef
    moved_outside: int  # weights that differ and that no graft of this set can carry

    @property
    def sizes(self) -> dict[str, int]:
        """Weights of every graftable tensor."""
        return {n: s.numel() for n, s in self.shapes.items()}

    @property
    def delta(self) -> dict[str, Tensor]:
        """The difference by name, as views."""
        parts = self.delta_P.split(list(self.sizes.values()))
        return {n: part.view(s) for (n, s), part in zip(self.shapes.items(), parts)}

    def graft(self, mask: Mask, manifest: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> Graft:
        """The graft of a mask, with the head and where it all comes from."""
        facts = {
            "base": self.read.loaded.ref.text,
            "base_hash": self.base_hash,
            "tuned_hash": self.tuned_hash,
            "task": self.task.name,
            "labels": list(self.task.labels),
            "reading": {k: _plain(getattr(self.cfg, k)) for k in READ_KEYS} | {"mode": self.read.mode},
            "graftable": len(self.delta_P),
        }
        if heads := head_names(mask):
            facts["head_hash"] = hash_of(named(self.read.loaded.model), heads)
        return Graft.cut(mask, self.delta, self.head, {**facts, **(manifest or {})}, dtype)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def open_pair(cfg: Any, base: ModelRef, tuned: ModelRef, task: Task, every: bool = False) -> Pair:
    """Load both, refuse what does not belong together, and keep of the tuned model only what differs.

    Graftable are the weights that the settings name, or `every` one.
    """
    cfg = as_tuned(cfg.model_copy(update={"parity": False}), tuned)  # here a matter of the mask, not of reading
    task = with_labels_of(task, tuned)
    if base.model_type != tuned.model_type:
        raise ModelError(
            f"The base '{base.text}' is a {base.model_type}, the tuned model '{tuned.text}' a {tuned.model_type}. Give "
            "the model that the tuned one was made from."
        )
    mode = mode_for(cfg, task, tuned)
    device = device_for(cfg.device)
    skilled = load(tuned, mode, head_spec(task, cfg), seed=cfg.model_seed or 0, device=device)
    if any(n.startswith("head.") for n in skilled.fresh):
        raise ModelError(
            f"The tuned model '{tuned.text}' has no trained head for '{task.name}' in --mode {mode}, so there is no "
            "skill to cut out. Fine-tune it on this task, or give the --mode it was tuned in."
        )
    cfg = cfg.model_copy(update={"mode": mode, "pool": getattr(skilled.model, "pool", cfg.pool)})
    loaded = load(base, mode, head_spec(task, cfg), seed=cfg.model_seed or 0, device=device)
    _same_words(loaded, skilled)
    return _compare(cfg, task, loaded, skilled, every)


def _same_words(base: Loaded, tuned: Loaded) -> None:
    ours, theirs = base.tokenizer.get_vocab(), tuned.tokenizer.get_vocab()
    if ours != theirs:
        raise ModelError(
            f"The base '{base.ref.text}' and the tuned model '{tuned.ref.text}' have different vocabularies "
            f"({len(ours):,} and {len(theirs):,} entries, {len(ours.items() ^ theirs.items()):,} differ): a word has "
            "not the same number in both. Give the model that the tuned one was made from."
        )


def _compare(cfg: Any, task: Task, loaded: Loaded, skilled: Loaded, every: bool) -> Pair:
    before, after = named(loaded.model), named(skilled.model)
    for name in {**before, **after}:
        if name not in before or name not in after or before[name].shape != after[name].shape:
            a, b = (tuple(x[name].shape) if name in x else "missing" for x in (before, after))
            part = "heads" if name.startswith(HEADS) else "architectures"
            raise ModelError(
                f"The base '{loaded.ref.text}' and the tuned model '{skilled.ref.text}' have different {part}: "
                f"'{name}' is {a} there and {b} here. Give the model that the tuned one was made from."
            )
    base_hash, tuned_hash = loaded_hash(loaded.ref, loaded.model), backbone_hash(skilled.model)
    names = graftable(loaded.model, every or cfg.embeddings, every or cfg.head)
    # a head that the base never had cannot be told as a difference: it goes along whole, with the pooler it reads
    whole = {n for n in before if n.startswith(HEADS) and n in loaded.fresh}
    if cfg.mode in ("head", "span"):
        spare = [n for n in before if n.startswith(HEADS) and n not in names]
        whole |= {n for n in spare if not torch.equal(before[n], after[n])}
    shapes = {n: before[n].shape for n in names if n not in whole}
    place, outside = 0, 0
    head = {}
    with torch.no_grad():
        for name, weight in before.items():
            if name in whole:
                head[name] = after[name].detach().clone()
                weight.copy_(after[name])
            elif name not in shapes:
                outside += int((weight != after[name]).sum())
            if name not in shapes:  # nobody reads it again: two models and their changes at once would be too much
                after[name].data = torch.empty(0)
        delta_P = torch.empty(sum(s.numel() for s in shapes.values()))
        for name, shape in shapes.items():
            part = delta_P[place : place + shape.numel()]
            torch.sub(after[name].detach().reshape(-1), before[name].detach().reshape(-1), out=part)
            place += shape.numel()
    if not bool(delta_P.any()):
        raise ModelError(
            f"'{loaded.ref.text}' and '{skilled.ref.text}' do not differ in any of {len(delta_P):,} graftable weights. "
            "Give the base first and its fine-tuned copy second."
        )
    read = reading(replace(loaded, fresh=()), task, cfg, cfg.mode, cfg.seed)
    return Pair(read, cfg, task, delta_P, shapes, head, base_hash, tuned_hash, skilled.ref, outside)


def tuned_reading(pair: Pair, task: Task | None = None, cfg: Any = None) -> Reading:
    """The tuned model itself, whatever of it moved, on the pair's task or on another with the same labels."""
    own = head_spec(pair.task, pair.cfg)
    skilled = load(pair.tuned, pair.read.mode, own, seed=pair.cfg.model_seed or 0, device=device_for(pair.cfg.device))
    return reading(skilled, task or pair.task, cfg or pair.cfg, pair.read.mode, pair.cfg.seed)


def mask_rows(pair: Pair) -> tuple[Row, ...]:
    """Rows that a mask may be fitted on: the training split alone."""
    rows = pair.task.rows("train")
    if not rows:
        raise ConfigError(f"Task '{pair.task.name}' has no training rows to choose weights on.")
    return rows

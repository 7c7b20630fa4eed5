"""Heads of stitched grafts: one that all bring alike goes into the model, others are written beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from budwood.methods.session import Session
from budwood.models.load import HeadSpec, Loaded, load
from budwood.models.load import save as save_model
from budwood.models.reference import ModelRef
from budwood.params.graft import Graft, backbone_hash, merge
from budwood.store.files import writing_directory
from budwood.train.plan import device_for


def read_by(graft: Graft) -> dict[str, Any]:
    """How the graft's task was put to the model."""
    return dict(graft.manifest.get("reading", {}))


def one_for_all(grafts: Mapping[str, Graft]) -> Graft | None:
    """A graft whose head is every graft's: same labels, same pooling, same numbers."""
    first, *rest = grafts.values()
    alike = all(
        g.manifest.get("labels") == first.manifest.get("labels")
        and read_by(g).get("pool") == read_by(first).get("pool")
        and g.head.keys() == first.head.keys()
        and all(torch.equal(v, first.head[n]) for n, v in g.head.items())
        for g in rest
    )
    return first if first.head and alike else None


def load_for(base: ModelRef, grafts: Mapping[str, Graft], device: str) -> Loaded:
    """The base as the grafts read it; where some bring no head, as those do, since that head has to stay."""
    told = next((g for g in grafts.values() if not g.head), next(iter(grafts.values())))
    mode = read_by(told).get("mode", "mlm")
    head = HeadSpec(labels=tuple(told.manifest.get("labels", ())), pool=read_by(told).get("pool", "auto"))
    return load(base, mode, head if mode == "head" else None, device=device_for(device))


def keep(session: Session, loaded: Loaded, grafts: Mapping[str, Graft]) -> dict[str, str]:
    """Write model/, and heads/NAME.graft for every head that is not in it; returns those by the grafts' names."""
    shared = one_for_all(grafts)
    own = {} if shared is not None else {n: g for n, g in grafts.items() if g.head}
    if shared is not None:
        merge(loaded.model, [Graft({}, {}, {}, shared.head)], force=True)
    with writing_directory(session.run.file("model")) as part:
        if len(own) < len(grafts):
            save_model(loaded, part)
        else:
            _save_headless(loaded, part)
    for name, graft in own.items():
        facts = {**graft.manifest, "base": "the stitched model", "base_hash": backbone_hash(loaded.model)}
        Graft({}, {}, {}, graft.head, facts).save(session.run.file("heads", f"{name}.graft"))
    return {name: str(session.run.file("heads", f"{name}.graft").resolve()) for name in own}


def _save_headless(loaded: Loaded, directory: Path) -> None:
    """The backbone alone, so that no head is taken for that of another task."""
    model: Any = loaded.model
    inner = getattr(model, model.base_model_prefix)
    inner.config.num_labels = 2  # the library's own names of labels again
    if any(n.startswith("pooler.") for n in loaded.fresh):
        inner.pooler = None  # never trained; a head that reads one brings its own
    inner.save_pretrained(directory)
    loaded.tokenizer.save_pretrained(directory)

"""Grafts named in a reference (`MODEL+x.graft`) put on the loaded model, their base recognised by a remembered hash."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from torch import nn

from budwood.errors import BudwoodError, TreeError
from budwood.models.reference import ModelRef
from budwood.params.graft import Graft, backbone_hash, merge
from budwood.params.graft_file import HEADS, manifest_of
from budwood.params.tree import named
from budwood.store.files import cache_dir, digest, write_json


def remembered_hash(ref: ModelRef, model: nn.Module) -> str:
    """The backbone's hash, kept beside path, size and time of the files it was loaded from."""
    places = [r.path.resolve() for r in (ref, ref.base) if r is not None and r.path is not None]
    files = [f for p in places for f in sorted(p.iterdir()) if f.suffix in (".safetensors", ".bin", ".json")]
    stats = [(str(f), (stat := f.stat()).st_size, stat.st_mtime_ns) for f in files]
    names = [n for n in named(model) if not n.startswith(HEADS)]
    note = cache_dir() / "digests" / f"backbone-{digest([stats, names])}.json"
    with contextlib.suppress(OSError, KeyError, ValueError):
        return str(json.loads(note.read_text())["hash"])
    value = backbone_hash(model)
    with contextlib.suppress(OSError, BudwoodError):
        write_json(note, {"hash": value})
    return value


def loaded_hash(ref: ModelRef, model: nn.Module) -> str:
    """The backbone's hash as `load` gave it: with grafts of the reference on it, the files no longer tell."""
    return backbone_hash(model) if ref.grafts else remembered_hash(ref, model)


def put_grafts(
    ref: ModelRef, model: nn.Module, labels: Sequence[str], fresh: Sequence[str], task: str = ""
) -> tuple[str, ...]:
    """Merge the grafts of a reference into the model; returns the names that are still freshly drawn.

    A head comes along where it was trained for the same labels in the same order. With several grafts that bring
    heads, that is the task's own, or else the last of them.
    """
    grafts = [Graft.load(path) for path in ref.grafts]
    fits = [g for g in grafts if not labels or tuple(g.manifest.get("labels", ())) == tuple(labels)]
    fits = [g for g in fits if g.head and g.task == task] or fits
    merge(model, grafts, head=False, force=ref.force, known_hash=None if ref.force else remembered_hash(ref, model))
    brought: set[str] = set()
    parameters = named(model) if any(g.head for g in fits) else {}
    for graft in fits:
        for name, value in graft.head.items():
            if name in parameters and parameters[name].shape == value.shape:
                parameters[name].data.copy_(value)
                brought.add(name)
    return tuple(n for n in fresh if n not in brought)


def graft_reading(ref: ModelRef, task: str | None) -> dict[str, Any]:
    """How rows were put to the model when its grafts were made: the last graft of this task, else what all share."""
    if not ref.grafts:
        return {}
    manifests = [manifest_of(p) for p in ref.grafts]
    own = [m for m in manifests if m.get("task") == task]
    found = [m.get("reading", {}) for m in (own[-1:] or manifests)]
    if not all(isinstance(r, dict) for r in found):
        raise TreeError(f"A graft of '{ref.text}' says nothing readable about how its task is put. Make it again.")
    return {k: v for k, v in found[0].items() if all(r.get(k) == v for r in found)} if found else {}


def graft_labels(ref: ModelRef) -> tuple[str, ...]:
    """The labels of the last graft that brings any."""
    labels = [tuple(map(str, manifest_of(p).get("labels", ()))) for p in ref.grafts]
    return next((x for x in reversed(labels) if x), ())

"""Ground truth: what models retrained on subsets of the rows said of every query, as an artefact on disk.

DIR/masks.npy [S, N] uint8, DIR/margins.npy [S, R, Q] float32 (NaN: that retrain diverged), DIR/index.json with ids.
The form in which such results are published elsewhere, masks and margins alone (.npy or .pt), is read as well.
Shapes: S subsets, R retrains of each with other seeds, N training rows, Q queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from budwood.errors import StoreError
from budwood.store.files import read_json, write_json, writing, writing_directory

FORMAT = 1


@dataclass(frozen=True)
class Truth:
    """Subsets and what came of them; without ids (the published form) rows are matched by their place."""

    mask_SN: np.ndarray
    margin_SRQ: np.ndarray
    train_ids: tuple[str, ...] = ()
    query_ids: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def diverged(self) -> list[tuple[int, int]]:
        """Retrains without an answer, as (subset, retrain)."""
        return [(int(s), int(r)) for s, r in np.argwhere(np.isnan(self.margin_SRQ).any(2))]

    def sound(self) -> Truth:
        """Only subsets with at least one retrain that has an answer."""
        held_S = ~np.isnan(self.margin_SRQ).any(2).all(1)
        return self.take(np.flatnonzero(held_S))

    def take(self, subsets: np.ndarray) -> Truth:
        """Some of the subsets."""
        return Truth(self.mask_SN[subsets], self.margin_SRQ[subsets], self.train_ids, self.query_ids, self.facts)

    def queries(self, index: Sequence[int]) -> Truth:
        """Some of the queries."""
        ids = tuple(self.query_ids[i] for i in index) if self.query_ids else ()
        return Truth(self.mask_SN, self.margin_SRQ[:, :, list(index)], self.train_ids, ids, self.facts)

    def mean_SQ(self) -> np.ndarray:
        """Margins averaged over the retrains of a subset; a diverged retrain is left out whole."""
        held_SR = ~np.isnan(self.margin_SRQ).any(2)
        total_SQ = np.where(held_SR[:, :, None], self.margin_SRQ, 0).sum(1, dtype=np.float64)
        return total_SQ / np.maximum(held_SR.sum(1), 1)[:, None]


def write_truth(path: Path, truth: Truth) -> None:
    """The artefact, whole or not at all."""
    with writing_directory(path) as part:
        _save(part / "masks.npy", truth.mask_SN.astype(np.uint8))
        _save(part / "margins.npy", truth.margin_SRQ.astype(np.float32))
        subsets, repeats, queries = truth.margin_SRQ.shape
        index = {"format": FORMAT, "subsets": subsets, "repeats": repeats, "queries": queries, **truth.facts}
        write_json(part / "index.json", {**index, "train_ids": truth.train_ids, "query_ids": truth.query_ids})


def _save(path: Path, values: np.ndarray) -> None:
    with writing(path) as part, part.open("wb") as f:
        np.save(f, values)


def read_truth(path: Path) -> Truth:
    """From a `validate lds` run, its truth/ directory, or a directory with published masks and margins."""
    place = next((p for p in (path / "truth", path, path / "files") if _file(p, "masks")), None)
    if place is None:
        raise StoreError(
            f"{path} holds no ground truth: neither masks.npy nor masks.pt is there. Give a run of `budwood validate "
            "lds`, or a folder with masks and margins."
        )
    mask_SN, margins = _array(place, "masks"), _array(place, "margins").astype(np.float64)
    margin_SRQ = margins[:, None, :] if margins.ndim == 2 else margins
    if mask_SN.ndim != 2 or margin_SRQ.ndim != 3 or len(mask_SN) != len(margin_SRQ):
        raise StoreError(
            f"{place}: masks are {list(mask_SN.shape)} and margins {list(margins.shape)}; expected [subsets, training "
            "rows] and [subsets, queries] or [subsets, repeats, queries]."
        )
    index = read_json(place / "index.json") if (place / "index.json").exists() else {}
    ids = {k: tuple(index.pop(k, ())) for k in ("train_ids", "query_ids")}
    return Truth(mask_SN != 0, margin_SRQ, **ids, facts=index)


def _file(place: Path, name: str) -> Path | None:
    return next((p for p in (place / f"{name}.npy", place / f"{name}.pt") if p.is_file()), None)


def _array(place: Path, name: str) -> np.ndarray:
    path = _file(place, name)
    if path is None:
        raise StoreError(f"{place} has masks but no {name}.npy or {name}.pt. Copy it there.")
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False)
    import torch

    found: np.ndarray = torch.load(path, map_location="cpu", weights_only=True).numpy()
    return found

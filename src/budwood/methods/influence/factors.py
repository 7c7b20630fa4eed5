"""Factors on disk: covariances, eigenbases and second moments of every map, and what they are the factors of.

RUN/factors/
  covariance.safetensors   A/source [I, I], G/map [O, O]: means over positions (A of exact labels: weighted)
  eigen.safetensors        qA/source, lA/source, qG/map, lG/map
  moments.safetensors      ekfac/map, diagonal/map [O, I]: means over rows
  factors.json             maps, rows, labels, model hash, damping evidence
Shapes: I in (with the bias's 1), O out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from budwood.capture.stream import Map
from budwood.errors import ConfigError, StoreError, nearest
from budwood.linalg.kron import eigenbasis, inverse
from budwood.methods.influence.moments import Basis
from budwood.store.files import digest, read_json, stamps

USUAL = 10.0  # of the mean: what --damping auto means where nothing is known


@dataclass(frozen=True)
class Setting:
    """A strategy and the label of its damping ("" for identity)."""

    strategy: str
    damping: str = ""

    @property
    def text(self) -> str:
        """How it is told: ekfac@1e-08."""
        return f"{self.strategy}@{self.damping}" if self.damping else self.strategy


def settings_of(strategies: Sequence[str], dampings: Sequence[str]) -> tuple[Setting, ...]:
    """Every strategy at every damping, the first damping of each first; identity has none."""
    return tuple(
        Setting(s, d)
        for s in strategies
        for d in (("",) if s == "identity" else dampings)
        if s in ("identity", "diagonal", "kfac", "ekfac")
    )


@dataclass(frozen=True)
class Factors:
    """Fitted factors; tensors are read when asked for."""

    path: Path
    maps: tuple[Map, ...]
    facts: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> Factors:
        """From a run directory or the `factors` directory in it."""
        place = Path(path) if (Path(path) / "factors.json").exists() else Path(path) / "factors"
        if not (place / "factors.json").exists():
            raise StoreError(
                f"{path} holds no factors (there is no {place / 'factors.json'}). Give a run of `influence fit`."
            )
        facts = read_json(place / "factors.json")
        return cls(place, tuple(Map(**m) for m in facts.pop("maps")), facts)

    @property
    def stamp(self) -> str:
        """Changes whenever a file of the factors does: enough for what one process remembers."""
        files = sorted(self.path.glob("*.*"))
        return digest([[f.name for f in files], stamps(files)])

    @cached_property
    def _where(self) -> dict[str, Path]:
        """Which file holds a tensor."""
        found: dict[str, Path] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as f:
                found |= dict.fromkeys(f.keys(), file)  # noqa: SIM118
        return found

    def tensor(self, key: str) -> Tensor:
        """One tensor by its key, e.g. "ekfac/encoder.layer.0.output.dense"."""
        if key not in self._where:
            kind = key.split("/")[0]
            raise StoreError(
                f"{self.path} has no '{key}'.{nearest(key, self._where)} Factors of strategy "
                f"'{kind if kind in ('ekfac', 'diagonal') else 'kfac'}' were not fitted: run `influence fit` with it."
            )
        with safe_open(self._where[key], framework="pt") as f:
            found: Tensor = f.get_tensor(key)
        return found

    def map(self, name: str) -> Map:
        """A map by its name."""
        for m in self.maps:
            if m.name == name:
                return m
        names = [m.name for m in self.maps]
        raise StoreError(f"There is no module '{name}' among the factors.{nearest(name, names)}")

    def basis(self, name: str) -> Basis:
        """Eigenbasis of a map: q_OO, q_II, l_O, l_I."""
        source = self.map(name).source
        return Basis(*(self.tensor(k) for k in (f"qG/{name}", f"qA/{source}", f"lG/{name}", f"lA/{source}")))

    @cached_property
    def bases(self) -> dict[str, Basis]:
        """All eigenbases, in memory; maps of one source share theirs."""
        turned = [m for m in self.maps if not m.diagonal]
        inputs = {s: (self.tensor(f"qA/{s}"), self.tensor(f"lA/{s}")) for s in {m.source for m in turned}}
        return {
            m.name: Basis(
                self.tensor(f"qG/{m.name}"), inputs[m.source][0], self.tensor(f"lG/{m.name}"), inputs[m.source][1]
            )
            for m in turned
        }

    def curvature(self, strategy: str, name: str) -> Tensor:
        """[O, I]: eigenvalues of kfac or ekfac in the eigenbasis, the diagonal in weights (of embeddings and norms in
        every strategy).
        """
        if self.map(name).diagonal:
            return self.tensor(f"diagonal/{name}")
        return self.basis(name).kron if strategy == "kfac" else self.tensor(f"{strategy}/{name}")

    def share(self, strategy: str) -> tuple[float, str | None]:
        """The share of a map's mean that `auto` means for a strategy, and the strategy whose evidence chose it: its
        own, else another's, else None.
        """
        evidence = self.facts["evidence"]
        for source in (strategy, "ekfac", "diagonal", "kfac"):
            if source in evidence:
                return float(evidence[source]["best"]), source
        return USUAL, None

    def damping(self, setting: Setting, name: str) -> float:
        """The number behind a label for one map: absolute, a share of the map's mean, or what the evidence chose."""
        label = setting.damping
        if label == "auto":
            label = f"{self.share(setting.strategy)[0]:g}mean"
        if not label.endswith("mean"):
            return float(label)
        curvature = self.curvature(setting.strategy, name)
        return float(label.removesuffix("mean")) * float(curvature.double().mean())

    def inverse(self, setting: Setting, name: str) -> Tensor | None:
        """1 / (curvature + damping) [O, I] of a map, computed in float64; None for identity."""
        if setting.strategy == "identity":
            return None
        curvature = self.curvature(setting.strategy, name)
        found = inverse(curvature, self.damping(setting, name)).to(curvature.dtype)
        if not (torch.isfinite(curvature).all() and torch.isfinite(found).all()):
            raise ConfigError(
                f"The {setting.strategy} curvature of '{name}' has no finite inverse at --damping {setting.damping}: "
                "some of it is not finite (a row's gradient was not: leave the module out with --modules), or so near "
                "to 0 that damping has to be larger (such as 0.1mean)."
            )
        return found

    def check(self, now: Mapping[str, Any]) -> None:
        """Refuse factors of another model, other rows or other settings, naming what differs."""
        if other := differing(self.facts, now):
            raise ConfigError(
                f"The factors in {self.path} are of another model or other settings, not those of this command:\n"
                + "\n".join(other)
                + "\nFit factors for this model and these settings, or leave --factors away."
            )


@dataclass(frozen=True)
class Unfitted(Factors):
    """Factors that are not there yet: tensors without numbers, for whoever counts memory before a fit."""

    @classmethod
    def of(cls, maps: tuple[Map, ...]) -> Unfitted:
        """Those of some maps."""
        return cls(Path(), maps, {})

    @cached_property
    def bases(self) -> dict[str, Basis]:
        """All eigenbases."""
        sides = lambda m: ((m.out, m.out), (m.columns, m.columns), (m.out,), (m.columns,))  # noqa: E731
        turned = [m for m in self.maps if not m.diagonal]
        return {m.name: Basis(*(torch.empty(size, device="meta") for size in sides(m))) for m in turned}

    def inverse(self, setting: Setting, name: str) -> Tensor | None:
        """The weights of a map; None for identity."""
        m = self.map(name)
        return None if setting.strategy == "identity" else torch.empty(m.out, m.columns, device="meta")


def differing(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line per fact that is not as it is now.

    >>> differing({"max_length": 8, "rows": 3}, {"max_length": 64})
    ['  max_length: 8 there, 64 now']
    """
    return [f"  {k}: {there.get(k)!r} there, {v!r} now" for k, v in now.items() if there.get(k) != v]


def facts_json(maps: Sequence[Map], facts: Mapping[str, Any]) -> str:
    """The text of factors.json."""
    return json.dumps({**facts, "maps": [asdict(m) for m in maps]}, indent=1)


def decompose(covariance: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """qA/, lA/, qG/, lG/ of every A/ and G/, in their type."""
    out: dict[str, Tensor] = {}
    for key, matrix in covariance.items():
        side, _, name = key.partition("/")
        vectors, values = eigenbasis(matrix, name)
        out[f"q{side}/{name}"] = vectors.to(matrix.dtype).contiguous()
        out[f"l{side}/{name}"] = values.to(matrix.dtype)
    return out


def merged(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sums of parts in float64, in their order; of parts that are made as they are asked for, one is held at a time."""
    out: dict[str, Tensor] = {}
    for part in parts:
        for key in part:
            out[key] = part[key].to(torch.float64, copy=True) if key not in out else out[key].add_(part[key])
        del part  # before the next one is made
    return out


def means(total: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Covariances divided by their weights; `total` is emptied on the way, so that not both are held.

    A map that no gradient reaches has no weight and stays zero.
    """
    keys = [k for k in total if not k.startswith(("nA/", "nG/"))]
    return {k: (total.pop(k) / (total[f"n{k}"] if total[f"n{k}"] > 0 else 1.0)).to(dtype) for k in keys}

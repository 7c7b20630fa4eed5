"""Trees: tensors under their canonical names, with the algebra that methods need.

Canonical names: backbone parameters without the model's own prefix (`encoder.layer.0...`, not `bert.encoder...`),
everything else under `head.`, a tied tensor once. The Fisher of a classifier and of a masked LM on one backbone
therefore match name by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from budwood.errors import TreeError, nearest
from budwood.store.files import writing

Tree = Mapping[str, Tensor]

HEAD = "head."
MANIFEST = "manifest"


def prefixes(model: nn.Module) -> tuple[str, str]:
    """(prefix of the backbone's parameters, prefix of a wrapper around everything), both ending in "." or empty.

    A bare backbone has ("", ""); a BERT classifier ("bert.", ""); the same inside an adapter wrapper
    ("base_model.model.bert.", "base_model.model.").
    """
    attribute = getattr(model, "base_model_prefix", "")
    backbone = getattr(model, attribute, None) if attribute else None
    if not isinstance(backbone, nn.Module) or backbone is model:
        return "", ""
    if attribute in model._modules:  # the usual case, asked for in every pass
        return f"{attribute}.", ""
    for name, module in model.named_modules():
        if module is backbone:
            return f"{name}.", name[: len(name) - len(attribute)]
    return "", ""


def canonical(name: str, backbone: str, wrapper: str) -> str:
    """The name of a parameter in a tree.

    >>> canonical("bert.encoder.layer.0.output.dense.weight", "bert.", "")
    'encoder.layer.0.output.dense.weight'
    >>> canonical("classifier.bias", "bert.", "")
    'head.classifier.bias'
    """
    if name.startswith(backbone):
        return name[len(backbone) :]
    name = name[len(wrapper) :] if name.startswith(wrapper) else name
    return name if name.startswith(HEAD) else HEAD + name


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter once under its canonical name, the backbone's first.

    >>> layer = nn.Linear(2, 2)
    >>> sorted(named(nn.Sequential(layer, layer)))
    ['0.bias', '0.weight']
    """
    backbone, wrapper = prefixes(model)
    both = list(model.named_parameters(remove_duplicate=False))
    order = [x for x in both if x[0].startswith(backbone)] + [x for x in both if not x[0].startswith(backbone)]
    out: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name, parameter in order:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            out[canonical(name, backbone, wrapper)] = parameter
    return out


def values(model: nn.Module) -> dict[str, Tensor]:
    """A detached copy of every parameter."""
    return {name: parameter.detach().clone() for name, parameter in named(model).items()}


def check(a: Tree, b: Tree, called: tuple[str, str] = ("the first tree", "the second tree")) -> None:
    """Refuse two trees whose names or shapes differ, naming the first difference; `called` names them."""
    missing, extra = sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())
    told = f"{called[0]} and {called[1]} do not hold the same tensors"
    told = told[0].upper() + told[1:]
    todo = "Both must be of one architecture and selection, as two models tuned from one base are."
    if missing or extra:
        name = (missing or extra)[0]
        lacking, other = (called[1], b) if missing else (called[0], a)
        raise TreeError(
            f"{told}: {lacking} has no '{name}' ({len(a):,} and {len(b):,} tensors, {len(missing) + len(extra):,} of "
            f"them in one alone). {todo}{nearest(name, other)}"
        )
    for name, value in a.items():
        if value.shape != b[name].shape:
            raise TreeError(
                f"{told}: '{name}' has shape {tuple(value.shape)} in {called[0]} and {tuple(b[name].shape)} in "
                f"{called[1]}. {todo}"
            )


def _each(a: Tree, b: Tree, op: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    check(a, b)
    return {name: op(value, b[name]) for name, value in a.items()}


def add(a: Tree, b: Tree) -> dict[str, Tensor]:
    """A + b, name by name."""
    return _each(a, b, torch.add)


def sub(a: Tree, b: Tree) -> dict[str, Tensor]:
    """A - b, name by name.

    >>> sub({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])})
    {'w': tensor([2.])}
    """
    return _each(a, b, torch.sub)


def times(a: Tree, b: Tree) -> dict[str, Tensor]:
    """The elementwise product, name by name."""
    return _each(a, b, torch.mul)


def scale(a: Tree, factor: float) -> dict[str, Tensor]:
    """Every tensor times one number."""
    return {name: value * factor for name, value in a.items()}


def dot(a: Tree, b: Tree) -> float:
    """The inner product over all tensors, summed in float64.

    >>> dot({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([1.0, 2.0])})
    11.0
    """
    check(a, b)
    return float(sum((float((value.double() * b[name].double()).sum()) for name, value in a.items()), 0.0))


def norm(a: Tree) -> float:
    """The Euclidean length of the whole tree.

    >>> norm({"v": torch.tensor([3.0]), "w": torch.tensor([4.0])})
    5.0
    """
    return dot(a, a) ** 0.5


def take(a: Tree, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The named part of a tree, in the order of `names`."""
    for name in names:
        if name not in a:
            raise TreeError(f"There is no tensor '{name}' among {len(a):,}.{nearest(name, a)}")
    return {name: a[name] for name in names}


def save(path: Path, a: Tree, manifest: Mapping[str, Any]) -> None:
    """Write a tree and its manifest as one safetensors file, whole or not at all."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in a.items()}
    with writing(path) as part:
        save_file(tensors, part, metadata={MANIFEST: json.dumps(dict(manifest), sort_keys=True)})


def manifest(path: Path) -> dict[str, Any]:
    """The manifest that `save` wrote, without the tensors."""
    with safe_open(path, framework="pt") as file:
        return dict(json.loads((file.metadata() or {}).get(MANIFEST, "{}")))


def load(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tree and the manifest that `save` wrote; tensors in the order of their names."""
    path = Path(path)
    if not path.is_file():
        raise TreeError(f"There is no file '{path}'. Give a .safetensors file that budwood wrote.")
    try:
        with safe_open(path, framework="pt", device=device) as file:
            facts = json.loads((file.metadata() or {}).get(MANIFEST, "{}"))
            return {name: file.get_tensor(name) for name in sorted(file.keys())}, facts
    except SafetensorError as error:
        raise TreeError(f"'{path}' is not a readable safetensors file ({error}). Write it again.") from error

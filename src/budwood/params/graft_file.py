"""The .graft file: a safetensors container with two streams, dense head tensors, a manifest and a checksum.

`indices`  uint8: for every tensor in turn the gaps between its sorted positions, seven bits to a byte, the lowest first
           (the first gap counts from -1, so every gap is at least 1 and is stored less one)
`values`   float32 or float16: what is added to the weight at each position, in the same order
`head:N`   float32: a whole tensor of the head or pooler, where the task needs one
`manifest` JSON in the container's metadata, with `tensors`: [name, shape, count] of every changed tensor
`checksum` blake2b over manifest and all bytes

A file is checked before anything of it is used: it may come from a stranger.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from budwood.errors import TreeError
from budwood.params.graft_manifest import checked, printable
from budwood.store.files import writing

FORMAT, META = "budwood-graft-1", "graft"
HEAD_KEY = "head:"
HEADS = ("head.", "pooler.")  # what a dense tensor may be called
MOST = 1 << 48  # weights of a tensor: larger shapes are nonsense


@dataclass(frozen=True)
class Contents:
    """What a file holds, as numpy arrays: positions and values per tensor, shapes, heads, manifest."""

    index: dict[str, np.ndarray]
    value: dict[str, np.ndarray]
    shape: dict[str, tuple[int, ...]]
    head: dict[str, np.ndarray]
    manifest: dict[str, Any]


def pack(index_K: np.ndarray) -> np.ndarray:
    """Sorted distinct positions as gaps of seven bits a byte; the high bit says that more follow.

    >>> pack(np.array([0, 1, 300])).tolist()
    [0, 0, 170, 2]
    """
    gap_K: np.ndarray = np.diff(np.asarray(index_K, dtype=np.int64), prepend=-1).astype(np.int64) - 1
    if len(gap_K) and gap_K.min() < 0:
        raise TreeError("The positions of a graft must be sorted, distinct and not negative.")
    width_K = np.ones(len(gap_K), dtype=np.int64)
    rest = gap_K >> 7
    while rest.any():
        width_K += rest > 0
        rest >>= 7
    start_K = np.concatenate([[0], np.cumsum(width_K)[:-1]]) if len(gap_K) else np.empty(0, np.int64)
    out = np.zeros(int(width_K.sum()), dtype=np.uint8)
    for place in range(int(width_K.max(initial=0))):
        chosen = width_K > place
        byte = (gap_K[chosen] >> (7 * place)) & 0x7F
        out[start_K[chosen] + place] = byte | np.where(width_K[chosen] > place + 1, 0x80, 0)
    return out


def unpack(stream: np.ndarray) -> np.ndarray:
    """The gaps (less one) in a stream; a number cut off or longer than 56 bits is refused."""
    if not len(stream):
        return np.empty(0, dtype=np.int64)
    last = (stream & 0x80) == 0
    if not last[-1]:
        raise TreeError("The positions end in the middle of a number.")
    end = np.flatnonzero(last)
    start = np.concatenate([[0], end[:-1] + 1])
    width = end - start + 1
    if width.max() > 8:
        raise TreeError("A position is longer than any tensor.")
    gap = np.zeros(len(end), dtype=np.int64)
    for place in range(int(width.max())):
        chosen = width > place
        gap[chosen] |= (stream[start[chosen] + place].astype(np.int64) & 0x7F) << (7 * place)
    return gap


def write(path: Path, contents: Contents) -> None:
    """Write a graft whole or not at all; the same contents give the same bytes."""
    from safetensors.numpy import save_file

    names = sorted(contents.index)
    empty = np.empty(0, dtype=np.float32)
    tensors = {
        "indices": np.concatenate([np.empty(0, np.uint8), *(pack(contents.index[n]) for n in names)]),
        "values": np.concatenate([contents.value[n] for n in names]) if names else empty,
        **{HEAD_KEY + n: np.ascontiguousarray(v, dtype=np.float32) for n, v in sorted(contents.head.items())},
    }
    manifest = {**contents.manifest, "tensors": [[n, list(contents.shape[n]), len(contents.index[n])] for n in names]}
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    with writing(path) as part:
        save_file(tensors, part, metadata=metadata(text, tensors))


def metadata(manifest: str, tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    """The container's metadata: one entry, since the library writes several in any order."""
    return {META: json.dumps({"checksum": checksum(manifest, tensors), "format": FORMAT, "manifest": manifest})}


def checksum(manifest: str, tensors: Mapping[str, np.ndarray]) -> str:
    """Hash over the manifest and every tensor's name, type, shape and bytes."""
    h = hashlib.blake2b(manifest.encode(), digest_size=16)
    for name in sorted(tensors):
        value = np.ascontiguousarray(tensors[name])
        h.update(f"\x00{name}\x00{value.dtype}\x00{value.shape}\x00".encode())
        h.update(value.reshape(-1).view(np.uint8).data)
    return h.hexdigest()


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest alone, checked; its tensors are not read."""
    manifest, _ = _open(path, tensors=False)
    with _distrusting(path):
        checked(manifest)
    return manifest


def read(path: Path) -> Contents:
    """The contents of a file, every part checked."""
    manifest, tensors = _open(path, tensors=True)
    with _distrusting(path):
        checked(manifest)
        return _decode(manifest, tensors)


@contextlib.contextmanager
def _distrusting(path: Path) -> Iterator[None]:
    try:
        yield
    except TreeError as e:
        raise TreeError(f"The graft '{path}' is not to be trusted: {e} Get it again from where it was made.") from None


def _open(path: Path, tensors: bool) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise TreeError(f"There is no graft '{path}'. `budwood graft learn` writes NAME.graft files.")
    damaged = f"The graft '{path}' is damaged or no graft at all"
    try:
        with safe_open(path, framework="numpy") as file:
            meta = json.loads((file.metadata() or {}).get(META, "{}"))
            if meta.get("format") != FORMAT:
                raise TreeError(
                    f"'{path}' is no graft: its format is '{meta.get('format', 'unknown')}', expected '{FORMAT}'. "
                    "`budwood graft learn` writes NAME.graft files."
                )
            text = str(meta.get("manifest", ""))
            found = {n: file.get_tensor(n) for n in sorted(file.keys())} if tensors else {}
            fits = not tensors or checksum(text, found) == meta.get("checksum")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        told = type(e).__name__ if isinstance(e, UnicodeError) else str(e).strip() or type(e).__name__
        raise TreeError(f"{damaged} ({told}). Copy or make it again.") from e
    if not fits:
        raise TreeError(f"{damaged}: its checksum does not fit its bytes. Copy or make it again.")
    try:
        manifest = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as e:
        raise TreeError(f"{damaged}: its manifest is not JSON. Copy or make it again.") from e
    if not isinstance(manifest, dict):
        raise TreeError(f"{damaged}: its manifest is no mapping. Copy or make it again.")
    return manifest, found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _decode(manifest: dict[str, Any], tensors: dict[str, np.ndarray]) -> Contents:
    indices, values = tensors.pop("indices", None), tensors.pop("values", None)
    if indices is None or values is None or indices.dtype != np.uint8 or indices.ndim != 1:
        raise TreeError("it lacks its stream of positions or values.")
    if values.dtype not in (np.float32, np.float16) or values.ndim != 1:
        raise TreeError("its values are neither float32 nor float16.")
    head = {}
    for key, value in tensors.items():
        name = key.removeprefix(HEAD_KEY)
        if not key.startswith(HEAD_KEY) or not name.startswith(HEADS) or value.dtype != np.float32:
            raise TreeError(f"it wants to replace '{name}' as a whole, which only a head or pooler may be.")
        if not value.size or not printable(name):
            raise TreeError("it has a head without a name or without weights.")
        head[name] = value
    if not all(np.isfinite(v).all() for v in (values, *head.values())):
        raise TreeError("some of its values are not finite.")
    gap = unpack(indices)
    if len(gap) != len(values):
        raise TreeError(f"it has {len(gap):,} positions and {len(values):,} values.")
    index, deltas, shape = _cut(manifest.get("tensors"), gap, values)
    rest = {k: v for k, v in manifest.items() if k != "tensors"}
    return Contents(index, deltas, shape, head, rest)


def _cut(table: Any, gap: np.ndarray, values: np.ndarray) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Positions, values and shape of every tensor in the manifest's table."""
    index: dict[str, np.ndarray] = {}
    value: dict[str, np.ndarray] = {}
    shape: dict[str, tuple[int, ...]] = {}
    total = np.cumsum(gap + 1)  # one sum over all; what came before a tensor is taken off again
    start, before = 0, 0
    for name, dims, count in _rows(table):
        if name in index:
            raise TreeError(f"it lists '{name}' twice.")
        size, end = math.prod(dims), start + count
        if count > size or end > len(gap):
            raise TreeError(f"it claims {count:,} positions for '{name}', which has {size:,} weights.")
        place = total[start:end] - (before + 1)
        if count and (place[-1] >= size or place.min() < 0):
            raise TreeError(f"it writes outside '{name}': position {int(place.max()):,} of {size:,}.")
        index[name], value[name], shape[name] = place, values[start:end], dims
        start, before = end, int(total[end - 1]) if end else 0
    if start != len(gap):
        raise TreeError(f"{len(gap) - start:,} of its positions belong to no tensor.")
    return index, value, shape


def _rows(table: Any) -> list[tuple[str, tuple[int, ...], int]]:
    """The manifest's table with every entry checked for its type."""
    if not isinstance(table, list):
        raise TreeError("its manifest does not list its tensors.")
    whole = lambda x: isinstance(x, int) and not isinstance(x, bool) and x > 0  # noqa: E731
    rows = []
    for row in table:
        fine = isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and isinstance(row[1], list)
        if not fine or not whole(row[2]) or not all(whole(d) for d in row[1]) or math.prod(row[1]) > MOST:
            raise TreeError(f"its manifest has an entry that is no tensor: {str(row)[:80]}.")
        rows.append((row[0], tuple(row[1]), row[2]))
    return rows

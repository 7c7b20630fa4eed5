"""Tokenised rows kept by content: the same rows, tokenizer and settings are never tokenised twice."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from budwood.data.batch import Features
from budwood.data.task import Row
from budwood.errors import BudwoodError
from budwood.store.files import cache_dir, canonical, writing

FORMAT = 2  # to be raised whenever the encoders would make other features of the same rows and settings
KINDS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1", "F32": "<f4", "F64": "<f8", "BOOL": "?"}


def rows_digest(rows: Sequence[Row]) -> str:
    """Content hash of rows in their order."""
    h = hashlib.blake2b(digest_size=16)
    for r in rows:
        h.update(repr((r.id, r.text, r.pair, r.label, r.words, r.answers)).encode("utf-8", "surrogatepass"))
    return h.hexdigest()


def cached_features(rows: Sequence[Row], key: Sequence[Any], encode: Callable[[], Features]) -> Features:
    """Features from the cache, or made by `encode` and put there; `key` names all else that decides them."""
    name = hashlib.blake2b(canonical([FORMAT, rows_digest(rows), *key]).encode(), digest_size=16).hexdigest()
    path = cache_dir() / "tokens" / name[:2] / f"{name}.safetensors"
    from safetensors import SafetensorError

    broken = (OSError, ValueError, KeyError, BudwoodError, SafetensorError)  # a cache that fails only costs time
    with contextlib.suppress(*broken):
        return read_features(path)
    made = encode()
    with contextlib.suppress(*broken):
        write_features(path, made)
    return made


def write_features(path: Path, features: Features) -> None:
    """Features as one safetensors file, written whole."""
    from safetensors.numpy import save_file

    arrays = {"offsets": features.offsets_N1}
    arrays |= {f"ragged.{k}": np.ascontiguousarray(v) for k, v in features.ragged.items()}
    arrays |= {f"fixed.{k}": np.ascontiguousarray(v) for k, v in features.fixed.items()}
    arrays["ids"] = np.frombuffer(json.dumps(features.ids).encode("utf-8", "surrogatepass"), dtype=np.uint8)
    with writing(path) as part:
        save_file(arrays, part, metadata={"info": json.dumps(dict(features.info))})


def read_features(path: Path) -> Features:
    """Features as they were written, mapped from the file: processes that read the same rows share the memory."""
    with path.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
        if size > path.stat().st_size - 8:  # a damaged length must not ask for all the memory there is
            raise ValueError(f"{path} is damaged: its header claims {size} bytes.")
        header = json.loads(f.read(size))
    info = json.loads(header.pop("__metadata__")["info"])
    whole = np.asarray(np.memmap(path, dtype=np.uint8, mode="r", offset=8 + size))
    arrays = {
        name: whole[slice(*entry["data_offsets"])].view(KINDS[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }
    part = lambda kind: {k.removeprefix(kind): v for k, v in arrays.items() if k.startswith(kind)}  # noqa: E731
    ids = tuple(json.loads(arrays["ids"].tobytes().decode("utf-8", "surrogatepass")))
    return Features(ids, arrays["offsets"], part("ragged."), part("fixed."), info)

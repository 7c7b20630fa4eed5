"""Encoded rows kept ragged, and batches cut from them without needless padding.

Shapes: N features, B examples of a batch, T longest length in the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # numpy alone suffices until a batch is made
    from torch import Tensor

IGNORE = -100  # a position without a target


@dataclass(frozen=True)
class Features:
    """Tokenised rows as flat arrays.

    `ids[n]` is the row's id (windows of one document share it). `ragged` holds one flat array per name, all cut by the
    same `offsets_N1`: always "input_ids"; "token_type_ids" where the tokenizer makes them; "target" (int, IGNORE =
    none) where tokens carry labels. `fixed` holds one value per feature: "label", "read_at", "start", "end", "row".
    `info` records what encoding did (truncated rows, ...).
    """

    ids: tuple[str, ...]
    offsets_N1: np.ndarray
    ragged: Mapping[str, np.ndarray]
    fixed: Mapping[str, np.ndarray] = field(default_factory=dict)
    info: Mapping[str, int | float | str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths_N(self) -> np.ndarray:
        """Number of tokens of each feature."""
        return np.diff(self.offsets_N1)

    def piece(self, name: str, n: int) -> np.ndarray:
        """The values of one ragged array that belong to feature n."""
        return self.ragged[name][self.offsets_N1[n] : self.offsets_N1[n + 1]]

    def take(self, index: Sequence[int] | np.ndarray) -> Features:
        """The features at `index`, in that order."""
        index_M = np.asarray(index, dtype=np.int64)
        lengths_M = self.lengths_N[index_M]
        offsets = np.concatenate([[0], np.cumsum(lengths_M)]).astype(np.int64)
        flat = (
            np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths_M) + np.repeat(self.offsets_N1[index_M], lengths_M)
        )
        return Features(
            ids=tuple(self.ids[i] for i in index_M),
            offsets_N1=offsets,
            ragged={k: v[flat] for k, v in self.ragged.items()},
            fixed={k: v[index_M] for k, v in self.fixed.items()},
            info=self.info,
        )

    @classmethod
    def from_lists(
        cls,
        ids: Sequence[str],
        ragged: Mapping[str, Sequence[Sequence[int]]],
        fixed: Mapping[str, Sequence[int] | Sequence[float]] | None = None,
        info: Mapping[str, int | float | str] | None = None,
    ) -> Features:
        """Flat arrays from one list per row.

        >>> f = Features.from_lists(["a", "b"], {"input_ids": [[5, 6], [7]]}, {"label": [1, 0]})
        >>> f.lengths_N.tolist(), f.piece("input_ids", 1).tolist()
        ([2, 1], [7])
        """
        lengths = [len(x) for x in ragged["input_ids"]]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        flat = {
            k: np.fromiter((t for x in v for t in x), dtype=np.int32, count=int(offsets[-1])) for k, v in ragged.items()
        }
        return cls(tuple(ids), offsets, flat, {k: np.asarray(v) for k, v in (fixed or {}).items()}, dict(info or {}))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Example ids first, then what the model eats and what it should answer.

    `inputs`: input_ids [B, T] and, where needed, attention_mask and token_type_ids. `targets`: the ragged targets
    padded with IGNORE ("target" [B, T]) and the fixed columns ("label" [B], "read_at" [B], ...). `index_B` points
    back into the features.
    """

    ids: tuple[str, ...]
    index_B: np.ndarray
    inputs: dict[str, Tensor]
    targets: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.ids)


def collate(features: Features, index: Sequence[int] | np.ndarray, pad_id: int) -> Batch:
    """Cut a batch, padded on the right to its own longest row; no attention mask where nothing is padded."""
    import torch

    index_B = np.asarray(index, dtype=np.int64)
    lengths_B = features.lengths_N[index_B]
    width = int(lengths_B.max())
    real_BT = np.arange(width) < lengths_B[:, None]
    source_BT = np.minimum(features.offsets_N1[index_B][:, None] + np.arange(width), features.offsets_N1[-1] - 1)
    padding = {"input_ids": pad_id, "target": IGNORE}
    inputs: dict[str, Tensor] = {}
    targets: dict[str, Tensor] = {}
    for name, flat in features.ragged.items():
        values_BT = np.where(real_BT, flat[source_BT], padding.get(name, 0)).astype(np.int64)
        (inputs if name in ("input_ids", "token_type_ids") else targets)[name] = torch.from_numpy(values_BT)
    if not real_BT.all():
        inputs["attention_mask"] = torch.from_numpy(real_BT.astype(np.int64))
    for name, column in features.fixed.items():
        targets[name] = torch.from_numpy(np.ascontiguousarray(column[index_B]))
    return Batch(ids=tuple(features.ids[i] for i in index_B), index_B=index_B, inputs=inputs, targets=targets)


def seed_of(*parts: object) -> int:
    """A 63-bit seed that is a pure function of its parts.

    >>> seed_of(0, "epoch", 1) == seed_of(0, "epoch", 1) != seed_of(0, "epoch", 2)
    True
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def training_batches(
    lengths_N: np.ndarray, batch_size: int, seed: int, epoch: int, window: int = 64
) -> list[np.ndarray]:
    """One epoch of batches of `batch_size` examples (one may be shorter), a pure function of its arguments.

    Rows are shuffled, then sorted by length inside windows of `window` batches, so that hardly anything is padded, and
    the batches are shuffled again so that length does not follow time.
    """
    rng = np.random.default_rng(seed_of(seed, "order", epoch))
    order = rng.permutation(len(lengths_N))
    span = batch_size * window
    windows = [order[i : i + span] for i in range(0, len(order), span)]
    order = np.concatenate([w[np.argsort(lengths_N[w], kind="stable")] for w in windows])
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]


def budget_batches(lengths_N: np.ndarray, tokens: int = 4096, most: int = 512) -> Iterator[np.ndarray]:
    """All rows once, longest first, in batches of at most `tokens` padded tokens (at least one row each).

    A batch of an eighth of that or more ends before rows under three quarters of its longest: little is padded even
    where rows are few and of all lengths.

    >>> [batch.tolist() for batch in budget_batches(np.array([4, 64, 60, 4, 4]), 512)]
    [[1, 2], [0, 3, 4]]
    """
    order = np.argsort(-lengths_N, kind="stable")
    falling_N = -lengths_N[order]
    start = 0
    while start < len(order):
        longest = max(1, int(lengths_N[order[start]]))
        alike = int(np.searchsorted(falling_N, -0.75 * longest, side="right")) - start
        take = max(1, min(most, tokens // longest, max(alike, -(-tokens // (8 * longest)))))
        yield order[start : start + take]
        start += take

"""Masked-language-model corruption that depends on the token's place alone, never on its batch.

Shapes: B rows of a batch, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from budwood.data.batch import IGNORE, seed_of

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # steps of the splitmix64 sequence
MASKED, RANDOM = 0.8, 0.9  # 80 % become the mask, 10 % a random token, 10 % stay


@dataclass(frozen=True, slots=True)
class Masking:
    """What masking needs to know of the tokenizer and of the run.

    `by_text`: draws hang on a row's tokens in place of its index, so that a row has the same masks whichever rows are
    beside it. Training draws by index: equal texts then have masks of their own.
    """

    mask_id: int
    vocab_size: int
    seed: int
    rate: float = 0.15
    by_text: bool = False


def mask_tokens(
    input_ids_BT: np.ndarray,
    special_BT: np.ndarray,
    index_B: np.ndarray,
    epoch: int,
    masking: Masking,
    attention_BT: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Corrupted ids and targets (the original id where the model must answer, IGNORE elsewhere).

    `special_BT` marks tokens that may not be masked, `attention_BT` (where given) the real ones; `index_B` are the
    features' own indices. The numbers drawn for a token are a function of (seed, epoch, index or text, position) alone.
    Every row with a maskable token gets at least one target.

    >>> ids, none = np.arange(8).reshape(2, 4), np.zeros((2, 4), int)
    >>> m = Masking(mask_id=99, vocab_size=100, seed=0)
    >>> corrupted_BT, target_BT = mask_tokens(ids, none, np.array([7, 3]), 1, m)
    >>> alone_BT, _ = mask_tokens(ids[1:], none[1:], np.array([3]), 1, m)
    >>> bool((alone_BT == corrupted_BT[1:]).all()), bool(((target_BT != IGNORE).sum(1) >= 1).all())
    (True, True)
    """
    allowed_BT = special_BT == 0
    if attention_BT is not None:
        allowed_BT = allowed_BT & (attention_BT != 0)
    of_B = _texts(input_ids_BT, attention_BT) if masking.by_text else np.asarray(index_B)
    key_BT = _keys(of_B, input_ids_BT.shape[1], masking.seed, epoch)
    chance_BT = np.where(allowed_BT, uniform(key_BT, 1), 2.0)
    chosen_BT = chance_BT < masking.rate
    lacking_B = ~chosen_BT.any(axis=1) & allowed_BT.any(axis=1)
    chosen_BT[lacking_B, chance_BT[lacking_B].argmin(axis=1)] = True
    fate_BT = uniform(key_BT, 2)
    random_BT = np.minimum((uniform(key_BT, 3) * masking.vocab_size).astype(np.int64), masking.vocab_size - 1)
    replaced_BT = np.where(fate_BT < MASKED, masking.mask_id, np.where(fate_BT < RANDOM, random_BT, input_ids_BT))
    return np.where(chosen_BT, replaced_BT, input_ids_BT), np.where(chosen_BT, input_ids_BT, IGNORE)


def _texts(input_ids_BT: np.ndarray, attention_BT: np.ndarray | None) -> np.ndarray:
    """A number for the real tokens of every row."""
    length_B = np.full(len(input_ids_BT), input_ids_BT.shape[1]) if attention_BT is None else attention_BT.sum(1)
    return np.array([seed_of(ids[:n].tolist()) for ids, n in zip(input_ids_BT, length_B)], dtype=np.uint64)


def uniform(key: np.ndarray, stream: int) -> np.ndarray:
    """Numbers in [0, 1), one per 64-bit key; different streams are independent."""
    with np.errstate(over="ignore"):
        mixed = _mix(key + GOLDEN * np.uint64(stream))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _keys(index_B: np.ndarray, width: int, seed: int, epoch: int) -> np.ndarray:
    root = np.uint64(seed_of(seed, "mask", epoch))
    with np.errstate(over="ignore"):
        row_B = _mix(root + GOLDEN * (index_B.astype(np.uint64) + np.uint64(1)))
        return _mix(row_B[:, None] + GOLDEN * np.arange(1, width + 1, dtype=np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of 64-bit words whose every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

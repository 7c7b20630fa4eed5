"""What passes need in memory, and how large their batches may be under --max-memory.

Figures follow from the model, the rows and the settings alone, never from what is free just now: batches, and so the
last bits of sums, are the same wherever and whenever a run is carried on.
Shapes: O out, I in (with the bias's 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from budwood.errors import ConfigError
from budwood.methods.influence.workshop import TOKENS, Shop, memory_budget

BASE = 450_000_000  # Python, torch and the tokenizer
WIDE = 8  # bytes of the numbers in which sums are added up
SOLVER = 6  # matrices of its size that an eigensolver has at once: two copies, its result and three to work in


@dataclass(frozen=True)
class Need:
    """Bytes of a pass: what it holds throughout, per token of a batch, and per row whose whole gradient is made."""

    held: int
    token: int
    row: int = 0


@dataclass(frozen=True)
class Sizes:
    """Numbers in a shop's factors: both covariances, weights, the largest matrix of weights, the largest covariance."""

    sides: int
    weights: int
    largest: int
    widest: int


def sizes(shop: Shop) -> Sizes:
    """The sizes of a shop."""
    turned = [m for m in shop.maps if not m.diagonal]
    return Sizes(
        sum(m.out**2 + (m.columns**2 if m.source == m.name else 0) for m in turned),
        sum(m.out * m.columns for m in shop.maps),
        max(m.out * m.columns for m in shop.maps),
        max((max(m.out, m.columns) ** 2 for m in turned), default=0),
    )


def of_fit(shop: Shop) -> Need:
    """`fit`: sums of a shard, then sums of all shards and the one that is added; eigenbases during second moments."""
    n, size, asked = sizes(shop), shop.like.element_size(), set(shop.cfg.strategy)
    kinds = len(asked & {"ekfac", "diagonal"})
    solving = 2 * size * n.sides + SOLVER * WIDE * n.widest  # covariances and eigenbases, and what one solution takes
    phases = [
        solving * bool(asked & {"kfac", "ekfac"}),
        (WIDE + size + size * ("kfac" in asked)) * n.sides * bool(asked & {"kfac", "ekfac"}),
        size * (n.sides * ("ekfac" in asked) + n.weights * kinds),
        (2 * WIDE + size) * n.weights * kinds,
    ]
    return Need(_standing(shop) + max(phases), _token(shop))


def of_self(shop: Shop, settings: int, sides: int, tile: int) -> Need:
    """`self`: eigenbases, weights of every setting, tiles of gradients; activations of one or two sides.

    Where texts were cut, whole gradients of one as well, turned and not.
    """
    n, size = sizes(shop), shop.like.element_size()
    cut = len(set(shop.train.ids)) < len(shop.train)
    weights = (settings + 2 * sides * cut) * n.weights
    return Need(_standing(shop) + size * (n.sides + weights + 3 * tile), _token(shop) * sides)


def of_index(shop: Shop, kept: int, bits: int) -> Need:
    """`index`: eigenbases, weights and spreads, one shard of stored coordinates; whole gradients of some rows."""
    n, size = sizes(shop), shop.like.element_size()
    choosing = 4 * 4 * n.weights + 5 * WIDE * n.weights  # spreads of queries and rows, energies of all, their order
    storing = kept * (shop.cfg.shard_rows * (2 if bits == 16 else 1) + 3 * WIDE)
    held = size * (n.sides + n.weights) + max(choosing, storing)
    return Need(_standing(shop) + held, _token(shop), 3 * size * n.largest + 3 * 4 * kept)


def whole_products(shop: Shop) -> int:
    """16-bit numbers of all outer products of a row of common length."""
    tokens = math.ceil(float(shop.train.lengths_N.mean()))
    return sum(min(tokens, m.out, m.columns) * (m.out + m.columns) for m in shop.maps)


def of_products(shop: Shop, kept: int, queries: int) -> Need:
    """`index` of products: eigenbases, weights, one shard of products or all of the calibration queries, tiles of query
    gradients; per row its gradient and what is kept, per token the products of all maps.
    """
    n, size = sizes(shop), shop.like.element_size()
    stored = max(kept * shop.cfg.shard_rows, queries * whole_products(shop))
    held = size * (n.sides + 2 * n.weights) + 2 * 2 * stored + 4 * size * (1 << 24)
    token = _token(shop) + 4 * 4 * sum(m.out + m.columns for m in shop.maps)
    return Need(_standing(shop) + held, token, 3 * size * n.largest + 4 * kept + WIDE * queries * len(shop.maps))


def _standing(shop: Shop) -> int:
    """The program and its model, which is there twice while it is loaded."""
    return BASE + 2 * shop.like.element_size() * sum(p.numel() for p in shop.model.parameters())


def _token(shop: Shop) -> int:
    """Activations and their gradients per token: sides of linear maps, attention over the longest row, words."""
    config = getattr(shop.model, "config", None)
    get = lambda name: int(getattr(config, name, 0) or 0)  # noqa: E731
    linear = 5 * sum(m.out + m.into for m in shop.maps) // 4
    attention = get("num_hidden_layers") * get("num_attention_heads") * int(shop.train.lengths_N.max())
    spoken = {"clm": 1.0, "mlm": shop.cfg.mlm_probability}.get(shop.read.mode, 0.0)
    return shop.like.element_size() * (linear + attention + int(4 * spoken * get("vocab_size")))


def least(shop: Shop, need: Need) -> int:
    """Bytes of a batch of the longest row alone."""
    return need.held + need.row + need.token * int(shop.train.lengths_N.max())


def check(shop: Shop, *needs: Need) -> None:
    """Refuse a --max-memory that is too little for any of the passes of a run, before the first; the most is named."""
    tokens_within(shop, max(needs, key=lambda need: least(shop, need)))


def tokens_within(shop: Shop, need: Need) -> int:
    """Padded tokens per batch: the usual, or as many as --max-memory leaves room for; too little is refused."""
    if shop.cfg.max_memory is None:
        return TOKENS
    longest = int(shop.train.lengths_N.max())
    budget = memory_budget(shop.cfg.max_memory)
    if budget < least(shop, need):
        raise ConfigError(
            f"--max-memory {shop.cfg.max_memory} is too little for a batch of one row of {longest} tokens: it takes at "
            f"least {math.ceil(least(shop, need) / 1e6):,} MB. Give more memory, fewer --modules or a smaller "
            "--max-length."
        )
    return max(longest, min(TOKENS, (budget - need.held - need.row) // need.token))


def rows_within(shop: Shop, need: Need, most: int) -> int:
    """Rows per batch whose whole gradients are made: at most `most`, fewer where --max-memory asks for it."""
    if shop.cfg.max_memory is None:
        return most
    tokens_within(shop, need)
    longest = int(shop.train.lengths_N.max())
    left = memory_budget(shop.cfg.max_memory) - need.held
    return max(1, min(most, left // (need.row + need.token * longest)))

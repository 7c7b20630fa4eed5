"""First weights of tiny-bert: its heads start out near where trained ones end up.

From small random weights a masked model this small needs tens of thousands of updates before a head finds neighbours or
equal words; started as below it copies from context after one thousand. Only the start is arranged: all of it trains.

Shapes: N positions, W width of the model, D width of a head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

AMPLITUDE = 0.085  # of positions: as strong as the words beside them
SHARPNESS = 1.5  # of heads that look at a neighbour
COPY = 0.49  # share of what a head sees that it hands on unchanged
FASTEST, SLOWEST = 2.0, 0.05  # radians per position


def arrange(model: Any) -> None:
    """Waves for positions; in the first block a head that looks one back, one that looks ahead and one that looks at
    equal words; above it only heads that look at their like and hand it on.
    """
    import torch

    blocks = model.bert.encoder.layer
    width = model.config.hidden_size // model.config.num_attention_heads
    speed = torch.exp(torch.linspace(math.log(FASTEST), math.log(SLOWEST), width // 2))
    with torch.no_grad():
        _arrange_embeddings(model.bert.embeddings, speed)
        _arrange_first(blocks[0].attention, speed)
        for block in blocks[1:]:
            _arrange_copying(block.attention)
        transform_WW = model.cls.predictions.transform.dense.weight
        transform_WW.mul_(0.5).add_(torch.eye(len(transform_WW)))  # what was copied shall reach the vocabulary


def waves(count: int, speed: Tensor) -> Tensor:
    """Sine and cosine of every position at every speed, side by side.

    >>> import torch
    >>> waves(2, torch.tensor([math.pi / 2])).round().tolist()
    [[0.0, 1.0], [1.0, -0.0]]
    """
    import torch

    phase = torch.arange(count)[:, None] * speed
    return torch.stack([phase.sin(), phase.cos()], dim=-1).reshape(count, -1)


def turn(speed: Tensor, places: int) -> Tensor:
    """The matrix that takes the waves of a position to those of the position `places` further.

    >>> import torch
    >>> speed = torch.tensor([1.0, 0.3])
    >>> bool(torch.allclose(waves(5, speed)[:4] @ turn(speed, 1).T, waves(5, speed)[1:], atol=1e-6))
    True
    """
    import torch

    angle = speed * places
    return torch.block_diag(*(torch.tensor([[c, s], [-s, c]]) for c, s in zip(angle.cos(), angle.sin(), strict=True)))


def _arrange_embeddings(embeddings: Any, speed: Tensor) -> None:
    """The first dimensions tell the place, the others the word."""
    place_NW = embeddings.position_embeddings.weight
    places = 2 * len(speed)
    place_NW.zero_()
    place_NW[:, :places] = AMPLITUDE * waves(len(place_NW), speed)
    embeddings.word_embeddings.weight[:, :places] *= 0.2


def _arrange_first(attention: Any, speed: Tensor) -> None:
    import torch

    width = 2 * len(speed)
    query_WW, key_WW = attention.self.query.weight, attention.self.key.weight
    for head, places in enumerate((-1, 1)):
        rows = slice(head * width, (head + 1) * width)
        query_WW[rows] = 0.0
        key_WW[rows] = 0.0
        query_WW[rows, :width] = SHARPNESS * turn(speed, places)
        key_WW[rows, :width] = SHARPNESS * torch.eye(width)
    like = slice(2 * width, 3 * width)
    key_WW[like] = query_WW[like]
    attention.output.dense.weight.mul_(2.0)


def _arrange_copying(attention: Any) -> None:
    import torch

    attention.self.key.weight.copy_(attention.self.query.weight)
    value_WW = attention.self.value.weight
    torch.nn.init.orthogonal_(value_WW)
    value_WW.mul_(math.sqrt(COPY))
    attention.output.dense.weight.copy_(value_WW.T)

"""Training and evaluation mode of a model, changed only inside `with`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The whole model in one mode inside the block; every module's own mode comes back at the end.

    >>> layer = nn.Dropout()
    >>> with in_mode(layer, training=False):
    ...     print(layer.training)
    False
    >>> layer.training
    True
    """
    modes = [(m, m.training) for m in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode

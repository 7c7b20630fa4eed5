"""A run that is stopped half way: the same interruption for every verb that must end alike when run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest


@contextmanager
def interrupted(room: Any, name: str, call: int) -> Iterator[None]:
    """What runs inside is stopped as it calls ``room.name`` for the given time; afterwards the function is itself."""
    real, calls = getattr(room, name), []

    def dies(*given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*given, **more)

    with mock.patch.object(room, name, dies), pytest.raises(KeyboardInterrupt):
        yield

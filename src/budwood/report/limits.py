"""How much of a run goes into a page."""

from __future__ import annotations

from dataclasses import dataclass

PAGE_BYTES = 10 << 20


@dataclass(frozen=True)
class Limits:
    """What is shown at most of each thing."""

    each: int = 20  # helpful, and as many harmful, rows per query
    queries: int = 1000
    strategies: int = 4
    detail: int = 5  # rows per side with shares by token and by layer
    records: int = 20
    points: int = 3000
    suspects: int = 40
    longest: int = 1200  # characters of a text


# tried in order until a page fits
STEPS = (
    Limits(),
    Limits(detail=0),
    Limits(detail=0, strategies=1, points=1000),
    Limits(detail=0, strategies=1, each=10, points=500, longest=600),
    Limits(detail=0, strategies=1, each=10, queries=300, points=300, records=10, longest=400),
    Limits(detail=0, strategies=1, each=5, queries=50, points=100, records=5, suspects=20, longest=200),
    Limits(each=0, queries=0, strategies=0, detail=0, records=0, points=50, suspects=0, longest=100),
)

"""The figure of a trade-off: labels that can be read however close the marks are."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

from budwood.figures.front import pareto
from budwood.figures.save import drawing, save


def group(retain: str, strength: float | None, new: float, kept: float) -> dict[str, Any]:
    ends = {f"{k}_error{end}": v for k, v in (("new", new), ("kept", kept)) for end in ("", "_low", "_high")}
    return {"retain": retain, "strength": strength, **ends, "front": kept < 1.3}


CROWD = [
    group("none", None, 0.50, 2.0),
    *(group("ewc", 10.0**-i, 0.52 + 0.002 * i, 1.20 + 0.001 * i) for i in range(5)),
    *(group("l2", 10.0**-i, 0.52 + 0.003 * i, 1.20 - 0.001 * i) for i in range(5)),
    *(group("recadam", 10.0**-i, 0.52, 1.20) for i in range(3)),
    group("replay", None, 0.53, 1.21),
]


@pytest.mark.parametrize("base", [1.19, 0.2])  # the second far enough below for everything to crowd at the top
def test_no_label_covers_another(tmp_path: Path, base: float) -> None:
    with drawing(7.4, 4.4) as axes:
        table = pareto(axes, CROWD, base, (0.9, 2.0), ("title", "new", "kept"))
        save(axes.figure, tmp_path / "front", table)
        axes.figure.draw_without_rendering()
        shown = [t for t in axes.texts if t.get_text()]
        texts = [Text.get_window_extent(t) for t in shown]  # without the line to the mark
        frame = axes.get_window_extent()
    assert sorted(t.get_text() for t in shown) == sorted(f"{g['strength']:g}" for g in CROWD if g["strength"])
    assert not [1 for a, b in combinations(texts, 2) if a.overlaps(b)]
    assert all(frame.x0 <= b.x0 and b.x1 <= frame.x1 and frame.y0 <= b.y0 for b in texts)

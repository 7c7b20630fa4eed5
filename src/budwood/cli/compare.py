"""`budwood compare`: two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from budwood.cli.show import grid
from budwood.store.index import find_run, read_listed


def register(app: App) -> None:
    """Add the verb."""

    @app.command
    def compare(
        a: str,
        b: str,
        *,
        directory: Path = Path("runs"),
        json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
    ) -> int:
        """Settings and metrics in which two runs differ.

        Parameters
        ----------
        a
            A run: its directory, or the start of its name.
        b
            The other run.
        directory
            Where the runs are.
        json_output
            One JSON object on stdout.
        """
        first, second = (read_listed(find_run(r, directory)) for r in (a, b))
        settings = rows_of(first.manifest.get("settings", {}), second.manifest.get("settings", {}), "setting")
        metrics = rows_of(first.metrics, second.metrics, "metric")
        if json_output:
            print(json.dumps({"a": str(first.path), "b": str(second.path), "settings": settings, "metrics": metrics}))
            return 0
        print(f"a  {first.path}\nb  {second.path}\n")
        print(grid(settings, ["setting", "a", "b"]) if settings else "same settings")
        print("\n" + grid(metrics, ["metric", "a", "b", "b - a"]) if metrics else "\nsame metrics")
        return 0


def rows_of(a: dict[str, Any], b: dict[str, Any], title: str) -> list[dict[str, Any]]:
    """One row per key that differs, with the difference where both are numbers.

    >>> rows_of({"x": 1.0, "y": 2}, {"x": 1.5, "y": 2}, "metric")
    [{'metric': 'x', 'a': 1.0, 'b': 1.5, 'b - a': 0.5}]
    """
    rows = []
    for key in {**a, **b}:
        va, vb = a.get(key), b.get(key)
        if va == vb:
            continue
        plain = [
            v if isinstance(v, int | float) and not isinstance(v, bool) else None if v is None else str(v)
            for v in (va, vb)
        ]
        numbers = all(isinstance(v, int | float) for v in plain)
        rows.append({title: key, "a": plain[0], "b": plain[1], "b - a": plain[1] - plain[0] if numbers else None})  # type: ignore[operator]
    return rows

"""`budwood doctor`: is this model safe to measure?"""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import App, Parameter

from budwood.cli.show import grid


def register(app: App) -> None:
    """Add the verb."""

    @app.command
    def doctor(
        model: str = "tiny-bert", *, json_output: Annotated[bool, Parameter(name="--json", negative="")] = False
    ) -> int:
        """Check a model: same output twice, padding and batch size without effect, no NaN, every parameter reached.

        Parameters
        ----------
        model
            The model to check.
        json_output
            JSON on stdout.
        """
        from budwood.methods.doctor import examine

        rows = examine(model)
        print(json.dumps(rows) if json_output else grid(rows, ["check", "result", "figure", "meaning"]))
        return 0 if all(r["result"] == "ok" for r in rows) else 2

"""`budwood demo`: the whole story on the shipped models."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App


def register(app: App) -> None:
    """Add the verb."""

    @app.command
    def demo(*, out: Path = Path("runs/demo")) -> int:
        """Teach the shipped models a skill and look at it, without network, in minutes; ends with a report to open.

        Parameters
        ----------
        out
            Where the demo's runs and its report go.
        """
        from budwood.studies.demo import run_demo

        print(run_demo(out))
        return 0

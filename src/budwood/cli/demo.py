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
        from budwood.report.page import rooms_of, write_report
        from budwood.report.tables import Story
        from budwood.studies.demo import TITLE, run_demo, told

        script, rows = run_demo(out)
        story = Story(TITLE, script.about, tuple((r["step"], r["says"], Path(r["run"])) for r in rows))
        report = write_report(rooms_of([Path(r["run"]) for r in rows]), out / "report.html", story)
        print(told(script, rows))
        print(f"\nfigure  {out / 'full' / 'figures' / 'loss.png'}\nreport  {report.resolve()}")
        return 0

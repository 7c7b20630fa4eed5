"""`budwood report`: runs as one page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter


def register(app: App) -> None:
    """Add the verb."""

    @app.command
    def report(
        *runs: str,
        out: Annotated[Path, Parameter(name=("--out", "-o"))] = Path("report.html"),
        directory: Path = Path("runs"),
        json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
    ) -> int:
        """Write one self-contained HTML page of runs: it opens from a file, asks no network, and can be passed on.

        Parameters
        ----------
        runs
            Runs: directories, names or the start of a name; or a folder that holds some. Default: all of them.
        out
            The page to write.
        directory
            Where runs given by name are.
        json_output
            One JSON object on stdout.
        """
        from budwood.report.page import rooms_of, write_report
        from budwood.store.index import find_run

        given = [Path(r) if Path(r).is_dir() else find_run(r, directory) for r in runs] or [directory]
        rooms = rooms_of(given)
        path = write_report(rooms, out)
        place, size = str(path.resolve()), path.stat().st_size
        print(json.dumps({"report": place, "bytes": size}) if json_output else f"{place} ({size / 1e6:.2f} MB)")
        for room in (r for r in rooms if r.status == "broken"):
            print(f"  {room.path.name} is broken: {'; '.join(room.problems)}", file=sys.stderr)
        return 0

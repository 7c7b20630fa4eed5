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

        given = [_place(r, directory) for r in runs] or [directory]
        rooms = rooms_of(given)
        new = not out.parent.exists()
        path = write_report(rooms, out)
        if new:
            print(f"  made the folder {out.parent}", file=sys.stderr)
        place, size = str(path.resolve()), path.stat().st_size
        print(json.dumps({"report": place, "bytes": size}) if json_output else f"{place} ({size / 1e6:.2f} MB)")
        for room in (r for r in rooms if r.status == "broken"):
            print(f"  {room.path.name} is broken: {'; '.join(room.problems)}", file=sys.stderr)
        return 0


def _place(given: str, directory: Path) -> Path:
    """A run, or a folder of runs: by path, or by its name in `directory`."""
    from budwood.errors import StoreError, nearest
    from budwood.store.index import directories, find_run

    path = Path(given)
    if path.is_dir():
        return path
    if path.parent != Path() and path.parent.is_dir():  # a path, not a name: look beside it
        beside = [p.name for p in directories(path.parent)]
        held = f"'{path.parent}' holds {', '.join(beside[:6])}{' …' if beside[6:] else ''}." if beside else ""
        raise StoreError(f"There is no run '{given}'.{nearest(path.name, beside)} {held}".rstrip())
    if not directory.is_dir():
        raise StoreError(f"There is no run '{given}', and no directory '{directory}' to look for it in.")
    return find_run(given, directory)

"""`budwood tasks` and `budwood models`: what is at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from budwood.cli.show import grid

Json = Annotated[bool, Parameter(name="--json", negative="")]


def register(app: App) -> None:
    """Add both verbs."""

    @app.command
    def tasks(name: str | None = None, *, data_dir: tuple[Path, ...] = (), json_output: Json = False) -> int:
        """List tasks and whether their files are here; with a NAME show three of its rows.

        Parameters
        ----------
        name
            A task to show.
        data_dir
            Folders with public data sets.
        json_output
            JSON on stdout.
        """
        from budwood.data.catalogue import describe, known_tasks

        folders = tuple(Path(p) for entry in data_dir for p in str(entry).split(","))
        if name is not None:
            shown = describe(name, folders)
            print(json.dumps(shown) if json_output else "\n".join(f"{k}: {v}" for k, v in shown.items()))
            return 0
        rows = known_tasks(folders)
        print(json.dumps(rows) if json_output else grid(rows, ["task", "kind", "labels", "metric", "where"]))
        return 0

    @app.command
    def models(*, directory: Path = Path("runs"), json_output: Json = False) -> int:
        """List models that need no network: shipped ones, fine-tuned runs, the hub cache.

        Parameters
        ----------
        directory
            Where the runs are.
        json_output
            JSON on stdout.
        """
        from budwood.models.catalogue import known_models

        rows = known_models(directory)
        print(json.dumps(rows) if json_output else grid(rows, ["model", "type", "size", "where"]))
        return 0

"""`budwood recipe`: a list of verbs as one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from budwood.cli.show import grid


def register(app: App) -> None:
    """Add the verb."""

    @app.command
    def recipe(
        name: str,
        *,
        small: Annotated[bool, Parameter(negative="")] = False,
        data_dir: Path | None = None,
        model: str | None = None,
        out: Path | None = None,
        overwrite: Annotated[bool, Parameter(negative="")] = False,
        dry_run: Annotated[bool, Parameter(negative="")] = False,
        json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
    ) -> int:
        """Run a YAML list of verbs; every step is a run of its own, and the whole can be stopped and carried on.

        Parameters
        ----------
        name
            A shipped recipe's name or a YAML file.
        small
            The small size: shipped models and data, minutes.
        data_dir
            Folder with public data sets, handed to every step.
        model
            Replaces the recipe's model.
        out
            Where the runs go; default runs/recipe-NAME.
        overwrite
            Replace runs of steps whose settings have changed.
        dry_run
            Print the commands only.
        json_output
            One JSON object on stdout.
        """
        from budwood.studies.recipe import Wishes, commands, read_recipe, run_recipe

        wishes = Wishes(small=small, data_dir=data_dir, model=model, out=out, overwrite=overwrite)
        script = read_recipe(name, wishes)
        if dry_run:
            lines = commands(script)
            print(json.dumps(lines)) if json_output else print("\n".join(lines))
            return 0
        rows = run_recipe(script)
        print(json.dumps({"recipe": script.name, "steps": rows})) if json_output else print(
            grid(rows, ["step", "verb", "model", "task", "metric", "score", "seconds", "run"])
        )
        return 0

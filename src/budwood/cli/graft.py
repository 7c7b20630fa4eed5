"""`budwood graft`: learn, show, overlap, stitch, subtract."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from budwood.cli.show import grid, serve, table
from budwood.config.graft import (
    GraftLearnConfig,
    GraftOverlapConfig,
    GraftStitchConfig,
    GraftStudyConfig,
    GraftSubtractConfig,
)

# what can be left out altogether has a default
OVERLAP, STITCH, STUDY = GraftOverlapConfig(), GraftStitchConfig(), GraftStudyConfig()


def register(app: App) -> None:
    """Add the verbs."""
    graft = App(name="graft", help="Cut a fine-tuned skill out as a small file, look at it, and put it back.")
    app.command(graft)

    _one(graft)
    _several(graft)
    _studies(graft)


def _one(graft: App) -> None:
    @graft.command
    def learn(base: str, tuned: str, *, settings: Annotated[GraftLearnConfig, Parameter(name="*")]) -> int:
        """The few weights that carry a skill, as NAME.graft; `BASE+NAME.graft` is then a model for every verb.

        Parameters
        ----------
        base
            The model before fine-tuning.
        tuned
            The same model after it: a run or a directory.
        """
        return serve("graft learn", settings, [base, tuned])

    @graft.command
    def show(
        graft: str,
        *,
        out: Path | None = None,
        json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
    ) -> int:
        """Where a graft lies and where it came from.

        Parameters
        ----------
        graft
            A NAME.graft file, or a run of `graft learn`.
        out
            Also write the map as OUT/map.svg, .png and .csv.
        json_output
            One JSON object on stdout.
        """
        from budwood.methods.graft.compare import draw_map
        from budwood.methods.graft.compare import show as look

        found = look(graft)
        if out is not None:
            draw_map(found, out / "map")
        if json_output:
            print(json.dumps(found))
            return 0
        print(table({k: v for k, v in found.items() if isinstance(v, str | int | float)}))
        print()
        print(grid(found["map"], ["layer", "module", "weights", "share", "of", "density"]))
        return 0


def _several(graft: App) -> None:
    @graft.command
    def overlap(*grafts: str, settings: Annotated[GraftOverlapConfig, Parameter(name="*")] = OVERLAP) -> int:
        """Do skills share weights: overlap, Jaccard and ratio to chance of every two; with --base, gains.

        Parameters
        ----------
        grafts
            Two or more NAME.graft files, or runs of `graft learn`.
        """
        return serve("graft overlap", settings, list(grafts))

    @graft.command
    def stitch(base: str, *grafts: str, settings: Annotated[GraftStitchConfig, Parameter(name="*")] = STITCH) -> int:
        """Several grafts on one base, written as a Hugging Face directory; what each task keeps of its gain.

        Parameters
        ----------
        base
            The model they were cut for.
        grafts
            NAME.graft files, or runs of `graft learn`.
        """
        return serve("graft stitch", settings, [base, *grafts])

    @graft.command
    def subtract(
        base: str, tuned: str, graft: str, *, settings: Annotated[GraftSubtractConfig, Parameter(name="*")]
    ) -> int:
        """The complement: the tuned model with the graft's weights put back, written as a Hugging Face directory.

        Parameters
        ----------
        base
            The model before fine-tuning.
        tuned
            The same model after it.
        graft
            The skill to take out.
        """
        return serve("graft subtract", settings, [base, tuned, graft])


def _studies(graft: App) -> None:
    @graft.command
    def localise(model: str, *, settings: Annotated[GraftStudyConfig, Parameter(name="*")] = STUDY) -> int:
        """SGD, AdamW and AdamW+L1 on each task: how few weights hold the skill; BitFit and retraining as controls.

        Parameters
        ----------
        model
            The base of everything.
        """
        return serve("graft localise", settings, [model])

    @graft.command
    def multitask(model: str, *, settings: Annotated[GraftStudyConfig, Parameter(name="*")] = STUDY) -> int:
        """One model tuned on all tasks at once, and a graft of it for each task.

        Parameters
        ----------
        model
            The base.
        """
        return serve("graft multitask", settings, [model])

    @graft.command
    def continual(model: str, *, settings: Annotated[GraftStudyConfig, Parameter(name="*")] = STUDY) -> int:
        """One task after another: what sequential fine-tuning forgets, and grafts do not.

        Parameters
        ----------
        model
            The base.
        """
        return serve("graft continual", settings, [model])

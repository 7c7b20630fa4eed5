"""`budwood graft`: learn, show, overlap, stitch, subtract, and the studies made of them."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from budwood.cli.show import serve
from budwood.config.graft import GraftLearnConfig


def register(app: App) -> None:
    """Add the verbs."""
    graft = App(name="graft", help="Cut a fine-tuned skill out as a small file, look at it, and put it back.")
    app.command(graft)

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

"""`budwood fisher`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from budwood.cli.show import serve
from budwood.config.fisher import FisherConfig


def register(app: App) -> None:
    """Add the verb."""

    @app.command
    def fisher(model: str, *, settings: Annotated[FisherConfig, Parameter(name="*")]) -> int:
        """How much each weight matters to what a model says on a task: diagonal Fisher information.

        Parameters
        ----------
        model
            A fine-tuned run or checkpoint; with --mode prompt, causal, mlm or clm any language model.
        """
        return serve("fisher", settings, [model])

"""`budwood linear`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from budwood.cli.show import serve
from budwood.config.linear import LinearConfig


def register(app: App) -> None:
    """Add the verb."""

    @app.command
    def linear(model: str, *, settings: Annotated[LinearConfig, Parameter(name="*")]) -> int:
        """How much of a task is in the frozen features: logistic regression on what a model says next.

        Parameters
        ----------
        model
            A language model, causal or masked; of an encoder without its head only the features `f`.
        """
        return serve("linear", settings, [model])

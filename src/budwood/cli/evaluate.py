"""`budwood evaluate`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from budwood.cli.show import serve
from budwood.config.finetune import EvaluateConfig


def register(app: App) -> None:
    """Add the verb."""

    @app.command
    def evaluate(model: str, *, settings: Annotated[EvaluateConfig, Parameter(name="*")]) -> int:
        """Score a model on a task as it is: metrics, calibration, one record per example.

        Parameters
        ----------
        model
            A fine-tuned run or checkpoint; with --mode prompt, causal, mlm or clm any language model.
        """
        return serve("evaluate", settings, [model])

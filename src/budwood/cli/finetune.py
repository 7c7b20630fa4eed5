"""`budwood finetune`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from budwood.cli.show import serve
from budwood.config.finetune import FinetuneConfig


def register(app: App) -> None:
    """Add the verb."""

    @app.command
    def finetune(model: str, *, settings: Annotated[FinetuneConfig, Parameter(name="*")]) -> int:
        """Teach a model a task, and score it.

        Parameters
        ----------
        model
            tiny-bert, tiny-gpt, a model directory, a hub name, or a run.
        """
        return serve("finetune", settings, [model])

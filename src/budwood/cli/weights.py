"""`budwood weights compare`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import App, Parameter

from budwood.cli.show import grid, serve
from budwood.config.compare import WeightsCompareConfig

COMPARE = WeightsCompareConfig()


def register(app: App) -> None:
    """Add the verb."""
    weights = App(name="weights", help="Weights of models side by side.")

    @weights.command
    def compare(
        base: str, *models: str, settings: Annotated[WeightsCompareConfig, Parameter(name="*")] = COMPARE
    ) -> int:
        """How far models have moved from their base: distance and cosine by layer, a map of weight rows.

        Parameters
        ----------
        base
            The model they were made from.
        models
            One or more models or runs of the same architecture.
        """
        return serve("weights compare", settings, [base, *models], told)

    app.command(weights)


def told(metrics: Mapping[str, Any], cost: Mapping[str, Any]) -> str:
    """Distance and cosine by layer as a table."""
    head = f"weights compare {' '.join(metrics['models'])}: distance from the base over its size, and cosine"
    return f"{head}\n\n{grid(metrics['movement'], ['model', 'layer', 'moved', 'cosine'])}"

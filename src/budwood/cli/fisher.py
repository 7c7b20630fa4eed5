"""`budwood fisher` and `budwood fisher compare`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from budwood.cli.show import grid, serve
from budwood.config.compare import FisherCompareConfig
from budwood.config.fisher import FisherConfig

COMPARE = FisherCompareConfig()


def register(app: App) -> None:
    """Add the verb."""
    verb = App(name="fisher")

    @verb.default
    def fisher(model: str, *, settings: Annotated[FisherConfig, Parameter(name="*")]) -> int:
        """How much each weight matters to what a model says on a task: diagonal Fisher information.

        Parameters
        ----------
        model
            A fine-tuned run or checkpoint; with --mode prompt, causal, mlm or clm any language model.
        """
        return serve("fisher", settings, [model])

    @verb.command
    def compare(*fishers: Path, settings: Annotated[FisherCompareConfig, Parameter(name="*")] = COMPARE) -> int:
        """Do the weights that matter most to one skill matter to others? Overlap by block, mass by layer.

        Parameters
        ----------
        fishers
            Two or more runs of `fisher` (or their files) on one architecture; the first one's heaviest weights are
            looked up in the others.
        """
        return serve("fisher compare", settings.model_copy(update={"fishers": fishers}), [], told)

    app.command(verb)


def told(metrics: Mapping[str, Any], cost: Mapping[str, Any]) -> str:
    """Overlap by block and mass by layer as tables."""
    names = list(metrics["fishers"])
    layers = list(metrics["mass"][names[0]]["by_layer"])
    mass = [{"layer": x, **{n: metrics["mass"][n]["by_layer"][x] for n in names}} for x in layers]
    modules = sorted({m for n in names for m in metrics["mass"][n]["by_module"]})
    kinds = [{"module": x, **{n: metrics["mass"][n]["by_module"].get(x, 0.0) for n in names}} for x in modules]
    columns = ["layer", "in", "overlap", "chance", "times_chance", "mean_at_top", "mean_elsewhere", "ratio"]
    head = f"fisher compare: the {metrics['top']} heaviest attention weights of {names[0]} in each block"
    return "\n".join(
        [head, "", grid(metrics["overlap"], columns), "", "share of the mass", grid(mass, ["layer", *names])]
        + ["", grid(kinds, ["module", *names])]
    )

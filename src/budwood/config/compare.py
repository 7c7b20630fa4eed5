"""Settings of `fisher compare` and `weights compare`: they read artefacts and models, no rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from pydantic import Field

from budwood.config.run import RunConfig

COMPARING = Group("Comparing", sort_key=1)


class LayersConfig(RunConfig):
    """What both comparisons look at."""

    layers: Annotated[tuple[int, ...], Parameter(group=COMPARING, negative="")] = Field(
        (), description="Blocks drawn in detail, counted from 0, as in 0,3; default: the first and the last."
    )


class FisherCompareConfig(LayersConfig):
    """Everything `fisher compare` can be told."""

    fishers: Annotated[tuple[Path, ...], Parameter(show=False, negative="")] = Field(
        (), description="Runs of `fisher` or their files; the first one's heaviest weights are looked up in the others."
    )
    top: Annotated[int, Parameter(group=COMPARING)] = Field(
        800, ge=1, description="How many of the heaviest attention weights of a block are looked up."
    )


class WeightsCompareConfig(LayersConfig):
    """Everything `weights compare` can be told."""

    points: Annotated[int, Parameter(group=COMPARING)] = Field(
        300, ge=2, description="Most weight rows of a block drawn per model, a seeded sample, the same in every model."
    )
    perplexity: Annotated[float, Parameter(group=COMPARING)] = Field(
        30.0, gt=0, description="Of t-SNE: about how many neighbours a row has. The published figure used 1."
    )

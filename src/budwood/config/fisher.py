"""Settings of `fisher`."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Group, Parameter
from pydantic import Field

from budwood.config.data import DataConfig
from budwood.config.finetune import ReadConfig
from budwood.config.run import JobsConfig, RunConfig

FISHER = Group("Fisher", sort_key=3)
FisherKind = Literal["exact", "sampled", "empirical", "batched", "mas", "adam"]


class FisherConfig(ReadConfig, DataConfig, JobsConfig, RunConfig):
    """Everything `fisher` can be told."""

    kind: Annotated[FisherKind | None, Parameter(group=FISHER)] = Field(
        None,
        description="Whose gradient is squared. exact: every label's, weighted by its probability; sampled: that of "
        "one label drawn from the model per row; empirical: the true label's; batched: the mean over --batch-rows "
        "rows; mas: no labels, mean |gradient of the squared output|; "
        "adam: the second moments that a run of finetune --save-second-moments ended with. "
        "Default: exact up to 8 labels, else sampled.",
    )
    on: Annotated[str, Parameter(group=FISHER)] = Field("train", description="Split whose rows are used.")
    batch_rows: Annotated[int, Parameter(group=FISHER)] = Field(
        32, ge=1, description="Rows of a batch for --kind batched; the others do not depend on it."
    )
    shard_rows: Annotated[int, Parameter(group=FISHER)] = Field(
        512, ge=1, description="Rows per file of partial sums: what is lost when a run is killed."
    )

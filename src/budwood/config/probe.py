"""Settings of `probe`, and of reading features."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Group, Parameter
from pydantic import Field, model_validator

from budwood.config.data import DataConfig
from budwood.config.finetune import ReadConfig
from budwood.config.run import JobsConfig, RunConfig

PROBE = Group("Probe", sort_key=3)


class FeatureConfig(ReadConfig, DataConfig, RunConfig):
    """What the feature store has to know of any verb's settings."""


class ProbeConfig(ReadConfig, DataConfig, JobsConfig, RunConfig):
    """Everything `probe` can be told."""

    layers: Annotated[tuple[int, ...], Parameter(group=PROBE, negative="")] = Field(
        (), description="Layers to probe, 0 = embedding output; default: all."
    )
    states: Annotated[Literal["auto", "cls", "last", "mean", "mask"], Parameter(group=PROBE)] = Field(
        "auto", description="State of a row that a label probe reads; auto: cls for encoders, last for causal models."
    )
    costs: Annotated[tuple[float, ...], Parameter(name=("--costs", "--Cs"), group=PROBE, negative="")] = Field(
        (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0), description="Costs C among which cross-validation chooses."
    )
    folds: Annotated[int, Parameter(group=PROBE)] = Field(5, ge=2, description="Folds that choose C.")
    repeats: Annotated[int, Parameter(group=PROBE)] = Field(
        5, ge=1, description="Fits on resampled training documents, for the band around a line."
    )
    no_controls: Annotated[bool, Parameter(group=PROBE, negative="")] = Field(
        False, description="Leave away control task, description length, resampled fits and random encoder."
    )
    decode: Annotated[Literal["hf", "original"], Parameter(group=PROBE)] = Field(
        "hf", description="How spans become answers: transformers' rule or the original's."
    )
    erase: Annotated[bool, Parameter(group=PROBE, negative="")] = Field(
        False, description="Also probe after LEACE has erased the labels."
    )
    pvi: Annotated[bool, Parameter(group=PROBE, negative="")] = Field(
        False, description="Pointwise information of every row at the best layer, in bits."
    )
    compare: Annotated[bool, Parameter(group=PROBE, negative="")] = Field(
        False, description="Also a map of the difference between the second and the first model."
    )

    @model_validator(mode="after")
    def _in_use(self) -> ProbeConfig:
        if self.seeds:
            raise ValueError("--seeds would repeat the same converged probes; use --repeats N for their spread")
        return self

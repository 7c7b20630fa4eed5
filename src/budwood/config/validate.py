"""Settings of `validate lds`, `counterfactual`, `brittleness`, `recall` and `mislabel`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from pydantic import Field, field_validator, model_validator

from budwood.config.base import Config
from budwood.config.data import DataConfig
from budwood.config.finetune import FinetuneConfig
from budwood.config.influence import STRATEGIES
from budwood.config.run import JobsConfig, RunConfig, Switch

VALIDATION = Group("Validation", sort_key=3)


class ScoredConfig(Config):
    """Which score matrices are checked."""

    scores: Annotated[tuple[Path, ...], Parameter(group=VALIDATION, negative="")] = Field(
        (), description="Runs of `influence score`: every matrix in them is checked."
    )
    only: Annotated[tuple[str, ...], Parameter(group=VALIDATION, negative="")] = Field(
        (), description="Only matrices with these names, e.g. ekfac, ekfac@0.01; default: all that cover the model."
    )


class LdsConfig(ScoredConfig, DataConfig, JobsConfig, RunConfig):
    """Everything `validate lds` can be told."""

    truth: Annotated[Path | None, Parameter(group=VALIDATION)] = Field(
        None, description="Ground truth of an earlier run, or a folder with published masks and margins."
    )
    subsets: Annotated[int, Parameter(group=VALIDATION)] = Field(
        100, ge=2, description="Random subsets of the training rows."
    )
    repeats: Annotated[int, Parameter(group=VALIDATION)] = Field(
        5, ge=1, description="Retrains of each subset, with other seeds."
    )
    fraction: Annotated[float, Parameter(group=VALIDATION)] = Field(
        0.5, gt=0, lt=1, description="Share of the rows in a subset."
    )
    until_se: Annotated[float | None, Parameter(group=VALIDATION)] = Field(
        None, gt=0, description="Stop when the standard error of the first matrix's score is this small."
    )
    tune: Annotated[Switch, Parameter(group=VALIDATION)] = Field(
        False, description="Choose among all matrices by score, reported on subsets the choice did not see."
    )
    ensemble: Annotated[Switch, Parameter(group=VALIDATION)] = Field(
        False, description="Also the mean of equally named matrices of runs of different models."
    )
    queries: Annotated[int | None, Parameter(group=VALIDATION)] = Field(
        None, ge=1, description="First rows of the reported split to measure; default: the queries of the scores."
    )

    @model_validator(mode="after")
    def _in_use(self) -> LdsConfig:
        if self.until_se is not None and not self.scores:
            raise ValueError("--until-se watches a score, and no --scores are given")
        if self.tune and not self.scores:
            raise ValueError("--tune chooses among --scores, and none are given")
        if self.queries is not None and self.scores:
            raise ValueError("--queries has no effect beside --scores: their queries are measured")
        return self


class RemovalConfig(ScoredConfig, DataConfig, JobsConfig, RunConfig):
    """Everything `validate counterfactual` and `validate brittleness` can be told."""

    remove: Annotated[tuple[str, ...], Parameter(group=VALIDATION, negative="")] = Field(
        (), description="How many rows are removed: numbers, or shares such as 2%,5%,10%; default 20,40,60,80,100,120."
    )
    targets: Annotated[int, Parameter(group=VALIDATION)] = Field(
        100, ge=1, description="Most queries to flip; those right under all base seeds, in order."
    )
    base_seeds: Annotated[int, Parameter(group=VALIDATION)] = Field(
        5, ge=1, description="Models trained on all rows: a target is right under each."
    )
    repeats: Annotated[int, Parameter(group=VALIDATION)] = Field(
        3, ge=1, description="Retrains without the removed rows; flipped: wrong in more than half of them."
    )
    bisect: Annotated[Switch, Parameter(group=VALIDATION)] = Field(
        False, description="Search the smallest removal that flips by halving, not upwards: fewer retrains."
    )
    together: Annotated[Switch, Parameter(group=VALIDATION)] = Field(
        False, description="Also the fall of the mean margin when rows that help all queries are removed together."
    )

    @field_validator("remove")
    @classmethod
    def _counts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            number = text.removesuffix("%")
            try:
                good = 0 < float(number) < (100 if text.endswith("%") else float("inf"))
            except ValueError:
                good = False
            if not good or (not text.endswith("%") and not number.isdigit()):
                raise ValueError(f"'{text}' is no number of rows and no share such as 5%")
        return value

    @model_validator(mode="after")
    def _scored(self) -> RemovalConfig:
        if not self.scores:
            raise ValueError("--scores is missing: give at least one run of `influence score`")
        return self


class RecallConfig(ScoredConfig, DataConfig, RunConfig):
    """Everything `validate recall` can be told."""

    sources: Annotated[Path | None, Parameter(group=VALIDATION)] = Field(
        None, description="JSON {query id: [training ids]} of known sources; default: training rows of the same text."
    )
    top: Annotated[tuple[int, ...], Parameter(group=VALIDATION, negative="")] = Field(
        (1, 10), description="Recall among the first so many rows."
    )
    randomised: Annotated[Path | None, Parameter(group=VALIDATION)] = Field(
        None, description="Scores of a model with random weights: the correlation with them should be near 0."
    )

    @model_validator(mode="after")
    def _scored(self) -> RecallConfig:
        if not self.scores:
            raise ValueError("--scores is missing: give at least one run of `influence score`")
        return self


class MislabelConfig(JobsConfig, FinetuneConfig):
    """Everything `validate mislabel` can be told: how to train, and how much noise is planted."""

    flip: Annotated[float, Parameter(group=VALIDATION)] = Field(
        0.1, gt=0, lt=0.5, description="Share of training rows whose label is replaced by another one."
    )
    by: Annotated[tuple[str, ...], Parameter(group=VALIDATION, negative="")] = Field(
        ("ekfac", "identity"),
        description="Strategies of self-influence; loss, margin and confident come by themselves.",
    )
    damping: Annotated[str, Parameter(group=VALIDATION)] = Field("auto", description="Damping of self-influence.")
    folds: Annotated[int, Parameter(group=VALIDATION)] = Field(
        5, ge=2, description="Parts for out-of-sample predictions, which confident learning needs."
    )

    @field_validator("by")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in STRATEGIES:
                raise ValueError(f"'{name}' is no strategy of self-influence: give some of {', '.join(STRATEGIES)}")
        return value

"""Settings of `inject`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from cyclopts import Group, Parameter
from pydantic import Field, model_validator

from budwood.config.finetune import FinetuneConfig
from budwood.config.run import JobsConfig

INJECT = Group("Injection", sort_key=0)
Retain = Literal["none", "ewc", "l2", "replay", "recadam"]
SWEPT = ("ewc", "l2", "recadam")  # ways of holding that have a strength
OWN = ("ewc", "ewc_strength", "l2_to_base", "l1_to_base", "replay")  # set by the study, cell by cell


class InjectConfig(FinetuneConfig, JobsConfig):
    """Everything `inject` can be told: what to keep, how, and how the new skill is trained."""

    seeds_inside: ClassVar[bool] = True  # one run holds all seeds

    keep: Annotated[tuple[str, ...], Parameter(group=INJECT, negative="")] = Field(
        description="Tasks that must not be lost; the first one is drawn against the new skill."
    )
    retain: Annotated[tuple[Retain, ...], Parameter(group=INJECT, negative="")] = Field(
        ("none", "ewc", "l2", "replay"),
        description="none: plain training; ewc: weights held by their Fisher information; l2: all held alike; "
        "recadam: l2 outside the update rule, letting go; replay: kept text rides along.",
    )
    strengths: Annotated[tuple[float, ...], Parameter(group=INJECT, negative="")] = Field(
        (0.001, 0.01, 0.1, 1.0), description="Strengths of ewc, l2 and recadam; the mean importance is 1 in each."
    )
    keep_by: Annotated[Literal["probe", "tune", "prompt"], Parameter(group=INJECT)] = Field(
        "probe",
        description="How a kept task with labels is scored from the injected model: a new head on frozen weights, "
        "fine-tuning, or its prompt as it is. Text is always scored by its loss.",
    )
    keep_rows: Annotated[int, Parameter(group=INJECT)] = Field(
        1000, ge=8, description="Most training rows of a kept task, for its head and its Fisher information."
    )
    keep_steps: Annotated[int, Parameter(group=INJECT)] = Field(
        150, ge=1, description="Updates of the head (probe) or the model (tune) of a kept task."
    )

    @property
    def anneals(self) -> bool:
        """Whether a way of the study lets go: recadam does, with or without a steepness of one's own."""
        return "recadam" in self.retain

    @model_validator(mode="after")
    def _a_study(self) -> InjectConfig:
        if not self.keep:
            raise ValueError("--keep names no task; give at least one that must not be lost")
        if self.task in self.keep:
            raise ValueError(f"--keep {self.task} is the new skill itself; keep another task")
        taken = [name for name in OWN if getattr(self, name)]
        if taken:
            raise ValueError(f"--{taken[0].replace('_', '-')} is what the study varies; use --retain and --strengths")
        if self.anneal and not self.anneals:
            raise ValueError("--anneal belongs to --retain recadam, which is not among the ways compared")
        if any(not 0 < s < float("inf") for s in self.strengths):
            raise ValueError("--strengths must be above 0 and finite; plain training is --retain none")
        if not self.strengths and set(self.retain) & set(SWEPT):
            raise ValueError("--strengths is empty; give at least one, as in 0.01,0.1,1")
        return self

"""Settings of `inject`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from cyclopts import Group, Parameter
from pydantic import Field, model_validator

from budwood.config.finetune import FinetuneConfig
from budwood.config.run import RUNNING, JobsConfig

INJECT = Group("Injection", sort_key=0)
Retain = Literal["none", "ewc", "l2", "replay", "recadam"]
SWEPT = ("ewc", "l2", "recadam")  # ways of holding that have a strength
OWN = ("ewc", "ewc_strength", "l2_to_base", "l1_to_base", "replay")  # refused
VARIED = "Set by the study, cell by cell."


class InjectConfig(FinetuneConfig, JobsConfig):
    """Everything `inject` can be told: what to keep, how, and how the new skill is trained."""

    seeds_inside: ClassVar[bool] = True  # one run holds all seeds

    keep: Annotated[tuple[str, ...], Parameter(group=INJECT, negative="")] = Field(
        description="Tasks that must not be lost, as in --task; the first one is drawn against the new skill."
    )
    retain: Annotated[tuple[Retain, ...], Parameter(group=INJECT, negative="")] = Field(
        ("none", "ewc", "l2", "replay"),
        description="Ways to compare. none: plain training; ewc: weights held by their Fisher information; l2: all "
        "held alike; recadam: l2 that acts outside the update rule and lets go over time; replay: rows of kept text "
        "are trained on too.",
    )
    strengths: Annotated[tuple[float, ...], Parameter(group=INJECT, negative="")] = Field(
        (0.001, 0.01, 0.1, 1.0),
        description="Strengths that ewc, l2 and recadam are tried with; a weight's importance is 1 on average in each.",
    )
    keep_by: Annotated[Literal["probe", "tune", "prompt"], Parameter(group=INJECT)] = Field(
        "probe",
        description="How a kept task with labels is scored from the injected model: a new head on frozen weights, "
        "fine-tuning, or its prompt as it is. Text is always scored by its loss.",
    )
    keep_rows: Annotated[int, Parameter(group=INJECT)] = Field(
        1000,
        ge=8,
        description="Most training rows of a kept task, for its head and its Fisher information; replay uses all.",
    )
    keep_steps: Annotated[int, Parameter(group=INJECT)] = Field(
        150, ge=1, description="Updates of the head (probe) or the model (tune) of a kept task."
    )

    seeds: Annotated[tuple[int, ...], Parameter(group=RUNNING, negative="")] = Field(
        (),
        description="Train every way with each seed, e.g. 0,1,2, and show medians and ranges; default: --seed alone.",
    )
    l1_to_base: Annotated[float, Parameter(show=False)] = Field(0.0, ge=0, description=VARIED)
    l2_to_base: Annotated[float, Parameter(show=False)] = Field(0.0, ge=0, description=VARIED)
    ewc: Annotated[tuple[Path, ...], Parameter(show=False, negative="")] = Field((), description=VARIED)
    ewc_strength: Annotated[float, Parameter(show=False)] = Field(0.0, ge=0, description=VARIED)
    replay: Annotated[str | None, Parameter(show=False)] = Field(None, description=VARIED)

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

"""Settings of the `graft` verbs, and how a size is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from pydantic import Field, field_validator, model_validator

from budwood.config.base import Config
from budwood.config.data import DATA, DataConfig
from budwood.config.finetune import ReadConfig
from budwood.config.run import JobsConfig, RunConfig, Switch

GRAFT = Group("Graft", sort_key=3)
Rule = Literal["learned", "movement", "first-order", "fisher", "random"]
RULES = ("learned", "first-order", "fisher", "movement", "random")


@dataclass(frozen=True)
class Size:
    """How many weights: `count` of them, a `fraction` of all, or as few as recover `gain` of what tuning gained."""

    count: int | None = None
    fraction: float | None = None
    gain: float | None = None


def parse_size(text: str) -> Size:
    """A size as people write it.

    >>> parse_size("500"), parse_size("0.01"), parse_size("5%"), parse_size("95%-of-gain")
    ... # doctest: +NORMALIZE_WHITESPACE
    (Size(count=500, fraction=None, gain=None), Size(count=None, fraction=0.01, gain=None),
     Size(count=None, fraction=0.05, gain=None), Size(count=None, fraction=None, gain=0.95))
    """
    word = text.strip()
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE]-?\d+)?|\.\d+)(%?)(-of-gain)?", word)
    if not found:
        raise ValueError("write a count (500), a fraction (0.01), a percentage (5%) or 95%-of-gain")
    number, percent, gain = float(found[1]) / (100 if found[2] else 1), bool(found[2]), bool(found[3])
    if gain and not percent:
        raise ValueError("the share of the gain is a percentage, such as 95%-of-gain")
    if number == 0:
        raise ValueError("a graft of size 0 changes nothing; ask for at least one weight")
    if (percent or not word.isdigit()) and number > 1:
        raise ValueError(f"more than everything was asked for; give at most 100%{'-of-gain' if gain else ''}")
    if gain:
        return Size(gain=number)
    return Size(count=int(word)) if word.isdigit() else Size(fraction=number)


class GraftableConfig(Config):
    """Which weights a graft may change."""

    embeddings: Annotated[Switch, Parameter(group=GRAFT)] = Field(
        False, description="Also the embeddings; default: the blocks alone, with their norms and biases."
    )
    head: Annotated[Switch, Parameter(group=GRAFT)] = Field(
        False, description="Also what is neither block nor embedding (a language-model head, a last norm)."
    )


class GraftLearnConfig(ReadConfig, GraftableConfig, DataConfig, JobsConfig, RunConfig):
    """Everything `graft learn` can be told."""

    size: Annotated[str, Parameter(group=GRAFT)] = Field(
        "1%", description="Weights of the graft: 500 (a count), 0.01, 1% or 95%-of-gain (the fewest that recover it)."
    )
    select: Annotated[Rule, Parameter(group=GRAFT)] = Field(
        "learned",
        description="learned: a mask trained on the task; first-order: -gradient x change; fisher: Fisher x change^2; "
        "movement: |change|; random.",
    )
    per_tensor: Annotated[Switch, Parameter(group=GRAFT)] = Field(
        False, description="Every tensor gives its share; default: one ranking over all."
    )
    fisher: Annotated[tuple[Path, ...], Parameter(group=GRAFT, negative="")] = Field(
        (),
        description="For --select fisher: a Fisher run or file, a run of finetune --save-second-moments, or adam "
        "(those that TUNED keeps); default: the training rows' own, at the base.",
    )
    name: Annotated[str | None, Parameter(group=GRAFT)] = Field(
        None, description="The file is NAME.graft; default: the task's name."
    )
    values: Annotated[Literal["fp32", "fp16"], Parameter(group=GRAFT)] = Field(
        "fp32", description="How the file keeps its numbers."
    )
    mask_steps: Annotated[int, Parameter(group=GRAFT)] = Field(
        40, ge=1, description="Steps of a learned mask (epochs of the original with --parity)."
    )
    path_points: Annotated[int, Parameter(group=GRAFT)] = Field(
        4,
        ge=0,
        description="first-order, and where learned begins: gradients at so many points between base and tuned; 0: at "
        "the base alone.",
    )
    mask_batch_size: Annotated[int, Parameter(group=GRAFT)] = Field(32, ge=1, description="Rows per mask step.")
    mask_rate: Annotated[float, Parameter(group=GRAFT)] = Field(
        0.5, gt=0, description="How far one mask step moves scores, in their own spread."
    )
    estimator: Annotated[Literal["straight-through", "annealed"], Parameter(group=GRAFT)] = Field(
        "straight-through", description="How a learned mask is trained under an exact size."
    )
    parity: Annotated[Switch, Parameter(group=GRAFT)] = Field(
        False, description="A learned mask by the published step: sigmoid of free scores, no exact size."
    )
    sigmoid_bias: Annotated[float, Parameter(group=GRAFT)] = Field(10.0, description="With --parity: the bias.")
    parity_rate: Annotated[float, Parameter(group=GRAFT)] = Field(1e7, gt=0, description="With --parity: the rate.")
    curve: Annotated[Switch, Parameter(group=GRAFT)] = Field(
        False, description="Score and share of the gain against size, for every rule."
    )
    curve_sizes: Annotated[tuple[float, ...], Parameter(group=GRAFT, negative="")] = Field(
        (0.0001, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1), description="Fractions on the curve."
    )
    ood: Annotated[tuple[str, ...], Parameter(group=DATA, negative="")] = Field(
        (), description="Tasks with the same labels on which base, tuned and graft are also scored."
    )
    off_task: Annotated[tuple[str, ...], Parameter(group=DATA, negative="")] = Field(
        (), description="Tasks the graft should not harm, such as a text for the language-model loss."
    )
    eval_batch_size: Annotated[
        int | None, Parameter(name=("--per-device-eval-batch-size", "--eval-batch-size"), group=GRAFT)
    ] = Field(None, ge=1, description="Most rows per evaluation batch; default: by length.")

    @field_validator("size", mode="before")
    @classmethod
    def _size(cls, value: object) -> str:
        parse_size(str(value))
        return str(value)

    @model_validator(mode="after")
    def _in_use(self) -> GraftLearnConfig:
        """Refuse a setting that would have no effect."""
        if self.fisher and self.select != "fisher" and not self.curve:
            raise ValueError("--fisher has no effect without --select fisher or --curve")
        if self.parity and self.select != "learned":
            raise ValueError("--parity belongs to --select learned")
        if self.parity and parse_size(self.size).gain:
            raise ValueError("--parity has no exact size, so --size cannot be a share of the gain")
        if any(not 0 < f <= 1 for f in self.curve_sizes):
            raise ValueError("--curve-sizes are fractions above 0 and at most 1")
        return self


class GraftOverlapConfig(ReadConfig, DataConfig, RunConfig):
    """Everything `graft overlap` can be told."""

    task: Annotated[str, Parameter(group=DATA)] = Field(
        "", description="For a graft whose task is your own file: that file; shipped and public ones need none."
    )
    base: Annotated[str | None, Parameter(group=GRAFT)] = Field(
        None, description="The model the grafts are for: also score every graft on every graft's task."
    )


class GraftStitchConfig(ReadConfig, DataConfig, RunConfig):
    """Everything `graft stitch` can be told."""

    task: Annotated[str, Parameter(group=DATA)] = Field(
        "", description="For a graft whose task is your own file: that file; shipped and public ones need none."
    )
    method: Annotated[Literal["stitch", "arithmetic", "ties", "dare", "fisher"], Parameter(group=GRAFT)] = Field(
        "stitch",
        description="stitch: the mean where grafts overlap; arithmetic: --weight x their sum; ties: trimmed, one sign "
        "elected, then the mean; dare: a share dropped, the rest scaled up; fisher: a mean weighted by --fisher.",
    )
    weight: Annotated[float | None, Parameter(group=GRAFT)] = Field(
        None, gt=0, description="Factor on the sum (arithmetic, dare; default 0.5) or the mean (ties; default 1)."
    )
    keep: Annotated[float, Parameter(group=GRAFT)] = Field(
        0.2, gt=0, le=1, description="Share kept of each graft (ties: the largest; dare: at random)."
    )
    fisher: Annotated[tuple[Path, ...], Parameter(group=GRAFT, negative="")] = Field(
        (), description="For --method fisher: one Fisher run or file per graft, in their order."
    )
    off_task: Annotated[tuple[str, ...], Parameter(group=DATA, negative="")] = Field(
        (), description="Tasks to score beside the grafts' own, such as a text for the language-model loss."
    )


class GraftSubtractConfig(ReadConfig, DataConfig, RunConfig):
    """Everything `graft subtract` can be told."""

    off_task: Annotated[tuple[str, ...], Parameter(group=DATA, negative="")] = Field(
        (), description="Tasks to score beside the graft's own."
    )


class GraftStudyConfig(RunConfig, DataConfig):
    """What the studies share: tasks, shots, the fine-tuning and the grafts in them."""

    task: Annotated[str, Parameter(group=DATA, show=False)] = Field("", description="Not needed: see --tasks.")
    tasks: Annotated[tuple[str, ...], Parameter(group=DATA, negative="")] = Field(
        ("tiny-sentiment", "tiny-topic", "tiny-grammar"), description="Tasks, in the order in which they come."
    )
    mode: Annotated[Literal["prompt", "causal", "head"], Parameter(group=GRAFT)] = Field(
        "prompt", description="How the tasks are put to the model."
    )
    size: Annotated[str, Parameter(group=GRAFT)] = Field("5%", description="Size of every graft.")
    select: Annotated[Rule, Parameter(group=GRAFT)] = Field("learned", description="How its weights are chosen.")
    max_steps: Annotated[int | None, Parameter(group=GRAFT)] = Field(
        None, ge=1, description="Updates of every fine-tuning; default: by the data."
    )
    optimizer: Annotated[Literal["sgd", "adamw"], Parameter(group=GRAFT)] = Field(
        "adamw", description="Of multitask and continual; localise tries all."
    )
    learning_rate: Annotated[float | None, Parameter(name=("--learning-rate", "--lr"), group=GRAFT)] = Field(
        None, gt=0, description="Learning rate of every fine-tuning; default: by the optimiser and the model."
    )
    l1: Annotated[float, Parameter(group=GRAFT)] = Field(
        1e-4, gt=0, description="localise: weight of the L1 distance to the base in AdamW+L1."
    )
    off_task: Annotated[tuple[str, ...], Parameter(group=DATA, negative="")] = Field(
        (), description="Tasks a graft should not harm, such as a text for the language-model loss."
    )

    @field_validator("size", mode="before")
    @classmethod
    def _size(cls, value: object) -> str:
        parse_size(str(value))
        return str(value)

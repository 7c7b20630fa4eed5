"""Settings of `finetune` and `evaluate`."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Group, Parameter
from pydantic import Field, model_validator

from budwood.config.base import Config
from budwood.config.data import DataConfig
from budwood.config.run import RunConfig
from budwood.config.train import TrainConfig

READING = Group("Reading the text", sort_key=2)
Mode = Literal["head", "prompt", "causal", "span", "mlm", "clm"]


class ReadConfig(Config):
    """How a row becomes tokens and a prediction."""

    mode: Annotated[Mode | None, Parameter(group=READING)] = Field(
        None,
        description="head: new classifier; prompt: label words at a mask; causal: label words after a prompt; span: "
        "start and end of an answer; mlm, clm: language modelling. Default: by task and model.",
    )
    pool: Annotated[Literal["auto", "cls", "mask", "last", "mean"], Parameter(group=READING)] = Field(
        "auto", description="What the head reads; auto: what the model's family does."
    )
    template: Annotated[str | None, Parameter(group=READING)] = Field(
        None, description="Prompt with the slots {text} {pair} {mask}; default: the task's own."
    )
    label_words: Annotated[tuple[str, ...], Parameter(group=READING, negative="")] = Field(
        (), description="One word per label, in the order of the labels."
    )
    max_length: Annotated[int | None, Parameter(name=("--max-length", "--max-seq-length"), group=READING)] = Field(
        None, ge=8, description="Most tokens of a row; default: 384 for span, else the model's positions."
    )
    truncate: Annotated[Literal["tail", "head"], Parameter(group=READING)] = Field(
        "tail", description="Which end of a long text is cut; the prompt never is."
    )
    doc_stride: Annotated[int, Parameter(group=READING)] = Field(128, ge=1, description="Step between span windows.")
    max_query_length: Annotated[int, Parameter(group=READING)] = Field(64, ge=1, description="Most question tokens.")
    max_answer_length: Annotated[int, Parameter(group=READING)] = Field(30, ge=1, description="Most answer tokens.")
    n_best_size: Annotated[int, Parameter(group=READING)] = Field(20, ge=1, description="Answers kept per question.")
    null_score_diff_threshold: Annotated[float, Parameter(group=READING)] = Field(
        0.0, description="'No answer' wins if its score exceeds the best answer's by more than this."
    )
    mlm_probability: Annotated[float, Parameter(group=READING)] = Field(
        0.15, gt=0, lt=1, description="Share of tokens masked in masked language modelling."
    )
    masks: Annotated[int | None, Parameter(group=READING)] = Field(
        None, ge=1, description="Masks for the answer of a number task; default: what its longest answer needs."
    )
    parity: Annotated[bool, Parameter(group=READING, negative="")] = Field(
        False,
        description="Number tasks as first published: three masks, no end piece, answers read at their true length, "
        "unparsed ones left out of the errors. For comparison only: it sees the length of the answer.",
    )
    number_loss: Annotated[float, Parameter(group=READING)] = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of an added loss that grows with the distance of the number said from the right one.",
    )

    @model_validator(mode="after")
    def _one_count(self) -> ReadConfig:
        if self.parity and self.masks is not None:
            raise ValueError("--parity has three masks; leave --masks away")
        return self


class FinetuneConfig(ReadConfig, TrainConfig, DataConfig, RunConfig):
    """Everything `finetune` can be told."""

    objective: Annotated[Literal["kl", "quad"], Parameter(group=READING)] = Field(
        "kl",
        description="With --mode clm. kl: cross-entropy of the next word; quad: minus its logit plus half the squared "
        "norm of all logits.",
    )
    output_embedding: Annotated[Literal["learned", "fixed"], Parameter(group=READING)] = Field(
        "learned", description="fixed: the output embedding (and what is tied to it) stays as it is."
    )


class EvaluateConfig(ReadConfig, DataConfig, RunConfig):
    """Everything `evaluate` can be told."""

    eval_split: Annotated[str | None, Parameter(name=("--on", "--eval-split"), group=READING)] = Field(
        None, description="Split to score; default: test where it has labels, else validation."
    )
    eval_batch_size: Annotated[
        int | None, Parameter(name=("--per-device-eval-batch-size", "--eval-batch-size"), group=READING)
    ] = Field(None, ge=1, description="Most rows per batch; default: by length.")

    @model_validator(mode="after")
    def _in_use(self) -> EvaluateConfig:
        if self.limit is not None:
            raise ValueError("--limit samples training rows, and nothing is trained here; use --limit-eval")
        return self

"""Settings of training: Hugging Face names, short forms beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from pydantic import Field, model_validator

from budwood.config.base import Config

TRAINING = Group("Training", sort_key=3)


class TrainConfig(Config):
    """How a model is trained. Unset values are chosen from the model and the data, and printed."""

    init: Annotated[Literal["pretrained", "random"], Parameter(group=TRAINING)] = Field(
        "pretrained", description="Start from the model's weights, or from random ones of the same shape (a baseline)."
    )
    optimizer: Annotated[Literal["adamw", "sgd"], Parameter(group=TRAINING)] = Field(
        "adamw", description="Update rule."
    )
    learning_rate: Annotated[float | None, Parameter(name=("--learning-rate", "--lr"), group=TRAINING)] = Field(
        None, gt=0, description="Peak learning rate; default: by the model's width."
    )
    num_train_epochs: Annotated[float | None, Parameter(name=("--num-train-epochs", "--epochs"), group=TRAINING)] = (
        Field(None, gt=0, description="Passes over the training rows; default 3, more on few rows.")
    )
    max_steps: Annotated[int | None, Parameter(group=TRAINING)] = Field(
        None, ge=1, description="Updates in all; overrides epochs."
    )
    per_device_train_batch_size: Annotated[
        int, Parameter(name=("--per-device-train-batch-size", "--batch-size"), group=TRAINING)
    ] = Field(16, ge=1, description="Rows per update (times accumulation).")
    eval_batch_size: Annotated[
        int | None, Parameter(name=("--per-device-eval-batch-size", "--eval-batch-size"), group=TRAINING)
    ] = Field(None, ge=1, description="Most rows per evaluation batch; default: by length.")
    gradient_accumulation_steps: Annotated[int, Parameter(group=TRAINING)] = Field(
        1, ge=1, description="Batches summed into one update."
    )
    lr_scheduler_type: Annotated[Literal["linear", "cosine", "constant"], Parameter(group=TRAINING)] = Field(
        "linear", description="Learning rate after warm-up."
    )
    warmup_steps: Annotated[float, Parameter(group=TRAINING)] = Field(
        0.06, ge=0, description="Updates of rising rate; below 1: share of all updates."
    )
    weight_decay: Annotated[float, Parameter(group=TRAINING)] = Field(
        0.01, ge=0, description="Decoupled decay, not on biases and LayerNorms."
    )
    adam_beta1: Annotated[float, Parameter(group=TRAINING)] = Field(0.9, ge=0, lt=1, description="AdamW's first decay.")
    adam_beta2: Annotated[float, Parameter(group=TRAINING)] = Field(
        0.999, ge=0, lt=1, description="AdamW's second decay."
    )
    adam_epsilon: Annotated[float, Parameter(group=TRAINING)] = Field(1e-8, gt=0, description="AdamW's epsilon.")
    momentum: Annotated[float, Parameter(group=TRAINING)] = Field(0.0, ge=0, lt=1, description="SGD's momentum.")
    max_grad_norm: Annotated[float, Parameter(group=TRAINING)] = Field(
        1.0, ge=0, description="Clip the gradient to this norm; 0: never."
    )
    dropout: Annotated[float | None, Parameter(group=TRAINING)] = Field(
        None, ge=0, lt=1, description="Dropout everywhere; default: the model's own."
    )
    freeze: Annotated[tuple[str, ...], Parameter(group=TRAINING, negative="")] = Field(
        (), description="Parts that stay as they are: embeddings, head, layers:K (the first K), or a name pattern."
    )
    train_only: Annotated[tuple[str, ...], Parameter(group=TRAINING, negative="")] = Field(
        (), description="Train nothing but these: bias, head, or a name pattern."
    )
    l1_to_base: Annotated[float, Parameter(group=TRAINING)] = Field(
        0.0, ge=0, allow_inf_nan=False, description="Weight of the sum of |weight - start|."
    )
    l2_to_base: Annotated[float, Parameter(group=TRAINING)] = Field(
        0.0, ge=0, allow_inf_nan=False, description="Weight of half the sum of (weight - start)^2."
    )
    ewc: Annotated[tuple[Path, ...], Parameter(group=TRAINING, negative="")] = Field(
        (), description="Fisher runs or files: weights that matter to those tasks are held (EWC)."
    )
    ewc_strength: Annotated[float, Parameter(group=TRAINING)] = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of half the sum of Fisher x (weight - start)^2; try 0.001 to 1.",
    )
    ewc_scale: Annotated[Literal["normalised", "raw"], Parameter(group=TRAINING)] = Field(
        "normalised",
        description="normalised: Fisher scaled to mean 1, so that strengths compare (several: their average); raw: as "
        "it is (several: their sum).",
    )
    ewc_decay: Annotated[float, Parameter(group=TRAINING)] = Field(
        1.0,
        gt=0,
        le=1,
        description="With several Fishers, in the order given: factor on the sum of the earlier ones (online EWC).",
    )
    anneal: Annotated[float, Parameter(group=TRAINING)] = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Above 0: EWC and L2 act outside the update rule and let go along a sigmoid of this steepness per "
        "update, as RecAdam does (0.01 to 1).",
    )
    anneal_at: Annotated[float, Parameter(group=TRAINING)] = Field(
        0.25, ge=0, allow_inf_nan=False, description="Update at which the hold is half gone; below 1: share of all."
    )
    replay: Annotated[str | None, Parameter(group=TRAINING)] = Field(
        None,
        description="A task (or several, a,b) whose rows ride along with every update, so that it is kept; "
        "--shots and --limit hold for it too, where it has labels.",
    )
    replay_rows: Annotated[int, Parameter(group=TRAINING)] = Field(16, ge=1, description="Replayed rows per update.")
    save_second_moments: Annotated[bool, Parameter(group=TRAINING, negative="")] = Field(
        False, description="Keep AdamW's second moments in the run, for `fisher --kind adam`."
    )
    inside: Annotated[Path | None, Parameter(group=TRAINING)] = Field(
        None, description="Train only the weights of this graft (a .graft file): can they learn the task again?"
    )
    checkpoint: Annotated[Literal["last", "best"], Parameter(group=TRAINING)] = Field(
        "last", description="Weights kept: of the last update, or best on validation."
    )
    eval_steps: Annotated[int | None, Parameter(group=TRAINING)] = Field(
        None, ge=1, description="With --checkpoint best: validate every so many updates; default: each epoch."
    )
    save_steps: Annotated[int | None, Parameter(group=TRAINING)] = Field(
        None, ge=1, description="Keep a checkpoint-N directory every so many updates."
    )
    logging_steps: Annotated[int | None, Parameter(group=TRAINING)] = Field(
        None, ge=1, description="Updates per point of the loss curve; default: about 60 points."
    )
    parallel: Annotated[Literal["ddp", "fsdp"], Parameter(group=TRAINING)] = Field(
        "ddp", description="Under torchrun: every process holds the model, or (fsdp) a part of its weights and state."
    )
    reduce: Annotated[Literal["mean", "sum"], Parameter(group=TRAINING)] = Field(
        "mean", description="Loss of a row with several targets."
    )

    @model_validator(mode="after")
    def _in_use(self) -> TrainConfig:
        """Refuse a setting that would have no effect."""
        given = self.model_fields_set
        if self.optimizer == "adamw" and self.momentum:
            raise ValueError("--momentum belongs to --optimizer sgd; AdamW has --adam-beta1")
        if self.optimizer == "sgd" and {"adam_beta1", "adam_beta2", "adam_epsilon"} & given and self._changed_adam():
            raise ValueError("--adam-* belong to --optimizer adamw; SGD has --momentum")
        if self.save_second_moments and self.optimizer != "adamw":
            raise ValueError("--save-second-moments belongs to --optimizer adamw; SGD has none")
        if "anneal_at" in given and not self.anneals and self.anneal_at != 0.25:
            raise ValueError("--anneal-at has no effect without --anneal")
        if self.eval_steps is not None and self.checkpoint != "best":
            raise ValueError("--eval-steps has no effect without --checkpoint best")
        return self

    @property
    def anneals(self) -> bool:
        """Whether a hold lets go during training."""
        return bool(self.anneal)

    def _changed_adam(self) -> bool:
        fields = type(self).model_fields
        return any(getattr(self, n) != fields[n].default for n in ("adam_beta1", "adam_beta2", "adam_epsilon"))

"""From settings to numbers: learning rate, updates, what is trained, on which device."""

from __future__ import annotations

import math

import torch
from torch import nn

from budwood.config.train import TrainConfig
from budwood.errors import ConfigError
from budwood.params.select import trainable_names
from budwood.params.tree import named
from budwood.train.fit import Plan
from budwood.train.step import Rule

EPOCHS, FEWEST_UPDATES = 3, 200


def device_for(wish: str) -> str:
    """The device asked for, or the best there is."""
    if wish != "auto":
        try:
            torch.empty(0, device=wish)
        except (RuntimeError, AssertionError) as e:
            raise ConfigError(
                f"--device {wish} cannot be used here ({str(e).splitlines()[0]}). Use cpu or auto."
            ) from e
        return wish
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_rate(width: int, optimizer: str) -> float:
    """A learning rate that suits a transformer of this width: narrower models take larger steps.

    AdamW: 5e-5 at 768, as is usual for BERT-base, rising in proportion as the model narrows. SGD: 100 times that.

    >>> f"{default_rate(768, 'adamw'):.0e}", f"{default_rate(128, 'adamw'):.0e}"
    ('5e-05', '3e-04')
    """
    rate = 5e-5 * 768 / width
    return rate if optimizer == "adamw" else 100 * rate


def make_plan(cfg: TrainConfig, rows: int, width: int, seed: int) -> Plan:
    """Every number of a training decided: unset epochs mean three, or as many as give 200 updates on few rows."""
    size = cfg.per_device_train_batch_size * cfg.gradient_accumulation_steps
    per_epoch = math.ceil(rows / size)
    if cfg.max_steps is not None:
        steps = cfg.max_steps
    elif cfg.num_train_epochs is not None:
        steps = max(1, math.ceil(cfg.num_train_epochs * per_epoch))
    else:
        steps = max(EPOCHS * per_epoch, FEWEST_UPDATES)
    return Plan(
        rule=Rule(cfg.optimizer, cfg.weight_decay, cfg.adam_beta1, cfg.adam_beta2, cfg.adam_epsilon, cfg.momentum),
        learning_rate=cfg.learning_rate or default_rate(width, cfg.optimizer),
        steps=steps,
        batch_size=cfg.per_device_train_batch_size,
        accumulation=cfg.gradient_accumulation_steps,
        warmup=cfg.warmup_steps,
        schedule=cfg.lr_scheduler_type,
        max_grad_norm=cfg.max_grad_norm,
        logging_steps=cfg.logging_steps or max(1, steps // 60),
        save_steps=cfg.save_steps,
        eval_steps=(cfg.eval_steps or per_epoch) if cfg.checkpoint == "best" else None,
        seed=seed,
    )


def prepare_model(model: nn.Module, cfg: TrainConfig) -> dict[str, int]:
    """Freeze what is not to be trained and set dropout; returns how many weights there are and how many train."""
    names = set(trainable_names(model, cfg.freeze, cfg.train_only))
    for name, parameter in named(model).items():
        parameter.requires_grad_(name in names)
    if cfg.dropout is not None:
        set_dropout(model, cfg.dropout)
    parameters = named(model).values()
    return {
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
    }


def set_dropout(model: nn.Module, rate: float) -> None:
    """The same dropout rate everywhere; attention keeps its rate as a plain number in most families."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name in ("dropout_prob", "attention_dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, rate)

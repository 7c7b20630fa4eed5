"""How the rows of a task are put to a model: mode, wording, objective, tokens and batches in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from budwood.config.finetune import Mode, ReadConfig
from budwood.data import encode
from budwood.data.batch import Batch, Features, collate
from budwood.data.cache import cached_features
from budwood.data.encoding import Encoding
from budwood.data.mask import Masking, mask_tokens
from budwood.data.prompt import label_word_ids, render
from budwood.data.task import Row, Task, Template
from budwood.errors import ConfigError, DataError
from budwood.models.grafted import graft_reading
from budwood.models.identity import tokenizer_rules_hash
from budwood.models.load import HeadSpec, Loaded
from budwood.models.number import number_values
from budwood.models.objective import Objective, Wording, make_objective
from budwood.models.reference import ModelRef
from budwood.store.files import digest, read_json

SPAN_LENGTH, CHUNK, PARITY_MASKS = 384, 128, 3


NUMBER_SETTINGS = ("masks", "parity", "number_loss")


def as_tuned(cfg: Any, ref: ModelRef, kind: str | None = None) -> Any:
    """The settings, with what was not set about reading as the run behind `ref` was trained with.

    What a number task was asked with is no matter to a task of another `kind`.
    """
    tuned = tuned_with(ref, getattr(cfg, "task", None))
    fields = [n for n in ReadConfig.model_fields if kind == "number" or n not in NUMBER_SETTINGS]
    default = {n: ReadConfig.model_fields[n].get_default() for n in fields}
    unset = [n for n in fields if getattr(cfg, n) == default[n] and tuned.get(n) is not None]
    return cfg.model_validate({**cfg.model_dump(), **{n: tuned[n] for n in unset}})


def tuned_with(ref: ModelRef, task: str | None = None) -> dict[str, Any]:
    """The settings that the run behind `ref` was trained with, or that its grafts remember; else none."""
    manifest = ref.run / "run.json" if ref.run else None
    if manifest is None or ref.grafts or not manifest.exists():
        return graft_reading(ref, task)
    kept = read_json(manifest)
    return {**kept.get("settings", {}), **kept.get("reading", {})}


def mode_for(cfg: ReadConfig, task: Task, ref: ModelRef) -> Mode:
    """The mode asked for, else the one that suits the kind of task and the family of the model."""
    if cfg.mode is not None:
        return cfg.mode
    causal = reads_left_to_right(ref)
    by_kind: dict[str, Mode] = {
        "span": "span",
        "text": "clm" if causal else "mlm",
        "number": "causal" if causal else "prompt",
    }
    return by_kind.get(task.kind, "head")


def reads_left_to_right(ref: ModelRef) -> bool:
    """Whether the model's family is causal."""
    from transformers.models.auto import modeling_auto as auto

    kind = ref.model_type or ""
    return kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES


def head_spec(task: Task, cfg: ReadConfig) -> HeadSpec:
    """The head a task needs, whatever the model."""
    return HeadSpec(kind=task.kind, labels=task.labels, pool=cfg.pool, task=task.name)


@dataclass(frozen=True)
class RowFeed:
    """Batches of encoded rows on one device; text for masked language modelling is masked anew in every epoch."""

    features: Features
    pad_id: int
    masking: Masking | None = None
    device: str = "cpu"

    @property
    def lengths_N(self) -> np.ndarray:
        """Tokens of each feature."""
        return self.features.lengths_N

    def __call__(self, index: np.ndarray, epoch: int = 0) -> Batch:
        """The features at `index` as a batch."""
        batch = collate(self.features, index, self.pad_id)
        if self.masking is not None:
            batch = _masked(batch, self.masking, epoch)
        if self.device == "cpu":
            return batch
        move = lambda named: {k: v.to(self.device) for k, v in named.items()}  # noqa: E731
        return replace(batch, inputs=move(batch.inputs), targets=move(batch.targets))


def _masked(batch: Batch, masking: Masking, epoch: int) -> Batch:
    attention = batch.inputs.get("attention_mask")
    ids_BT, target_BT = mask_tokens(
        batch.inputs["input_ids"].numpy(),
        batch.targets["special"].numpy(),
        batch.index_B,
        epoch,
        masking,
        None if attention is None else attention.numpy(),
    )
    inputs = {**batch.inputs, "input_ids": torch.from_numpy(ids_BT)}
    return replace(batch, inputs=inputs, targets={**batch.targets, "target": torch.from_numpy(target_BT)})


@dataclass(frozen=True)
class Reading:
    """A task as one model reads it."""

    loaded: Loaded
    task: Task
    mode: Mode
    objective: Objective
    encoding: Encoding
    template: Template | None
    masking: Masking | None
    device: str = "cpu"

    def encode(self, rows: Sequence[Row]) -> Features:
        """Tokens and targets of rows, from the cache where they were made before."""
        key = [
            tokenizer_rules_hash(self.loaded.tokenizer),
            self.mode,
            self.task.kind,
            asdict(self.encoding),
        ]
        key.append(digest(asdict(self.template)) if self.template else "")
        return cached_features(rows, key, lambda: self._encode(rows))

    def _encode(self, rows: Sequence[Row]) -> Features:
        tokenizer, enc, causal = self.loaded.tokenizer, self.encoding, self.mode in ("causal", "clm")
        if self.task.kind == "number":
            return encode.encode_number(rows, tokenizer, enc, causal)
        if self.template is not None:
            return encode.encode_words(rows, tokenizer, enc, self.template, causal)
        simple = {
            "span": encode.encode_span,
            "mlm": encode.encode_mlm_text,
            "clm": encode.encode_clm_text,
            "head": encode.encode_tokens if self.task.kind == "tokens" else encode.encode_head,
        }
        return simple[self.mode](rows, tokenizer, enc)

    @property
    def settled(self) -> Reading:
        """The same with masks that hang on a row's text alone: what is measured of it is so whatever else is asked."""
        return self if self.masking is None else replace(self, masking=replace(self.masking, by_text=True))

    def feed(self, features: Features) -> RowFeed:
        """Encoded rows as batches for this model."""
        return RowFeed(features, int(self.loaded.tokenizer.pad_token_id or 0), self.masking, self.device)

    def examples(self, rows: Sequence[Row], count: int = 3) -> list[str]:
        """The first rows as the model sees them in words."""
        if self.template is None:
            return [" | ".join(filter(None, [r.text or " ".join(r.words or ()), r.pair])) for r in rows[:count]]
        mask = self.loaded.tokenizer.mask_token or ""
        return [render(self.template, r, mask, self.mode == "causal") for r in rows[:count]]


def reading(loaded: Loaded, task: Task, cfg: ReadConfig, mode: Mode, seed: int, reduce: str = "mean") -> Reading:
    """Everything that turns rows of `task` into batches and losses of this model."""
    worded = mode in ("prompt", "causal") or (
        mode == "head" and "mask" in (cfg.pool, getattr(loaded.model, "pool", ""))
    )
    template = _template(task, cfg, mode) if worded and task.kind != "number" else None
    if template is None and (cfg.template or cfg.label_words):
        raise ConfigError(
            f"--template and --label-words have no effect with --mode {mode}. Use --mode prompt or causal."
        )
    words: tuple[int, ...] = ()
    if template is not None and mode != "head":
        spoken = template.causal_words if mode == "causal" else template.words
        words = tuple(label_word_ids(loaded.tokenizer, spoken))
    if task.kind != "number" and (cfg.parity or cfg.masks or cfg.number_loss):
        raise ConfigError(
            f"--parity, --masks and --number-loss are for tasks whose answers are numbers; '{task.name}' is of kind "
            f"'{task.kind}'. Leave them away."
        )
    values = number_values(loaded.tokenizer) if cfg.number_loss else None
    wording = Wording(
        word_ids=words,
        bounds=task.bounds,
        reduce=reduce,  # type: ignore[arg-type]
        values_V=values,
        number_loss=cfg.number_loss,
    )
    objective = make_objective(mode, task.kind, wording)
    masking = None
    if mode == "mlm":
        tokenizer = loaded.tokenizer
        if tokenizer.mask_token_id is None:
            raise ConfigError("--mode mlm needs a tokenizer with a mask token; this one has none. Use --mode clm.")
        masking = Masking(int(tokenizer.mask_token_id), len(tokenizer), seed, cfg.mlm_probability)
    return Reading(
        loaded, task, mode, objective, _encoding(loaded, task, cfg, mode), template, masking, device_of(loaded)
    )


def device_of(loaded: Loaded) -> str:
    """Where the model's weights are."""
    return str(next(loaded.model.parameters()).device)


def _encoding(loaded: Loaded, task: Task, cfg: ReadConfig, mode: Mode) -> Encoding:
    length = cfg.max_length or (SPAN_LENGTH if mode == "span" else None)
    masks = cfg.masks or 6
    if cfg.parity:
        masks = PARITY_MASKS
        if mode == "causal":
            raise ConfigError("--parity is about masks, and a causal model has none. Leave it away.")
    elif task.kind == "number" and mode == "prompt" and cfg.masks is None:
        masks = encode.masks_needed([r for rows in task.splits.values() for r in rows], loaded.tokenizer)
    return Encoding(
        positions=loaded.positions,
        max_length=length,
        truncate=cfg.truncate,
        doc_stride=cfg.doc_stride,
        max_query_length=cfg.max_query_length,
        chunk=min(cfg.max_length or CHUNK, loaded.positions) if mode in ("mlm", "clm") else None,
        masks=masks,
        end=not cfg.parity,
    )


def _template(task: Task, cfg: ReadConfig, mode: Mode) -> Template:
    """The task's wording with what the user put in its place; a wording that cannot ask every label is refused."""
    own = task.template or Template()
    causal = mode == "causal"
    wording = cfg.template or (own.causal if causal else own.masked)
    words = cfg.label_words or (own.causal_words if causal else own.words)
    slots = "{text} and {mask}" if not causal else "{text}"
    if not wording:
        raise DataError(
            f"Task '{task.name}' has no {'causal ' if causal else ''}prompt. Give one with --template (with {slots}) "
            f"and --label-words, or use --mode head."
        )
    need = 2 if task.kind == "regression" else len(task.labels)
    if mode != "head" and len(words) != need:
        raise DataError(
            f"Task '{task.name}' needs {need} label words, in the order {', '.join(task.labels) or 'low, high'}; "
            f"{len(words)} were given ({', '.join(words) or 'none'}). Set --label-words."
        )
    changed = {"causal": wording, "causal_words": words} if causal else {"masked": wording, "words": words}
    return replace(own, **changed)  # type: ignore[arg-type]

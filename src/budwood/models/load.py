"""Loading and saving: a reference and a mode become a float32 model in evaluation mode, with its tokenizer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError  # to recognise a refusal; nothing here reads or writes pickles
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn

from budwood.config.finetune import Mode
from budwood.data.batch import seed_of
from budwood.errors import ModelError
from budwood.models.grafted import graft_reading, put_grafts
from budwood.models.pooled import Pool, Pooled, read_pooled, write_pooled
from budwood.models.reference import ModelRef, tokenizer_places
from budwood.params.tree import HEAD, canonical, named, prefixes

LM_MODES = ("prompt", "mlm", "causal", "clm")
AUTO_CLASSES = {
    ("head", "label"): "AutoModelForSequenceClassification",
    ("head", "regression"): "AutoModelForSequenceClassification",
    ("head", "tokens"): "AutoModelForTokenClassification",
    ("prompt", ""): "AutoModelForMaskedLM",
    ("mlm", ""): "AutoModelForMaskedLM",
    ("causal", ""): "AutoModelForCausalLM",
    ("clm", ""): "AutoModelForCausalLM",
    ("span", ""): "AutoModelForQuestionAnswering",
}
UNBOUNDED = 100_000  # tokenizers without a limit say something astronomic


class HeadMissing(ModelError):
    """A language-model head was asked for, and the checkpoint has none."""


@dataclass(frozen=True)
class HeadSpec:
    """What a head has to tell apart: the labels of a task of kind "label" or "tokens", or a number ("regression").

    `task` chooses among the heads that several grafts bring.
    """

    kind: str = "label"
    labels: tuple[str, ...] = ()
    pool: Pool | Literal["auto"] = "auto"
    task: str = ""

    @property
    def size(self) -> int:
        """Number of outputs."""
        return 1 if self.kind == "regression" else len(self.labels)


@dataclass(frozen=True)
class Loaded:
    """A model ready for use. `positions`: most tokens it takes. `fresh`: canonical names of parameters newly drawn."""

    model: nn.Module
    tokenizer: Any
    ref: ModelRef
    positions: int
    fresh: tuple[str, ...]


def load(
    ref: ModelRef, mode: Mode, head: HeadSpec | None = None, *, seed: int = 0, device: str = "cpu", merge: bool = True
) -> Loaded:
    """The model of a reference for a mode: float32, evaluation mode; what the checkpoint lacks comes from `seed` alone.

    A checkpoint's head is kept where its labels are those asked for (in any order: its rows are put into the order of
    `head.labels`), and made afresh otherwise. With `merge=False` an adapter's matrices stay beside those of its base,
    and only what it trained requires a gradient.
    """
    if ref.kind == "graft":
        raise ModelError(f"'{ref.text}' is a graft, not a model. Give the model it is for: MODEL+{ref.text}.")
    head = head or HeadSpec()
    pool = graft_reading(ref, None).get("pool", "auto")
    if mode == "head" and head.pool == "auto" and pool != "auto":
        head = replace(head, pool=pool)
    if mode == "head" and head.kind not in ("label", "regression", "tokens"):
        raise ModelError(f"--mode head does not fit a task of kind '{head.kind}', which has no labels to tell apart.")
    if mode == "head" and not head.size:
        raise ModelError(f"A classification head on '{ref.text}' needs the labels of the task, and none were given.")
    if head.pool != "auto" and (mode != "head" or head.kind == "tokens"):
        raise ModelError(
            f"--pool {head.pool} has no effect in --mode {mode} on a task of kind '{head.kind}'. Leave it out."
        )
    _check_mode(ref, mode)
    tokenizer = load_tokenizer(ref)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "fresh weights"))
        model, fresh = _adapted(ref, mode, head, merge) if ref.base else _plain(ref, mode, head)
    if ref.grafts:
        fresh = put_grafts(ref, model, head.labels if mode == "head" else (), fresh, head.task)
    # sequence classifiers of causal families find the last token by this id: it must be the one batches are padded with
    model.config.pad_token_id = tokenizer.pad_token_id
    model = model.to(device).eval()
    return Loaded(model, tokenizer, ref, positions(model, tokenizer), fresh)


def load_backbone(ref: ModelRef) -> nn.Module:
    """The model of a reference without any head, its adapter merged: for looking at weights."""
    if ref.base:
        return _adapted(ref, "head", HeadSpec(labels=("a", "b")))[0]
    model, info = _from_pretrained(ref, "AutoModel", _config(ref))
    lost = [k for k in info["missing_keys"] if not k.startswith("pooler.")]
    if lost:
        raise ModelError(f"'{ref.text}' lacks {len(lost):,} of its weights, such as '{lost[0]}'.")
    return model


def load_tokenizer(ref: ModelRef) -> Any:
    """The tokenizer of a reference, with a padding token (the end-of-text token where there is none of its own)."""
    from transformers import AutoTokenizer

    place = next(tokenizer_places(ref), None)
    if place is None:
        raise ModelError(
            f"'{ref.text}' has no tokenizer: none of tokenizer.json, vocab.txt, vocab.json, ... is in {ref.path}. Put "
            "the tokenizer's files there (`tokenizer.save_pretrained(DIR)`)."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, revision=ref.revision, trust_remote_code=ref.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"The tokenizer of '{ref.text}' cannot be read ({_first_line(error)}). Save it again."
        ) from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"'{ref.text}' has only a slow tokenizer. Save it with a tokenizer.json (a fast one) beside it."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
    return tokenizer


def _check_mode(ref: ModelRef, mode: Mode) -> None:
    """Refuse a mode that the architecture cannot serve, naming one that it can."""
    from transformers.models.auto import modeling_auto as auto

    kind = ref.model_type or ""
    masked = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    causal = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not masked
    if mode in ("prompt", "mlm") and not masked:
        instead = {"prompt": "causal", "mlm": "clm"}[mode] if causal else "head"
        raise ModelError(
            f"'{ref.text}' ({kind}) reads text from left to right and has no masked-language-model head, so --mode "
            f"{mode} cannot be used. Use --mode {instead}, or an encoder such as tiny-bert."
        )
    if mode in ("causal", "clm") and not causal:
        instead = {"causal": "prompt", "clm": "mlm"}[mode] if masked else "head"
        raise ModelError(
            f"'{ref.text}' ({kind}) reads text in both directions and is no causal language model, so --mode {mode} "
            f"cannot be used. Use --mode {instead}, or a decoder such as tiny-gpt."
        )
    if mode == "span" and kind not in auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES:
        raise ModelError(
            f"'{ref.text}' ({kind}) has no question-answering form in transformers. Use an encoder such as tiny-bert."
        )


def _plain(ref: ModelRef, mode: Mode, head: HeadSpec) -> tuple[nn.Module, tuple[str, ...]]:
    if mode == "head" and head.kind != "tokens" and (head.pool != "auto" or _saved_pool(ref)):
        return _pooled(ref, head)
    name = AUTO_CLASSES[mode, head.kind if mode == "head" else ""]
    config = _config(ref)
    old_labels = tuple(str(config.id2label[i]) for i in range(config.num_labels))
    if mode == "head":
        _name_labels(config, head)
    model, info = _from_pretrained(ref, name, config)
    fresh = _check_missing(model, info, ref, mode)
    if mode == "head" and not any(n.startswith(HEAD) for n in fresh):
        fresh += _settle_head(model, old_labels, head)
    return model, tuple(sorted(fresh))


def _config(ref: ModelRef) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(ref.source, revision=ref.revision, trust_remote_code=ref.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"The configuration of '{ref.text}' cannot be read ({_first_line(error)}).") from error


def _from_pretrained(ref: ModelRef, auto_class: str, config: Any) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    with _quiet():
        try:
            return getattr(transformers, auto_class).from_pretrained(
                ref.source,
                config=config,
                revision=ref.revision,
                trust_remote_code=ref.trust_remote_code,
                dtype=torch.float32,
                weights_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except UnpicklingError as error:
            raise ModelError(
                f"The weights of '{ref.text}' are a pickle that holds more than tensors, and are refused: reading it "
                "could run any code. Load it where you trust it and write it with `model.save_pretrained(DIR)`."
            ) from error
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise ModelError(
                f"'{ref.text}' cannot be loaded as {auto_class} ({_first_line(error)}). Check that config.json and the "
                "weights belong together."
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no loading report inside the block: what is missing is reported by us, in one line."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _name_labels(config: Any, head: HeadSpec) -> None:
    labels = ("value",) if head.kind == "regression" else head.labels
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: i for i, label in enumerate(labels)}
    if head.kind == "regression":
        config.problem_type = "regression"
    elif head.kind == "label":
        config.problem_type = "single_label_classification"


def _check_missing(model: nn.Module, info: dict[str, Any], ref: ModelRef, mode: Mode) -> tuple[str, ...]:
    """Canonical names of what was not in the checkpoint; refused where a random value would be a silent defect."""
    backbone, wrapper = prefixes(model)
    parameters = named(model)
    mismatched = [str(entry[0]) for entry in info["mismatched_keys"]]
    fresh = tuple(
        c for k in (*info["missing_keys"], *mismatched) if (c := canonical(k, backbone, wrapper)) in parameters
    )
    lost = [n for n in fresh if not n.startswith((HEAD, "pooler."))]
    if lost:
        raise ModelError(
            f"'{ref.text}' lacks {len(lost):,} of its {len(parameters):,} weights, such as '{sorted(lost)[0]}', or has "
            "them in another shape. Check that config.json and the weights belong together."
        )
    heads = sorted(n for n in fresh if n.startswith(HEAD))
    if mode in LM_MODES and heads:
        raise HeadMissing(
            f"'{ref.text}' has no language-model head (its checkpoint lacks '{heads[0]}'), "
            f"so --mode {mode} would read random words. Use --mode head, or a model with its language-model head."
        )
    return fresh


def _settle_head(model: nn.Module, old_labels: Sequence[str], head: HeadSpec) -> tuple[str, ...]:
    """Keep a checkpoint's head, its rows in the task's order; make it afresh where it was for other labels."""
    if head.kind == "regression":
        return ()
    old, new = [x.lower() for x in old_labels], [x.lower() for x in head.labels]
    if old == new or all(x.startswith("label_") for x in old):
        return ()
    if sorted(old) == sorted(new):
        _reorder(model, [old.index(x) for x in new])
        return ()
    fresh = tuple(n for n in named(model) if n.startswith(HEAD))
    _renew(model, fresh)
    return fresh


def _reorder(model: nn.Module, order: list[int]) -> None:
    """Put the rows of the last layer of the head into a new order."""
    rows = [p for n, p in named(model).items() if n.startswith(HEAD) and p.shape[0] == len(order)]
    with torch.no_grad():
        for parameter in rows[-2:] if rows[-1].dim() == 1 else rows[-1:]:
            parameter.copy_(parameter[order])


def _renew(model: nn.Module, names: Sequence[str]) -> None:
    """Draw parameters anew: matrices from the model's own initial spread, biases zero, norm weights one."""
    std = float(getattr(model.config, "initializer_range", 0.02) or 0.02)
    parameters = named(model)
    with torch.no_grad():
        for name in names:
            p = parameters[name]
            p.copy_(
                torch.randn_like(p) * std if p.dim() > 1 else torch.full_like(p, 0.0 if name.endswith("bias") else 1.0)
            )


def _saved_pool(ref: ModelRef) -> bool:
    return ref.path is not None and (ref.path / "pool.json").is_file()


def _pooled(ref: ModelRef, head: HeadSpec) -> tuple[nn.Module, tuple[str, ...]]:
    """A backbone with a linear head on pooled states: the saved head where it fits, else a fresh one."""
    backbone, info = _from_pretrained(ref, "AutoModel", _config(ref))
    lost = [k for k in info["missing_keys"] if not k.startswith("pooler.")]
    if lost:
        raise ModelError(f"'{ref.text}' lacks {len(lost):,} of its weights, such as '{lost[0]}'.")
    unused = getattr(backbone, "pooler", None)
    if isinstance(unused, nn.Module):
        backbone.pooler = None  # the head reads pooled states of its own, so the pooler would only be dead weight
    saved = read_pooled(ref.path) if _saved_pool(ref) and ref.path else None
    pool = saved.pool if saved and head.pool == "auto" else head.pool
    mask_id = load_tokenizer(ref).mask_token_id
    if pool == "mask" and mask_id is None:
        raise ModelError(f"'{ref.text}' has no mask token, so --pool mask cannot be used. Use --pool last or mean.")
    labels = ("value",) if head.kind == "regression" else head.labels
    model = Pooled(backbone, "cls" if pool == "auto" else pool, labels, mask_id)
    _renew(model, ("head.weight", "head.bias"))
    if saved and saved.pool == pool and saved.labels == labels:
        with torch.no_grad():
            model.head.weight.copy_(saved.weight)
            model.head.bias.copy_(saved.bias)
        return model, ()
    return model, ("head.bias", "head.weight")


def _adapted(ref: ModelRef, mode: Mode, head: HeadSpec, merge: bool = True) -> tuple[nn.Module, tuple[str, ...]]:
    """The base of an adapter with the adapter merged into its weights, or (`merge=False`) beside them."""
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise ModelError(f"'{ref.text}' is an adapter; reading it needs peft: pip install 'budwood[peft]'.") from error
    assert ref.base is not None and ref.path is not None
    if head.pool != "auto":
        raise ModelError(
            f"'{ref.text}' is an adapter, whose head is its own: --pool {head.pool} cannot be used with it."
        )
    if PeftConfig.from_pretrained(str(ref.path)).is_prompt_learning:
        raise ModelError(
            f"'{ref.text}' is an adapter of learned prompts, which has no weights to be merged into its base. Give an "
            "adapter of weights, such as LoRA."
        )
    model, fresh = _adapted(ref.base, mode, head) if ref.base.base else _plain(ref.base, mode, head)
    before = {n: p.detach().clone() for n, p in named(model).items() if n in fresh}
    try:
        patched = PeftModel.from_pretrained(model, str(ref.path), is_trainable=not merge)
        # reading an adapter freezes its base: merged, it is a model like any other
        joined = patched.merge_and_unload().requires_grad_(True) if merge else patched.get_base_model()
    except (ValueError, RuntimeError, KeyError, OSError, SafetensorError, UnpicklingError) as error:
        raise ModelError(f"The adapter '{ref.text}' does not fit its base ({_first_line(error)}).") from error
    after = named(joined)
    return joined, tuple(n for n in fresh if n in after and torch.equal(after[n], before[n]))


def positions(model: nn.Module, tokenizer: Any) -> int:
    """Most tokens a row may have: the model's positions, or the tokenizer's limit where that is smaller."""
    limit = int(getattr(model.config, "max_position_embeddings", 0) or UNBOUNDED)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            limit = module.num_embeddings - module.padding_idx - 1  # such models count from behind the padding index
    own = int(tokenizer.model_max_length or UNBOUNDED)
    return min(limit, own) if 0 < own < UNBOUNDED else limit


def save(loaded: Loaded, directory: Path) -> None:
    """Write model and tokenizer as a Hugging Face directory that `load` (and transformers) reads again."""
    directory.mkdir(parents=True, exist_ok=True)
    model: Any = loaded.model
    if isinstance(model, Pooled):
        write_pooled(model, directory)
    else:
        model.save_pretrained(directory)
    loaded.tokenizer.save_pretrained(directory)


def random_weights(model: nn.Module, seed: int) -> nn.Module:
    """A new model of the same architecture with initial weights drawn from `seed`; the given one is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "random weights"))
        if isinstance(model, Pooled):
            inner = type(model.backbone)(copy.deepcopy(model.backbone.config))
            if getattr(model.backbone, "pooler", inner) is None:
                inner.pooler = None
            fresh: nn.Module = Pooled(inner, model.pool, model.labels, model.mask_id)
            _renew(fresh, ("head.weight", "head.bias"))
        else:
            fresh = type(model)(copy.deepcopy(model.config))
    first = next(model.parameters())
    return fresh.to(device=first.device, dtype=first.dtype).eval()

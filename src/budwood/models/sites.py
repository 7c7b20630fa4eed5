"""Sites: where the embeddings, the blocks and the language-model head of a model are, by canonical names.

Shapes: B examples, T tokens, M readouts, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from budwood.errors import ModelError
from budwood.params.tree import prefixes

LmHead = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Family:
    """Where things are inside the backbone of one model type; "" = there is none."""

    blocks: str
    embeddings: str
    final_norm: str = ""


@dataclass(frozen=True)
class Sites:
    """The places of one model. `blocks`: every distinct block once ("block.0", ...); `n_layers` counts their uses."""

    backbone: nn.Module
    embeddings: nn.Module | None
    blocks: tuple[tuple[str, nn.Module], ...]
    n_layers: int
    final_norm: nn.Module | None
    lm_head: LmHead | None


FAMILIES = {
    "bert": Family("encoder.layer", "embeddings"),
    "roberta": Family("encoder.layer", "embeddings"),
    "xlm-roberta": Family("encoder.layer", "embeddings"),
    "camembert": Family("encoder.layer", "embeddings"),
    "distilbert": Family("transformer.layer", "embeddings"),
    "albert": Family("encoder.albert_layer_groups", "embeddings"),
    "electra": Family("encoder.layer", "embeddings"),
    "deberta": Family("encoder.layer", "embeddings"),
    "deberta-v2": Family("encoder.layer", "embeddings"),
    "gpt2": Family("h", "wte", "ln_f"),
    "gpt_neox": Family("layers", "embed_in", "final_layer_norm"),
    "llama": Family("layers", "embed_tokens", "norm"),
}


def _distilbert(model: nn.Module) -> LmHead:
    m: Any = model
    return lambda h: m.vocab_projector(m.vocab_layer_norm(m.activation(m.vocab_transform(h))))


def _electra(model: nn.Module) -> LmHead:
    m: Any = model
    return lambda h: m.generator_lm_head(m.generator_predictions(h))


def _deberta(model: nn.Module) -> LmHead:
    m: Any = model
    if hasattr(m, "lm_predictions"):
        return lambda h: m.lm_predictions(h, m.deberta.embeddings.word_embeddings)
    return m.cls


# class name -> LM head; other classes go through their whole forward pass, which is always right and sometimes slower
LM_HEADS: dict[str, Callable[[Any], LmHead]] = {
    "BertForMaskedLM": lambda m: m.cls,
    "RobertaForMaskedLM": lambda m: m.lm_head,
    "XLMRobertaForMaskedLM": lambda m: m.lm_head,
    "CamembertForMaskedLM": lambda m: m.lm_head,
    "DistilBertForMaskedLM": _distilbert,
    "AlbertForMaskedLM": lambda m: m.predictions,
    "ElectraForMaskedLM": _electra,
    "DebertaForMaskedLM": _deberta,
    "DebertaV2ForMaskedLM": _deberta,
    "GPT2LMHeadModel": lambda m: m.lm_head,
    "GPTNeoXForCausalLM": lambda m: m.get_output_embeddings(),
    "LlamaForCausalLM": lambda m: m.lm_head,
    "MistralForCausalLM": lambda m: m.lm_head,
    "Qwen2ForCausalLM": lambda m: m.lm_head,
}


def _roberta_transform(model: Any) -> LmHead:
    head = model.lm_head
    return lambda h: head.layer_norm(functional.gelu(head.dense(h)))


def _albert_transform(model: Any) -> LmHead:
    head = model.predictions
    return lambda h: head.LayerNorm(head.activation(head.dense(h)))


def _distilbert_transform(model: Any) -> LmHead:
    return lambda h: model.vocab_layer_norm(model.activation(model.vocab_transform(h)))


# class name -> what the masked-LM head does before its output embedding
LM_TRANSFORMS: dict[str, Callable[[Any], LmHead]] = {
    "BertForMaskedLM": lambda m: m.cls.predictions.transform,
    "RobertaForMaskedLM": _roberta_transform,
    "XLMRobertaForMaskedLM": _roberta_transform,
    "CamembertForMaskedLM": _roberta_transform,
    "DistilBertForMaskedLM": _distilbert_transform,
    "AlbertForMaskedLM": _albert_transform,
    "ElectraForMaskedLM": lambda m: m.generator_predictions,
}


def lm_transform(model: nn.Module) -> LmHead:
    """The part of a masked-LM head that comes before the output embedding: states [M, D] to states [M, D]."""
    name = type(unwrapped(model)).__name__
    if name not in LM_TRANSFORMS:
        raise ModelError(
            f"The masked-LM transform of a {name} is not known. Known: {', '.join(LM_TRANSFORMS)}. Use the features "
            "'cls' or 'mask', or --mode prompt with a model that has a masked-LM head."
        )
    return LM_TRANSFORMS[name](unwrapped(model))


def unwrapped(model: nn.Module) -> nn.Module:
    """The Hugging Face model inside an adapter wrapper; any other model itself."""
    wrapper = prefixes(model)[1]
    return model.get_submodule(wrapper[:-1]) if wrapper else model


def backbone_of(model: nn.Module) -> nn.Module:
    """The part that turns tokens into hidden states."""
    prefix = prefixes(model)[0]
    return model.get_submodule(prefix[:-1]) if prefix else model


def sites(model: nn.Module) -> Sites:
    """Embeddings, blocks and head of a model; unknown types by their longest list of modules."""
    backbone = backbone_of(model)
    config: Any = getattr(backbone, "config", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    layers = _find(backbone, family.blocks) if family else None
    if family is None or layers is None:
        family, layers = Family("", ""), _longest(backbone)
    blocks = tuple((f"block.{i}", block) for i, block in enumerate(layers.children()))
    embeddings = _find(backbone, family.embeddings) or _embeddings(backbone)
    head = LM_HEADS.get(type(unwrapped(model)).__name__)
    return Sites(
        backbone=backbone,
        embeddings=embeddings,
        blocks=blocks,
        n_layers=int(getattr(config, "num_hidden_layers", len(blocks))),
        final_norm=_find(backbone, family.final_norm),
        lm_head=head(unwrapped(model)) if head else None,
    )


def _find(module: nn.Module, path: str) -> nn.Module | None:
    if not path:
        return None
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _longest(backbone: nn.Module) -> nn.Module:
    """The module list with most entries (the first of equals): the blocks of an unknown architecture."""
    lists = [m for m in backbone.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise ModelError(
            f"No blocks were found in a {type(backbone).__name__}: it holds no list of layers. Models with a stack of "
            f"layers work; known types: {', '.join(sorted(FAMILIES))}."
        )
    return max(lists, key=len)


def _embeddings(backbone: nn.Module) -> nn.Module | None:
    getter = getattr(backbone, "get_input_embeddings", None)
    return getter() if getter else None


def model_inputs(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the model may be given, on its device.

    Token types are dropped where the model has fewer than two: GPT-2 would look them up as words.
    """
    config: Any = getattr(backbone_of(model), "config", None)
    types = getattr(config, "type_vocab_size", None) or 0
    device = next(model.parameters()).device
    return {k: v.to(device) for k, v in inputs.items() if k != "token_type_ids" or types > 1}


def run(module: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    """The output of a model or of its backbone; nothing is kept for generating further tokens."""
    return module(**inputs, use_cache=False) if _caches(type(module).forward) else module(**inputs)


@functools.cache
def _caches(forward: Callable[..., Any]) -> bool:
    return "use_cache" in inspect.signature(forward).parameters


def hidden_states(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """n_layers + 1 tensors [B, T, D]: the embedding output, then the output of every block, from one pass.

    The last one is what the backbone returns, so it has passed the final norm where there is one.
    """
    out = backbone_of(model)(**model_inputs(model, inputs), output_hidden_states=True)
    return tuple(out.hidden_states)


def lm_logits(model: nn.Module, inputs: Mapping[str, Tensor], rows_M: Tensor, positions_M: Tensor) -> Tensor:
    """logits_MV of the language-model head at M places only: row `rows_M`, position `positions_M` of the batch."""
    place = sites(model)
    fit = model_inputs(model, inputs)
    device = fit["input_ids"].device
    rows_M, positions_M = rows_M.to(device), positions_M.to(device)
    if place.lm_head is None:
        return run(model, fit).logits[rows_M, positions_M]
    return place.lm_head(run(place.backbone, fit)[0][rows_M, positions_M])

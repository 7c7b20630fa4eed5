"""Tiny random models of every family, built from configurations with a seed, and toy batches for every objective."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from budwood.data.batch import IGNORE, Batch, Features, collate
from budwood.models.objective import Head, Objective, Span, Tokens, Words

VOCABULARY, WIDTH, LAYERS, POSITIONS = 40, 16, 3, 32
PAD = 1
ENCODERS = ("bert", "roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2")
DECODERS = ("gpt2", "gpt_neox", "llama")
FAMILIES = (*ENCODERS, *DECODERS)
FORMS = {
    "head": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "span": "AutoModelForQuestionAnswering",
    "backbone": "AutoModel",
}
CLASSES = 3

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": PAD,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_RELATIVE = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "type_vocab_size": 2,
    "pooler_hidden_size": WIDTH,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", {**_COMMON, **_NO_DROPOUT}),
    "roberta": ("RobertaConfig", {**_COMMON, **_NO_DROPOUT}),
    "distilbert": (
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": WIDTH,
            "n_layers": LAYERS,
            "n_heads": 2,
            "hidden_dim": 24,
            "max_position_embeddings": POSITIONS,
            "pad_token_id": PAD,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "seq_classif_dropout": 0.0,
            "qa_dropout": 0.0,
        },
    ),
    "albert": ("AlbertConfig", {**_COMMON, **_NO_DROPOUT, "embedding_size": 8, "classifier_dropout_prob": 0.0}),
    "electra": ("ElectraConfig", {**_COMMON, **_NO_DROPOUT, "embedding_size": 8, "summary_last_dropout": 0.0}),
    "deberta": ("DebertaConfig", {**_COMMON, **_NO_DROPOUT, **_RELATIVE}),
    "deberta-v2": (
        "DebertaV2Config",
        {
            **_COMMON,
            **_NO_DROPOUT,
            **_RELATIVE,
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "conv_kernel_size": 3,
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": 2,
            "n_positions": POSITIONS,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": PAD,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {**_COMMON, "bos_token_id": 0, "eos_token_id": 0}),
    "llama": ("LlamaConfig", {**_COMMON, "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 0}),
}


def config_of(family: str, **changes: Any) -> Any:
    """The configuration of a tiny model."""
    import transformers

    name, settings = CONFIGS[family]
    return getattr(transformers, name)(**{**settings, **changes})


def build(
    family: str, form: str = "lm", seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any
) -> nn.Module:
    """A tiny random model in evaluation mode; weights are spread widely so that no gradient is negligible."""
    import transformers

    auto = FORMS.get(form) or ("AutoModelForCausalLM" if family in DECODERS else "AutoModelForMaskedLM")
    if form in ("head", "tokens"):
        changes = {"num_labels": CLASSES, **changes}
    if form == "regression":
        changes = {"num_labels": 1, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, auto).from_config(config_of(family, **changes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model = model.to(dtype).eval()
    exact_norms(model)
    return model


def exact_norms(model: nn.Module) -> None:
    """Let RMS norms compute in the model's own type: the library's always round to float32, which hides errors."""
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = _rms_norm.__get__(module)  # type: ignore[method-assign]  # only this instance is changed


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


@dataclass(frozen=True)
class Case:
    """A model, what it is asked, and features to ask it about."""

    model: nn.Module
    objective: Objective
    features: Features

    def batch(self, index: list[int] | None = None) -> Batch:
        """The features at `index` (default: all) as one batch."""
        return collate(self.features, list(range(len(self.features))) if index is None else index, PAD)


OBJECTIVES = ("head", "regression", "words", "soft", "tokens", "lm", "span")
FORM_OF = {"head": "head", "regression": "regression", "tokens": "tokens", "span": "span"}


def case(family: str, objective: str, seed: int = 0, rows: int = 4, dtype: torch.dtype = torch.float64) -> Case:
    """A toy problem for a family and one of OBJECTIVES."""
    made: dict[str, Objective] = {
        "head": Head(),
        "regression": Head(regression=True),
        "words": Words((5, 9, 11)),
        "soft": Words((5, 9), (0.0, 5.0)),
        "tokens": Tokens(lm=False),
        "lm": Tokens(lm=True),
        "span": Span(),
    }
    model = build(family, FORM_OF.get(objective, "lm"), seed, dtype)
    return Case(
        model, made[objective], toy_features(objective, seed, rows, with_types=family in ("bert", "electra", "albert"))
    )


def toy_features(objective: str, seed: int = 0, rows: int = 4, with_types: bool = False) -> Features:
    """Random rows of unequal lengths, with the columns that an objective reads; words repeat within a row."""
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.permutation(np.arange(5, 5 + rows))]
    ids = [[int(t) for t in rng.integers(3, 14, n)] for n in lengths]
    ragged: dict[str, list[list[int]]] = {"input_ids": ids}
    fixed: dict[str, list[int] | list[float]] = {}
    if with_types:
        ragged["token_type_ids"] = [[int(i >= n // 2) for i in range(n)] for n in lengths]
    if objective in ("head", "words"):
        fixed["label"] = [int(rng.integers(CLASSES)) for _ in lengths]
    if objective in ("regression", "soft"):
        fixed["label"] = [float(rng.uniform(0, 5)) for _ in lengths]
    if objective in ("words", "soft"):
        fixed["read_at"] = [int(rng.integers(1, n)) for n in lengths]
    if objective in ("tokens", "lm"):
        most = CLASSES if objective == "tokens" else VOCABULARY
        ragged["target"] = [[int(rng.integers(most)) if i % 2 else IGNORE for i in range(n)] for n in lengths]
    if objective == "span":
        ragged["allowed"] = [[int(i != 1) for i in range(n)] for n in lengths]
        fixed["start"] = [int(rng.choice([0, 2, 3])) for _ in lengths]
        fixed["end"] = [int(rng.choice([0, 3, 4])) for _ in lengths]
    return Features.from_lists([f"row/{i}" for i in range(rows)], ragged, fixed)


def tiny_tokenizer() -> Any:
    """A word-level fast tokenizer over VOCABULARY made-up words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    words = special + [f"w{i}" for i in range(len(special), VOCABULARY)]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=POSITIONS, **names)


def write_model(directory: Path, family: str = "bert", form: str = "lm", seed: int = 0, **changes: Any) -> Path:
    """A tiny model and its tokenizer as a Hugging Face directory."""
    model: Any = build(family, form, seed, torch.float32, **changes)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory

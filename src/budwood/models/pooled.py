"""A linear head on pooled hidden states, for readings that a family's own classifier does not offer.

Shapes: B examples, T tokens, D hidden, K outputs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from budwood.errors import ModelError
from budwood.models.sites import run
from budwood.store.files import writing

Pool = Literal["cls", "mask", "last", "mean"]


@dataclass(frozen=True)
class Logits:
    """What a head returns, under the name that Hugging Face models use."""

    logits: Tensor


@dataclass(frozen=True)
class SavedHead:
    """A head on disk."""

    pool: Pool
    labels: tuple[str, ...]
    weight: Tensor
    bias: Tensor


class Pooled(nn.Module):
    """logits_BK = dropout(pool(hidden_BTD)) W + b.

    pool: cls = the first token, mask = the mask token, last = the last real token, mean = the mean of the real tokens.
    """

    base_model_prefix = "backbone"

    def __init__(self, backbone: nn.Module, pool: Pool, labels: tuple[str, ...], mask_id: int | None) -> None:
        super().__init__()
        self.backbone: Any = backbone
        self.config: Any = backbone.config
        self.pool: Pool = pool
        self.labels = labels
        self.mask_id = mask_id
        rate = next((m.p for m in backbone.modules() if isinstance(m, nn.Dropout)), 0.0)
        self.dropout = nn.Dropout(rate)
        self.head = nn.Linear(self.config.hidden_size, len(labels))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Logits:
        """Logits of every example."""
        given = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        hidden_BTD = run(self.backbone, {"input_ids": input_ids, **{k: v for k, v in given.items() if v is not None}})[
            0
        ]
        real_BT = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if self.pool == "mean":
            weight_BT = (real_BT / real_BT.sum(1, keepdim=True)).to(hidden_BTD.dtype)
            pooled_BD = torch.einsum("bt,btd->bd", weight_BT, hidden_BTD)
        else:  # read, not multiplied by zeros elsewhere: whoever looks which positions count sees this one alone
            pooled_BD = hidden_BTD[torch.arange(len(input_ids), device=input_ids.device), self._at(input_ids, real_BT)]
        return Logits(self.head(self.dropout(pooled_BD)))

    def _at(self, input_ids: Tensor, real_BT: Tensor) -> Tensor:
        """at_B: the token of every row whose state is read."""
        if self.pool == "mask":
            is_mask_BT = input_ids == self.mask_id
            if not bool(is_mask_BT.any(1).all()):
                raise ModelError(
                    "--pool mask reads the state at the mask token, and a row has none. Give a --template with {mask}."
                )
            return is_mask_BT.int().argmax(1)
        return real_BT.sum(1) - 1 if self.pool == "last" else torch.zeros_like(input_ids[:, 0])


def write_pooled(model: Pooled, directory: Path) -> None:
    """The backbone as a Hugging Face directory, with head.safetensors and pool.json beside it."""
    model.backbone.save_pretrained(directory)
    tensors = {
        "weight": model.head.weight.detach().cpu().contiguous(),
        "bias": model.head.bias.detach().cpu().contiguous(),
    }
    with writing(directory / "head.safetensors") as part:
        save_file(tensors, part)
    with writing(directory / "pool.json") as part:
        part.write_text(json.dumps({"pool": model.pool, "labels": list(model.labels)}, indent=2), encoding="utf-8")


def read_pooled(directory: Path) -> SavedHead:
    """The head that `write_pooled` wrote."""
    try:
        facts = json.loads((directory / "pool.json").read_text(encoding="utf-8"))
        tensors = load_file(directory / "head.safetensors")
        return SavedHead(facts["pool"], tuple(facts["labels"]), tensors["weight"], tensors["bias"])
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"The head in '{directory}' cannot be read ({error}). Save the model again.") from error

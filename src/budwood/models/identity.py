"""Hashes by which models and tokenizers are known, whatever their files are called."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from budwood.params.tree import named


def model_hash(model: nn.Module) -> str:
    """A hash of every parameter's canonical name, shape and float32 bytes."""
    h = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(named(model).items()):
        value: Tensor = parameter.detach().to("cpu", torch.float32).contiguous()
        h.update(f"{name}\x00{tuple(value.shape)}\x00".encode())
        h.update(value.numpy().tobytes())
    return h.hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of every token and its id: two tokenizers with the same one number words alike."""
    h = hashlib.blake2b(digest_size=16)
    for token, number in sorted(tokenizer.get_vocab().items()):
        h.update(f"{number}\x00{token}\x00".encode("utf-8", "surrogatepass"))
    return h.hexdigest()


def tokenizer_rules_hash(tokenizer: Any) -> str:
    """A hash of all that decides which ids a text becomes: its tokens and every rule of a fast tokenizer.

    Padding and truncation are no part of it: each call sets them anew, and they stay as the last call left them.
    """
    text = tokenizer.backend_tokenizer.to_str()
    _, _, rules = text.partition('"added_tokens"')  # both are written before it
    return hashlib.blake2b((rules or text).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

"""Pre-trains the shipped models on `tiny-text`: `python -m budwood.studies.pretrain tiny-bert --out DIR`.

Shapes: B rows of a batch, T tokens of the longest row, M masked positions, V words of the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from budwood.data import world
from budwood.data.batch import IGNORE, seed_of
from budwood.errors import ConfigError, nearest
from budwood.studies.vocabulary import POSITIONS, make_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerFast

WIDTH, LAYERS, HEADS = 128, 4, 4
STD = 0.06  # of the first weights: layers this narrow stay silent for long at the usual 0.02
COMMON = 1000
REPORT = 100  # steps between two lines of progress
Inputs = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, real, segment, each [B, T]


@dataclass(frozen=True)
class Plan:
    """One pre-training run: everything that decides its weights."""

    name: str
    seed: int = 0
    steps: int = 2600
    tokens: int = 1024  # per batch, padding included
    lr: float = 1e-3
    warmup: float = 0.06  # share of the steps
    mask_rate: float = 0.12
    vocabulary: int = 2000
    short_epochs: int = 3  # of pieces of passages, before whole ones


# ---------------------------------------------------------------- models


def make_model(name: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> nn.Module:
    """The untrained model, initialised from the seed alone."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(name, "weights", seed))
        if name == "tiny-bert":
            return BertForMaskedLM(
                BertConfig(
                    vocab_size=len(tokenizer),
                    hidden_size=WIDTH,
                    num_hidden_layers=LAYERS,
                    num_attention_heads=HEADS,
                    intermediate_size=4 * WIDTH,
                    max_position_embeddings=POSITIONS,
                    hidden_dropout_prob=0.0,
                    attention_probs_dropout_prob=0.0,
                    initializer_range=STD,
                    pad_token_id=tokenizer.pad_token_id,
                )
            )
        end = tokenizer.eos_token_id
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(tokenizer),
                n_positions=POSITIONS,
                n_embd=WIDTH,
                n_layer=LAYERS,
                n_head=HEADS,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                initializer_range=STD,
                bos_token_id=end,
                eos_token_id=end,
                pad_token_id=end,
            )
        )


# ---------------------------------------------------------------- rows and batches


@dataclass(frozen=True)
class Rows:
    """Token ids of rows and, for tiny-bert, the place where a second segment begins (the length where none does)."""

    ids: list[list[int]]
    second: list[int]


def pieces(docs: Sequence[list[list[int]]], most: int, rng: np.random.Generator) -> list[list[list[int]]]:
    """The passages cut into runs of 2 to `most` sentences."""
    out = []
    for doc in docs:
        start = 0
        while start < len(doc):
            stop = start + int(rng.integers(2, most + 1))
            out.append(doc[start:stop])
            start = stop
    return out


def bert_rows(docs: Sequence[list[list[int]]], frame: tuple[int, int], seed: int, epoch: int) -> Rows:
    """Passages as one segment, as two cut at a sentence, or two passages as two segments, drawn anew every epoch."""
    rng = np.random.default_rng(seed_of(seed, "rows", epoch))
    cls, sep = frame
    order = rng.permutation(len(docs)).tolist()
    ids: list[list[int]] = []
    second: list[int] = []
    while order:
        doc = docs[order.pop()]
        at = rng.random()
        if at < 0.5 or len(doc) < 2:
            first, rest = doc, []
        elif at < 0.95 or not order:
            cut = int(rng.integers(1, len(doc)))
            first, rest = doc[:cut], doc[cut:]
        else:
            first, rest = doc, docs[order.pop()]
        row = [cls, *(t for s in first for t in s), sep]
        second.append(len(row))
        ids.append((row + [t for s in rest for t in s] + ([sep] if rest else []))[:POSITIONS])
    return Rows(ids, second)


def gpt_rows(docs: Sequence[list[list[int]]], end: int, seed: int, epoch: int) -> Rows:
    """One passage, or now and then two, each closed by the end token."""
    rng = np.random.default_rng(seed_of(seed, "rows", epoch))
    order = rng.permutation(len(docs)).tolist()
    ids: list[list[int]] = []
    while order:
        row = [t for s in docs[order.pop()] for t in s] + [end]
        if order and rng.random() < 0.1:
            row += [t for s in docs[order.pop()] for t in s] + [end]
        ids.append(row[:POSITIONS])
    return Rows(ids, [len(row) for row in ids])


def batches(rows: Rows, tokens: int, seed: int, epoch: int) -> Iterator[np.ndarray]:
    """Row numbers of batches of at most `tokens` padded tokens, similar lengths together, in random order."""
    lengths_N = np.array([len(r) for r in rows.ids])
    order = np.argsort(lengths_N, kind="stable")
    cuts, start = [], 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * lengths_N[order[stop]] <= tokens:
            stop += 1
        cuts.append(order[start:stop])
        start = stop
    for i in np.random.default_rng(seed_of(seed, "batches", epoch)).permutation(len(cuts)):
        yield cuts[i]


@dataclass(frozen=True)
class Masker:
    """Chooses what is hidden.

    A rare token that stands once in its row cannot be guessed and is chosen less often; the last word of a sentence,
    which answers the question or sums up, is chosen four times as often.
    """

    mask_id: int  # the words of the vocabulary come after it
    common_V: np.ndarray  # tokens that make up at least one in `COMMON` of the text
    rate: float
    stop_id: int  # the full stop

    def __call__(self, ids_BT: np.ndarray, real_BT: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(corrupted ids, targets): of the chosen tokens 8 in 10 are masked, 1 is random, 1 stays."""
        rng = np.random.default_rng(seed)
        size = len(self.common_V)
        key_BT = ids_BT + size * np.arange(len(ids_BT))[:, None]
        repeated_BT = np.bincount(key_BT.ravel(), minlength=size * len(ids_BT))[key_BT] > 1
        rate_BT = np.where(repeated_BT | self.common_V[ids_BT], self.rate, self.rate / 4)
        rate_BT[:, :-1] *= np.where(ids_BT[:, 1:] == self.stop_id, 4.0, 1.0)
        chosen_BT = (rng.random(ids_BT.shape) < rate_BT) & real_BT & (ids_BT > self.mask_id)
        fate_BT = rng.random(ids_BT.shape)
        random_BT = rng.integers(self.mask_id + 1, size, ids_BT.shape)
        out_BT = np.where(chosen_BT & (fate_BT < 0.8), self.mask_id, ids_BT)
        out_BT = np.where(chosen_BT & (fate_BT >= 0.9), random_BT, out_BT)
        return out_BT, np.where(chosen_BT, ids_BT, IGNORE)


def pad(rows: Rows, index: np.ndarray, pad_id: int) -> Inputs:
    """(ids, real, segment), each [B, T]."""
    width = max(len(rows.ids[i]) for i in index)
    ids_BT = np.full((len(index), width), pad_id, dtype=np.int64)
    for b, i in enumerate(index):
        ids_BT[b, : len(rows.ids[i])] = rows.ids[i]
    real_BT = np.arange(width) < np.array([len(rows.ids[i]) for i in index])[:, None]
    segment_BT = (np.arange(width) >= np.array([rows.second[i] for i in index])[:, None]) & real_BT
    return ids_BT, real_BT, segment_BT.astype(np.int64)


# ---------------------------------------------------------------- losses


def mlm_loss(model: Any, masker: Masker, inputs: Inputs, seed: int) -> Tensor:
    """Mean loss over the masked tokens of a batch; the vocabulary is scored at those positions alone."""
    import torch
    from torch.nn.functional import cross_entropy

    ids_BT, real_BT, segment_BT = inputs
    input_BT, target_BT = masker(ids_BT, real_BT, seed)
    hidden_BTD = model.bert(
        input_ids=torch.from_numpy(input_BT),
        attention_mask=None if real_BT.all() else torch.from_numpy(real_BT.astype(np.int64)),
        token_type_ids=torch.from_numpy(segment_BT),
    ).last_hidden_state
    where_BT = torch.from_numpy(target_BT != IGNORE)
    return cross_entropy(model.cls(hidden_BTD[where_BT]), torch.from_numpy(target_BT)[where_BT])


def clm_loss(model: Any, inputs: Inputs) -> Tensor:
    """Mean loss over the next tokens of a batch."""
    import torch
    from torch.nn.functional import cross_entropy

    ids_BT, real_BT, _ = inputs
    input_BT = torch.from_numpy(ids_BT)
    where_BT = torch.from_numpy(real_BT)[:, 1:]  # padding stands on the right, where no real token looks
    hidden_BTD = model.transformer(input_ids=input_BT).last_hidden_state[:, :-1]
    return cross_entropy(model.lm_head(hidden_BTD[where_BT]), input_BT[:, 1:][where_BT])


# ---------------------------------------------------------------- the run


def sentences(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> list[list[list[int]]]:
    """Token ids of every sentence of every passage."""
    parts = [[p + " ." for p in text.removesuffix(" .").split(" . ")] for text in texts]
    byte_level = tokenizer.mask_token is None
    flat = [(" " if byte_level and i else "") + p for doc in parts for i, p in enumerate(doc)]
    coded = iter(tokenizer(flat, add_special_tokens=False)["input_ids"])
    return [[next(coded) for _ in doc] for doc in parts]


def rows_of(plan: Plan, docs: list[list[list[int]]], tokenizer: PreTrainedTokenizerFast, epoch: int) -> Rows:
    """The rows of one epoch: short pieces first, in which attention soon finds what belongs together."""
    if epoch < plan.short_epochs:
        docs = pieces(docs, 5, np.random.default_rng(seed_of(plan.seed, "pieces", epoch)))
    if plan.name == "tiny-gpt":
        return gpt_rows(docs, tokenizer.eos_token_id, plan.seed, epoch)
    return bert_rows(docs, (tokenizer.cls_token_id, tokenizer.sep_token_id), plan.seed, epoch)


def make_masker(docs: list[list[list[int]]], tokenizer: PreTrainedTokenizerFast, rate: float) -> Masker:
    """The masker of a text."""
    count_V = np.bincount([t for doc in docs for s in doc for t in s], minlength=len(tokenizer))
    common_V = count_V * COMMON >= count_V.sum()
    return Masker(tokenizer.mask_token_id, common_V, rate, tokenizer.convert_tokens_to_ids("."))


def held_out_loss(model: Any, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> float:
    """Mean loss over passages, one row each: next tokens, or 15 in 100 tokens masked in a fixed way."""
    import torch

    causal = tokenizer.mask_token is None
    flat = [[t for s in doc for t in s] for doc in sentences(texts, tokenizer)]
    if causal:
        ids = [[*d, tokenizer.eos_token_id] for d in flat]
    else:
        ids = [[tokenizer.cls_token_id, *d, tokenizer.sep_token_id] for d in flat]
        masker = Masker(tokenizer.mask_token_id, np.ones(len(tokenizer), bool), 0.15, stop_id=-1)
    rows = Rows(ids, [len(i) for i in ids])
    model.eval()
    losses = []
    with torch.no_grad():
        for i in range(len(ids)):
            inputs = pad(rows, np.array([i]), tokenizer.pad_token_id)
            loss = clm_loss(model, inputs) if causal else mlm_loss(model, masker, inputs, seed_of("held-out", i))
            losses.append(float(loss))
    return sum(losses) / len(losses)


def train(plan: Plan) -> tuple[Any, PreTrainedTokenizerFast, dict[str, Any]]:
    """(model, tokenizer, manifest) of one run."""
    import torch

    started = time.perf_counter()
    task = world.load("tiny-text")
    texts = [r.text for r in task.rows("train")]
    tokenizer = make_tokenizer(plan.name, texts, plan.vocabulary)
    model: Any = make_model(plan.name, tokenizer, plan.seed)
    docs = sentences(texts, tokenizer)
    masker = make_masker(docs, tokenizer, plan.mask_rate) if plan.name == "tiny-bert" else None
    optimizer = make_optimizer(model, plan)
    model.train()
    seen, running, epoch = 0, 0.0, 0
    for step, (at, inputs) in enumerate(islice(stream(plan, docs, tokenizer), plan.steps)):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * schedule(step, plan)
        seed = seed_of(plan.seed, "mask", step)
        loss = mlm_loss(model, masker, inputs, seed) if masker else clm_loss(model, inputs)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        epoch = at
        seen += int(inputs[1].sum())
        running += float(loss.detach())
        if (step + 1) % REPORT == 0:
            speed = seen / (time.perf_counter() - started)
            print(f"step {step + 1:5d}  loss {running / REPORT:.4f}  {speed:,.0f} tokens/s", flush=True)
            running = 0.0
    facts = {
        "loss": held_out_loss(model, tokenizer, [r.text for r in task.rows("validation")[:50]]),
        "loss_on": "the first 50 validation passages of tiny-text",
        "epochs": epoch + 1,
        "trained_tokens": seen,
        "data": {"task": "tiny-text", "seed": 0, "digest": task.digest},
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(time.perf_counter() - started, 1),
        "threads": torch.get_num_threads(),
        "versions": {
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "tokenizers": version("tokenizers"),
        },
    }
    return model, tokenizer, {**asdict(plan), **facts, "command": f"python -m budwood.studies.pretrain {plan.name}"}


def stream(plan: Plan, docs: list[list[list[int]]], tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[int, Inputs]]:
    """Batches without end, each with the number of its epoch."""
    for epoch in count():
        rows = rows_of(plan, docs, tokenizer, epoch)
        for index in batches(rows, plan.tokens, plan.seed, epoch):
            yield epoch, pad(rows, index, tokenizer.pad_token_id)


def make_optimizer(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    """AdamW that lets matrices decay and leaves biases and norms alone."""
    import torch

    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.lr)


def schedule(step: int, plan: Plan) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    warm = max(1, int(plan.warmup * plan.steps))
    if step < warm:
        return (step + 1) / warm
    return 0.05 + 0.475 * (1 + math.cos(math.pi * (step - warm) / max(1, plan.steps - warm)))


def save(directory: Path, model: Any, tokenizer: PreTrainedTokenizerFast, manifest: dict[str, Any]) -> None:
    """A Hugging Face directory with its manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: which model, where to, and optionally seed, steps and threads."""
    parser = argparse.ArgumentParser(
        prog="python -m budwood.studies.pretrain", description="Pre-train a shipped model."
    )
    parser.add_argument("name", help="tiny-bert or tiny-gpt")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(arguments)
    if given.name not in PLANS:
        raise ConfigError(
            f"'{given.name}' is no shipped model: give tiny-bert or tiny-gpt.{nearest(given.name, PLANS)}"
        )
    import torch

    torch.set_num_threads(given.threads)
    plan = PLANS[given.name]
    plan = Plan(**{**asdict(plan), "seed": given.seed, "steps": given.steps or plan.steps})
    save(given.out, *train(plan))


PLANS = {"tiny-bert": Plan("tiny-bert"), "tiny-gpt": Plan("tiny-gpt", steps=1500)}

if __name__ == "__main__":
    main()

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
from budwood.data.world.lexicon import PEOPLE, PLACES, RIVERS
from budwood.errors import ConfigError, nearest
from budwood.studies.first_weights import arrange
from budwood.studies.passages import (
    Inputs,
    Masker,
    Passage,
    Rows,
    batches,
    bert_rows,
    echoed,
    gpt_rows,
    lines_of,
    pad,
    read,
)
from budwood.studies.vocabulary import POSITIONS, make_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerFast

WIDTH, LAYERS, HEADS = 128, 4, 4
STD = 0.06  # of the first weights: layers this narrow stay silent for long at the usual 0.02
DROPOUT = 0.2  # for those who fine-tune tiny-bert: it would soon know their rows by heart; pre-training needs none
BETAS = (0.9, 0.99)
REPORT = 100  # steps between two lines of progress


@dataclass(frozen=True)
class Plan:
    """One pre-training run: everything that decides its weights."""

    name: str
    seed: int = 0
    steps: int = 18000
    tokens: int = 256  # per batch, padding included: skills come with the number of updates, not of tokens
    lr: float = 7e-4
    warmup: float = 0.06  # share of the steps
    mask_rate: float = 0.2
    answer_rate: float = 0.5  # of label words and of answers to questions
    vocabulary: int = 2000
    short_epochs: int = 3  # of single lines, before whole passages come in
    echo: float = 0.0  # share of tiny-bert's short rows that are said twice
    short: float = 0.0  # share of its rows that end early
    focus: float = 0.0  # share of its rows with label words or answers in which those alone are masked


# ---------------------------------------------------------------- models


def make_model(name: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> nn.Module:
    """The untrained model, initialised from the seed alone."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(name, "weights", seed))
        if name == "tiny-bert":
            model = BertForMaskedLM(
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
            arrange(model)
            return model
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


def rows_of(plan: Plan, passages: list[Passage], tokenizer: PreTrainedTokenizerFast, epoch: int) -> Rows:
    """The rows of one epoch."""
    # single lines first: in them attention soon finds what belongs together
    shown = lines_of(passages, 0.0 if epoch < plan.short_epochs else 0.5, plan.seed, epoch)
    if plan.name == "tiny-gpt":
        return gpt_rows(shown, tokenizer.eos_token_id, tokenizer("\n")["input_ids"][0])
    frame = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    return echoed(bert_rows(shown, frame, plan.short, plan.seed, epoch), frame, plan.echo, plan.seed, epoch)


def make_masker(tokenizer: PreTrainedTokenizerFast, plan: Plan) -> Masker:
    """The masker of tiny-bert. Names and numbers can hardly be guessed and would drown the rest: masked rarely."""
    names = tokenizer([*PEOPLE, *PLACES, *RIVERS, *"0123456789"], add_special_tokens=False)["input_ids"]
    rate_V = np.full(len(tokenizer), plan.mask_rate)
    rate_V[sorted({t for pieces in names for t in pieces})] = plan.mask_rate / 5
    labels = {w for name in world.NAMES if (t := world.load(name).template) for w in t.words}
    rate_V[tokenizer.convert_tokens_to_ids(sorted(labels))] = plan.answer_rate
    rate_V[: tokenizer.mask_token_id + 1] = 0.0
    mask, stop = tokenizer.convert_tokens_to_ids([tokenizer.mask_token, "."])
    return Masker(rate_V, mask, stop, plan.answer_rate, plan.mask_rate, plan.focus)


def held_out_loss(model: Any, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> float:
    """Mean loss over passages, one row each: next tokens, or 15 in 100 tokens masked in a fixed way."""
    import torch

    causal = tokenizer.mask_token is None
    passages = read(texts, tokenizer)
    if causal:
        ids = gpt_rows(passages, tokenizer.eos_token_id, tokenizer("\n")["input_ids"][0]).ids
    else:
        cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
        ids = [[cls, *(t for line in p for s in line for t in s), sep][:POSITIONS] for p in passages]
        plain_V = np.where(np.arange(len(tokenizer)) > tokenizer.mask_token_id, 0.15, 0.0)
        masker = Masker(plain_V, tokenizer.mask_token_id, stop_id=-1, answer=0.0, again=0.0, focus=0.0)
    rows = Rows(ids, [len(i) for i in ids])
    model.eval()
    losses = []
    with torch.no_grad():
        for i in range(len(ids)):
            inputs = pad(rows, np.array([i]), tokenizer.pad_token_id)
            loss = clm_loss(model, inputs) if causal else mlm_loss(model, masker, inputs, seed_of("held-out", i))
            losses += [float(loss)] if bool(loss.isfinite()) else []  # a short passage may have no masked token
    return sum(losses) / len(losses) if losses else 0.0


def train(plan: Plan) -> tuple[Any, PreTrainedTokenizerFast, dict[str, Any]]:
    """(model, tokenizer, manifest) of one run."""
    import torch

    started = time.perf_counter()
    task = world.load("tiny-text")
    texts = [r.text for r in task.rows("train")]
    tokenizer = make_tokenizer(plan.name, texts, plan.vocabulary)
    model: Any = make_model(plan.name, tokenizer, plan.seed)
    passages = read(texts, tokenizer)
    masker = make_masker(tokenizer, plan) if plan.name == "tiny-bert" else None
    optimizer = make_optimizer(model, plan)
    model.train()
    seen, running, epoch = 0, 0.0, 0
    for step, (at, inputs) in enumerate(islice(stream(plan, passages, tokenizer), plan.steps)):
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


def stream(plan: Plan, passages: list[Passage], tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[int, Inputs]]:
    """Batches without end, each with the number of its epoch."""
    for epoch in count():
        rows = rows_of(plan, passages, tokenizer, epoch)
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
    return torch.optim.AdamW(groups, lr=plan.lr, betas=BETAS, fused=True)


def schedule(step: int, plan: Plan) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    warm = max(1, int(plan.warmup * plan.steps))
    if step < warm:
        return (step + 1) / warm
    return 0.05 + 0.475 * (1 + math.cos(math.pi * (step - warm) / max(1, plan.steps - warm)))


def save(directory: Path, model: Any, tokenizer: PreTrainedTokenizerFast, manifest: dict[str, Any]) -> None:
    """A Hugging Face directory with its manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    if manifest["name"] == "tiny-bert":
        model.config.update({"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT})
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


PLANS = {
    "tiny-bert": Plan("tiny-bert", steps=33000, lr=1e-3, echo=0.1, short=0.4, focus=0.5),
    "tiny-gpt": Plan("tiny-gpt"),
}

if __name__ == "__main__":
    main()

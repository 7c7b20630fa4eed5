"""The state f of every row: one forward pass per (model, rows, prompt), in shards that are jobs.

Shapes: N rows, B rows of a batch, D width.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from budwood.config.linear import LinearConfig, Read
from budwood.data import encode
from budwood.data.batch import Features, budget_batches
from budwood.data.cache import rows_digest
from budwood.data.encoding import Encoding
from budwood.data.opened import Key
from budwood.data.registry import PUBLIC
from budwood.data.source import load_task
from budwood.data.task import Row, Task, Template
from budwood.engine.jobs import Job
from budwood.engine.run import run_all
from budwood.errors import ConfigError, DataError, StoreError
from budwood.methods.session import RUNS, Session
from budwood.models.identity import model_hash, tokenizer_rules_hash
from budwood.models.load import HeadMissing, HeadSpec, Loaded, load
from budwood.models.output import states_at
from budwood.models.reading import RowFeed, reads_left_to_right
from budwood.models.reference import ModelRef, resolve
from budwood.models.sites import backbone_of, model_inputs, run
from budwood.params import tree
from budwood.store.files import canonical
from budwood.train.evaluate import evaluating
from budwood.train.plan import device_for

TOKENS, SHARD = 8192, 4096
SUBJECT = {True: "with prompt", False: "without prompt"}


@dataclass(frozen=True)
class Speaker:
    """A model that is read: `speaks` says whether it has an output embedding."""

    loaded: Loaded
    causal: bool
    speaks: bool


def load_speaker(ref: ModelRef, device: str) -> Speaker:
    """The model with its language-model head; an encoder that has none is read without it."""
    causal = reads_left_to_right(ref)
    try:
        return Speaker(load(ref, "clm" if causal else "mlm", device=device), causal, True)
    except HeadMissing:
        return Speaker(load(ref, "head", HeadSpec(labels=("no", "yes")), device=device), causal, False)


def prompt_of(cfg: LinearConfig, task: Task) -> str:
    """The words that end a text: the user's, the registry's, or what the task's causal wording puts behind it."""
    if cfg.prompt_text is not None:
        return cfg.prompt_text.strip()
    if task.name in PUBLIC and PUBLIC[task.name].feature_prompt:
        return PUBLIC[task.name].feature_prompt.strip()
    wording = task.template.causal if task.template else ""
    before, _, after = wording.partition("{text}")
    if before or not after.strip() or "{" in after:
        raise DataError(f"Task '{task.name}' has no prompt that follows its text. Give one with --prompt-text.")
    return after.strip()


def place_of(wish: Read, speaker: Speaker, prompted: bool) -> Read:
    """Where the state is read."""
    if wish == "auto":
        if speaker.causal:
            return "last"
        return "mean" if not speaker.speaks else "mask" if prompted else "cls"
    if wish == "mask" and (speaker.causal or not speaker.speaks or not prompted):
        raise ConfigError(
            "--read mask reads the mask behind a prompt: it needs a masked language model and --prompt. Use --read "
            f"{'last' if speaker.causal else 'cls'}."
        )
    if speaker.speaks and speaker.causal and wish == "cls":
        raise ConfigError("--read cls is the first token, which in a causal model has seen nothing. Use --read last.")
    return wish


def encoded(speaker: Speaker, rows: Sequence[Row], prompt: str | None, place: Read, length: int | None) -> Features:
    """Tokens of the rows with `read_at`; too long a row loses text, never the prompt."""
    tokenizer = speaker.loaded.tokenizer
    enc = Encoding(positions=speaker.loaded.positions, max_length=length)
    paired = any(r.pair is not None for r in rows)
    body = "{text} {pair}" if paired else "{text}"
    if place == "mask":
        return encode.encode_words(rows, tokenizer, enc, Template(masked=f"{body} {prompt} {{mask}} ."), causal=False)
    if speaker.causal:
        wording = f"{body} {prompt}" if prompt else body
        return encode.encode_words(rows, tokenizer, enc, Template(causal=wording), causal=True)
    if prompt:  # the beginning of a long text is cut, so that the prompt at its end stays
        joined = (" ".join(filter(None, [r.text.rstrip(), r.pair, prompt])) for r in rows)
        rows = [replace(r, text=text, pair=None) for r, text in zip(rows, joined)]
        enc = replace(enc, truncate="head")
    made = encode.encode_head(rows, tokenizer, enc)
    at_N = made.lengths_N - 1 if place == "last" else np.zeros(len(rows), np.int64)
    return replace(made, fixed={**made.fixed, "read_at": at_N.astype(np.int64)})


def states(speaker: Speaker, features: Features, place: Read) -> Tensor:
    """state_ND of encoded rows, float32."""
    model = speaker.loaded.model
    feed = RowFeed(features, int(speaker.loaded.tokenizer.pad_token_id or 0))
    out: Tensor | None = None
    with evaluating(model):
        for index in budget_batches(features.lengths_N, TOKENS, 512):
            batch = feed(index)
            if place == "mean" or not speaker.speaks:
                state_BD = _pooled(model, batch, place)
            else:
                state_BD = states_at(model, batch.inputs, torch.arange(len(batch)), batch.targets["read_at"])
            if out is None:
                out = torch.empty(len(features), state_BD.shape[1])
            out[torch.from_numpy(index)] = state_BD.float().cpu()
    assert out is not None
    return out


def _pooled(model: Any, batch: Any, place: Read) -> Tensor:
    """The backbone's last states at the place, or their mean over real tokens."""
    inputs = model_inputs(model, batch.inputs)
    hidden_BTD = run(backbone_of(model), inputs)[0]
    if place != "mean":
        return hidden_BTD[torch.arange(len(batch)), batch.targets["read_at"].to(hidden_BTD.device)]
    real_BT = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).to(hidden_BTD)
    return torch.einsum("bt,btd->bd", real_BT / real_BT.sum(1, keepdim=True), hidden_BTD)


# ---------------------------------------------------------------- jobs


@dataclass(frozen=True)
class Shop:
    """A model and the rows it reads: the train split, then the reported one."""

    speaker: Speaker
    task: Task
    cfg: LinearConfig

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every row that gets features."""
        return (*self.task.rows("train"), *self.task.rows(self.task.reported))

    def asks(self, prompted: bool) -> tuple[str | None, Read]:
        """Prompt and place."""
        return (prompt_of(self.cfg, self.task) if prompted else None), place_of(self.cfg.read, self.speaker, prompted)


@lru_cache(maxsize=1)
def open_shop(key: Key) -> Shop:
    """The shop behind a key, loaded once per process."""
    settings = json.loads(key.settings)
    cfg = LinearConfig(**settings["cfg"])
    ref = resolve(settings["model"], runs_dir=RUNS, revision=cfg.revision, offline=True)
    return Shop(load_speaker(ref, device_for(cfg.device)), key.task or load_task(cfg), cfg)


def settings_for(session: Session) -> dict[str, Any]:
    """What a shard's job has to know."""
    dumped = session.cfg.model_dump(mode="json")
    return {"model": session.models[0].text, "cfg": dumped, "task": session.task.name}


def shard(arguments: dict[str, Any], part: Path) -> None:
    """Job: the states of one stretch of rows."""
    number, prompted = arguments.pop("shard"), arguments.pop("prompted")
    shop = open_shop(Key(canonical(arguments)))
    prompt, place = shop.asks(prompted)
    rows = shop.rows[number * SHARD : (number + 1) * SHARD]
    features = encoded(shop.speaker, rows, prompt, place, shop.cfg.max_length)
    info = {"truncated": str(features.info.get("truncated", 0))}
    save_file({"state": states(shop.speaker, features, place)}, part, metadata=info)


def collect_states(session: Session, shop: Shop, prompted: bool) -> Tensor:
    """state_ND of all rows, from shards in the run; written as features/NAME.safetensors with a manifest."""
    name = "prompt" if prompted else "plain"
    kept = session.run.file("features", f"{name}.safetensors")
    if shop.cfg.features_from is not None:
        return reused(shop, prompted)
    if kept.exists():
        return load_file(kept)["f"]
    arguments = {**settings_for(session), "prompted": prompted}
    jobs = [
        Job(
            "budwood.methods.linear.states:shard",
            {**arguments, "shard": i},
            session.run.file("shards", f"{name}-{i:05d}.safetensors"),
        )
        for i in range(-(-len(shop.rows) // SHARD))
    ]
    with session.progress.stage(f"states {SUBJECT[prompted]}", len(jobs), sum(j.done for j in jobs)) as bar:
        run_all(jobs, session.cfg, lambda job: bar.advance(1))
    state_ND = torch.cat([load_file(job.output)["state"] for job in jobs])
    tree.save(kept, {"f": state_ND}, manifest(shop, prompted))
    for job in jobs:
        job.output.unlink()
    return state_ND


def manifest(shop: Shop, prompted: bool) -> dict[str, Any]:
    """What features were made of."""
    prompt, place = shop.asks(prompted)
    return {
        "artefact": "features",
        "model": shop.speaker.loaded.ref.text,
        "model_hash": model_hash(shop.speaker.loaded.model),
        "task": shop.task.name,
        "rows": rows_digest(shop.rows),
        "prompt": prompt or "",
        "read": place,
        "tokenizer": tokenizer_rules_hash(shop.speaker.loaded.tokenizer)[:16],
        "max_length": shop.cfg.max_length or 0,
    }


def reused(shop: Shop, prompted: bool) -> Tensor:
    """States of an earlier run; refused by name where anything they were made of differs."""
    folder = shop.cfg.features_from or Path()
    path = folder / "features" / f"{'prompt' if prompted else 'plain'}.safetensors"
    if not path.exists():
        there = ", ".join(sorted(p.name for p in folder.glob("features/*.safetensors"))) or "none"
        raise StoreError(
            f"--features-from {folder} holds no states {SUBJECT[prompted]} (there: {there}). Give a run of `linear` "
            f"{SUBJECT[prompted]}, or leave --features-from out."
        )
    found, made_of = tree.load(path)
    wanted = manifest(shop, prompted)
    same = ("tokenizer", "rows", "prompt", "read", "max_length")
    names = {"model_hash": "model", **{n: n for n in same}}
    for key, told in names.items():
        if made_of.get(key) != wanted[key]:
            name = "model" if told == "model" else key
            raise StoreError(
                f"The features in {path} were built from another {told}: {made_of.get(name)!r} there, "
                f"{wanted[name]!r} here. Leave --features-from out, so that they are made anew."
            )
    return found["f"]

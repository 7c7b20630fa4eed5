"""The feature store: every layer's states of a split of a task, from one forward pass, on disk.

An extraction is named by its content (weights, tokenizer, wording, rows, kind), so a changed prompt or model never
meets old features. Rows go in shards, each a job that writes one file of 16-bit numbers with one scale per layer;
layers are read back one at a time.
Shapes: B examples, T tokens, D hidden, L layers (0: embedding output), M kept states of all rows laid end to end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from budwood.capture.activations import activations
from budwood.config.probe import FeatureConfig
from budwood.data.batch import IGNORE, Batch, Features, budget_batches
from budwood.data.opened import Key
from budwood.data.source import load_task
from budwood.data.task import Task
from budwood.engine.jobs import Job
from budwood.engine.run import Where, Wish, run_all
from budwood.errors import DataError, ModelError
from budwood.models.identity import model_hash, tokenizer_rules_hash
from budwood.models.load import load, random_weights
from budwood.models.mode import in_mode
from budwood.models.reading import Reading, head_spec, mode_for, reading
from budwood.models.reference import resolve
from budwood.models.sites import lm_transform, model_inputs, run, sites
from budwood.store.files import cache_dir, canonical, digest, write_json

FeatureKind = Literal["token", "target", "allowed", "cls", "last", "mean", "mask", "mlm-cls", "mlm-mask"]
TOKENS = 1024  # padded tokens of a batch: what a layer makes of them stays near the cores
MANY = 8192  # on other devices, where calls are what costs
HERE = Where()
SHARD = 2048  # rows of a file: what is lost when a run is killed
PEAK = 1024.0  # largest stored |value|: far from float16's limits on both sides
FORMAT = 1


@dataclass(frozen=True)
class Ask:
    """Which features: a model, settings of data and reading (as a dict), a split, a kind; `random`: a seed of fresh
    weights in place of the model's own.

    kind  token: every token; target: tokens with a label; allowed: tokens where an answer may lie; cls, last, mean,
          mask: one state per row; mlm-cls, mlm-mask: the same after the transform of the masked-LM head, last layer
          only.
    """

    model: str
    settings: Mapping[str, Any]
    split: str
    kind: FeatureKind
    random: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, for a job."""
        return {
            "model": self.model,
            "settings": dict(self.settings),
            "split": self.split,
            "kind": self.kind,
            "random": self.random,
        }


@dataclass(frozen=True)
class Stored:
    """Features on disk, or (`planned`) what they would be. `offsets_N1` cuts the M states by encoded row (row i alone
    where the kind keeps one each).
    """

    ask: Ask
    directory: Path
    encoded: Features
    offsets_N1: np.ndarray
    layers: int

    def layer(self, number: int) -> Tensor:
        """states_MD of one layer, float32; 0 is the embedding output."""
        if not 0 <= number < self.layers:
            raise DataError(f"There is no layer {number}: layers are 0 (embeddings) to {self.layers - 1}.")
        parts = []
        for path in sorted(self.directory.glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as f:
                    parts.append(f.get_tensor(f"layer.{number}").float().mul_(f.get_tensor("scale")[number]))
            except SafetensorError as e:
                raise DataError(f"{path} is damaged ({e}). Delete it and run the same command again.") from e
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def states(model: nn.Module, batch: Batch, kind: FeatureKind, mask_id: int | None = None) -> list[Tensor]:
    """What is kept of a batch, one [m, D] tensor per layer: rows in the batch's order, tokens from left to right."""
    inputs = model_inputs(model, batch.inputs)
    with in_mode(model, training=False), torch.no_grad(), activations(model) as seen:
        run(sites(model).backbone, inputs)
    real_BT = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    if kind == "mean":
        weight_BT = real_BT / real_BT.sum(1, keepdim=True)
        return [torch.einsum("bt,btd->bd", weight_BT, s.float()) for s in seen]
    if kind in ("token", "target", "allowed"):
        keep_BT = {
            "token": lambda: real_BT,
            "target": lambda: batch.targets["target"] != IGNORE,
            "allowed": lambda: (batch.targets["allowed"] != 0) & real_BT,
        }[kind]()
        at_M = keep_BT.flatten().nonzero()[:, 0]  # once for all layers: a mask would be searched again for each
        return [s.flatten(0, 1).index_select(0, at_M).float() for s in seen]
    at_B = _place(batch.inputs["input_ids"], real_BT, kind, mask_id)
    rows_B = torch.arange(len(at_B))
    if kind.startswith("mlm-"):
        with in_mode(model, training=False), torch.no_grad():
            return [lm_transform(model)(seen[-1][rows_B, at_B]).float()]
    return [s[rows_B, at_B].float() for s in seen]


def _place(ids_BT: Tensor, real_BT: Tensor, kind: str, mask_id: int | None) -> Tensor:
    if kind.endswith("mask"):
        is_mask_BT = ids_BT == mask_id
        if mask_id is None or not bool(is_mask_BT.any(1).all()):
            raise ModelError(
                "These features are read at the mask token, and a row has none. Give a prompt with {mask}."
            )
        return is_mask_BT.int().argmax(1)
    return real_BT.sum(1) - 1 if kind == "last" else torch.zeros(len(ids_BT), dtype=torch.long)


@lru_cache(maxsize=1)
def _model(key: Key) -> Reading:
    given = json.loads(key.settings)
    cfg = FeatureConfig(**given["settings"])
    task = key.task or load_task(cfg)
    ref = resolve(given["model"], runs_dir=Path("runs"), revision=cfg.revision, offline=True)
    mode = mode_for(cfg, task, ref)
    loaded = load(ref, mode, head_spec(task, cfg), seed=cfg.model_seed or 0)
    if given["random"] is not None:
        loaded = type(loaded)(
            random_weights(loaded.model, given["random"]), loaded.tokenizer, ref, loaded.positions, loaded.fresh
        )
    return reading(loaded, task, cfg, mode, cfg.seed)


def open_reading(ask: Ask, task: Task | None = None) -> Reading:
    """The model of an extraction at its task; the last one is kept in memory."""
    return _model(Key(canonical({k: v for k, v in ask.as_dict().items() if k not in ("split", "kind")}), task))


def config_of(cfg: Any) -> dict[str, Any]:
    """The settings of any verb that decide how rows are read, for `Ask.settings`."""
    fields = FeatureConfig.model_fields.keys() - {"out", "progress"}
    # `probe --parity` is about training probes, `finetune --parity` about number tasks, which have no features
    return {k: v for k, v in cfg.model_dump(mode="json").items() if k in fields - {"parity"}}


@lru_cache(maxsize=1)
def _weights(model: nn.Module) -> str:
    """The hash of a model that is only read, once for all splits."""
    return model_hash(model)


def key_of(read: Reading, rows_digest: str, ask: Ask) -> str:
    """Name of an extraction: everything that changes a number in it."""
    tokenizer = tokenizer_rules_hash(read.loaded.tokenizer)
    wording = repr((read.mode, read.encoding, read.template))
    return digest([FORMAT, SHARD, _weights(read.loaded.model), tokenizer, wording, rows_digest, ask.kind], 12)


def store(
    ask: Ask,
    task: Task | None = None,
    where: Wish = HERE,
    started: Callable[[int, int], Callable[[int], None]] = lambda total, done: lambda n: None,
    most_bytes: float = math.inf,
) -> Stored:
    """The features asked for: read from disk where they were made before, else made, shard by shard.

    Features that would take more than `most_bytes` are refused before anything is written.
    """
    plan = planned(ask, task)
    size = bytes_of(open_reading(ask, task), plan.encoded, ask.kind)
    if size > most_bytes and not plan.directory.exists():
        raise DataError(
            f"Features of {ask.model} on '{ask.split}' would take {size / 1e9:,.3g} GB, more than the "
            f"{most_bytes / 1e9:,.3g} GB allowed. Give --online to keep none (every epoch runs the model again), fewer "
            "rows with --limit and --limit-eval, or a larger --feature-budget."
        )
    count = -(-len(plan.encoded) // SHARD)
    arguments = ask.as_dict()
    jobs = [
        Job("budwood.capture.features:shard", {**arguments, "shard": i}, plan.directory / f"{i:05d}.safetensors")
        for i in range(count)
    ]
    advance = started(len(plan.encoded), sum(SHARD for j in jobs if j.done))
    run_all(jobs, where, lambda job: advance(SHARD))
    about = {"model": ask.model, "split": ask.split, "kind": ask.kind, "layers": plan.layers}
    if not (plan.directory / "about.json").exists():
        write_json(plan.directory / "about.json", about)
    return plan


def planned(ask: Ask, task: Task | None = None) -> Stored:
    """Where the features asked for lie or would lie, and how they are cut; nothing is written."""
    read = open_reading(ask, task)
    encoded = read.encode(read.task.rows(ask.split))
    rows_digest = digest([encoded.ids, [digest(v.tobytes().hex()) for _, v in sorted(encoded.ragged.items())]])
    home = cache_dir() / "features" / key_of(read, rows_digest, ask)
    offsets_N1 = np.concatenate([[0], np.cumsum(kept_counts(encoded, ask.kind))]).astype(np.int64)
    return Stored(ask, home, encoded, offsets_N1, layer_count(read, ask.kind))


def layer_count(read: Reading, kind: FeatureKind) -> int:
    """Layers that are kept, the embedding output among them."""
    return 1 if kind.startswith("mlm-") else sites(read.loaded.model).n_layers + 1


def kept_counts(encoded: Features, kind: FeatureKind) -> np.ndarray:
    """How many states of every encoded row are kept."""
    if kind == "token":
        return encoded.lengths_N
    if kind in ("target", "allowed"):
        kept = encoded.ragged["target"] != IGNORE if kind == "target" else encoded.ragged["allowed"] != 0
        return np.diff(np.concatenate([[0], np.cumsum(kept)])[encoded.offsets_N1])
    return np.ones(len(encoded), dtype=np.int64)


def shard(arguments: dict[str, Any], part: Path) -> None:
    """Job: all layers of one shard of rows."""
    number = arguments.pop("shard")
    ask = Ask(**arguments)
    read = open_reading(ask)
    encoded = read.encode(read.task.rows(ask.split))
    save_shard(read, encoded, np.arange(number * SHARD, min((number + 1) * SHARD, len(encoded))), ask.kind, part)


def save_shard(read: Reading, encoded: Features, index: np.ndarray, kind: FeatureKind, part: Path) -> None:
    """Run the rows at `index` through the model once and write every layer's kept states, in the order of the rows."""
    feed, mask_id = read.feed(encoded), read.loaded.tokenizer.mask_token_id
    kept = kept_counts(encoded, kind)[index]
    offsets = np.concatenate([[0], np.cumsum(kept)])
    batches = list(budget_batches(encoded.lengths_N[index], TOKENS if read.device == "cpu" else MANY))
    found = [[x.cpu() for x in states(read.loaded.model, feed(index[b], 0), kind, mask_id)] for b in batches]
    at = [torch.from_numpy(np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in b])) for b in batches]
    scale = torch.tensor([max(*(_largest(x) for x in pieces), 1e-20) / PEAK for pieces in zip(*found)])
    tensors = {}
    for i, pieces in enumerate(zip(*found)):
        tensors[f"layer.{i}"] = torch.empty(int(offsets[-1]), pieces[0].shape[1], dtype=torch.float16)
        for where, piece in zip(at, pieces):
            tensors[f"layer.{i}"][where] = (piece / scale[i]).half()
    # one entry: several are written in an order that changes from one process to the next
    save_file({**tensors, "scale": scale}, part, {"features": f"{kind}, format {FORMAT}"})


def _largest(x: Tensor) -> float:
    """Largest magnitude; 0 of nothing."""
    return max(-float(x.min()), float(x.max())) if x.numel() else 0.0


def bytes_of(read: Reading, encoded: Features, kind: FeatureKind) -> int:
    """Bytes that an extraction takes on disk."""
    kept = int(kept_counts(encoded, kind).sum())
    return kept * int(read.loaded.model.config.hidden_size) * 2 * layer_count(read, kind)

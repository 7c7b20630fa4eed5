"""Diagonal Fisher information: how much each weight matters to what a model says on a task.

Sums of squared per-example gradients and counts are kept and divided once. Rows go in shards, each a job that writes
one file; sums are added in the order of the shards, so workers, kills and resumes leave the same bytes.
Shapes: B examples, M readouts, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from budwood.capture.accumulate import Sums
from budwood.capture.gradients import Coverage, Question, cover, per_example_grads, per_example_square_sum
from budwood.capture.questions import labels_for, questions
from budwood.config.fisher import FisherConfig, FisherKind
from budwood.data.batch import Batch, Features, budget_batches
from budwood.data.opened import Key
from budwood.data.task import Task, as_json, from_json
from budwood.engine.jobs import Job
from budwood.engine.run import run_all
from budwood.errors import ModelError
from budwood.figures.mass import mass_by_layer
from budwood.figures.save import drawing, save
from budwood.methods.session import RUNS, Session, fingerprint
from budwood.models.identity import model_hash, tokenizer_hash
from budwood.models.load import Loaded, load
from budwood.models.objective import MAKERS, Objective, Targets
from budwood.models.reading import Reading, as_tuned, head_spec, mode_for, reading
from budwood.models.reference import ModelRef, resolve
from budwood.params import tree
from budwood.params.parts import layer_name, layer_order
from budwood.params.sketch import sketch
from budwood.store.files import canonical, read_json, write_json
from budwood.train.plan import device_for

TOKENS = 4096  # padded tokens per batch of capture
GRADIENTS = 1 << 26  # most numbers of per-example gradients held at once (mas)
ADAM = "adam.safetensors"  # what `finetune --save-second-moments` leaves in its run


def fisher(session: Session) -> dict[str, Any]:
    """Diagonal Fisher of every parameter as fisher.safetensors; returns kind, rows, total and mass by layer."""
    cfg: FisherConfig = session.cfg
    rows = session.task.rows(cfg.on)
    if cfg.kind == "adam":
        return _from_adam(session)
    settings = _settings(session)
    with session.progress.stage("load"):
        shop = _open(Key(canonical(settings), session.task))
        kind = shop.kind
    shards = -(-len(shop.features) // cfg.shard_rows)
    manifest = {**_manifest(session), **_facts(shop)}
    jobs = [
        Job(
            "budwood.methods.fisher:shard", {**settings, "shard": i}, session.run.file("shards", f"{i:05d}.safetensors")
        )
        for i in range(shards)
    ]
    with session.progress.stage("fisher", shards, sum(j.done for j in jobs)) as bar:
        run_all(jobs, cfg, lambda job: bar.advance(1))
    mode = shop.read.mode
    del shop
    _open.cache_clear()  # the model has done its part: weights and sums are never held with a third tree
    total = Sums()
    for job in jobs:
        total.merge(Sums.load(job.output)[0])
    metrics = _kept(session, total.mean(in_place=True), {**manifest, "count": total.count})
    for file in (*(job.output for job in jobs), session.run.file("shards", "rows.json")):
        file.unlink(missing_ok=True)
    return {"kind": kind, "mode": mode, "split": cfg.on, "n": len(rows), "examples": total.count, **metrics}


def _kept(session: Session, mean: dict[str, Tensor], manifest: dict[str, Any]) -> dict[str, Any]:
    """Write the artefact and the figure; returns the summary."""
    tree.save(session.run.file("fisher.safetensors"), mean, manifest)
    metrics = summary(mean)
    with drawing() as axes:
        title = f"{session.models[0].name}, {session.task.name}: Fisher mass ({manifest['kind']})"
        save(axes.figure, session.run.file("figures", "mass"), mass_by_layer(axes, metrics["by_layer"], title))
    return metrics


def _settings(session: Session) -> dict[str, Any]:
    """What a shard has to be told. Workers cannot see this process's rows, so they find them in the run."""
    cfg, model = session.cfg, session.models[0]
    rows = session.run.file("shards", "rows.json")
    if cfg.workers > 1:
        write_json(rows, as_json(session.task))
    return {
        "model": model.text,
        "weights": fingerprint(model),
        "cfg": cfg.model_dump(mode="json"),
        "rows": session.task.digest,
        "file": str(rows) if cfg.workers > 1 else None,
    }


def _from_adam(session: Session) -> dict[str, Any]:
    """The second moments that AdamW left behind after training, as a Fisher file: an estimate that costs nothing."""
    ref, cfg = session.models[0], session.cfg
    path = ref.run / ADAM if ref.run else None
    if path is None or not path.is_file():
        raise ModelError(
            f"'{ref.text}' has no second moments of AdamW to read. Fine-tune with --save-second-moments and give that "
            "run, or use --kind exact, sampled or empirical."
        )
    mean, made = tree.load(path)
    loaded = load(ref, made["mode"], head_spec(session.task, cfg), device="cpu")
    facts = {"kind": "adam", "mode": made["mode"], "count": made["steps"], "looped": [], "unused": []}
    manifest = {**_manifest(session), **_identity(loaded), **facts}
    metrics = _kept(session, mean, manifest)
    return {
        "kind": "adam",
        "mode": made["mode"],
        "split": "train",
        "n": made["rows"],
        "steps": made["steps"],
        **metrics,
    }


@dataclass(frozen=True)
class _Shop:
    """A model at work on one task: what every shard of it needs."""

    read: Reading
    features: Features
    coverage: Coverage
    kind: FisherKind
    cfg: FisherConfig


@lru_cache(maxsize=1)
def _open(key: Key) -> _Shop:
    import json

    settings = json.loads(key.settings)
    cfg = FisherConfig(**settings["cfg"])
    task = key.task or from_json(read_json(Path(settings["file"])))
    ref = resolve(settings["model"], runs_dir=RUNS, revision=cfg.revision, offline=True, force=cfg.force)
    cfg = _as_tuned(cfg, ref, task)
    mode = mode_for(cfg, task, ref)
    loaded = load(ref, mode, head_spec(task, cfg), seed=cfg.model_seed or 0, device=device_for(cfg.device))
    if any(name.startswith("head.") for name in loaded.fresh):
        raise ModelError(
            f"'{ref.text}' has no trained head for task '{task.name}', so its Fisher information would be that of "
            "random weights. Fine-tune it first, or use --mode prompt or mlm."
        )
    read = reading(loaded, task, cfg, mode, cfg.seed)
    features = read.encode(task.rows(cfg.on))
    coverage = cover(loaded.model, read.objective, read.feed(features)(np.arange(min(3, len(features))), 0))
    return _Shop(read, features, coverage, kind_for(cfg, task), cfg)


def _as_tuned(cfg: FisherConfig, ref: ModelRef, task: Task) -> FisherConfig:
    """Rows read as the run was trained, its mode only where it fits the task; only a likelihood has a Fisher."""
    tuned = as_tuned(cfg, ref, task.kind)
    mode = tuned.mode if cfg.mode or (tuned.mode, task.kind) in MAKERS else None
    return tuned.model_copy(update={"mode": mode, "number_loss": 0.0})


def kind_for(cfg: FisherConfig, task: Task) -> FisherKind:
    """The kind asked for, else exact for few labels and sampled for many; exact over a vocabulary is refused."""
    if cfg.kind == "batched" or cfg.kind == "mas" or cfg.kind == "adam":
        return cfg.kind
    return labels_for(cfg.kind, task, "--kind")


def shard(arguments: dict[str, Any], part: Path) -> None:
    """Job: the sums of one shard of rows."""
    number = arguments.pop("shard")
    shop = _open(Key(canonical(arguments)))
    size = shop.cfg.shard_rows
    # longest first, so that rows of one shard have one length and next to nothing is padded
    order = np.argsort(-shop.features.lengths_N, kind="stable")[number * size : (number + 1) * size]
    sums = Sums()
    KINDS[shop.kind](shop, order, sums)
    sums.save(part, {"shard": number, "kind": shop.kind})


def _batches(shop: _Shop, order: np.ndarray) -> list[np.ndarray]:
    lengths = shop.features.lengths_N[order]
    return [order[i] for i in budget_batches(lengths, TOKENS, 256)]


def _squares(ask: Callable[[_Shop, Batch], Sequence[Question]]) -> Callable[[_Shop, np.ndarray, Sums], None]:
    """A kind that is a sum over examples (and questions) of squared gradients."""

    def add(shop: _Shop, order: np.ndarray, sums: Sums) -> None:
        feed = shop.read.feed(shop.features)
        for index in _batches(shop, order):
            batch = feed(index, 0)
            sums.total = per_example_square_sum(
                shop.read.loaded.model, shop.read.objective, batch, ask(shop, batch), shop.coverage, sums.total
            )
            sums.count += len(batch)

    return add


def _ask(shop: _Shop, batch: Batch) -> Sequence[Question]:
    assert shop.kind in ("exact", "sampled", "empirical")
    return questions(shop.kind, shop.read.task, batch, shop.cfg.seed)


def _add_batched(shop: _Shop, order: np.ndarray, sums: Sums) -> None:
    """Squares of batch-mean gradients, one count per batch: what some EWC codes compute."""
    model, objective, feed = shop.read.loaded.model, shop.read.objective, shop.read.feed(shop.features)
    parameters = {n: p for n, p in tree.named(model).items() if n in shop.coverage.names}
    for first in range(0, len(order), shop.cfg.batch_rows):
        batch = feed(order[first : first + shop.cfg.batch_rows], 0)
        loss = objective.loss(objective.logits(model, batch), objective.targets(batch)).mean()
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        found = {n: torch.zeros_like(p) if g is None else g.square() for (n, p), g in zip(parameters.items(), grads)}
        sums.add(found, 1)


def _add_mas(shop: _Shop, order: np.ndarray, sums: Sums) -> None:
    """|gradient of the squared norm of the output|, summed over examples."""
    model, objective, feed = shop.read.loaded.model, shop.read.objective, shop.read.feed(shop.features)
    size = max(1, GRADIENTS // sum(p.numel() for p in model.parameters()))
    question = Question(lambda z_MC, targets: _squared_norm(objective, z_MC, targets))
    for first in range(0, len(order), size):
        batch = feed(order[first : first + size], 0)
        grads = per_example_grads(model, objective, batch, question, shop.coverage)
        sums.add({n: g.abs().sum(0) for n, g in grads.items()}, len(batch))


def _squared_norm(objective: Objective, logits_MC: Tensor, targets: Targets) -> Tensor:
    value_M = torch.where(logits_MC.isfinite(), logits_MC, 0.0).square().sum(1)
    if targets.row_M is None:
        return value_M
    return value_M.new_zeros(targets.count).index_add(0, targets.row_M, value_M)


# kind "adam" is read, not computed
KINDS: dict[FisherKind, Callable[[_Shop, np.ndarray, Sums], None]] = {
    "exact": _squares(_ask),
    "sampled": _squares(_ask),
    "empirical": _squares(_ask),
    "batched": _add_batched,
    "mas": _add_mas,
}


def _manifest(session: Session) -> dict[str, Any]:
    return {
        "artefact": "fisher",
        "task": session.task.name,
        "rows": session.task.digest,
        "seed": session.cfg.seed,
        "model": session.models[0].text,
    }


def _facts(shop: _Shop) -> dict[str, Any]:
    return {
        "kind": shop.kind,
        "mode": shop.read.mode,
        **_identity(shop.read.loaded),
        "looped": list(shop.coverage.looped),
        "unused": list(shop.coverage.unused),
    }


def _identity(loaded: Loaded) -> dict[str, Any]:
    """What tells one model from another: family, weights, tokenizer."""
    return {
        "model_type": loaded.model.config.model_type,
        "model_hash": model_hash(loaded.model),
        "tokenizer": tokenizer_hash(loaded.tokenizer),
        "sketch": sketch(tree.named(loaded.model)),
    }


def summary(mean: dict[str, Tensor]) -> dict[str, Any]:
    """Total mass, mass by layer, and how concentrated it is."""
    by_layer: dict[str, float] = {}
    for name, value in mean.items():
        part = layer_name(name)
        by_layer[part] = by_layer.get(part, 0.0) + float(value.double().sum())
    parameters = sum(v.numel() for v in mean.values())
    count = max(1, parameters // 100)
    best = torch.cat([v.flatten().topk(min(count, v.numel())).values for v in mean.values()])
    top = best.topk(count).values.double().sum()
    total = sum(by_layer.values())
    return {
        "total": total,
        "by_layer": {k: by_layer[k] for k in sorted(by_layer, key=layer_order)},
        "parameters": parameters,
        "share_of_top_1_percent": float(top) / total if total else 0.0,
    }

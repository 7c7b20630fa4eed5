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
from budwood.data.source import load_task
from budwood.data.task import Task
from budwood.engine.jobs import Job
from budwood.engine.run import run_all
from budwood.errors import ModelError
from budwood.figures.mass import mass_by_layer
from budwood.figures.save import drawing, save
from budwood.methods.session import RUNS, Session
from budwood.models.load import load, model_hash
from budwood.models.objective import Objective, Targets
from budwood.models.reading import Reading, head_spec, mode_for, reading
from budwood.models.reference import resolve
from budwood.params import tree
from budwood.params.select import layer_of
from budwood.store.files import canonical
from budwood.train.plan import device_for

TOKENS = 4096  # padded tokens per batch of capture
GRADIENTS = 1 << 26  # most numbers of per-example gradients held at once (mas)


def fisher(session: Session) -> dict[str, Any]:
    """Diagonal Fisher of every parameter as fisher.safetensors; returns kind, rows, total and mass by layer."""
    cfg: FisherConfig = session.cfg
    rows = session.task.rows(cfg.on)
    with session.progress.stage("load"):
        settings = {"model": session.models[0].text, "cfg": cfg.model_dump(mode="json"), "task": session.task.name}
        shop = _open(_Key(canonical(settings), session.task))
        kind = shop.kind
    shards = -(-len(shop.features) // cfg.shard_rows)
    jobs = [
        Job(
            "budwood.methods.fisher:shard", {**settings, "shard": i}, session.run.file("shards", f"{i:05d}.safetensors")
        )
        for i in range(shards)
    ]
    with session.progress.stage("fisher", shards, sum(j.done for j in jobs)) as bar:
        run_all(jobs, cfg, lambda job: bar.advance(1))
    total = Sums()
    for job in jobs:
        total.merge(Sums.load(job.output)[0])
    manifest = _manifest(session, shop, total.count)
    mean = total.mean()
    tree.save(session.run.file("fisher.safetensors"), mean, manifest)
    metrics = _summary(mean)
    with drawing() as axes:
        title = f"{session.models[0].name}, {session.task.name}: Fisher mass ({kind})"
        save(axes.figure, session.run.file("figures", "mass"), mass_by_layer(axes, metrics["by_layer"], title))
    for job in jobs:
        job.output.unlink()
    return {"kind": kind, "mode": shop.read.mode, "split": cfg.on, "n": len(rows), **metrics}


@dataclass(frozen=True)
class _Shop:
    """A model at work on one task: what every shard of it needs."""

    read: Reading
    features: Features
    coverage: Coverage
    kind: FisherKind
    cfg: FisherConfig


@dataclass(frozen=True)
class _Key:
    """What identifies a shop; the task rides along where it is already in memory."""

    settings: str
    task: Task | None = None

    def __hash__(self) -> int:
        return hash(self.settings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.settings == self.settings


@lru_cache(maxsize=1)
def _open(key: _Key) -> _Shop:
    import json

    settings = json.loads(key.settings)
    cfg = FisherConfig(**settings["cfg"])
    task = key.task or load_task(cfg)
    ref = resolve(settings["model"], runs_dir=RUNS, revision=cfg.revision, offline=True)
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


def kind_for(cfg: FisherConfig, task: Task) -> FisherKind:
    """The kind asked for, else exact for few labels and sampled for many; exact over a vocabulary is refused."""
    if cfg.kind == "batched" or cfg.kind == "mas":
        return cfg.kind
    return labels_for(cfg.kind, task, "--kind")


def shard(arguments: dict[str, Any], part: Path) -> None:
    """Job: the sums of one shard of rows."""
    number = arguments.pop("shard")
    shop = _open(_Key(canonical(arguments)))
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
            squares = per_example_square_sum(
                shop.read.loaded.model, shop.read.objective, batch, ask(shop, batch), shop.coverage
            )
            sums.add(squares, len(batch))

    return add


def _ask(shop: _Shop, batch: Batch) -> Sequence[Question]:
    assert shop.kind in ("exact", "sampled", "empirical")
    return questions(shop.kind, shop.read.task, shop.read.objective, batch, shop.cfg.seed)


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


KINDS: dict[FisherKind, Callable[[_Shop, np.ndarray, Sums], None]] = {
    "exact": _squares(_ask),
    "sampled": _squares(_ask),
    "empirical": _squares(_ask),
    "batched": _add_batched,
    "mas": _add_mas,
}


def _manifest(session: Session, shop: _Shop, count: int) -> dict[str, Any]:
    return {
        "artefact": "fisher",
        "kind": shop.kind,
        "mode": shop.read.mode,
        "task": session.task.name,
        "rows": session.task.digest,
        "count": count,
        "seed": session.cfg.seed,
        "model": session.models[0].text,
        "model_type": session.models[0].model_type,
        "model_hash": model_hash(shop.read.loaded.model),
        "looped": list(shop.coverage.looped),
        "unused": list(shop.coverage.unused),
    }


def _summary(mean: dict[str, Tensor]) -> dict[str, Any]:
    """Total mass, mass by layer, and how concentrated it is."""
    by_layer: dict[str, float] = {}
    for name, value in mean.items():
        layer = layer_of(name)
        part = f"block.{layer}" if layer is not None else "head" if name.startswith(tree.HEAD) else "embeddings"
        by_layer[part] = by_layer.get(part, 0.0) + float(value.double().sum())
    flat = torch.cat([v.flatten() for v in mean.values()])
    top = flat.topk(max(1, len(flat) // 100)).values.double().sum()
    total = float(flat.double().sum())
    order = sorted(by_layer, key=lambda k: (k == "head", k != "embeddings", int(k.split(".")[1]) if "." in k else -1))
    return {
        "total": total,
        "by_layer": {k: by_layer[k] for k in order},
        "parameters": len(flat),
        "share_of_top_1_percent": float(top) / total if total else 0.0,
    }

"""`influence score`: how much every training row helped every query.

One pass over the training rows serves all queries, strategies and dampings. Rows go in shards, each a job that writes
one file of scores. A positive score is a row that helps: with more weight on it, the query would be answered better.
Shapes: S settings, G groups (all modules, then modules or layers), Q queries, N training rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from budwood.capture.stream import Map
from budwood.config.influence import BASELINES, STRATEGIES, ScoreConfig
from budwood.data.batch import Features
from budwood.data.opened import Key
from budwood.data.task import Row, Task
from budwood.engine.jobs import Job
from budwood.engine.local import run_jobs
from budwood.engine.run import run_all
from budwood.errors import ConfigError, DataError, nearest
from budwood.linalg.ranking import spearman_by_row
from budwood.methods.influence.factors import Factors, Setting, settings_of
from budwood.methods.influence.fit import Bench, fitted, identity, say_damping
from budwood.methods.influence.pairs import TILE, Blocks, Meeting, OnDisk, Resident
from budwood.methods.influence.precondition import (
    Preconditioner,
    Work,
    bytes_needed,
    measurement,
    precondition,
    query_blocks,
)
from budwood.methods.influence.profile import profile
from budwood.methods.influence.scores import Matrix, Stored, Tokens, pack, unpack, writing_scores
from budwood.methods.influence.workshop import ROWS, Shop, memory_budget, open_shop, settings_for
from budwood.methods.session import Session
from budwood.params.select import layer_of
from budwood.store.files import canonical
from budwood.store.progress import Progress

HERE = "budwood.methods.influence.score"
STORED: dict[str, Stored] = {"float32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SIGN = "positive = the training row helps the query"


@dataclass(frozen=True)
class Outcome:
    """Scores of one model: total_SGQN with its groups, and what was used."""

    settings: tuple[Setting, ...]
    groups: tuple[str, ...]
    total_SGQN: np.ndarray
    tokens_SQM: np.ndarray | None
    factors: Factors
    shop: Shop


def score(session: Session) -> dict[str, Any]:
    """Score matrices under RUN/scores; returns strategies, queries, rows and the damping used."""
    cfg: ScoreConfig = session.cfg
    _warn_overlap(session, rows := query_rows(session.task, cfg))
    outcomes = []
    if set(cfg.strategy) & set(STRATEGIES):
        for number, model in enumerate([session.models[0].text, *cfg.checkpoints]):
            place = session.run.path if number == 0 else session.run.file("checkpoints", str(number))
            outcomes.append(scored(cfg, model, session.task, place, session.progress))
    with session.progress.stage("save"):
        told = _write(session, outcomes, rows)
    if cfg.profile:
        told["profile"] = profile(session)
    for parts in session.run.path.rglob("parts"):
        shutil.rmtree(parts)
    return told


def query_rows(task: Task, cfg: ScoreConfig) -> list[Row]:
    """The rows that are asked about: a whole split, its first rows, or rows by id."""
    split = cfg.query_split or task.reported
    rows = list(task.rows(split))
    if not cfg.queries:
        return rows
    by_id = {r.id: r for r in rows}
    if len(cfg.queries) == 1 and cfg.queries[0].isdigit():
        return rows[: int(cfg.queries[0])]
    for wish in cfg.queries:
        if wish not in by_id:
            raise DataError(f"Split '{split}' of '{task.name}' has no row '{wish}'.{nearest(wish, by_id)}")
    return [by_id[i] for i in cfg.queries]


def _warn_overlap(session: Session, rows: Sequence[Row]) -> None:
    """Say which queries are training rows as well: their best helper is themselves."""
    seen = {(r.text, r.pair, r.words): r.id for r in session.task.rows(session.cfg.train_split)}
    both = [(r.id, seen[key]) for r in rows if (key := (r.text, r.pair, r.words)) in seen]
    if both:
        shown = ", ".join(f"{q} = {n}" for q, n in both[:5])
        session.progress.say(
            f"{len(both)} of {len(rows)} queries are training rows too ({shown}{' ...' if len(both) > 5 else ''}): "
            "they will look like their own best helpers."
        )
        session.progress.event(overlap=[list(x) for x in both])


def scored(cfg: ScoreConfig, model: str, task: Task, place: Path, progress: Progress) -> Outcome:
    """Scores of one model, its factors fitted at `place` where none are given."""
    own = settings_for(cfg, model)
    with progress.stage("load"):
        shop = open_shop(own, task)
    bench = Bench(shop, own, place / "factors", cfg, progress)
    factors = given_factors(cfg.factors, shop) if cfg.factors else fitted(bench)
    arguments = {
        **own,
        "factors": str(factors.path),
        "stamp": [shop.hash, factors.stamp],
        "score": {k: v for k, v in cfg.model_dump(mode="json").items() if k in ScoreConfig.model_fields},
        "place": str(place),
    }
    with progress.stage("queries"):
        desk = _desk(Key(canonical(arguments), task))
    order = np.argsort(-shop.train.lengths_N, kind="stable")
    pieces = [order[i : i + cfg.shard_rows] for i in range(0, len(order), cfg.shard_rows)]
    jobs = [
        Job(f"{HERE}:score_shard", {**arguments, "shard": i}, place / "parts" / f"scores-{i:05d}.npz")
        for i in range(len(pieces))
    ]
    with progress.stage("scores", len(jobs), sum(j.done for j in jobs)) as bar:
        run_all(jobs, cfg, lambda job: bar.advance(1))
    return _assembled(desk, factors, jobs, pieces)


def given_factors(path: Path, shop: Shop) -> Factors:
    """Factors of another run, which must be those of this model, these rows and these settings."""
    factors = Factors.open(path)
    factors.check(identity(shop))
    return factors


@dataclass(frozen=True)
class _Desk:
    """Everything a shard of scores needs."""

    shop: Shop
    ready: Preconditioner
    blocks: Blocks
    queries: Features
    cfg: ScoreConfig
    rows: int  # rows of the query blocks: queries, or 1 where they are summed

    @property
    def groups(self) -> tuple[str, ...]:
        """All modules (""), then modules or layers."""
        return ("", *dict.fromkeys(g for m in self.shop.maps for g in groups_of(m, self.cfg)))


def groups_of(m: Map, cfg: ScoreConfig) -> list[str]:
    """The groups a map belongs to, besides all."""
    layer = layer_of(f"{m.name}.weight")
    layer_name = f"layer.{layer}" if layer is not None else "head"
    return [g for g, wanted in ((m.name, cfg.per_module), (layer_name, cfg.per_layer)) if wanted]


@lru_cache(maxsize=1)
def _desk(key: Key) -> _Desk:
    given = json.loads(key.settings)
    cfg = ScoreConfig(**given["score"])
    shop = open_shop(given, key.task)
    features = shop.read.encode(query_rows(shop.read.task, cfg))
    ready = ready_for(shop, Factors.open(Path(given["factors"])), cfg, len(features))
    summed = "query" in cfg.aggregate
    rows = 1 if summed else len(features)
    blocks: Blocks
    if summed or bytes_needed(ready, rows) * 1.2 < _room(cfg, shop, rows):
        blocks = Resident(rows, shop.like, summed)
        fill(shop, ready, features, cfg, blocks)
    else:
        job = Job(f"{HERE}:query_file", given, Path(given["place"]) / "parts" / "queries.bin")
        run_jobs([job], 1)
        blocks = OnDisk.at(job.output, ready, rows, shop.like)
    return _Desk(shop, ready, blocks, features, cfg, rows)


def ready_for(shop: Shop, factors: Factors, cfg: Any, queries: int) -> Preconditioner:
    """Preconditioner of the settings asked for; scores by token need queries turned back to weights."""
    settings = settings_of(cfg.strategy, cfg.damping)
    work = Work(queries, len(shop.train), float(shop.train.lengths_N.mean()))
    return precondition(factors, settings, work, "back" if getattr(cfg, "per_token", False) else None)


def _room(cfg: ScoreConfig, shop: Shop, queries: int) -> int:
    """Bytes left for query blocks, after model, activations and tiles; too little for one tile is refused."""
    size = shop.like.element_size()
    fixed = 3 * size * sum(p.numel() for p in shop.model.parameters()) + 4 * size * TILE
    fixed += 64 * size * max(m.columns for m in shop.maps) * 4096
    least = fixed + 2 * size * queries * max(m.columns for m in shop.maps)
    budget = memory_budget(cfg.max_memory)
    if cfg.max_memory is not None and budget < least:
        raise ConfigError(
            f"--max-memory {cfg.max_memory} is too little for one tile of {queries} queries: it takes at least "
            f"{least / 1e6:,.0f} MB. Give more memory or fewer --queries."
        )
    return budget - fixed


def fill(shop: Shop, ready: Preconditioner, features: Features, cfg: Any, blocks: Blocks) -> None:
    """Compute all query blocks."""
    question = measurement(shop.read.objective, cfg.measurement)
    most = getattr(cfg, "query_batch", None) or 64
    query_blocks(shop, ready, features, np.arange(len(features)), question, blocks.put, most)


def query_file(arguments: dict[str, Any], part: Path) -> None:
    """Job: all query blocks in one file, for queries that do not fit into memory."""
    cfg = ScoreConfig(**arguments["score"])
    shop = open_shop(arguments)
    features = shop.read.encode(query_rows(shop.read.task, cfg))
    ready = ready_for(shop, Factors.open(Path(arguments["factors"])), cfg, len(features))
    fill(shop, ready, features, cfg, OnDisk.at(part, ready, len(features), shop.like))


def score_shard(arguments: dict[str, Any], part: Path) -> None:
    """Job: scores of one shard of training rows."""
    number = arguments.pop("shard")
    desk = _desk(Key(canonical(arguments)))
    size = desk.cfg.shard_rows
    shop = desk.shop
    order = np.argsort(-shop.train.lengths_N, kind="stable")[number * size : (number + 1) * size]
    total_SGQB = meet(desk, order)
    found = {"scores": total_SGQB}
    if desk.cfg.per_token:
        from budwood.methods.influence.by_token import token_scores

        found["tokens"] = token_scores(shop, desk.ready, desk.blocks, desk.rows, order)
    found["skipped"] = np.array([i for i, n in enumerate(order) if shop.train.ids[n] in shop.skipped], np.int64)
    with part.open("wb") as f:
        np.savez(f, **found)  # type: ignore[arg-type]


def meet(desk: _Desk, order: np.ndarray) -> np.ndarray:
    """total_SGQB of the training rows at `order`."""
    groups = {g: i for i, g in enumerate(desk.groups)}
    settings = desk.ready.settings
    total = np.zeros((len(settings), len(groups), desk.rows, len(order)))
    place = {int(n): i for i, n in enumerate(order)}

    def add(setting: int, m: Map, took: np.ndarray, score_BQ: Tensor) -> None:
        at = [place[int(n)] for n in took]
        value_QB = score_BQ.T.double().cpu().numpy()
        for group in ("", *groups_of(m, desk.cfg)):
            total[setting, groups[group]][:, at] += value_QB

    half = desk.cfg.dtype == "bf16" and multiplies_bf16()
    meeting = Meeting(desk.shop, desk.ready, desk.blocks, desk.rows, add, half)
    meeting(desk.shop.train, order, desk.cfg.train_batch or ROWS)
    return total if desk.shop.like.dtype == torch.float64 else total.astype(np.float32)


def multiplies_bf16() -> bool:
    """Whether this machine multiplies bfloat16 faster than float32."""
    ask = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool((ask and ask()) or (amx and amx()))


def _assembled(desk: _Desk, factors: Factors, jobs: Sequence[Job], pieces: Sequence[np.ndarray]) -> Outcome:
    """All shards as one array with a row per query and a column per training row."""
    shop = desk.shop
    columns = {i: n for n, i in enumerate(dict.fromkeys(shop.train.ids))}
    rows = {i: n for n, i in enumerate(dict.fromkeys(desk.queries.ids))} if desk.rows > 1 else {}
    at_q = np.array([rows[i] for i in desk.queries.ids]) if desk.rows > 1 else np.zeros(1, np.int64)
    kind = np.float64 if shop.like.dtype == torch.float64 else np.float32
    shape = (len(desk.ready.settings), len(desk.groups), len(rows) or 1, len(columns))
    total = np.zeros(shape, kind)
    by_token: list[np.ndarray | None] = [None] * len(shop.train)
    for job, piece in zip(jobs, pieces):
        with np.load(job.output, allow_pickle=False) as found:
            at_n = [columns[shop.train.ids[n]] for n in piece]
            _add_windows(total, at_q, np.array(at_n), found["scores"])
            shop.skipped.update(shop.train.ids[piece[i]] for i in found["skipped"])
            if "tokens" in found:
                ends = np.cumsum([shop.train.lengths_N[n] + 1 for n in piece])[:-1]
                for n, own in zip(piece, np.split(found["tokens"], ends, axis=2)):
                    by_token[n] = own
    tokens = np.concatenate([t for t in by_token if t is not None], axis=2) if desk.cfg.per_token else None
    return Outcome(desk.ready.settings, desk.groups, total, tokens, factors, shop)


def _add_windows(total_SGQN: np.ndarray, at_q: np.ndarray, at_n: np.ndarray, part_SGFB: np.ndarray) -> None:
    """Add scores of features to those of their rows: windows of one document share an id, and their scores add up."""
    if len(set(at_n)) == len(at_n) and len(set(at_q)) == len(at_q):
        total_SGQN[:, :, at_q[:, None], at_n[None, :]] += part_SGFB
        return
    for f, q in enumerate(at_q):
        for b, n in enumerate(at_n):
            total_SGQN[:, :, q, n] += part_SGFB[:, :, f, b]


def _write(session: Session, outcomes: Sequence[Outcome], queries: Sequence[Row]) -> dict[str, Any]:
    """The matrices of all settings, averaged over models, and what there is to tell."""
    cfg: ScoreConfig = session.cfg
    train = session.task.rows(cfg.train_split)
    train_ids = list(dict.fromkeys(outcomes[0].shop.train.ids)) if outcomes else [r.id for r in train]
    scale = 1.0 / len(train_ids) if cfg.scale == "mean" else 1.0
    facts = _facts(session, outcomes, len(train_ids))
    tokens = _words(outcomes[0].shop) if outcomes and cfg.per_token else None
    query_ids = ["all"] if "query" in cfg.aggregate else [r.id for r in queries]
    sum_train = "train" in cfg.aggregate
    agreement: dict[str, float] = {}
    with writing_scores(
        session.run.file("scores"), query_ids, ["all"] if sum_train else train_ids, facts, tokens
    ) as desk:
        for i, setting in enumerate(outcomes[0].settings if outcomes else ()):
            for j, group in enumerate(outcomes[0].groups):
                parts = [o.total_SGQN[i, j].astype(np.float64) for o in outcomes]
                value: np.ndarray = sum(parts[1:], parts[0]) * (scale / len(parts))
                value = value.sum(1, keepdims=True) if sum_train else value
                matrix = _matrix(setting, group, cfg, outcomes[0].factors)
                desk.put(matrix, slice(None), slice(None), value)
                if not group and cfg.dtype != "float32":
                    stored = unpack(pack(value.astype(np.float32), matrix.dtype), matrix.dtype)
                    agreement[setting.text] = float(spearman_by_row(stored, value).mean())
            if tokens is not None and outcomes[0].tokens_SQM is not None:
                desk.put(
                    _matrix(setting, "tokens", cfg, outcomes[0].factors),
                    slice(None),
                    slice(None),
                    outcomes[0].tokens_SQM[i] * scale,
                )
        _baselines(session, desk, queries, cfg)
    told = {**facts, "queries": len(queries), "train": len(train_ids), "n": len(train_ids)}
    told |= {"strategies": list(cfg.strategy), "agreement": agreement}
    session.progress.say(f"scores: {SIGN}; {facts['scale']}.")
    for name, agreed in agreement.items():
        session.progress.say(f"{name}: mean Spearman of {cfg.dtype} against float32 {agreed:.5f}")
    return told


def _baselines(session: Session, desk: Any, queries: Sequence[Row], cfg: ScoreConfig) -> None:
    """Baselines among the strategies."""
    wanted = [s for s in cfg.strategy if s in BASELINES]
    if not wanted:
        return
    from budwood.methods.influence.baselines import write_baselines

    write_baselines(session, desk, queries, wanted)


def _matrix(setting: Setting, group: str, cfg: ScoreConfig, factors: Factors) -> Matrix:
    main = setting.strategy == "identity" or setting.damping == cfg.damping[0]
    used = {} if setting.strategy == "identity" else {"damping": _used(setting, factors)}
    return Matrix(setting.strategy, setting.damping, group, main, STORED[cfg.dtype], used)


def _used(setting: Setting, factors: Factors) -> dict[str, float]:
    """Smallest, mean and largest damping over the modules."""
    values = [factors.damping(setting, m.name) for m in factors.maps]
    return {"least": min(values), "mean": sum(values) / len(values), "most": max(values)}


def _facts(session: Session, outcomes: Sequence[Outcome], rows: int) -> dict[str, Any]:
    cfg: ScoreConfig = session.cfg
    by_rows = f"divided by the {rows:,} training rows" if cfg.scale == "mean" else "not divided"
    facts: dict[str, Any] = {
        "measurement": cfg.measurement,
        "sign": SIGN,
        "scale": by_rows,
        "query_split": cfg.query_split or session.task.reported,
        "train_split": cfg.train_split,
        "damping": list(cfg.damping),
        "models": [session.models[0].text, *cfg.checkpoints],
        "task": session.task.name,
    }
    if outcomes:
        first = outcomes[0]
        facts |= {
            "model_hash": first.shop.hash,
            "fisher": first.shop.labels,
            "fit_rows": first.factors.facts["fit_rows"],
            "evidence": first.factors.facts["evidence"],
            **say_damping(session.progress, first.factors, cfg.strategy, cfg.damping),
            "not_covered": sorted(first.shop.left),
            "skipped": sorted(first.shop.skipped),
        }
    return facts


def _words(shop: Shop) -> Tokens:
    """The tokens of every training row, spelled."""
    spell = shop.read.loaded.tokenizer.convert_ids_to_tokens
    return Tokens(tuple(tuple(spell(shop.train.piece("input_ids", n).tolist())) for n in range(len(shop.train))))

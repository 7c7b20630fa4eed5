"""`influence self`: how much every training row explains itself. High for rows that are odd, hard or mislabelled.

Shapes: S settings, B rows of a batch, N rows, T positions, O out, I in (with the bias's 1).
"""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from budwood.capture.stream import Map, Sides
from budwood.config.influence import SelfConfig
from budwood.engine.jobs import Job
from budwood.engine.run import run_all
from budwood.linalg.kron import outer_
from budwood.methods.influence.factors import Factors, Setting, settings_of
from budwood.methods.influence.fit import Bench, fitted, say_damping
from budwood.methods.influence.memory import of_self, tokens_within
from budwood.methods.influence.moments import Turner, with_one
from budwood.methods.influence.precondition import Preconditioner, Work, measurement, precondition
from budwood.methods.influence.profile import profiled
from budwood.methods.influence.score import given_factors
from budwood.methods.influence.workshop import Shop, open_shop, rows_for, settings_for, sweep
from budwood.methods.session import Session

HERE = "budwood.methods.influence.itself"
TILE = 1 << 22  # numbers of gradients made at a time


def itself(session: Session) -> dict[str, Any]:
    """records.parquet with a column per setting, and self/STRATEGY.npy; returns strategies, rows and the highest."""
    cfg: SelfConfig = session.cfg
    own = settings_for(cfg, session.models[0].text) | rows_for(cfg, session.task, session.run.path)
    with session.progress.stage("load"):
        shop = open_shop(own, session.task)
    bench = Bench(shop, own, session.run.path / "factors", cfg, session.progress, cfg.damping)
    _tokens(shop, len(settings_of(cfg.strategy, cfg.damping)), 1 + (cfg.measurement != "loss"))
    factors = given_factors(cfg.factors, shop) if cfg.factors else fitted(bench)
    given = {**own, "factors": str(factors.path), "damping": list(cfg.damping), "measurement": cfg.measurement}
    order = np.argsort(-shop.train.lengths_N, kind="stable")
    pieces = [order[i : i + cfg.shard_rows] for i in range(0, len(order), cfg.shard_rows)]
    jobs = [
        Job(f"{HERE}:self_shard", {**given, "shard": i}, session.run.file("parts", f"self-{i:05d}.npz"))
        for i in range(len(pieces))
    ]
    with session.progress.stage("self", len(jobs), sum(j.done for j in jobs)) as bar:
        run_all(jobs, cfg, lambda job: bar.advance(1))
    _ready.cache_clear()
    settings = settings_of(cfg.strategy, cfg.damping)
    value_SN = np.zeros((len(settings), len(shop.train)), np.float32)
    for job, piece in zip(jobs, pieces):
        with np.load(job.output, allow_pickle=False) as found:
            value_SN[:, piece] = found["values"]
            shop.skipped.update(shop.train.ids[piece[i]] for i in found["skipped"])
    with session.progress.stage("save"):
        told = _written(session, shop, [s.text for s in settings], value_SN)
    told |= say_damping(session.progress, factors, cfg.strategy, cfg.damping)
    shutil.rmtree(session.run.file("parts"))
    return profiled(session, told)


def _written(session: Session, shop: Shop, names: list[str], value_SN: np.ndarray) -> dict[str, Any]:
    import pandas

    from budwood.store.files import writing

    ids = list(dict.fromkeys(shop.train.ids))
    at = {i: n for n, i in enumerate(ids)}
    by_row = np.zeros((len(names), len(ids)), np.float32)
    for n, own in enumerate(shop.train.ids):
        by_row[:, at[own]] += value_SN[:, n]
    table = pandas.DataFrame({"id": ids, **{f"self:{n}": by_row[i] for i, n in enumerate(names)}})
    with writing(session.run.file("records.parquet")) as part:
        table.to_parquet(part, index=False)
    for i, name in enumerate(names):
        with writing(session.run.file("self", f"{name}.npy")) as part, part.open("wb") as f:
            np.save(f, by_row[i])
    top = np.argsort(-by_row[0], kind="stable")[:10]
    return {
        "strategies": list(session.cfg.strategy),
        "measurement": session.cfg.measurement,
        "damping": list(session.cfg.damping),
        "fisher": shop.labels,
        "mode": shop.read.mode,
        "train": len(ids),
        "n": len(ids),
        "highest": [{"id": ids[n], "self": float(by_row[0, n])} for n in top],
        "skipped": sorted(shop.skipped),
    }


@lru_cache(maxsize=1)  # one shard after another needs the same; the stamp says whether it is
def _ready(place: str, settings: tuple[Setting, ...], stamp: str) -> Preconditioner:
    return precondition(Factors.open(Path(place)), settings, Work(1, 1, 1.0), "turn")


def self_shard(arguments: dict[str, Any], part: Path) -> None:
    """Job: self-influence of one shard of rows, one line per setting."""
    shop = open_shop(arguments)
    size = shop.cfg.shard_rows
    number = arguments["shard"]
    order = np.argsort(-shop.train.lengths_N, kind="stable")[number * size : (number + 1) * size]
    settings = settings_of(shop.cfg.strategy, arguments["damping"])
    place = arguments["factors"]
    ready = _ready(place, settings, Factors.open(Path(place)).stamp)
    values = self_influence(shop, ready, order, arguments["measurement"]).astype(np.float32)
    skipped = np.array([i for i, n in enumerate(order) if shop.train.ids[n] in shop.skipped], np.int64)
    with part.open("wb") as f:
        np.savez(f, values=values, skipped=skipped)


def self_influence(shop: Shop, ready: Preconditioner, order: np.ndarray, measured: str = "loss") -> np.ndarray:
    """value_SN: gᵀ H⁻¹ g of every row's loss; with measurement margin, the margin's gradient on one side."""
    place = {int(n): i for i, n in enumerate(order)}
    out = np.zeros((len(ready.settings), len(order)))
    asked = [measurement(shop.read.objective, "loss")]
    if measured != "loss":
        asked.append(measurement(shop.read.objective, measured))
    for index in shop.batches(shop.train, order, tokens=_tokens(shop, len(ready.settings), len(asked))):
        turners = [Turner(ready.bases) for _ in asked]
        seen: dict[str, Sides] = {}
        found = shop.like.new_zeros(len(ready.settings), len(index), dtype=torch.float64)

        def use(question: int, m: Map, s: Sides, turners: Any = turners, seen: Any = seen, found: Any = found) -> None:
            if question + 1 < len(asked):
                seen[m.name] = s  # waits for the other side
                return
            both = [seen.pop(m.name), s] if len(asked) > 1 else [s]
            _add(found, ready, m, turners, both)

        took = sweep(shop, shop.train, index, lambda batch: asked, use)
        out[:, [place[int(n)] for n in took]] = found[:, : len(took)].cpu().numpy()
    return out


def _tokens(shop: Shop, settings: int, sides: int) -> int:
    """Tokens per batch within --max-memory."""
    return tokens_within(shop, of_self(shop, settings, sides, TILE))


def _add(found_SB: Any, ready: Preconditioner, m: Map, turners: list[Turner], both: list[Sides]) -> None:
    """Add one map's part for every setting, some rows at a time."""
    terms = ready.terms[m.name]
    for turned in (False, True):
        mine = [t for t in terms if t.turned == turned]
        if not mine:
            continue
        pairs = []
        for turner, s in zip(turners, both):
            g, a = s.live()
            pairs.append(turner(m, g, a) if turned else (g, with_one(a, m)))
        count = len(both[0].g_BTO)
        step = max(1, TILE // (m.out * m.columns))
        for first in range(0, count, step):
            last = min(count, first + step)
            size = (last - first, m.out, m.columns)
            made = [outer_(g.new_empty(size), g[first:last], a[first:last]) for g, a in pairs]
            square = made[0] * made[-1]
            for term in mine:
                weighed = square if term.weight_OI is None else square * term.weight_OI
                found_SB[term.setting, first:last] += weighed.flatten(1).sum(1, dtype=torch.float64)

"""`influence self`: how much every training row explains itself. High for rows that are odd, hard or mislabelled.

Shapes: S settings, B rows of a batch, N rows, T positions, O out, I in (with the bias's 1).
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from budwood.capture.gradients import Question
from budwood.capture.stream import Map, Sides
from budwood.config.influence import SelfConfig
from budwood.engine.jobs import Job
from budwood.engine.run import run_all
from budwood.linalg.kron import outer_
from budwood.methods.influence.factors import Factors, Setting, settings_of
from budwood.methods.influence.fit import Bench, fitted, say_damping
from budwood.methods.influence.memory import check, of_fit, of_self, tokens_within
from budwood.methods.influence.moments import Turner, with_one
from budwood.methods.influence.precondition import Preconditioner, Term, Work, measurement, precondition
from budwood.methods.influence.profile import profiled
from budwood.methods.influence.queries import say_skipped, warn_other_rows
from budwood.methods.influence.score import given_factors
from budwood.methods.influence.workshop import Shop, open_shop, rows_for, settings_for, sweep
from budwood.methods.session import Session

HERE = "budwood.methods.influence.itself"
TILE = 1 << 22  # numbers of gradients made at a time
Take = Callable[[Map, list[Turner], list[Sides]], None]
Sums = dict[tuple[str, bool], list[Tensor]]  # gradients of a row, by map and whether in the eigenbasis


def itself(session: Session) -> dict[str, Any]:
    """records.parquet with a column per setting, and self/STRATEGY.npy; returns strategies, rows and the highest."""
    cfg: SelfConfig = session.cfg
    warn_other_rows(session)
    own = settings_for(cfg, session.models[0].text) | rows_for(cfg, session.task, session.run.path)
    with session.progress.stage("load"):
        shop = open_shop(own, session.task)
        measurement(shop.read.objective, cfg.measurement)  # what cannot be asked is refused before the work
    bench = Bench(shop, own, session.run.path / "factors", cfg, session.progress, cfg.damping)
    need = of_self(shop, len(settings_of(cfg.strategy, cfg.damping)), 1 + (cfg.measurement != "loss"), TILE)
    check(shop, need, *(() if cfg.factors or (bench.path / "factors.json").exists() else (of_fit(shop),)))
    factors = given_factors(cfg.factors, shop, bench.path) if cfg.factors else fitted(bench)
    given = {**own, "factors": str(factors.path), "damping": list(cfg.damping), "measurement": cfg.measurement}
    pieces = _shards(shop)
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
    say_skipped(session, told["skipped"], told["train"])
    return profiled(session, told)


def _shards(shop: Shop) -> list[np.ndarray]:
    """Training rows of like length; all pieces of a text that was cut are in one shard."""
    order = np.argsort(-shop.train.lengths_N, kind="stable")
    met: dict[str, int] = {}
    row = np.array([met.setdefault(shop.train.ids[n], len(met)) for n in order])
    order, row = order[np.argsort(row, kind="stable")], np.sort(row)
    ends = np.searchsorted(row, row[:: shop.cfg.shard_rows])
    return [p for p in np.split(order, ends[1:]) if len(p)]


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
        "scale": "g (H + d)^-1 g of every row, not divided",
        "highest": [{"id": ids[n], "self": float(by_row[0, n])} for n in top],
        "skipped": sorted(shop.skipped),
        "not_covered": sorted(shop.left),
    }


@lru_cache(maxsize=1)  # one shard after another needs the same; the stamp says whether it is
def _ready(place: str, settings: tuple[Setting, ...], stamp: str) -> Preconditioner:
    return precondition(Factors.open(Path(place)), settings, Work(1, 1, 1.0), "turn")


def self_shard(arguments: dict[str, Any], part: Path) -> None:
    """Job: self-influence of one shard of rows, one line per setting."""
    shop = open_shop(arguments)
    order = _shards(shop)[arguments["shard"]]
    settings = settings_of(shop.cfg.strategy, arguments["damping"])
    place = arguments["factors"]
    ready = _ready(place, settings, Factors.open(Path(place)).stamp)
    values = self_influence(shop, ready, order, arguments["measurement"]).astype(np.float32)
    skipped = np.array([i for i, n in enumerate(order) if shop.train.ids[n] in shop.skipped], np.int64)
    with part.open("wb") as f:
        np.savez(f, values=values, skipped=skipped)


def self_influence(shop: Shop, ready: Preconditioner, order: np.ndarray, measured: str = "loss") -> np.ndarray:
    """value_SN: gᵀ H⁻¹ g of every row's loss; with measurement margin, the margin's gradient on one side.

    The gradient of a text that was cut is the sum over its pieces: its value stands at the first of them.
    """
    out = np.zeros((len(ready.settings), len(order)))
    asked = [measurement(shop.read.objective, "loss")]
    if measured != "loss":
        asked.append(measurement(shop.read.objective, measured))
    tokens = tokens_within(shop, of_self(shop, len(ready.settings), len(asked), TILE))
    row_N = [shop.train.ids[n] for n in order]
    count = Counter(row_N)
    single = np.array([count[i] == 1 for i in row_N], bool)
    place = {int(n): i for i, n in enumerate(order)}
    for index in shop.batches(shop.train, order[single], tokens=tokens):
        found = shop.like.new_zeros(len(ready.settings), len(index), dtype=torch.float64)
        took = _pass(shop, ready, index, asked, partial(_add, found, ready))
        out[:, [place[int(n)] for n in took]] = found[:, : len(took)].cpu().numpy()
    for row in dict.fromkeys(i for i, alone in zip(row_N, single) if not alone):
        mine = [n for n, i in enumerate(row_N) if i == row]
        sums: Sums = {}
        for index in shop.batches(shop.train, order[mine], tokens=tokens):
            _pass(shop, ready, index, asked, partial(_sum, sums, ready))
        out[:, mine[0]] = _of_sums(sums, ready)
    return out


def _pass(shop: Shop, ready: Preconditioner, index: np.ndarray, asked: Sequence[Question], take: Take) -> np.ndarray:
    """One pass over a batch: `take(map, turners, sides of every question)`; returns the rows that took part."""
    turners = [Turner(ready.bases) for _ in asked]
    seen: dict[str, Sides] = {}

    def use(question: int, m: Map, s: Sides) -> None:
        if question + 1 < len(asked):
            seen[m.name] = s  # waits for the other side
            return
        take(m, turners, [seen.pop(m.name), s] if len(asked) > 1 else [s])

    return sweep(shop, shop.train, index, lambda batch: asked, use)


def _pairs(m: Map, turned: bool, turners: list[Turner], both: list[Sides]) -> list[tuple[Tensor, Tensor]]:
    """(output gradients, inputs) of every question, in the eigenbasis or not."""
    found = []
    for turner, s in zip(turners, both):
        g, a = s.live()
        found.append(turner(m, g, a) if turned else (g, with_one(a, m)))
    return found


def _add(found_SB: Tensor, ready: Preconditioner, m: Map, turners: list[Turner], both: list[Sides]) -> None:
    """Add one map's part for every setting, some rows at a time."""
    for turned, mine in _terms(ready, m):
        pairs = _pairs(m, turned, turners, both)
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


def _sum(sums: Sums, ready: Preconditioner, m: Map, turners: list[Turner], both: list[Sides]) -> None:
    """Add a batch's gradients of one map, all rows of it together, for every question."""
    for turned, _ in _terms(ready, m):
        made = [g.flatten(0, 1).T @ a.flatten(0, 1) for g, a in _pairs(m, turned, turners, both)]
        before = sums.get((m.name, turned))
        sums[m.name, turned] = made if before is None else [x.add_(y) for x, y in zip(before, made)]


def _of_sums(sums: Sums, ready: Preconditioner) -> np.ndarray:
    """value_S of the row whose gradients these are."""
    out = np.zeros(len(ready.settings))
    for (name, turned), made in sums.items():
        square_OI = made[0] * made[-1]
        for term in ready.terms[name]:
            if term.turned == turned:
                weighed_OI = square_OI if term.weight_OI is None else square_OI * term.weight_OI
                out[term.setting] += float(weighed_OI.sum(dtype=torch.float64))
    return out


def _terms(ready: Preconditioner, m: Map) -> list[tuple[bool, list[Term]]]:
    """The settings of a map by whether they want gradients in the eigenbasis."""
    found = [(turned, [t for t in ready.terms[m.name] if t.turned == turned]) for turned in (False, True)]
    return [(turned, mine) for turned, mine in found if mine]

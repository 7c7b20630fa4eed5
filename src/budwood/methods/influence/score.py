"""`influence score`: how much every training row helped every query.

One pass over the training rows serves all queries, strategies and dampings. Rows go in shards, each a job that writes
one file of scores. A positive score is a row that helps: with more weight on it, the query would be answered better.
Shapes: S settings, G groups (all modules, then modules or layers), Q queries, B training rows of a shard.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from budwood.capture.stream import Map
from budwood.config.influence import STRATEGIES, ScoreConfig
from budwood.data.task import Task
from budwood.engine.jobs import Job
from budwood.engine.run import run_all
from budwood.methods.influence.asked import Asked, asked_of, check_room, groups_of, held_bytes
from budwood.methods.influence.factors import Factors
from budwood.methods.influence.fit import Bench, fitted, identity
from budwood.methods.influence.foreign import is_kronfluence, read_kronfluence
from budwood.methods.influence.outcome import Outcome, assembled, write
from budwood.methods.influence.pairs import MET, Meeting, most_held, multiplies_bf16
from budwood.methods.influence.precondition import measurement
from budwood.methods.influence.profile import profiled
from budwood.methods.influence.queries import encoded, query_rows, warn_fewer, warn_other_rows, warn_overlap
from budwood.methods.influence.workshop import Shop, open_shop, rows_for, settings_for
from budwood.methods.session import Session
from budwood.store.files import read_json
from budwood.store.progress import Progress

HERE = "budwood.methods.influence.score"


def score(session: Session) -> dict[str, Any]:
    """Score matrices under RUN/scores; returns strategies, queries, rows and the damping used."""
    cfg: ScoreConfig = session.cfg
    warn_other_rows(session)
    overlap = warn_overlap(session, rows := query_rows(session.task, cfg))
    warn_fewer(session, rows)
    outcomes = []
    if set(cfg.strategy) & set(STRATEGIES):
        begun = _begun(session)
        for number, model in enumerate([session.models[0].text, *cfg.checkpoints]):
            place = session.run.path if number == 0 else session.run.file("checkpoints", str(number))
            outcomes.append(scored(cfg, model, session.task, place, session.progress, begun))
    told = {**write(session, outcomes, rows), "overlap": overlap}
    for parts in session.run.path.rglob("parts"):
        shutil.rmtree(parts)
    return profiled(session, told)


def _begun(session: Session) -> dict[str, Any]:
    """What the machine that began the run decides, whichever carries it on: `half`, whether products are in bfloat16,
    and `held`, the most bytes that rows wait in.
    """
    found: dict[str, Any] | None = read_json(session.run.file("run.json")).get("begun")
    if found is None:
        found = {"half": session.cfg.dtype == "bf16" and multiplies_bf16(), "held": most_held()}
        session.run.note(begun=found)
    return found


def scored(cfg: ScoreConfig, model: str, task: Task, place: Path, progress: Progress, begun: dict[str, Any]) -> Outcome:
    """Scores of one model, its factors fitted at `place` where none are given."""
    own = settings_for(cfg, model) | rows_for(cfg, task, place)
    with progress.stage("load"):
        shop = open_shop(own, task)
        encoded(shop.read, query_rows(task, cfg))  # what cannot be asked is refused before the work
        measurement(shop.read.objective, cfg.measurement)
        check_room(shop, cfg, {"place": str(place), **begun}, (place / "factors" / "factors.json").exists())
    bench = Bench(shop, own, place / "factors", cfg, progress, cfg.damping)
    factors = given_factors(cfg.factors, shop, place / "factors") if cfg.factors else fitted(bench)
    arguments = {
        **own,
        "factors": str(factors.path),
        "stamp": [shop.hash, factors.stamp],
        "score": {k: v for k, v in cfg.model_dump(mode="json").items() if k in ScoreConfig.model_fields},
        "place": str(place),
        **begun,
    }
    with progress.stage("queries"):
        asked = asked_of(arguments, task)
        asked.settle()
    jobs = [
        Job(f"{HERE}:score_shard", {**arguments, "shard": i}, place / "parts" / f"scores-{i:05d}.npz")
        for i in range(len(asked.pieces))
    ]
    with progress.stage("scores", len(jobs), sum(j.done for j in jobs)) as bar:
        run_all(jobs, cfg, lambda job: bar.advance(1))
    found = assembled(asked, factors, jobs)
    asked.file.unlink(missing_ok=True)  # a further checkpoint has blocks of its own
    return found


def given_factors(path: Path, shop: Shop, place: Path) -> Factors:
    """Factors of another run, which must be those of this model, these rows and these settings; or kronfluence's, which
    are written to `place` as ours (their files name no model: modules, shapes and labels have to fit).
    """
    if is_kronfluence(path):
        if not (place / "factors.json").exists():
            read_kronfluence(path, shop, place)
        path = place
    factors = Factors.open(path)
    factors.check(identity(shop))
    return factors


def score_shard(arguments: dict[str, Any], part: Path) -> None:
    """Job: scores of one shard of training rows."""
    number = arguments.pop("shard")
    asked = asked_of(arguments)
    shop, order = asked.shop, asked.pieces[number]
    total_SGQB = meet(asked, order)
    found = {"scores": total_SGQB[:, :, : asked.rows]}
    if asked.half:
        found["exact"] = total_SGQB[:, 0, asked.rows :]
    if asked.cfg.per_token:
        from budwood.methods.influence.by_token import token_scores

        found["tokens"] = token_scores(shop, asked.ready, asked.blocks, asked.rows, order)
    found["skipped"] = np.array([i for i, n in enumerate(order) if shop.train.ids[n] in shop.skipped], np.int64)
    with part.open("wb") as f:
        np.savez(f, **found)  # type: ignore[arg-type]


def meet(asked: Asked, order: np.ndarray) -> np.ndarray:
    """total_SGQB of the training rows at `order`; behind the queries those of `asked.exact` again, in float32."""
    groups = {g: i for i, g in enumerate(asked.groups)}
    total = np.zeros((len(asked.ready.settings), len(groups), asked.rows + len(asked.exact), len(order)))
    place = {int(n): i for i, n in enumerate(order)}

    def add(setting: int, m: Map, took: np.ndarray, score_BQ: Tensor) -> None:
        at = [place[int(n)] for n in took]
        value_QB = score_BQ.T.double().cpu().numpy()
        for group in ("", *groups_of(m, asked.cfg)):
            total[setting, groups[group]][:, at] += value_QB

    held = held_bytes(asked)
    meeting = Meeting(asked.shop, asked.ready, asked.blocks, asked.rows, add, asked.half, asked.exact, held)
    meeting(asked.shop.train, order, asked.cfg.train_batch or MET)
    return total if asked.shop.like.dtype == torch.float64 else total.astype(np.float32)

"""Masks as jobs: every rule and size is one file of the run, so that a killed run goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from budwood.config.graft import GraftLearnConfig, parse_size
from budwood.data.opened import Key
from budwood.data.task import as_json, from_json
from budwood.engine.jobs import Job
from budwood.engine.run import run_all
from budwood.methods.graft.learned import ESTIMATORS, Steps
from budwood.methods.graft.measure import Scores
from budwood.methods.graft.pair import Pair, open_pair
from budwood.methods.graft.parity import Published, published
from budwood.methods.graft.rules import mask_of, random_mask, score
from budwood.methods.session import RUNS, Session, fingerprint
from budwood.models.reference import resolve
from budwood.params import mask as masks
from budwood.params import tree
from budwood.params.mask import Mask
from budwood.store.files import canonical, read_json, write_json
from budwood.train.evaluate import goodness

PUBLISHED = "published"  # the rule of --parity


@dataclass(frozen=True)
class Shop:
    """A pair at work: what every mask of a run needs, and the scores of the rule at work."""

    pair: Pair
    cfg: GraftLearnConfig
    scores: dict[str, Tensor]


def settings_of(session: Session) -> dict[str, Any]:
    """What a job has to be told. Workers cannot see this process's rows, so they find them in the run."""
    cfg = session.cfg
    rows = session.run.file("masks", "rows.json")
    if cfg.workers > 1:
        write_json(rows, as_json(session.task))
    return {
        "models": [m.text for m in session.models],
        "weights": [fingerprint(m) for m in session.models],
        "cfg": cfg.model_dump(mode="json"),
        "rows": session.task.digest,
        "file": str(rows) if cfg.workers > 1 else None,
    }


@lru_cache(maxsize=1)
def open_shop(key: Key) -> Shop:
    """The pair of these settings, opened once per process."""
    settings = json.loads(key.settings)
    cfg = GraftLearnConfig(**settings["cfg"])
    task = key.task or from_json(read_json(Path(settings["file"])))
    wish: dict[str, Any] = {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code, "force": cfg.force}
    base, tuned = (resolve(m, runs_dir=RUNS, offline=True, **wish) for m in settings["models"])
    return Shop(open_pair(cfg, base, tuned, task), cfg, {})


def make(session: Session, wanted: Sequence[tuple[str, int]]) -> list[Mask]:
    """The masks of these rules and sizes, in their order; those whose file is there are only read."""
    settings = settings_of(session)
    jobs = [
        Job(
            "budwood.methods.graft.choice:choose",
            {**settings, "rule": rule, "count": count, "state": str(session.run.file("masks", f"{rule}-{count}.part"))},
            session.run.file("masks", f"{rule}-{count}.safetensors"),
        )
        for rule, count in wanted
    ]
    run_all(jobs, session.cfg)
    sizes = open_shop(Key(canonical(settings), session.task)).pair.sizes
    return [masks.split(tree.load(job.output)[0]["places"], sizes) for job in jobs]


def tidy(session: Session) -> None:
    """The masks have been used: drop their files, and the models."""
    for file in session.run.file("masks", "rows.json").parent.glob("*"):
        file.unlink()
    open_shop.cache_clear()


def choose(arguments: dict[str, Any], part: Path) -> None:
    """Job: the places of one mask."""
    rule, count, state = (arguments.pop(k) for k in ("rule", "count", "state"))
    shop = open_shop(Key(canonical(arguments)))
    mask = _mask(shop, rule, count, Path(state))
    tree.save(part, {"places": masks.join(mask, shop.pair.sizes)}, {"artefact": "mask", "rule": rule, "count": count})


def _mask(shop: Shop, rule: str, count: int, state: Path) -> Mask:
    pair, cfg = shop.pair, shop.cfg
    if rule == "random":
        return random_mask(pair, count, cfg.seed)
    if rule == PUBLISHED:
        train = Scores(pair.read, pair.cfg, pair.task.rows("train"))
        plan = Published(cfg.mask_steps, cfg.parity_rate, cfg.sigmoid_bias, cfg.seed)
        return published(pair, count, plan, lambda m: goodness(train.of([pair.graft(m)]).metrics))
    if rule == "learned":
        return ESTIMATORS[cfg.estimator](pair, count, _steps(shop, state), cfg.per_tensor)
    return mask_of(pair, _scored(shop, rule), count, cfg.per_tensor)


def _scored(shop: Shop, rule: str) -> Tensor:
    if rule not in shop.scores:
        cfg = shop.cfg
        shop.scores.clear()  # a curve goes rule by rule: one copy is enough
        shop.scores[rule] = score(shop.pair, rule, cfg.path_points, cfg.fisher[0] if cfg.fisher else None)
    return shop.scores[rule]


def _steps(shop: Shop, state: Path) -> Steps:
    """How to learn a mask. A run that learns several keeps the scores they all begin with, at the price of a copy."""
    cfg = shop.cfg
    several = cfg.curve or parse_size(cfg.size).gain is not None
    return Steps(
        cfg.mask_steps,
        cfg.mask_batch_size,
        cfg.mask_rate,
        cfg.seed,
        cfg.path_points,
        start=_scored(shop, "first-order") if several else None,
        state=state,
        every=float(os.environ.get("BUDWOOD_SAVE_SECONDS", Steps.every)),
    )

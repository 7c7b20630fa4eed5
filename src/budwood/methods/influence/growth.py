"""How many rows factors need: the sample doubles until the ranking of calibration scores stops changing.

Eigenbases are those of the first BASES rows at most (not with kfac, whose curvature they are): second moments are right
in any basis, and in one that stays they are sums, so that further rows are passed through the model once for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from budwood.capture.stream import Map
from budwood.data.batch import seed_of
from budwood.linalg.ranking import spearman_by_row
from budwood.methods.influence import evidence
from budwood.methods.influence.factors import Factors, Setting
from budwood.methods.influence.fit import Bench, fitted_on
from budwood.methods.influence.pairs import Meeting, Resident
from budwood.methods.influence.precondition import Work, measurement, precondition, query_blocks
from budwood.methods.influence.workshop import Shop, sweep

AGREE = 0.99
BASES = 2048  # rows from which eigenbases are made at most
QUERIES, ROWS = 16, 192  # of the calibration


def grown(bench: Bench) -> Factors:
    """Factors from the smallest sample whose calibration ranks agree with those of half of it (Spearman >= 0.99)."""
    rows = len(bench.shop.train)
    size = min(rows, evidence.ROWS)  # from there on all samples are damped alike
    steps: list[dict[str, Any]] = []
    before: np.ndarray | None = None
    while True:
        before_it = [step["rows"] for step in steps]
        # kfac reads its curvature off the bases' own covariances, so there these go on growing
        settled = None if "kfac" in bench.shop.cfg.strategy else BASES
        factors = fitted_on(bench, size, before_it, bench.path / "growth" / str(size), settled)
        with bench.progress.stage("calibration"):
            now = _calibration(bench.shop, factors, bench.dampings[0])
        agreement = None if before is None else float(spearman_by_row(before, now).mean())
        steps.append({"rows": size, "spearman": agreement})
        said = "" if agreement is None else f", Spearman with the last size {agreement:.4f}"
        bench.progress.say(f"factors on {size:,} of {rows:,} rows{said}")
        if size == rows or (agreement is not None and agreement >= AGREE):
            break
        before, size = now, min(rows, 2 * size)
    return _adopted(bench, factors, steps)


def _adopted(bench: Bench, factors: Factors, steps: list[dict[str, Any]]) -> Factors:
    """The last sample's factors, moved to where the run keeps them."""
    import json
    import shutil

    from budwood.store.files import read_json, write_text

    for file in ("covariance", "eigen", "moments"):
        source = factors.path / f"{file}.safetensors"
        if source.exists():
            shutil.copyfile(source, bench.path / source.name)
    facts = {**read_json(factors.path / "factors.json"), "growth": steps}
    write_text(bench.path / "factors.json", json.dumps(facts, indent=1))
    shutil.rmtree(bench.path / "growth")
    return Factors.open(bench.path)


def _calibration(shop: Shop, factors: Factors, damping: str) -> np.ndarray:
    """Scores of a few training rows as queries for some others, drawn from the end of the seeded order."""
    rng = np.random.default_rng(seed_of(shop.cfg.seed, "fit rows"))
    order = rng.permutation(len(shop.train))[::-1]
    # a forward pass alone leaves out, or stops at, queries without a finite loss
    queries = sweep(shop, shop.train, order[:QUERIES], lambda batch: (), lambda i, m, s: None)
    rows = order[QUERIES : QUERIES + ROWS]
    if not len(rows):
        rows = queries
    strategy = next((s for s in ("ekfac", "diagonal", "kfac") if s in shop.cfg.strategy), "identity")
    setting = Setting(strategy, "" if strategy == "identity" else damping)
    ready = precondition(factors, [setting], Work(len(queries), len(rows), float(shop.train.lengths_N.mean())))
    blocks = Resident(len(queries), shop.like)
    question = measurement(shop.read.objective, "margin")
    query_blocks(shop, ready, shop.train, queries, question, blocks.put)
    out = np.zeros((len(queries), len(shop.train)))

    def add(_: int, m: Map, took: np.ndarray, score_BQ: Tensor) -> None:
        out[:, took] += score_BQ.T.double().numpy()

    Meeting(shop, ready, blocks, len(queries), add, held=0)(shop.train, rows)
    return out[:, rows]

"""What all shards of scores add up to, and the matrices that are written of it.

Shapes: S settings, G groups (all modules, then modules or layers), Q queries, N training rows, K queries whose scores
were computed in float32 as well, M tokens of all training rows (see `Tokens`), F pieces of queries, B pieces of
training rows: long texts are cut, the pieces share the row's id, and their scores add up to the row's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from budwood.config.influence import BASELINES, ScoreConfig
from budwood.data.task import Row
from budwood.engine.jobs import Job
from budwood.errors import DataError
from budwood.linalg.ranking import spearman_by_row
from budwood.methods.influence.asked import Asked
from budwood.methods.influence.factors import Factors, Setting
from budwood.methods.influence.fit import say_damping
from budwood.methods.influence.queries import say_skipped
from budwood.methods.influence.scores import STORED, TOKENS, Desk, Matrix, Tokens, unit_for, writing_scores
from budwood.methods.influence.workshop import Shop, open_shop, settings_for
from budwood.methods.session import Session

SIGN = "positive = the training row helps the query"
LARGE = 1 << 26  # bytes from which sums lie in a file


@dataclass(frozen=True)
class Outcome:
    """Scores of one model, and what was used."""

    settings: tuple[Setting, ...]
    groups: tuple[str, ...]
    total_SGQN: np.ndarray
    tokens_SQM: np.ndarray | None
    exact_SKN: np.ndarray | None
    at_K: np.ndarray  # the queries of exact_SKN
    factors: Factors
    shop: Shop


def assembled(asked: Asked, factors: Factors, jobs: Sequence[Job]) -> Outcome:
    """All shards as one array with a row per query and a column per training row."""
    shop, pieces = asked.shop, asked.pieces
    columns = {i: n for n, i in enumerate(dict.fromkeys(shop.train.ids))}
    rows = {i: n for n, i in enumerate(dict.fromkeys(asked.queries.ids))}
    at_q = np.zeros(1, np.int64) if asked.summed else np.array([rows[i] for i in asked.queries.ids])
    count, parts = 1 if asked.summed else len(rows), Path(asked.given["place"]) / "parts"
    settings = len(asked.ready.settings)
    kind = np.float64 if shop.like.dtype == torch.float64 else np.float32
    total = _room(parts / "total.npy", (settings, len(asked.groups), count, len(columns)), kind)
    starts_F = _token_starts(shop, columns)
    tokens = None
    if asked.cfg.per_token:
        tokens = _room(parts / "tokens.npy", (settings, count, int(shop.train.lengths_N.sum()) + len(columns)), kind)
    at_K = np.unique(at_q[list(asked.exact)])
    exact = np.zeros((settings, len(at_K), len(columns)), kind) if asked.half else None
    for job, piece in zip(jobs, pieces):
        with np.load(job.output, allow_pickle=False) as found:
            at_n = np.array([columns[shop.train.ids[n]] for n in piece])
            _add(total, at_q, at_n, found["scores"])
            if exact is not None:
                _add(exact, np.searchsorted(at_K, at_q[list(asked.exact)]), at_n, found["exact"])
            shop.skipped.update(shop.train.ids[piece[i]] for i in found["skipped"])
            if tokens is not None:
                at_m = np.concatenate([_token_columns(starts_F[n], int(shop.train.lengths_N[n])) for n in piece])
                _add(tokens, at_q, at_m, found["tokens"])
    return Outcome(asked.ready.settings, asked.groups, total, tokens, exact, at_K, factors, shop)


def _room(path: Path, shape: tuple[int, ...], kind: Any) -> np.ndarray:
    """Zeros in memory, or in a file where they are many."""
    if int(np.prod(shape)) * np.dtype(kind).itemsize < LARGE:
        return np.zeros(shape, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    return np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)


def _add(total_SQN: np.ndarray, at_q: np.ndarray, at_n: np.ndarray, part_SFB: np.ndarray) -> None:
    """Add scores of pieces to those of their rows: what is at one place of `at_q` or `at_n` twice adds up.

    >>> total = np.zeros((2, 3))
    >>> _add(total, np.array([0, 1, 1]), np.array([2, 0, 2]), np.arange(9.0).reshape(3, 3))
    >>> total.tolist()
    [[1.0, 0.0, 2.0], [11.0, 0.0, 22.0]]
    """
    if len(np.unique(at_q)) < len(at_q):
        by_query = np.zeros((*part_SFB.shape[:-2], total_SQN.shape[-2], part_SFB.shape[-1]), part_SFB.dtype)
        np.add.at(np.moveaxis(by_query, -2, 0), at_q, np.moveaxis(part_SFB, -2, 0))
        part_SFB = by_query
    if len(np.unique(at_n)) < len(at_n):
        np.add.at(np.moveaxis(total_SQN, -1, 0), at_n, np.moveaxis(part_SFB, -1, 0))
    else:
        total_SQN[..., at_n] += part_SFB


def _token_starts(shop: Shop, columns: dict[str, int]) -> np.ndarray:
    """[F, 2]: where the leading column of a piece's row is, and where the piece's own tokens begin."""
    length_N = np.zeros(len(columns), np.int64)
    before_F = np.zeros(len(shop.train), np.int64)
    row_F = np.array([columns[i] for i in shop.train.ids])
    for f, n in enumerate(row_F):
        before_F[f] = length_N[n]
        length_N[n] += shop.train.lengths_N[f]
    start_N = np.concatenate([[0], np.cumsum(length_N + 1)[:-1]])
    return np.stack([start_N[row_F], start_N[row_F] + 1 + before_F], 1)


def _token_columns(start_2: np.ndarray, length: int) -> np.ndarray:
    """Columns of one piece: the leading one of its row, then its tokens.

    >>> _token_columns(np.array([4, 8]), 3).tolist()
    [4, 8, 9, 10]
    """
    return np.concatenate([start_2[:1], start_2[1] + np.arange(length)])


def words_of(shop: Shop) -> Tokens:
    """The tokens of every training row, spelled; those of its pieces one after the other."""
    spell = shop.read.loaded.tokenizer.convert_ids_to_tokens
    words: dict[str, list[str]] = {}
    for n, own in enumerate(shop.train.ids):
        words.setdefault(own, []).extend(spell(shop.train.piece("input_ids", n).tolist()))
    return Tokens(tuple(map(tuple, words.values())))


def write(session: Session, outcomes: Sequence[Outcome], queries: Sequence[Row]) -> dict[str, Any]:
    """The matrices of all settings, averaged over models, and what there is to tell."""
    cfg: ScoreConfig = session.cfg
    shop = outcomes[0].shop if outcomes else open_shop(settings_for(cfg, session.models[0].text), session.task)
    train_ids = list(dict.fromkeys(shop.train.ids))
    scale = 1.0 / len(train_ids) if cfg.scale == "mean" else 1.0
    facts = _facts(session, outcomes, len(train_ids)) | _without_text(session, train_ids)
    tokens = words_of(outcomes[0].shop) if outcomes and cfg.per_token else None
    query_ids = ["all"] if "query" in cfg.aggregate else [r.id for r in queries]
    columns = ["all"] if "train" in cfg.aggregate else train_ids
    with writing_scores(session.run.file("scores"), query_ids, columns, facts, tokens) as desk:
        with session.progress.stage("save"):
            agreement = _matrices(desk, outcomes, cfg, scale, query_ids)
        lost = _baselines(session, desk, queries, cfg) | set(facts.get("skipped", ()))
    told = {**facts, "queries": len(queries), "train": len(train_ids), "n": len(train_ids), "skipped": sorted(lost)}
    told |= {"strategies": list(cfg.strategy), "agreement": agreement}
    say_skipped(session, lost, len(train_ids))
    session.progress.say(f"scores: {SIGN}; {facts['scale']}.")
    for name, agreed in agreement.items():
        session.progress.say(
            f"{name}: Spearman of {cfg.dtype} against float32 by query: mean {agreed['mean']:.5f}, least "
            f"{agreed['least']:.5f} of {agreed['queries']}"
        )
    return told


def _matrices(
    desk: Desk, outcomes: Sequence[Outcome], cfg: ScoreConfig, scale: float, query_ids: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Write the mean over models of every setting and group; returns how near 16 bits are to float32."""
    agreement: dict[str, dict[str, float]] = {}
    summed = "train" in cfg.aggregate
    for i, setting in enumerate(outcomes[0].settings if outcomes else ()):
        used = _used(setting, outcomes[0].factors) | _rank(cfg)
        for j, group in enumerate(outcomes[0].groups):
            value_QN = _mean([o.total_SGQN[i, j] for o in outcomes], scale)
            _finite(value_QN, setting, cfg, query_ids, list(dict.fromkeys(outcomes[0].shop.train.ids)))
            value_QN = value_QN.sum(1, keepdims=True) if summed else value_QN
            matrix = _matrix(setting, group, cfg, used, value_QN)
            desk.put(matrix, slice(None), slice(None), value_QN)
            if not group and cfg.dtype != "float32" and not summed:
                agreement[setting.text] = _agreement(matrix, value_QN, outcomes, i, scale)
        by_token = [o.tokens_SQM[i] for o in outcomes if o.tokens_SQM is not None]
        if by_token:
            value_QM = _mean(by_token, scale)
            desk.put(_matrix(setting, TOKENS, cfg, used, value_QM), slice(None), slice(None), value_QM)
    return agreement


def _finite(
    value_QN: np.ndarray, setting: Setting, cfg: ScoreConfig, query_ids: Sequence[str], train_ids: Sequence[str]
) -> None:
    """Refuse scores that are no numbers, by the names of the rows that made them so."""
    bad_QN = ~np.isfinite(value_QN)
    if not bad_QN.any():
        return
    if rows := np.flatnonzero(bad_QN.all(0)).tolist():
        raise DataError(
            f"{len(rows)} of {len(train_ids)} training rows have no finite score with any query ({setting.text}), such "
            f"as '{train_ids[rows[0]]}': their loss is finite and its gradient is not. Leave them out of the task."
        )
    lost = np.flatnonzero(bad_QN.any(1)).tolist()
    raise DataError(
        f"{len(lost)} of {len(query_ids)} queries have scores that are not finite ({setting.text}), such as "
        f"'{query_ids[lost[0]]}': is what is measured of them ({cfg.measurement}), or its gradient, a number? Leave "
        "them out with --queries, or give another --measurement."
    )


def _agreement(
    matrix: Matrix, value_QN: np.ndarray, outcomes: Sequence[Outcome], setting: int, scale: float
) -> dict[str, float]:
    """Spearman, by query, of what is stored against float32: computed so where products were in half precision."""
    exact = [o.exact_SKN[setting] for o in outcomes if o.exact_SKN is not None]
    at, want = (outcomes[0].at_K, _mean(exact, scale)) if exact else (np.arange(len(value_QN)), value_QN)
    found = spearman_by_row(matrix.kept(value_QN[at]), want)
    return {"mean": float(found.mean()), "least": float(found.min()), "queries": len(found)}


def _without_text(session: Session, there: Sequence[str]) -> dict[str, Any]:
    """Training rows in which the model finds nothing to predict: they have no column, and that is said."""
    known = set(there)
    lost = [r.id for r in session.task.rows(session.cfg.train_split) if r.id not in known]
    if lost:
        session.progress.say(f"{len(lost)} training rows have no text to learn from and no score, such as '{lost[0]}'.")
    return {"without_text": lost} if lost else {}


def _mean(parts: Sequence[np.ndarray], scale: float) -> np.ndarray:
    """The mean over models in float64, scaled."""
    total = parts[0].astype(np.float64)
    for part in parts[1:]:
        total += part
    total *= scale / len(parts)
    return total


def _baselines(session: Session, desk: Desk, queries: Sequence[Row], cfg: ScoreConfig) -> set[str]:
    """Baselines among the strategies; returns the training rows that they left out."""
    wanted = [s for s in cfg.strategy if s in BASELINES]
    if not wanted:
        return set()
    from budwood.methods.influence.baselines import write_baselines

    return write_baselines(session, desk, queries, wanted)


def _matrix(setting: Setting, group: str, cfg: ScoreConfig, used: dict[str, Any], value: np.ndarray) -> Matrix:
    main = setting.strategy == "identity" or setting.damping == cfg.damping[0]
    stored = STORED[cfg.dtype]
    return Matrix(setting.strategy, setting.damping, group, main, stored, used, unit_for(value, stored))


def _used(setting: Setting, factors: Factors) -> dict[str, Any]:
    """Smallest, mean and largest damping over the modules; every module's curvature is read for it."""
    if setting.strategy == "identity":
        return {}
    values = [factors.damping(setting, m.name) for m in factors.maps]
    return {"damping": {"least": min(values), "mean": sum(values) / len(values), "most": max(values)}}


def _rank(cfg: ScoreConfig) -> dict[str, int]:
    """How many outer products stand for a query, where they do."""
    return {} if cfg.query_rank is None else {"query_rank": cfg.query_rank}


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
        **_rank(cfg),
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

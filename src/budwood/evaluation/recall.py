"""`validate recall`: do scores find rows known to be the source, and do they behave as scores should?

Known sources are training rows with the query's own text (planted copies), or a list given for paraphrases. A query
that is a training row is neither its own source nor in the way of others.
Shapes: Q queries, N training rows, K first rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from budwood.config.validate import RecallConfig
from budwood.data.task import Row, Task
from budwood.errors import DataError, StoreError
from budwood.evaluation.matrices import Scored, common_queries, open_scores
from budwood.evaluation.retrain import Recipe, find_rows
from budwood.linalg.ranking import spearman_by_row, top_k
from budwood.methods.session import Session
from budwood.store.files import read_json

FIRST = 10  # rows looked at by the checks that need no sources


def validate_recall(session: Session) -> dict[str, Any]:
    """Recall of known sources and mean reciprocal rank per matrix, with quick checks that need no sources."""
    cfg: RecallConfig = session.cfg
    matrices = open_scores(cfg.scores, cfg.only)
    queries = common_queries(matrices)
    model = session.models[0]
    task = Recipe.of_run(model.run, model.text).task()
    train_ids = [r.id for r in task.rows("train")]
    truth = sources(task, queries, cfg)
    rows = find_rows(task, queries)
    other = {m.matrix.name: m for m in open_scores([cfg.randomised])} if cfg.randomised else {}
    results = []
    for m in matrices:
        score_QN = m.aligned(queries, train_ids)
        others_QN = without_selves(score_QN, queries, train_ids)
        row: dict[str, Any] = {"scores": m.name, **found(others_QN, [truth[q] for q in queries], train_ids, cfg.top)}
        row |= habits(others_QN, rows, task.rows("train"))
        if cfg.randomised:
            row["randomised"] = _against(m, other, score_QN, queries, train_ids)
        results.append(row)
    asked = sum(1 for q in queries if truth[q])
    return {"n": len(queries), "with_sources": asked, "train_rows": len(train_ids), "results": results}


def sources(task: Task, queries: Sequence[str], cfg: RecallConfig) -> dict[str, set[str]]:
    """Other training ids that are the source of each query; none anywhere is refused, as there is nothing to recall."""
    train = task.rows("train")
    if cfg.sources is not None:
        given = read_json(cfg.sources)
        if not isinstance(given, dict):
            raise DataError(f"{cfg.sources} holds no JSON object {{query id: [training ids]}}.")
        known = {r.id for r in train}
        for ids in given.values():
            if lost := [i for i in ids if i not in known]:
                raise DataError(f"{cfg.sources} names '{lost[0]}', which is no training row of '{task.name}'.")
        found = {q: set(given.get(q, ())) for q in queries}
    else:
        by_text: dict[tuple[str, str | None], set[str]] = {}
        for r in train:
            by_text.setdefault(_text(r), set()).add(r.id)
        found = {r.id: by_text.get(_text(r), set()) for r in find_rows(task, queries)}
    found = {q: own - {q} for q, own in found.items()}
    if not any(found.values()):
        raise DataError(
            f"No query has a known source among the other training rows of '{task.name}'. Score queries that are "
            "copies of training rows, or list sources with --sources FILE.json."
        )
    return found


def _text(row: Row) -> tuple[str, str | None]:
    clean = lambda s: " ".join(s.lower().split())  # noqa: E731
    return clean(row.text), None if row.pair is None else clean(row.pair)


def without_selves(score_QN: np.ndarray, queries: Sequence[str], train_ids: Sequence[str]) -> np.ndarray:
    """A copy in which a query that is a training row comes last in its own row.

    >>> without_selves(np.array([[1.0, 3.0]]), ["b"], ["a", "b"]).tolist()
    [[1.0, -inf]]
    """
    place, found_QN = {t: i for i, t in enumerate(train_ids)}, score_QN.copy()
    for row_N, query in zip(found_QN, queries):
        if query in place:
            row_N[place[query]] = -np.inf
    return found_QN


def found(
    score_QN: np.ndarray, sources: Sequence[set[str]], train_ids: Sequence[str], tops: Sequence[int]
) -> dict[str, float]:
    """Share of queries with a source among their first rows, and the mean of 1 / rank of the first source.

    Rows of equal score have no order: the rank is the mean over all orders of them, so equal scores find nothing.

    >>> found(np.array([[1.0, 3.0, 2.0]]), [{"c"}], ["a", "b", "c"], (1, 2))
    {'recall_at_1': 0.0, 'recall_at_2': 1.0, 'mrr': 0.5}
    >>> found(np.zeros((1, 3)), [{"c"}], ["a", "b", "c"], (1, 2))
    {'recall_at_1': 0.0, 'recall_at_2': 1.0, 'mrr': 0.5}
    """
    place = {t: i for i, t in enumerate(train_ids)}
    ranks = []
    for score_N, own in zip(score_QN, sources):
        if own:
            own_M = score_N[[place[t] for t in own]]
            best = own_M.max()
            equal, ours = int((score_N == best).sum()), int((own_M == best).sum())
            ranks.append(int((score_N > best).sum()) + (equal + 1) / (ours + 1))
    rank = np.array(ranks)
    return {f"recall_at_{k}": float((rank <= k).mean()) for k in tops} | {"mrr": float((1 / rank).mean())}


def habits(score_QN: np.ndarray, queries: Sequence[Row], train: Sequence[Row]) -> dict[str, float]:
    """Quick checks: is the first row of the query's class, and do different queries get different rows?

    `distinct_in_top`: distinct rows among all first tens, as a share of the most there could be.
    """
    first_QK = top_k(score_QN, FIRST)
    most = min(first_QK.size, len(train))
    same = [train[int(f[0])].label == q.label for f, q in zip(first_QK, queries)]
    return {"same_class": float(np.mean(same)), "distinct_in_top": len(np.unique(first_QK)) / most}


def _against(
    scored: Scored, other: Mapping[str, Scored], score_QN: np.ndarray, queries: Sequence[str], ids: Sequence[str]
) -> float:
    twin = other.get(scored.matrix.name)
    if twin is None:
        raise StoreError(
            f"The scores of the randomised model have no matrix '{scored.matrix.name}'. Score it with the same "
            "--strategy and --damping."
        )
    return float(spearman_by_row(score_QN, twin.aligned(queries, ids)).mean())

"""Score matrices laid on rows and queries by their ids, whatever order they were written in.

Shapes: Q queries, N training rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from budwood.errors import StoreError, nearest
from budwood.methods.influence.scores import TOKENS, Matrix, Scores
from budwood.methods.session import RUNS
from budwood.store.index import find_run


@dataclass(frozen=True)
class Scored:
    """One score matrix of one run, under a name that tells it from the others."""

    name: str
    run: Path
    scores: Scores
    matrix: Matrix

    @property
    def label(self) -> str:
        """The file's name; scores kept in half precision say so, being a claim of their own."""
        return _label(self.matrix)

    @property
    def model(self) -> str:
        """Hash of the model that was scored; where the scores do not tell, the run stands for it."""
        return str(self.scores.facts.get("model_hash") or self.run.resolve())

    def aligned(self, query_ids: Sequence[str], train_ids: Sequence[str]) -> np.ndarray:
        """score_QN with rows and columns in the order asked for; other training rows are refused."""
        column = {t: i for i, t in enumerate(self.scores.train_ids)}
        if set(column) != set(train_ids):
            lost = sorted(set(train_ids) - set(column)) or sorted(set(column) - set(train_ids))
            raise StoreError(
                f"The scores in {self.run} are of other training rows: {len(column):,} columns, and the retrained "
                f"models saw {len(train_ids):,} rows; '{lost[0]}' is on one side only. Score the rows the model was "
                "trained on (the same --limit, --shots and --data-seed)."
            )
        row = {q: i for i, q in enumerate(self.scores.query_ids)}
        values = self.scores.rows([row[q] for q in query_ids], self.matrix)
        found: np.ndarray = values[:, [column[t] for t in train_ids]]
        return found

    def by_place(self, queries: int, rows: int) -> np.ndarray:
        """score_QN where the other side has no ids: the shapes must agree."""
        shape = (len(self.scores.query_ids), len(self.scores.train_ids))
        if shape != (queries, rows):
            raise StoreError(
                f"The scores in {self.run} are {list(shape)}, the ground truth has no ids and is of {queries} queries "
                f"and {rows} training rows. Score exactly those rows in their order."
            )
        return self.scores.whole(self.matrix)


def open_scores(paths: Sequence[Path], only: Sequence[str] = ()) -> list[Scored]:
    """Every matrix of every run given (by directory or run:ID), apart from those by token or module."""
    places = [p if (p / "index.json").exists() or p.is_dir() else find_run(str(p), RUNS) for p in paths]
    opened = [(p, Scores.open(p)) for p in places]
    found = [
        (p, s, m) for p, s in opened for m in s.matrices if m.module != TOKENS and (not m.module or m.name in only)
    ]
    names = [_label(m) for _, _, m in found]
    full = full_names(names, [p.resolve() for p, _, _ in found])
    every = [Scored(n, p, s, m) for n, (p, s, m) in zip(full, found)]
    known = sorted({*full, *names})
    for wish in only:
        if wish not in known:
            raise StoreError(f"No score matrix is named '{wish}'.{nearest(wish, known)} There are: {', '.join(known)}.")
    return [s for s, n in zip(every, names) if not only or n in only or s.name in only]


def full_names(names: Sequence[str], runs: Sequence[Path]) -> list[str]:
    """Each name told apart from equal ones by as much of the end of its run's path as it takes, else by a number.

    >>> full_names(["a", "a", "b"], [Path("/x/s"), Path("/y/s"), Path("/x/s")])
    ['x/s:a', 'y/s:a', 'b']
    >>> full_names(["a", "a"], [Path("/s"), Path("/s")])
    ['s:a#1', 's:a#2']
    """
    found = []
    for i, (name, run) in enumerate(zip(names, runs)):
        others = [r for j, r in enumerate(runs) if j != i and names[j] == name]
        depths = (d for d in range(1, len(run.parts)) if all(r.parts[-d:] != run.parts[-d:] for r in others))
        depth = next(depths, None)
        if not others:
            found.append(name)
        elif depth is None:
            found.append(f"{run.name}:{name}#{1 + names[:i].count(name)}")
        else:
            found.append(f"{'/'.join(run.parts[-depth:])}:{name}")
    return found


def _label(matrix: Matrix) -> str:
    """The name, and in what a matrix is less than exact."""
    short: list[str] = [] if matrix.dtype in ("float32", "float64") else [matrix.dtype]
    if rank := matrix.facts.get("query_rank"):
        short.append(f"rank {rank}")
    return f"{matrix.name} ({', '.join(short)})" if short else matrix.name


def common_queries(matrices: Sequence[Scored]) -> list[str]:
    """Queries that every matrix has, in the order of the first; none at all is refused."""
    if not matrices:
        return []
    shared = set.intersection(*(set(m.scores.query_ids) for m in matrices))
    found = [q for q in matrices[0].scores.query_ids if q in shared]
    if not found:
        raise StoreError(
            f"The score matrices in {', '.join(sorted({str(m.run) for m in matrices}))} share no query. Score the same "
            "queries in each."
        )
    return found

"""`validate counterfactual` and `brittleness`: remove the rows said to help a prediction most; does it flip?

Every way of choosing rows goes through the same loop, and so does the baseline: random training rows of the same label.
Shapes: Q queries, N training rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from budwood.config.validate import RemovalConfig
from budwood.data.batch import seed_of
from budwood.engine.jobs import Job
from budwood.errors import ConfigError, StoreError
from budwood.evaluation.fleet import Fleet, check_some
from budwood.evaluation.matrices import common_queries, open_scores
from budwood.evaluation.retrain import Outcome, find_rows, outcome
from budwood.figures.removal import flip_curves, smallest_bars
from budwood.figures.save import drawing, save
from budwood.linalg.metrics import accuracy_interval
from budwood.linalg.ranking import top_k
from budwood.methods.session import Session

COUNTS = (20, 40, 60, 80, 100, 120)
RANDOM = "random of the label"


def validate_counterfactual(session: Session) -> dict[str, Any]:
    """Flips by rows removed, for every matrix and for random rows of the same label."""
    with _study(session) as study:
        found = study.search()
        group = {"group": study.group()} if session.cfg.together else {}
    results = []
    for name, first in found.items():
        for k in study.counts:
            flipped = sum(1 for smallest in first if smallest is not None and smallest <= k)
            low, high = accuracy_interval(flipped, len(first))
            row = {"scores": name, "k": k, "flipped": flipped, "targets": len(first), "low": low, "high": high}
            results.append({**row, "share": flipped / len(first)})
    most = next(r["share"] for r in results if r["k"] == study.counts[-1])
    metrics = {**study.facts(), "metric": "share_flipped", "score": most, "results": results, **group}
    with drawing() as axes:
        title = f"Rows removed and predictions flipped, {session.models[0].name} on {session.task.name}"
        save(axes.figure, session.run.file("figures", "flips"), flip_curves(axes, results, title))
    return metrics


def validate_brittleness(session: Session) -> dict[str, Any]:
    """The smallest removal that flips each target, for every matrix and for random rows of the same label."""
    with _study(session) as study:
        found = study.search()
    results = []
    for name, first in found.items():
        known = [k for k in first if k is not None]
        # a target that never flips counts as more than the largest removal
        middle = float(np.median([np.inf if k is None else k for k in first]))
        row = {"scores": name, "targets": len(first), "flipped": len(known), "never": len(first) - len(known)}
        results.append({**row, "median_k": middle if np.isfinite(middle) else None, "smallest": list(first)})
    ids = [study.fleet.recipe.queries[q] for q in study.targets]
    with drawing() as axes:
        title = f"Smallest removal that flips, {session.models[0].name} on {session.task.name}"
        save(axes.figure, session.run.file("figures", "smallest"), smallest_bars(axes, found, study.counts, title))
    return {**study.facts(), "results": results, "target_ids": ids}


@dataclass
class Study:
    """Targets, ways of choosing rows for them, and the retrains that tell."""

    session: Session
    fleet: Fleet
    counts: list[int]
    targets: list[int]
    order: Mapping[str, np.ndarray]  # [targets, N]: rows in the order in which a way would remove them
    group_order: Mapping[str, np.ndarray]
    base_margin_Q: np.ndarray
    base_accuracy: float
    diverged: list[str] = field(default_factory=list)
    retrained: int = 0
    _flips: dict[tuple[str, int, int], bool] = field(default_factory=dict)
    _undecided: list[dict[str, Any]] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """What every table of this study carries."""
        return {
            "n": len(self.targets),
            "targets": len(self.targets),
            "asked": len(self.fleet.recipe.queries),
            "train_rows": len(self.fleet.train_ids),
            "base_accuracy": self.base_accuracy,
            "retrains": self.retrained,
            "diverged": len(self.diverged),
            "diverged_names": self.diverged[:50],
            "undecided": self._undecided,
            "removed": self.counts,
            "seeds": self.session.cfg.repeats,
        }

    def search(self) -> dict[str, list[int | None]]:
        """For every way and target the smallest removal tried that flips it."""
        step = self._halving if self.session.cfg.bisect else self._upwards
        open_: dict[tuple[str, int], tuple[int, int]] = {
            (way, t): (0, len(self.counts)) for way in self.order for t in range(len(self.targets))
        }
        most = len(open_) * (len(self.counts).bit_length() if self.session.cfg.bisect else len(self.counts))
        with self.session.progress.stage("retrain", most * self.session.cfg.repeats) as bar:
            while asked := {key: step(low, high) for key, (low, high) in open_.items() if low < high}:
                self._ask(asked, bar)
                for key, at in asked.items():
                    low, high = open_[key]
                    open_[key] = (low, at) if self._flips[(*key, at)] else (at + 1, high)
        size = len(self.counts)
        place = lambda way, t: open_[(way, t)][0]  # noqa: E731
        return {
            way: [self.counts[place(way, t)] if place(way, t) < size else None for t in range(len(self.targets))]
            for way in self.order
        }

    @staticmethod
    def _upwards(low: int, high: int) -> int:
        return low

    @staticmethod
    def _halving(low: int, high: int) -> int:
        return (low + high) // 2

    def _ask(self, asked: Mapping[tuple[str, int], int], bar: Any) -> None:
        """Retrain without the rows in question, for all open (way, target) at once, until the answer is sure."""
        repeats, queries = self.session.cfg.repeats, self.fleet.recipe.queries
        jobs: dict[tuple[str, int, int], list[Job]] = {}
        for (way, t), at in asked.items():
            kept_N = self._without(self.order[way][t], self.counts[at])
            jobs[(way, t, at)] = [self.fleet.wanted(kept_N, r, "removal") for r in range(repeats)]
        taken = {key: own[: (repeats + 1) // 2] for key, own in jobs.items()}  # fewer never decide
        open_ = taken
        while open_:
            self._retrain(open_, bar)
            lacking = {key: self._lacking(key[1], own) for key, own in open_.items()}
            open_ = {key: jobs[key][: len(taken[key]) + more] for key, more in lacking.items() if more}
            taken |= open_
        self.retrained += len({j.output for own in taken.values() for j in own})
        for (way, t, at), own in taken.items():
            query, k = queries[self.targets[t]], self.counts[at]
            found = flipped(self._wrong(t, self._said(own, f"without {k} rows of {way} for {query}")), repeats)
            self._flips[(way, t, at)] = bool(found)
            if found is None:
                self._undecided.append({"scores": way, "target": query, "k": k})

    def _retrain(self, jobs: Mapping[tuple[str, int, int], Sequence[Job]], bar: Any) -> None:
        """Bring the retrains into being, telling how many targets flipped as it gets known."""
        waiting = {key: {j.output for j in own if not j.done} for key, own in jobs.items()}
        flips: dict[str, set[int]] = {way: set() for way in self.order}
        for (way, t, _), found in self._flips.items():
            if found:
                flips[way].add(t)

        def settle(key: tuple[str, int, int]) -> None:
            if not waiting[key] and flipped(
                self._wrong(key[1], self.fleet.outcomes(jobs[key])), self.session.cfg.repeats
            ):
                flips[key[0]].add(key[1])

        def tell(job: Job) -> None:
            for key, left in waiting.items():
                if job.output in left:
                    left.remove(job.output)
                    settle(key)
            told = ", ".join(f"{len(own)} by {way}" for way, own in flips.items())
            bar.advance(1, f"of {len(self.targets)} targets flipped: {told}")

        for key in jobs:  # a run that goes on has answers already
            settle(key)
        self.fleet.run([j for own in jobs.values() for j in own], tell)

    def _lacking(self, t: int, jobs: Sequence[Job]) -> int:
        """Retrains that are missing, at least, until it is sure whether the target flips; 0: it is, or none is left."""
        repeats = self.session.cfg.repeats
        wrong = self._wrong(t, self.fleet.outcomes(jobs))
        if flipped(wrong, repeats) is not None:
            return 0
        half = repeats // 2
        return min(half + 1 - sum(wrong), repeats - half - (len(wrong) - sum(wrong)), repeats - len(jobs))

    def _wrong(self, t: int, said: Sequence[Outcome]) -> list[bool]:
        """Of every retrain that did not diverge, whether it gets the target wrong."""
        return [not o.correct_Q[self.targets[t]] for o in said if not o.diverged]

    def _said(self, jobs: Sequence[Job], what: str) -> list[Outcome]:
        """Outcomes of the retrains of one removal that did not diverge; those that did are named."""
        outcomes = self.fleet.outcomes(jobs)
        self.diverged += [f"{what}, retrain {r}" for r, o in enumerate(outcomes) if o.diverged]
        return [o for o in outcomes if not o.diverged]

    def _without(self, order_N: np.ndarray, count: int) -> np.ndarray:
        kept_N = np.ones(len(self.fleet.train_ids), dtype=bool)
        kept_N[order_N[:count]] = False
        return kept_N

    def group(self) -> list[dict[str, Any]]:
        """The fall of the mean margin over all queries when the rows that help them all are removed together."""
        repeats = self.session.cfg.repeats
        jobs = {
            (way, k): [self.fleet.wanted(self._without(order_N, k), r, "removal") for r in range(repeats)]
            for way, order_N in self.group_order.items()
            for k in self.counts
        }
        todo = [j for own in jobs.values() for j in own]
        with self.session.progress.stage("group", len(todo), sum(j.done for j in todo)) as bar:
            self.fleet.run(todo, lambda job: bar.advance(1))
        self.retrained += len({j.output for j in todo})
        rows = []
        for (way, k), own in jobs.items():
            check_some(self.fleet.outcomes(own), f"retrains without {k} rows of {way}")
            said = self._said(own, f"without {k} rows of {way} for all queries")
            fall = float(self.base_margin_Q.mean() - np.mean([o.margin_Q.mean() for o in said]))
            right = float(np.mean([o.correct_Q.mean() for o in said]))
            rows.append({"scores": way, "k": k, "margin_drop": fall, "accuracy": right})
        return rows


def flipped(wrong: Sequence[bool], repeats: int) -> bool | None:
    """Whether more than half of the retrains asked for are wrong; None where those without an answer would decide.

    >>> flipped([True, True, False], 3), flipped([False, False], 3), flipped([True], 3)
    (True, False, None)
    """
    half = repeats // 2
    if sum(wrong) > half:
        return True
    return None if sum(wrong) + repeats - len(wrong) > half else False


@contextlib.contextmanager
def _study(session: Session) -> Iterator[Study]:
    """A study whose workers stay until the block ends."""
    matrices = open_scores(session.cfg.scores, session.cfg.only)
    queries = common_queries(matrices)
    fleet = Fleet.of(session, queries)
    laid = {m.name: m.aligned(queries, fleet.train_ids) for m in matrices}
    removals(session.cfg.remove, len(fleet.train_ids))  # refused before any worker is started
    with fleet.standing() as fleet:
        yield _prepared(session, fleet, laid)


def _prepared(session: Session, fleet: Fleet, laid: Mapping[str, np.ndarray]) -> Study:
    cfg: RemovalConfig = session.cfg
    queries, rows = fleet.recipe.queries, len(fleet.train_ids)
    counts = removals(cfg.remove, rows)
    jobs = [fleet.wanted(np.ones(rows, dtype=bool), r, "base") for r in range(cfg.base_seeds)]
    with session.progress.stage("base", len(jobs), sum(j.done for j in jobs)) as bar:
        fleet.run(jobs, lambda job: bar.advance(1))
    outcomes = [outcome(j) for j in jobs]
    check_some(outcomes, "base models")
    lost = [f"base model {r}" for r, o in enumerate(outcomes) if o.diverged]
    said = [o for o in outcomes if not o.diverged]
    right_Q = np.all([o.correct_Q for o in said], axis=0)
    targets = np.flatnonzero(right_Q)[: cfg.targets].tolist()
    if not targets:
        raise StoreError(
            f"None of the {len(queries)} queries is right under all {len(said)} base models, so none can flip. "
            "Score more queries, or train longer."
        )
    labels_N = np.array([repr(r.label) for r in fleet.task.rows("train")])
    asked = [repr(r.label) for r in find_rows(fleet.task, queries)]
    order = {name: top_k(score_QN[targets], max(counts)) for name, score_QN in laid.items()}
    group = {name: top_k(score_QN.mean(0)[None], max(counts))[0] for name, score_QN in laid.items()}
    order[RANDOM] = np.stack([same_label(labels_N, asked[q], max(counts), cfg.seed, queries[q]) for q in targets])
    group["random rows"] = np.random.default_rng(seed_of(cfg.seed, "group")).permutation(rows)[: max(counts)]
    margin_Q = np.mean([o.margin_Q for o in said], axis=0)
    accuracy = float(np.mean([o.correct_Q.mean() for o in said]))
    return Study(session, fleet, counts, targets, order, group, margin_Q, accuracy, lost, len(jobs))


def removals(given: Sequence[str], rows: int) -> list[int]:
    """Numbers of rows to remove, rising.

    >>> removals(["10%", "5"], 200), removals([], 200)
    ([5, 20], [20, 40, 60, 80, 100, 120])
    """
    number = lambda text: round(float(text[:-1]) / 100 * rows) if text.endswith("%") else int(text)  # noqa: E731
    found = sorted({max(1, number(t)) for t in given}) or list(COUNTS)
    if found[-1] >= rows:
        raise ConfigError(
            f"--remove {found[-1]} leaves nothing of {rows} training rows. Give smaller numbers or shares such as 5%."
        )
    return found


def same_label(labels_N: np.ndarray, label: str, count: int, seed: int, query: str) -> np.ndarray:
    """Training rows of one label in a random order of the query's own; of other labels only when these run out."""
    order = np.random.default_rng(seed_of(seed, "random rows", query)).permutation(len(labels_N))
    ours = labels_N[order] == label
    return np.concatenate([order[ours], order[~ours]])[:count]

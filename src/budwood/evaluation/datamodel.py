"""`validate lds`: retrain on random subsets, then ask of every score matrix whether it foresaw the outcome.

Shapes: S subsets, R retrains of each, N training rows, Q queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from budwood.config.validate import LdsConfig
from budwood.data.batch import seed_of
from budwood.engine.jobs import Job
from budwood.errors import StoreError
from budwood.evaluation import lds
from budwood.evaluation.combined import across_models, candidates, ensembles
from budwood.evaluation.fleet import Fleet, check_some
from budwood.evaluation.matrices import Scored, common_queries, open_scores
from budwood.evaluation.retrain import outcome
from budwood.evaluation.truth import Truth, read_truth, write_truth
from budwood.figures.lds import lds_bars, predicted_measured
from budwood.figures.save import drawing, save
from budwood.methods.session import Session

CHUNK = 10  # subsets between two looks at the standard error


def validate_lds(session: Session) -> dict[str, Any]:
    """Linear datamodelling score of every matrix, with intervals, a ceiling and a random line."""
    cfg: LdsConfig = session.cfg
    matrices = open_scores(cfg.scores, cfg.only)
    truth = _truth(session, matrices)
    whole = truth
    truth = truth.sound()
    lds.check_subsets(len(truth.mask_SN))
    truth, laid = lay(truth, matrices)
    if cfg.ensemble:
        laid |= ensembles(matrices, laid)
    results = [_row(name, truth, score_QN, cfg.seed) for name, score_QN in laid.items()]
    lost = whole.diverged
    metrics: dict[str, Any] = {
        "n": truth.margin_SRQ.shape[2],
        "metric": "lds",
        "score": results[0]["lds"] if results else None,
        "results": results,
        "subsets": len(truth.mask_SN),
        "seeds": truth.margin_SRQ.shape[1],
        "train_rows": truth.mask_SN.shape[1],
        "reliability": lds.reliability(truth),
        "ceiling": lds.ceiling(truth),
        "retrain_sd": lds.noise(truth),
        "diverged": len(lost),
        "diverged_names": [f"subset {s}, retrain {r}" for s, r in lost[:50]],
        "matched_by": "id" if truth.train_ids else "place",
    }
    if laid:
        first = next(iter(laid.values()))
        metrics["random"], metrics["random_sd"] = lds.random_line(truth, first, cfg.seed)
        metrics["differences"] = _differences(truth, laid, cfg.seed)
        metrics["base_seeds"] = _spread(matrices, results)
        _draw(session, truth, laid, metrics)
    if cfg.tune:
        choice = lds.tune(truth, candidates(matrices, laid), cfg.seed)
        metrics["tune"] = {
            "chosen": choice.chosen,
            "by_fold": list(choice.by_fold),
            "lds": choice.unseen.value,
            "low": choice.unseen.low,
            "high": choice.unseen.high,
        }
    return metrics


def _truth(session: Session, matrices: Sequence[Scored]) -> Truth:
    cfg: LdsConfig = session.cfg
    if cfg.truth is not None:
        return read_truth(cfg.truth)
    if session.run.file("truth", "index.json").exists():
        return read_truth(session.run.path)
    asked = list(dict.fromkeys(q for m in matrices for q in m.scores.query_ids))
    fleet = Fleet.of(session, asked, cfg.queries)
    for m in matrices:
        m.aligned([], fleet.train_ids)  # other rows are refused now, not after an hour
    with fleet.standing() as fleet:
        truth = grow(session, fleet, matrices)
    write_truth(session.run.file("truth"), truth)
    for file in fleet.directory.glob("*.safetensors"):
        file.unlink()
    return truth


def subset(rows: int, fraction: float, seed: int, number: int) -> np.ndarray:
    """kept_N of one random subset, a pure function of its arguments.

    >>> int(subset(10, 0.5, 0, 3).sum())
    5
    """
    order = np.random.default_rng(seed_of(seed, "subset", number)).permutation(rows)
    kept_N = np.zeros(rows, dtype=bool)
    kept_N[order[: max(1, round(fraction * rows))]] = True
    return kept_N


def grow(session: Session, fleet: Fleet, matrices: Sequence[Scored]) -> Truth:
    """Retrain subset after subset; with --until-se, until the first matrix's score is sharp enough."""
    cfg: LdsConfig = session.cfg
    rows = len(fleet.train_ids)
    mask_SN = np.stack([subset(rows, cfg.fraction, cfg.seed, s) for s in range(cfg.subsets)])
    jobs = [[fleet.wanted(mask_N, r) for r in range(cfg.repeats)] for mask_N in mask_SN]
    there = sum(j.done for own in jobs for j in own)
    watched = matrices[0].aligned(_known(fleet, matrices[0]), fleet.train_ids) if matrices else None
    size = CHUNK if cfg.until_se is not None else len(jobs)
    with session.progress.stage("retrain", cfg.subsets * cfg.repeats, there) as bar:
        note = _Estimate(fleet, jobs, mask_SN, matrices[0] if matrices else None, watched)

        def finished(one: Job) -> None:
            bar.advance(1, note.text(bar.done + 1))

        for first in range(0, len(jobs), size):
            fleet.run([j for own in jobs[first : first + size] for j in own], finished)
            grown = _gathered(fleet, jobs[: first + size], mask_SN)
            if cfg.until_se is not None and note.se(grown) <= cfg.until_se:
                session.progress.say(
                    f"{len(grown.mask_SN)} subsets give a standard error of {note.se(grown):.3f}: enough"
                )
                break
    return grown


def _known(fleet: Fleet, scored: Scored) -> list[str]:
    own = set(scored.scores.query_ids)
    return [q for q in fleet.recipe.queries if q in own]


def _gathered(fleet: Fleet, jobs: Sequence[Sequence[Job]], mask_SN: np.ndarray) -> Truth:
    outcomes = [fleet.outcomes(own) for own in jobs]
    check_some([o for own in outcomes for o in own], "retrains")
    margin_SRQ = np.stack([[o.margin_Q for o in own] for own in outcomes])
    facts = {"fraction": fleet.cfg.fraction, "base": fleet.recipe.base, "task": fleet.task.name}
    return Truth(mask_SN[: len(jobs)], margin_SRQ, fleet.train_ids, fleet.recipe.queries, facts)


class _Estimate:
    """The score so far, for the progress line: recomputed now and then from the subsets that are complete."""

    def __init__(
        self,
        fleet: Fleet,
        jobs: Sequence[Sequence[Job]],
        mask_SN: np.ndarray,
        scored: Scored | None,
        score_QN: np.ndarray | None,
    ) -> None:
        self.fleet, self.jobs, self.mask_SN, self.scored, self.score_QN = fleet, jobs, mask_SN, scored, score_QN
        self.columns = (
            [i for i, q in enumerate(fleet.recipe.queries) if q in set(_known(fleet, scored))] if scored else []
        )
        self.every = max(1, len(jobs) * len(jobs[0]) // 25)
        self.last = ""

    def text(self, done: int) -> str:
        """Name, value and standard error of the first matrix."""
        if self.scored is None or done % self.every:
            return self.last
        whole = [s for s, own in enumerate(self.jobs) if all(j.done for j in own)]
        if len(whole) >= 3:
            margin = [[outcome(j).margin_Q for j in self.jobs[s]] for s in whole]
            truth = Truth(self.mask_SN[whole], np.stack(margin)).sound()
            if len(truth.mask_SN) >= 3:
                found = self._score(truth)
                self.last = f"LDS of {self.scored.name} so far {found.value:.3f} ± {found.se:.3f}"
        return self.last

    def se(self, truth: Truth) -> float:
        """Standard error of the first matrix's score on complete subsets."""
        return self._score(truth.sound()).se

    def _score(self, truth: Truth) -> lds.Estimate:
        assert self.score_QN is not None
        return lds.lds(truth.queries(self.columns), self.score_QN, self.fleet.cfg.seed)


def lay(truth: Truth, matrices: Sequence[Scored]) -> tuple[Truth, dict[str, np.ndarray]]:
    """The truth on the queries all matrices have, and the matrices in its order."""
    if not matrices:
        return truth, {}
    if not truth.train_ids:
        shape = truth.margin_SRQ.shape[2], truth.mask_SN.shape[1]
        return truth, {m.name: m.by_place(*shape) for m in matrices}
    measured = {q: i for i, q in enumerate(truth.query_ids)}
    asked = [q for q in common_queries(matrices) if q in measured]
    if not asked:
        raise StoreError(
            f"None of the queries of {matrices[0].run} was measured in this ground truth ({len(measured)}, such as "
            f"'{truth.query_ids[0]}'). Score those queries, or retrain without --truth."
        )
    return truth.queries([measured[q] for q in asked]), {m.name: m.aligned(asked, truth.train_ids) for m in matrices}


def _row(name: str, truth: Truth, score_QN: np.ndarray, seed: int) -> dict[str, Any]:
    found = lds.lds(truth, score_QN, seed)
    against = lds.difference(truth, score_QN, lds.shuffled(score_QN, seed), seed)
    return {
        "scores": name,
        "lds": found.value,
        "low": found.low,
        "high": found.high,
        "se": found.se,
        "above_random": against.value,
        "above_random_low": against.low,
    }


def _differences(truth: Truth, laid: dict[str, np.ndarray], seed: int) -> list[dict[str, Any]]:
    """The first matrix against every other, on the same draws."""
    (name, first), *others = laid.items()
    return [
        {"first": name, "second": other, **asdict(lds.difference(truth, first, score_QN, seed))}
        for other, score_QN in others
    ]


def _spread(matrices: Sequence[Scored], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread over models (base seeds) of equally named matrices."""
    value = {r["scores"]: r["lds"] for r in results}
    by_label = {label: [value[m.name] for m in own] for label, own in across_models(matrices).items()}
    return [
        {"scores": label, "runs": len(own), "mean": float(np.mean(own)), "sd": float(np.std(own, ddof=1))}
        for label, own in by_label.items()
    ]


def _draw(session: Session, truth: Truth, laid: dict[str, np.ndarray], metrics: dict[str, Any]) -> None:
    where = f"{session.models[0].name} on {session.task.name}"
    with drawing(height=1.6 + 0.34 * len(laid)) as axes:
        title = f"Do scores foresee retraining?\n{where}, {metrics['subsets']} subsets x {metrics['seeds']}"
        table = lds_bars(axes, metrics["results"], metrics["ceiling"], metrics["random"], title)
        save(axes.figure, session.run.file("figures", "lds"), table)
    best = max(metrics["results"], key=lambda r: r["lds"])["scores"]
    with drawing(4.6, 4.2) as axes:
        pred_QS = lds.predicted(truth.mask_SN, laid[best])
        table = predicted_measured(axes, pred_QS, truth.mean_SQ().T, f"{best}: predicted and measured\n{where}")
        save(axes.figure, session.run.file("figures", "predicted"), table)

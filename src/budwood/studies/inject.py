"""Injection: teach a model a new skill in every way of holding the old ones, and show what each way costs.

Every cell (way, strength, seed) is a job whose steps are runs of their own under OUT/cells, so a stopped study carries
on in the middle of a training.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from budwood.config.data import DataConfig
from budwood.config.finetune import EvaluateConfig, FinetuneConfig
from budwood.config.fisher import FisherConfig
from budwood.config.inject import SWEPT, InjectConfig
from budwood.data.arithmetic import copy_max, is_problem
from budwood.data.source import load_task, sampled
from budwood.data.task import Task, as_json, from_json
from budwood.engine.jobs import Job
from budwood.engine.run import run_all
from budwood.errors import ConfigError
from budwood.figures.front import pareto
from budwood.figures.save import drawing, save
from budwood.linalg.metrics import bootstrap_interval, mcc, pearson, spearman
from budwood.linalg.ranking import bootstrap_ratio
from budwood.methods.session import RUNS, Session
from budwood.models.objective import check_mode
from budwood.models.reading import mode_for, reads_left_to_right
from budwood.models.reference import resolve
from budwood.store.files import read_json, write_json
from budwood.studies.tradeoff import error_of, grouped, hypervolumes, knee
from budwood.studies.verbs import run_verb

SCORES = (
    *("metric", "score", "rmsle", "rmsle_parsed", "exact", "parse_rate", "accuracy", "f1", "mcc", "pearson"),
    *("lm_loss", "token_accuracy", "loss", "n", "majority", "dropped", "answers_too_long"),
)
LM_MODES = ("prompt", "causal", "mlm", "clm")
RESAMPLED = {"mcc": mcc, "pearson": pearson, "spearman": spearman}  # metrics that are no mean over rows
ANSWERS = ("predicted", "label")
STEEPNESS = 0.05  # of RecAdam's sigmoid, where --anneal is not set


def inject(session: Session) -> dict[str, Any]:
    """Run every cell, then compare: cells, groups over seeds, front, hypervolume by way, knee."""
    cfg: InjectConfig = session.cfg
    mode = mode_for(cfg, session.task, session.models[0])
    check_mode(mode, session.task.kind)  # now, not after the model before has been scored
    whole = {name: load_task(_kept_data(cfg, name, whole=True)) for name in cfg.keep}
    kept = {name: sampled(task, _kept_data(cfg, name)) for name, task in whole.items()}
    ways, notes = _ways(cfg, mode, kept)
    notes |= _shared_rows(session.task, whole)
    for note, text in notes.items():
        session.progress.say(f"  {note}: {text}")
    write_json(session.run.file("task.json"), as_json(session.task))
    seeds = cfg.seeds or (cfg.seed,)
    order = _order(session, kept, mode)
    base = [Cell("base", None, s) for s in seeds]
    cells = [Cell(w, s, seed) for seed in seeds for w in ways for s in (cfg.strengths if w in SWEPT else (None,))]
    before = _work(session, "base", base, order)
    if {"ewc"} & set(ways):
        order["fishers"] = [str(_fisher(session, order, name, task, seeds[0])) for name, task in kept.items()]
    found = _work(session, "cells", cells, order)
    return {
        **_compared(session, found, before, next(iter(kept))),
        "mode": mode,
        "seeds": list(seeds),
        "warnings": notes,
    }


@dataclass(frozen=True)
class Cell:
    """One way of training: how old skills are held, how strongly, with which seed."""

    retain: str
    strength: float | None
    seed: int

    @property
    def name(self) -> str:
        """The cell's directory.

        >>> Cell("ewc", 10.0, 1).name, Cell("none", None, 1).name
        ('ewc-10-seed1', 'none-seed1')
        """
        return "-".join(
            [self.retain, *([f"{self.strength:g}"] if self.strength is not None else []), f"seed{self.seed}"]
        )


def _slug(name: str) -> str:
    """A task's name as that of a directory; a file's folders are joined to it."""
    return name.strip("./").replace("/", "-")


def _kept_data(cfg: InjectConfig, name: str, whole: bool = False) -> DataConfig:
    """Where a kept task is: with at most --keep-rows training rows, or with all it has."""
    some = {} if whole else {"limit": cfg.keep_rows, "limit_eval": cfg.limit_eval}
    return DataConfig(task=name, data_dir=cfg.data_dir, offline=cfg.offline, data_seed=cfg.data_seed, **some)


def _kept_task(cfg: InjectConfig, name: str) -> Task:
    return load_task(_kept_data(cfg, name))


def _ways(cfg: InjectConfig, mode: str, kept: Mapping[str, Task]) -> tuple[list[str], dict[str, str]]:
    """The ways that can be gone here, and why one is left out; a study that cannot be is refused."""
    text = [name for name, task in kept.items() if task.kind == "text"]
    if text and mode not in LM_MODES:
        raise ConfigError(
            f"--keep {text[0]} is measured by the language-model loss, but in --mode {mode} the model that learns "
            f"'{cfg.task}' has no language-model head. Use --mode prompt, or keep tasks with labels only."
        )
    if cfg.keep_by == "prompt" and mode not in LM_MODES and len(text) < len(kept):
        raise ConfigError(f"--keep-by prompt asks the language model, and --mode {mode} has none. Use probe or tune.")
    ways: list[str] = list(dict.fromkeys(cfg.retain))
    notes: dict[str, str] = {}
    if "replay" in ways and not (text and mode in LM_MODES):
        ways.remove("replay")
        notes["replay"] = "left out: no kept task is text that the model in training could read"
    if "replay" in ways:
        notes["replay"] = f"reads every training row of {', '.join(text)}, Fisher and heads at most {cfg.keep_rows:,}"
    if not ways:
        raise ConfigError("Nothing is left to compare: replay needs a kept task of text. Add --retain none,ewc,l2.")
    return ways, notes


def _shared_rows(task: Task, whole: Mapping[str, Task]) -> dict[str, str]:
    """A warning for every kept task that has rows of the new one, also beyond --keep-rows, since replay reads all."""
    words = lambda t: {(r.text, r.pair, r.words) for rows in t.splits.values() for r in rows}  # noqa: E731
    own = words(task)
    common = {name: len(own & words(other)) for name, other in whole.items()}
    return {
        f"shared rows {name}": f"{n:,} rows of '{name}' are also in '{task.name}': they are learned, not kept"
        for name, n in common.items()
        if n
    }


def _order(session: Session, kept: Mapping[str, Task], mode: str) -> dict[str, Any]:
    """What every cell is told, as plain JSON."""
    return {
        "model": session.models[0].text,
        "cfg": session.cfg.model_dump(mode="json"),
        "task": str(session.run.file("task.json")),
        "kinds": {name: task.kind for name, task in kept.items()},
        "mode": mode,
        "fishers": [],
    }


def _work(session: Session, stage: str, cells: Sequence[Cell], order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Bring every cell's file into being; returns what is in them, in order."""
    place = session.run.file("cells")
    jobs = [
        Job(
            "budwood.studies.inject:work",
            {**order, **asdict(c), "place": str(place / c.name)},
            place / f"{c.name}.json",
        )
        for c in cells
    ]

    def told(job: Job) -> None:
        bar.advance(1)
        done = read_json(job.output)
        kept = ", ".join(f"{n} {k['score']:.3f}" for n, k in done["kept"].items())
        new = f"{done['new']['metric']} {done['new']['score']:.3f}" if done["new"] else "no answer yet"
        session.progress.say(f"  {job.output.stem}: {new}; kept: {kept}")

    with session.progress.stage(stage, len(jobs), sum(j.done for j in jobs)) as bar:
        run_all(jobs, session.cfg, told)
    return [read_json(j.output) for j in jobs]


def work(arguments: dict[str, Any], part: Path) -> None:
    """Job: train one cell (nothing for the base) and score it on the new skill and on everything kept."""
    cfg = InjectConfig(**arguments["cfg"])
    cell = Cell(arguments["retain"], arguments["strength"], arguments["seed"])
    place = Path(arguments["place"])
    task = from_json(read_json(Path(arguments["task"])))
    if cell.retain == "base":
        model = arguments["model"]
        new = _base_score(cfg, cell, place, model, task, arguments["mode"])
    else:
        settings = _training(cfg, cell, arguments)
        trained = run_verb("finetune", FinetuneConfig(**settings, out=place / "new"), [arguments["model"]], task)
        model, new = str(trained.run), _scores(trained.metrics, trained.run, task.kind)
        new |= {k: trained.metrics[k] for k in ("ewc_effective", "ewc_mean") if k in trained.metrics}
        if "ood" in task.splits:
            new["ood"] = _evaluated(cfg, cell, place / "ood", model, task, "ood").get("by_magnitude", {})
    kept = {
        name: _keep_score(cfg, cell, place / f"keep-{_slug(name)}", model, name, kind)
        for name, kind in arguments["kinds"].items()
    }
    write_json(part, {**asdict(cell), "new": new, "kept": kept})


def _common(cfg: InjectConfig, cell: Cell) -> dict[str, Any]:
    """Settings that every child run shares."""
    same = ("device", "threads", "offline", "revision", "trust_remote_code", "data_dir")
    return {**{k: getattr(cfg, k) for k in same}, "seed": cell.seed, "progress": "none"}


def _training(cfg: InjectConfig, cell: Cell, order: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one cell's training."""
    fields = FinetuneConfig.model_fields
    own = {k: v for k, v in cfg.model_dump().items() if k in fields and k in cfg.model_fields_set}
    gone = ("out", "config", "seeds", "limit", "limit_eval", "shots", "split", "group", "text", "text_pair", "label")
    files = ("train_file", "validation_file", "test_file")
    for name in (*gone, *files, "data_seed", "json_output", "overwrite", "anneal", "anneal_at"):
        own.pop(name, None)
    if own.get("model_seed") == cfg.seed:  # not asked for: new weights follow the seed of the cell
        own.pop("model_seed")
    texts = ",".join(n for n, kind in order["kinds"].items() if kind == "text")
    ways: dict[str, dict[str, Any]] = {
        "none": {},
        "ewc": {"ewc": tuple(map(Path, order["fishers"])), "ewc_strength": cell.strength},
        "l2": {"l2_to_base": cell.strength},
        "recadam": {
            "l2_to_base": cell.strength,
            "anneal": cfg.anneal or STEEPNESS,
            "anneal_at": cfg.anneal_at,
        },
        "replay": {"replay": texts or None},
    }
    return {**own, **_common(cfg, cell), "task": cfg.task, **ways[cell.retain]}


def _base_score(cfg: InjectConfig, cell: Cell, place: Path, model: str, task: Task, mode: str) -> dict[str, Any] | None:
    """The untrained model on the new skill; None where it has no head for it yet."""
    if mode not in LM_MODES:
        return None
    return _evaluated(cfg, cell, place / "new", model, task, task.reported)


def _reading(cfg: InjectConfig) -> dict[str, Any]:
    names = ("mode", "template", "label_words", "max_length", "truncate", "mlm_probability", "masks", "parity")
    return {k: getattr(cfg, k) for k in names if k in cfg.model_fields_set}


def _evaluated(cfg: InjectConfig, cell: Cell, place: Path, model: str, task: Task, split: str) -> dict[str, Any]:
    settings = EvaluateConfig(task=task.name, eval_split=split, out=place, **_common(cfg, cell), **_reading(cfg))
    result = run_verb("evaluate", settings, [model], task)
    return _scores(result.metrics, result.run, task.kind)


def _keep_score(cfg: InjectConfig, cell: Cell, place: Path, model: str, name: str, kind: str) -> dict[str, Any]:
    """A kept task from the model of a cell: text by its loss, labels by a head on frozen weights or as asked for."""
    task = _kept_task(cfg, name)
    common = {**_common(cfg, cell), "task": name, "out": place}
    if kind == "text" or cfg.keep_by == "prompt":
        mode = "prompt" if kind != "text" else _text_mode(model)
        found = run_verb("evaluate", EvaluateConfig(**common, mode=mode, eval_split=task.reported), [model], task)
        return _scores(found.metrics, found.run, kind)
    only: dict[str, Any] = {}
    if cfg.keep_by == "probe":
        only = {"train_only": ("head",), "learning_rate": 5e-3, "dropout": 0.0}
        if kind in ("label", "regression"):
            only["pool"] = "mean"  # a fresh pooler between frozen states and the head would be noise
    settings = FinetuneConfig(**common, **only, max_steps=cfg.keep_steps)
    found = run_verb("finetune", settings, [model], task)
    if cell.retain != "base":
        shutil.rmtree(found.model, ignore_errors=True)  # the cell's own model stays; heads of kept tasks are many
    return _scores(found.metrics, found.run, kind)


def _text_mode(model: str) -> str:
    """How the model of a cell reads text; said outright, since its run was made in another mode."""
    return "clm" if reads_left_to_right(resolve(model, runs_dir=RUNS, offline=True)) else "mlm"


def _scores(metrics: Mapping[str, Any], run: Path, kind: str) -> dict[str, Any]:
    """The numbers worth keeping, with a 95 % interval of the main one over resampled rows."""
    kept = {k: metrics[k] for k in SCORES if k in metrics}
    if kind == "span":
        kept["full"] = 100  # SQuAD's scores are per cent
    if "by_magnitude" in metrics:
        kept["by_magnitude"] = metrics["by_magnitude"]
    low, high = _interval(metrics, run)
    return {**kept, "low": low, "high": high, "run": f"cells/{run.parent.name}/{run.name}"}


def _interval(metrics: Mapping[str, Any], run: Path) -> tuple[float | None, float | None]:
    if "accuracy_low" in metrics and metrics["metric"] == "accuracy":
        return metrics["accuracy_low"], metrics["accuracy_high"]
    import pandas

    table = pandas.read_parquet(run / "records.parquet")
    if metrics["metric"] == "lm_loss":
        tokens = table["tokens"].to_numpy(float)
        return bootstrap_ratio(table["loss"].to_numpy(float) * tokens, tokens, 0)
    if metrics["metric"] == "rmsle":
        if "dropped" in metrics:
            table = table[table["predicted"].notna()]
        said = np.array([0.0 if p is None or p != p else max(float(p), 0.0) for p in table["predicted"]])
        gap = (np.log1p(said) - np.log1p(table["label"].to_numpy(float))) ** 2
        low, high = bootstrap_ratio(gap, np.ones(len(gap)), 0)
        return low**0.5, high**0.5
    if metrics["metric"] in RESAMPLED:
        codes = [pandas.Categorical(table[k], categories=sorted(table["label"].unique())).codes for k in ANSWERS]
        said, gold = codes if metrics["metric"] == "mcc" else (table[k].to_numpy(float) for k in ANSWERS)
        return bootstrap_interval(RESAMPLED[metrics["metric"]], said, gold, 0)
    return None, None


def _fisher(session: Session, order: Mapping[str, Any], name: str, task: Task, seed: int) -> Path:
    """The Fisher information of one kept task: of the language model, or of the head that was put on the base."""
    cfg: InjectConfig = session.cfg
    headed = task.kind != "text" and cfg.keep_by != "prompt"
    model = str(session.run.file("cells", f"base-seed{seed}", f"keep-{_slug(name)}")) if headed else order["model"]
    mode = "prompt" if task.kind != "text" and not headed else None
    session.progress.say(f"  Fisher information of {name} ({len(task.rows('train')):,} rows)")
    common = _common(cfg, Cell("base", None, seed))
    settings = FisherConfig(**common, task=name, out=session.run.file("fisher", _slug(name)), mode=mode)
    return run_verb("fisher", settings, [model], task).run


def _compared(session: Session, cells: list[dict[str, Any]], before: list[dict[str, Any]], main: str) -> dict[str, Any]:
    """The study's metrics; writes the figure."""
    groups = grouped(cells, main)
    base_kept = float(np.median([error_of(b["kept"][main]) for b in before]))
    reference, name = _reference(session.task, before, groups)
    area = hypervolumes(cells, main, reference)
    plain = next((g for g in groups if g["retain"] == "none"), None)
    corner = (reference, plain["kept_error"] if plain else max(g["kept_error"] for g in groups))
    metric = cells[0]["new"]["metric"]
    words = (
        f"{session.models[0].name}: {session.task.name} against {main}",
        f"{session.task.name}: {_axis(metric)}",
        f"{main}: {_axis(cells[0]['kept'][main]['metric'])}",
    )
    with drawing(7.4, 4.4) as axes:
        save(axes.figure, session.run.file("figures", "front"), pareto(axes, groups, base_kept, corner, words))
    best = min(groups, key=lambda g: g["new_error"])
    return {
        "split": session.task.reported,
        "n": len(session.task.rows(session.task.reported)),
        "metric": metric,
        "score": best["new"]["score"],
        "main_kept": main,
        "base": {"new": before[0]["new"], "kept": before[0]["kept"], "kept_error": base_kept},
        "reference": {"new_error": corner[0], "kept_error": corner[1], "is": name},
        "cells": cells,
        "groups": groups,
        "front": [{"retain": g["retain"], "strength": g["strength"]} for g in groups if g["front"]],
        "hypervolume": area,
        "knee": knee(groups, base_kept, reference),
    }


def _axis(metric: str) -> str:
    from budwood.train.evaluate import LOWER_IS_BETTER

    return f"{metric} (lower is better)" if metric in LOWER_IS_BETTER else f"1 - {metric}"


def _reference(
    task: Task, before: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> tuple[float, str]:
    """The error of a trivial answer: copying the larger operand, the commonest label, or the model before."""
    rows = task.rows(task.reported)
    if task.kind == "number" and all(is_problem(r) for r in rows):
        return copy_max(rows), "copying the larger operand"
    if groups[0]["new"]["metric"] in ("mcc", "pearson", "spearman"):
        return 1.0, "one answer for all"
    if "majority" in groups[0]["new"] and groups[0]["new"]["metric"] == "accuracy":
        return 1.0 - float(groups[0]["new"]["majority"]), "the commonest label"
    if before[0]["new"] is not None:
        return error_of(before[0]["new"]), "the model before"
    return max(g["new_error"] for g in groups), "the worst cell"


def estimate(cfg: InjectConfig, models: tuple[Any, ...], task: Task) -> dict[str, Any]:
    """Figures of a whole study: one training, times the cells; scoring what is kept is not counted."""
    from budwood.methods.estimate import finetune

    kept = {name: _kept_task(cfg, name) for name in cfg.keep}
    ways, _ = _ways(cfg, mode_for(cfg, task, models[0]), kept)
    cells = len(cfg.seeds or (0,)) * sum(len(cfg.strengths) if w in SWEPT else 1 for w in ways)
    one = finetune(cfg, models, task)
    return {
        **one,
        "cells": cells,
        "flops": one["flops"] * cells,
        "disk_bytes": one["disk_bytes"] * cells,
        "seconds": one["seconds"] * cells,
    }

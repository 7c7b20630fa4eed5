"""From settings to a finished run: references, data, directory, lock, results. Every verb goes through here."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from budwood.config.data import DataConfig
from budwood.config.run import NEUTRAL, JobsConfig, RunConfig
from budwood.data.source import load_task, resolve_task, sampled
from budwood.data.task import Task
from budwood.engine.run import answering
from budwood.errors import BudwoodError, ConfigError
from budwood.methods.result import Result
from budwood.models.reference import ModelRef, resolve
from budwood.store.files import cache_dir, digest, file_digest, read_json, write_json
from budwood.store.memory import peak_mb
from budwood.store.progress import Progress, style_for
from budwood.store.run import Run, locked, open_run, plain, run_name, same, status_of


class VerbConfig(RunConfig, DataConfig):
    """What a session reads of any verb's settings."""


@dataclass(frozen=True)
class Session:
    """What a method gets: settings, resolved models, rows, and a run to write into."""

    verb: str
    cfg: Any
    models: tuple[ModelRef, ...]
    task: Task
    run: Run
    progress: Progress


class Method(Protocol):
    """A verb's work: writes its artefacts into `session.run` and returns the metrics."""

    def __call__(self, session: Session) -> dict[str, Any]:
        """Do the work."""


RUNS = Path("runs")
SEED = "@seed"  # in a reference: the seed of each child run, as in RUN/seeds/@seed
# settings that name files: their content decides, not their place
ARTEFACTS = frozenset(
    [
        "ewc",
        "fisher",
        "fishers",
        "inside",
        "factors",
        "features_from",
        "checkpoints",
        "source",
        "sources",
        "scores",
        "truth",
        "randomised",
    ]
)
MODELS = frozenset(["checkpoints"])  # settings that name models as the verb's own argument does


def carry_out(verb: str, cfg: Any, references: Sequence[str], method: Method, task: Task | None = None) -> Result:
    """Run `method` once for these settings: nothing if it is done already, the rest if it was interrupted."""
    inside = getattr(cfg, "seeds_inside", False)  # a study that runs all its seeds itself
    if cfg.seeds and not inside:
        return _per_seed(verb, cfg, references, method, task)
    cfg = with_seeds(cfg)
    models, task = prepare(cfg, references, task)
    settings = settings_of(cfg, models, task) | ({"seeds": list(cfg.seeds)} if inside else {})
    path = cfg.out or RUNS / run_name(verb, references[0] if references else "none", task.name, settings)
    with locked(path):
        facts = _facts(cfg, models, task)
        run = _opened(path, verb, cfg, settings, facts)
        if status_of(path) == "done":
            return Result(path, read_json(path / "metrics.json"), read_json(path / "cost.json"), fresh=False)
        progress = Progress(style_for(cfg.progress), path / "progress.jsonl")
        began = _Clock()
        with _refusals(run):
            if isinstance(cfg, JobsConfig):
                answering(cfg)
            _machine(cfg, run)
            found = method(Session(verb, cfg, models, task, run, progress))
        metrics = _plain({**_common(verb, cfg, models, task), **found})
        cost = _cost(began, progress, path)
        run.finish(metrics, cost)
        run.file("state.safetensors").unlink(missing_ok=True)  # only now is it worth nothing
        return Result(path, metrics, cost)


@contextlib.contextmanager
def _refusals(run: Run) -> Iterator[None]:
    """A run that is refused before it made anything leaves its place free; one that made something says why it failed.

    One that is killed comes through here neither way, so the same command carries on with it.
    """
    try:
        yield
    except BudwoodError as e:
        if not run.withdraw():
            run.note(status="failed", error=str(e))
        raise


def prepare(cfg: RunConfig, references: Sequence[str], task: Task | None) -> tuple[tuple[ModelRef, ...], Task]:
    """Resolve names before anything heavy is imported, then read the rows."""
    models = tuple(_resolved(cfg, r) for r in references)
    if not isinstance(cfg, DataConfig):  # a verb that looks at models and artefacts alone
        return models, Task("none", "text", {})
    if task is None and not cfg.task:  # a verb about grafts, each of which names its task
        return models, Task("grafts", "text", {})
    if task is None:
        resolve_task(cfg)
        return models, load_task(cfg)
    return models, sampled(task, cfg)


def _resolved(cfg: RunConfig, reference: str) -> ModelRef:
    return resolve(
        reference,
        runs_dir=RUNS,
        revision=cfg.revision,
        offline=getattr(cfg, "offline", True),
        trust_remote_code=cfg.trust_remote_code,
        force=cfg.force,
    )


def with_seeds(cfg: Any) -> Any:
    """--data-seed and --model-seed default to --seed."""
    filled = {k: cfg.seed for k in ("data_seed", "model_seed") if getattr(cfg, k, 0) is None}
    return cfg.model_copy(update=filled)


def settings_of(cfg: Any, models: Sequence[ModelRef], task: Task) -> dict[str, Any]:
    """The settings that decide the result: the verb's own, and the content of models and data."""
    own = {k: v for k, v in cfg.model_dump(mode="json").items() if k not in NEUTRAL}
    given = {k: getattr(cfg, k) for k in own if k in ARTEFACTS and getattr(cfg, k)}
    listed = {k: v if isinstance(v, list | tuple) else (v,) for k, v in given.items()}
    # one name may be a file here and a word there: `graft --fisher FILE`, `influence --fisher exact`
    own |= {k: [content(x) for x in v] for k, v in listed.items() if all(isinstance(x, Path) for x in v)}
    named = [(k, v) for k, v in listed.items() if k in MODELS and all(isinstance(x, str) for x in v)]
    own |= {k: [fingerprint(_resolved(cfg, x)) for x in v] for k, v in named}
    return {**own, "models": [fingerprint(m) for m in models], "task": task.name, "rows": task.digest}


def content(path: Path) -> str:
    """Hash of an artefact given as a file or as the run that holds it; the path itself where there is nothing yet."""
    kinds = ("**/*.safetensors", "scores/*", "truth/*", "*.npy", "*.pt", "files/*.pt", "*_ids.json", "**/factors.json")
    bergson = ("scores.bin", "info.json")  # its scores, and how they lie in their file
    files = sorted({f for kind in kinds + bergson for f in path.glob(kind)}) if path.is_dir() else [path]
    return digest([_cached_digest(f) for f in files if f.is_file()] or str(path), 8)


def fingerprint(model: ModelRef) -> str:
    """Content hash of a model directory, its base and its patches: the same wherever they lie."""
    kinds = (".json", ".safetensors", ".bin", ".txt", ".model")
    files = [p for p in sorted(model.path.iterdir()) if p.suffix in kinds] if model.path else []
    found = [(f.name, _cached_digest(f)) for f in [*files, *model.grafts]]
    return digest([model.hub_name if not files else "", found, fingerprint(model.base) if model.base else ""], 8)


def _cached_digest(path: Path) -> str:
    """A file's hash, remembered by path, size and time of change."""
    stat = path.stat()
    note = cache_dir() / "digests" / f"{digest([str(path.resolve()), stat.st_size, stat.st_mtime_ns])}.json"
    with contextlib.suppress(OSError, KeyError, ValueError):
        return str(json.loads(note.read_text())["digest"])
    value = file_digest(path)
    with contextlib.suppress(OSError, BudwoodError):
        write_json(note, {"digest": value})
    return value


def _opened(path: Path, verb: str, cfg: Any, settings: dict[str, Any], facts: dict[str, Any]) -> Run:
    """The run, new or carried on; --overwrite replaces other settings, never a run of the same ones."""
    defaults = {k: f.get_default() for k, f in type(cfg).model_fields.items() if not f.is_required()}
    defaults = plain({k: v for k, v in defaults.items() if k in settings})
    old = read_json(path / "run.json").get("settings", {}) if (path / "run.json").exists() else {}
    replaced = bool(cfg.overwrite and old and not same(old, plain(settings), defaults))
    return open_run(path, verb, settings, facts, replaced, defaults)


def _facts(cfg: Any, models: Sequence[ModelRef], task: Task) -> dict[str, Any]:
    """What run.json holds beside the settings: everything given, and where it came from."""
    return {
        "models": [m.text for m in models],
        "parents": [str(m.run) for m in models if m.run],
        "task": task.name,
        "notes": dict(task.notes),
        "given": cfg.model_dump(mode="json"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _common(verb: str, cfg: Any, models: Sequence[ModelRef], task: Task) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "verb": verb,
        "budwood": version("budwood"),
        "task": task.name,
        "models": [m.text for m in models],
        "seed": cfg.seed,
        "limited": "limited" in task.notes,
        "notes": dict(task.notes),
    }


def _machine(cfg: Any, run: Run) -> None:
    """Threads as asked for, and the facts of this machine that decide the last bits of a sum."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # our own stages say what is going on
    # a run that is carried on keeps the threads it began with: sums in another order have other last bits
    torch.set_num_threads(cfg.threads or read_json(run.file("run.json")).get("threads") or torch.get_num_threads())
    run.note(
        threads=torch.get_num_threads(), kernels=torch.backends.cpu.get_cpu_capability(), machine=platform.machine()
    )


@dataclass(frozen=True)
class _Clock:
    """A moment, on the wall and by the processor; workers count once they have ended."""

    wall: float = field(default_factory=time.perf_counter)
    processor: float = field(default_factory=lambda: sum(os.times()[:4]))


def _cost(began: _Clock, progress: Progress, path: Path) -> dict[str, Any]:
    now = _Clock()
    return {
        "seconds": round(now.wall - began.wall, 3),
        "cpu_seconds": round(now.processor - began.processor, 2),
        "phase_seconds": {k: round(v, 3) for k, v in progress.seconds.items()},
        "peak_rss_mb": round(peak_mb(), 1),
        "run": str(path.resolve()),
    }


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's own; what is not finite becomes null, since JSON has no word for it."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and value != value or value in (float("inf"), float("-inf")):
        return None
    return value


def _per_seed(verb: str, cfg: Any, references: Sequence[str], method: Method, task: Task | None) -> Result:
    """One child run per seed under OUT/seeds, then the mean, spread and median of every number."""
    if len(set(cfg.seeds)) != len(cfg.seeds):
        raise ConfigError(f"--seeds {','.join(map(str, cfg.seeds))} names a seed twice. Give each once.")
    own = lambda seed: [r.replace(SEED, str(seed)) for r in references]  # noqa: E731
    models, first = prepare(with_seeds(cfg), own(cfg.seeds[0]), task)
    settings = {**settings_of(cfg, models, first), "seeds": list(cfg.seeds)}
    path = cfg.out or RUNS / run_name(verb, references[0], first.name, settings)
    with locked(path):
        facts = _facts(cfg, models, first)
        run = _opened(path, verb, cfg, settings, facts)
        if status_of(path) == "done":
            return Result(path, read_json(path / "metrics.json"), read_json(path / "cost.json"), fresh=False)
        began = _Clock()
        child = lambda s: cfg.model_copy(update={"seed": s, "seeds": (), "out": path / "seeds" / str(s)})  # noqa: E731
        with _refusals(run):
            children = [carry_out(verb, child(s), own(s), method, task) for s in cfg.seeds]
        metrics = _plain({**_common(verb, cfg, models, first), **_spread([c.metrics for c in children], cfg.seeds)})
        cost = {**_cost(began, Progress(), path), "children": [str(c.run.resolve()) for c in children]}
        run.finish(metrics, cost)
        return Result(path, metrics, cost)


def _spread(metrics: Sequence[dict[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    """Mean over seeds under each metric's own name; sd and median beside it."""
    from statistics import mean, median, stdev

    numeric = [
        k for k, v in metrics[0].items() if isinstance(v, int | float) and not isinstance(v, bool) and k != "seed"
    ]
    values = {k: [float(m[k]) for m in metrics if m.get(k) is not None] for k in numeric}
    same = {k: v for k, v in metrics[0].items() if k not in numeric and all(m.get(k) == v for m in metrics)}
    return {
        **same,
        "seed": list(seeds),
        **{k: mean(v) for k, v in values.items() if v},
        "sd": {k: stdev(v) if len(v) > 1 else 0.0 for k, v in values.items() if v},
        "median": {k: median(v) for k, v in values.items() if v},
    }

"""Studies made of fine-tuning and grafts: localisation by optimiser, one model for many tasks, one task after another.

Every step is a run of its own inside the study's directory, so a stopped study carries on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from budwood.config.options import build_settings
from budwood.errors import ConfigError
from budwood.figures.graft import matrix
from budwood.figures.save import drawing, save
from budwood.methods.result import Result
from budwood.methods.session import Session
from budwood.studies.verbs import run_verb, verb_named

VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "adamw": {"optimizer": "adamw"},
    "adamw+l1": {"optimizer": "adamw", "l1_to_base": True},  # the weight is the study's --l1
}
CURVE = (0.001, 0.01, 0.05)


def step(session: Session, name: str, verb: str, models: Sequence[str], **settings: Any) -> Result:
    """One verb inside the study."""
    cfg = session.cfg
    machine = ("seed", "model_seed", "threads", "device")
    passed = (*machine, "data_seed", "data_dir", "offline", "limit", "limit_eval", "shots")
    fields = verb_named(verb).settings.model_fields
    shared = {k: getattr(cfg, k) for k in passed if k in fields and getattr(cfg, k) not in (None, ())}
    given = {**shared, "progress": "none", "out": session.run.file("steps", name), **settings}
    session.progress.say(f"  {name}")
    return run_verb(verb, build_settings(verb_named(verb).settings, given, f"graft study, {name}"), models)


def _tuned(session: Session, name: str, model: str, task: str, **settings: Any) -> Result:
    cfg = session.cfg
    frozen = "embeddings" if cfg.mode == "head" else "embeddings,head"
    plan = {k: getattr(cfg, k) for k in ("max_steps", "learning_rate") if getattr(cfg, k) is not None}
    given = {"optimizer": cfg.optimizer, "freeze": frozen, "weight_decay": 0.0, **plan, **settings}
    return step(session, name, "finetune", [model], task=task, mode=cfg.mode, **given)


def _graft(session: Session, name: str, models: Sequence[str], task: str, **settings: Any) -> Result:
    cfg = session.cfg
    given = {"size": cfg.size, "select": cfg.select, "mode": cfg.mode, **settings}
    return step(session, name, "graft learn", models, task=task, **given)


def _off_task(session: Session) -> dict[str, Any]:
    return {"off_task": session.cfg.off_task} if session.cfg.off_task else {}


def localise(session: Session) -> dict[str, Any]:
    """SGD, AdamW and AdamW+L1 on each task: what share of the weights holds the skill; BitFit and retraining beside."""
    base = session.models[0].text
    rows = []
    for task in session.cfg.tasks:
        grafts = {}
        for name, own in VARIANTS.items():
            given = {k: session.cfg.l1 if k == "l1_to_base" else v for k, v in own.items()}
            tuned = _tuned(session, f"{task}-{name}", base, task, **given)
            sizes = {"curve": True, "curve_sizes": CURVE, **_off_task(session)}
            graft = _graft(session, f"{task}-{name}-graft", [base, str(tuned.run)], task, **sizes)
            rows.append({"task": task, "tuning": name, **_line(graft.metrics)})
            grafts[name] = Path(graft.metrics["file"])
        rows += _controls(session, base, task, grafts)
    return {"results": rows, "n": len(rows)}


def _line(m: dict[str, Any]) -> dict[str, Any]:
    at = {
        f"{r['select']} {r['fraction']:.1%}": r["recovered"]
        for r in m["curve"]
        if r["select"] in ("movement", "learned")
    }
    return {"base": m["base"]["score"], "tuned": m["tuned"]["score"], "graft": m["graft"]["score"], "recovered": at}


def _controls(session: Session, base: str, task: str, grafts: dict[str, Path]) -> list[dict[str, Any]]:
    """Biases alone, and the weights of each variant's graft trained afresh."""
    found = {"bitfit": _tuned(session, f"{task}-bitfit", base, task, train_only="bias")}
    for name, graft in grafts.items():
        found[f"inside the graft of {name}"] = _tuned(session, f"{task}-{name}-inside", base, task, inside=graft)
    return [
        {"task": task, "tuning": name, "base": r.metrics.get("zero_shot"), "tuned": r.metrics["score"]}
        for name, r in found.items()
    ]


def _one_head(mode: str) -> None:
    """Refuse, before anything is trained, what would need a head per task."""
    if mode == "head":
        raise ConfigError("Tasks with heads of their own cannot be learned by one model here. Use --mode prompt.")


def multitask(session: Session) -> dict[str, Any]:
    """One model tuned on all tasks at once, then a graft per task: do they share weights?"""
    cfg, base = session.cfg, session.models[0].text
    _one_head(cfg.mode)
    first, *rest = cfg.tasks
    tuned = _tuned(session, "tuned", base, first, replay=",".join(rest))
    grafts = [_graft(session, f"graft-{t}", [base, str(tuned.run)], t, **_off_task(session)) for t in cfg.tasks]
    overlap = step(session, "overlap", "graft overlap", [g.metrics["file"] for g in grafts], base=base)
    keys = ("overlap", "jaccard", "over_chance", "gain", "sizes")
    results = [
        {
            "task": t,
            "base": g.metrics["base"]["score"],
            "tuned": g.metrics["tuned"]["score"],
            "graft": g.metrics["score"],
        }
        for t, g in zip(cfg.tasks, grafts)
    ]
    return {"tasks": list(cfg.tasks), "results": results, "n": len(grafts), **{k: overlap.metrics.get(k) for k in keys}}


def continual(session: Session) -> dict[str, Any]:
    """One task after another: fine-tuning on and on, against a graft per task (task known, and all stitched)."""
    cfg, base = session.cfg, session.models[0].text
    _one_head(cfg.mode)
    current, grafts = base, []
    tables: dict[str, list[list[float]]] = {"sequential": [], "known": [], "stitched": []}
    for place, task in enumerate(cfg.tasks):
        apart = _tuned(session, f"apart-{place}", base, task)
        graft = _graft(session, f"graft-{place}", [base, str(apart.run)], task, **_off_task(session))
        grafts.append(graft.metrics["file"])
        on = apart if place == 0 else _tuned(session, f"on-{place}", current, task)
        current = str(on.run)
        models = {"sequential": current, "stitched": "+".join([base, *grafts])}
        for name, model in models.items():
            tables[name].append([_scored(session, f"{name}-{place}-{i}", model, t) for i, t in enumerate(cfg.tasks)])
        known = [f"{base}+{g}" for g in grafts] + [base] * (len(cfg.tasks) - len(grafts))
        tables["known"].append(
            [_scored(session, f"known-{place}-{i}", m, t) for i, (m, t) in enumerate(zip(known, cfg.tasks))]
        )
    names = [f"after {t}" for t in cfg.tasks]
    for name, values in tables.items():
        with drawing(1.8 + 1.2 * len(cfg.tasks), 1.4 + 0.75 * len(cfg.tasks)) as axes:
            table = matrix(axes, values, (names, cfg.tasks), f"score, {name}", "")
            save(axes.figure, session.run.file("figures", f"forgetting-{name}"), table)
    lost = {f"forgotten_{k}": forgotten(v) for k, v in tables.items()}
    return {"tasks": list(cfg.tasks), "n": len(cfg.tasks), **lost, **tables}


def forgotten(scores: Sequence[Sequence[float]]) -> float:
    """Mean over all tasks but the last of (score right after learning it - score at the end).

    >>> round(forgotten([[0.9, 0.5], [0.6, 0.8]]), 3)
    0.3
    """
    last = len(scores) - 1
    return sum(scores[i][i] - scores[last][i] for i in range(last)) / max(1, last)


def _scored(session: Session, name: str, model: str, task: str) -> float:
    found = step(session, f"scores/{name}", "evaluate", [model], task=task, mode=session.cfg.mode)
    return float(found.metrics["score"])

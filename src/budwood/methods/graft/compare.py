"""`graft overlap`, `graft stitch`, `graft subtract`: several grafts beside and on top of one another.

Shapes: matrices have grafts as rows and grafts or tasks as columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from budwood.data.registry import PUBLIC
from budwood.data.source import shipped_names
from budwood.data.task import Task
from budwood.errors import BudwoodError, ConfigError, DataError, ModelError, TreeError
from budwood.figures.graft import matrix
from budwood.figures.save import drawing, save
from budwood.methods.graft import heads
from budwood.methods.graft.measure import Scores, damage, other_task, recovered, scores_on
from budwood.methods.graft.merging import merged
from budwood.methods.graft.pair import open_pair
from budwood.methods.graft.parts import share_map
from budwood.methods.session import RUNS, Session
from budwood.models.grafted import loaded_hash
from budwood.models.load import Loaded
from budwood.models.load import save as save_model
from budwood.models.reference import ModelRef, resolve
from budwood.params import mask as masks
from budwood.params.graft import Graft, check, merge
from budwood.params.tree import named
from budwood.store.files import writing_directory
from budwood.train.evaluate import goodness


def open_grafts(refs: Sequence[ModelRef], least: int) -> dict[str, Graft]:
    """Grafts by the names of their files; anything else in their place is refused."""
    wrong = [r for r in refs if r.kind != "graft"]
    if wrong or len(refs) < least:
        given = f"'{wrong[0].text}' is a model" if wrong else f"{len(refs)} given"
        raise ConfigError(
            f"{least} or more grafts are needed here (NAME.graft files or runs of `graft learn`): {given}."
        )
    found: dict[str, Graft] = {}
    for ref in refs:
        name = ref.grafts[0].stem
        found[name if name not in found else f"{name} {len(found) + 1}"] = Graft.load(ref.grafts[0])
    return found


def overlap(session: Session) -> dict[str, Any]:
    """Shared weights of every two grafts, against chance; with --base also what each does for each one's task."""
    grafts = open_grafts(session.models, 2)
    names = list(grafts)
    total = {int(g.manifest.get("graftable", 0)) for g in grafts.values()}
    if len(total) != 1 or len({g.manifest.get("base_hash") for g in grafts.values()}) != 1:
        raise ConfigError(
            "These grafts were not cut from the same weights of the same base, so their positions do not compare: "
            + ", ".join(
                f"{n} of {g.manifest.get('base', '?')} ({g.manifest.get('graftable', 0):,})" for n, g in grafts.items()
            )
        )
    shared = [[masks.common(a.index, b.index) for b in grafts.values()] for a in grafts.values()]
    size = [g.size for g in grafts.values()]
    every = range(len(names))
    tables = {
        "overlap": [[shared[i][j] / max(1, size[j]) for j in every] for i in every],
        "jaccard": [[shared[i][j] / max(1, size[i] + size[j] - shared[i][j]) for j in every] for i in every],
        "over_chance": [[shared[i][j] * max(total) / max(1, size[i] * size[j]) for j in every] for i in every],
    }
    _draw(session, "overlap", tables["overlap"], (names, names), "share of the column's graft in the row's")
    _draw(session, "over_chance", tables["over_chance"], (names, names), "overlap as a multiple of chance")
    gains = _gains(session, grafts) if session.cfg.base else {}
    return {"grafts": names, "sizes": size, "graftable": max(total), "n": len(names), **tables, **gains}


def _draw(session: Session, name: str, values: Any, names: Any, title: str) -> None:
    with drawing(1.6 + 1.1 * len(names[1]), 1.4 + 0.75 * len(names[0])) as axes:
        save(axes.figure, session.run.file("figures", name), matrix(axes, values, names, title, ""))


def own_scores(session: Session, base: ModelRef, graft: Graft) -> Scores:
    """The base on a graft's own task, read as it was when the graft was made, with the graft's head."""
    reading = {k: tuple(v) if isinstance(v, list) else v for k, v in graft.manifest.get("reading", {}).items()}
    scores = scores_on(session.cfg, base, _task_of(session.cfg, graft), reading)
    check(graft, scores.read.loaded.model, session.cfg.force)
    parameters = named(scores.read.loaded.model)
    for name, value in graft.head.items():
        if name not in parameters or parameters[name].shape != value.shape:
            raise TreeError(
                f"The graft for '{graft.task}' brings a head tensor '{name}' of shape {tuple(value.shape)}, which the "
                "model has no place for. Make it again for this task."
            )
    with torch.no_grad():
        for name, value in graft.head.items():
            parameters[name].copy_(value)
    return scores


def _task_of(cfg: Any, graft: Graft) -> Task:
    """The task a graft names: a shipped or public one, or the one given with --task. A file opens no other file."""
    if graft.task in (*shipped_names(), *PUBLIC):
        return other_task(cfg, graft.task)
    given = other_task(cfg, cfg.task) if cfg.task else None
    if given is None or given.name != graft.task:
        raise DataError(
            f"The graft names the task '{graft.task}', which is neither shipped nor public, so its rows are not looked "
            "for. Give the task with --task."
        )
    return given


def _gains(session: Session, grafts: dict[str, Graft]) -> dict[str, Any]:
    """Score of every graft on every graft's task, less the base's."""
    base = resolve(session.cfg.base, runs_dir=RUNS, offline=session.cfg.offline)
    _fitting(session, base, grafts)
    names = list(grafts)
    gain: list[list[float | None]] = [[None] * len(names) for _ in names]
    skipped = {}
    for j, name in enumerate(names):
        try:
            scores = own_scores(session, base, grafts[name])
        except BudwoodError as e:
            skipped[name] = str(e)
            continue
        start = goodness(scores.of([]).metrics)
        for i, other in enumerate(names):
            gain[i][j] = goodness(scores.of([grafts[other]], head=False).metrics) - start
    _draw(
        session, "gain", gain, (names, [grafts[n].task for n in names]), "gain of the row's graft on the column's task"
    )
    return {"gain": gain, **({"skipped": skipped} if skipped else {})}


def _fitting(session: Session, base: ModelRef, grafts: dict[str, Graft]) -> Loaded:
    """The base, refused at once where it is not the one that every graft was cut for."""
    loaded = heads.load_for(base, grafts, session.cfg.device)
    known = None if session.cfg.force else loaded_hash(base, loaded.model)
    for graft in grafts.values():
        check(graft, loaded.model, session.cfg.force, known)
    return loaded


def stitch(session: Session) -> dict[str, Any]:
    """Several grafts on one base as model/, and what each task keeps of its gain."""
    cfg = session.cfg
    base, grafts = session.models[0], open_grafts(session.models[1:], 1)
    if base.kind == "graft":
        raise ModelError(f"'{base.text}' is a graft. The first word is the model that the grafts go on.")
    loaded = _fitting(session, base, grafts)
    one = merged(list(grafts.values()), cfg, loaded.model)
    with session.progress.stage("score"):
        results = [_kept(session, base, name, graft, one) for name, graft in grafts.items()]
        harm = damage(cfg, base, cfg.off_task, {"stitched": one})
    merge(loaded.model, [one], force=True)
    apart = heads.keep(session, loaded, grafts)
    shares = [r["kept"] for r in results if r.get("kept") is not None]
    return {
        "method": cfg.method,
        "grafts": list(grafts),
        "size": one.size,
        "results": results,
        "least_kept": min(shares) if shares else None,
        "n": len(grafts),
        **({"heads": apart} if apart else {}),
        **({"off_task": harm} if harm else {}),
    }


def _kept(session: Session, base: ModelRef, name: str, graft: Graft, one: Graft) -> dict[str, Any]:
    try:
        scores = own_scores(session, base, graft)
    except BudwoodError as e:
        return {"graft": name, "task": graft.task, "skipped": str(e)}
    cases = {"base": [], "alone": [graft], "stitched": [one]}
    found = {k: scores.of(g, head=False).metrics for k, g in cases.items()}
    good = {k: goodness(m) for k, m in found.items()}
    return {
        "graft": name,
        "task": graft.task,
        "metric": found["base"]["metric"],
        **{k: m["score"] for k, m in found.items()},
        "kept": recovered(good["stitched"], good["base"], good["alone"]),
        "n": len(scores.rows),
    }


def subtract(session: Session) -> dict[str, Any]:
    """The tuned model with the graft's weights as they were in the base: what is left without the skill."""
    cfg = session.cfg
    if len(session.models) != 3 or session.models[2].kind != "graft":
        raise ConfigError("`graft subtract` takes BASE TUNED GRAFT, in this order.")
    base, tuned, (name, graft) = *session.models[:2], next(iter(open_grafts(session.models[2:], 1).items()))
    pair = open_pair(cfg, base, tuned, session.task, every=True)
    check(graft, pair.read.loaded.model, cfg.force, pair.base_hash)
    if not cfg.force and graft.manifest.get("tuned_hash") != pair.tuned_hash:
        raise TreeError(
            f"The graft '{name}' was not cut out of '{tuned.text}' but of "
            f"{graft.manifest.get('tuned', 'another model')}. Give that model, or add --force to take the graft's "
            "places out of this one all the same."
        )
    rest = pair.graft(masks.complement(graft.index, pair.sizes))
    full, only = pair.graft(masks.everything(pair.sizes)), pair.graft(graft.index)
    scores = Scores(pair.read, pair.cfg, pair.task.rows(pair.task.reported))
    with session.progress.stage("score"):
        cases = {"base": [], "tuned": [full], "graft": [only], "without": [rest]}
        found = {k: scores.of(g).metrics for k, g in cases.items()}
        harm = damage(pair.cfg, base, cfg.off_task, {"tuned": full, "without": rest})
    merge(pair.read.loaded.model, [rest], force=True)
    with writing_directory(session.run.file("model")) as part:
        save_model(pair.read.loaded, part)
    good = {k: goodness(m) for k, m in found.items()}
    return {
        "graft_name": name,
        "split": pair.task.reported,
        "metric": found["base"]["metric"],
        "n": len(scores.rows),
        "size": graft.size,
        "score": found["without"]["score"],
        **{f"{k}_score": m["score"] for k, m in found.items()},
        "left": recovered(good["without"], good["base"], good["tuned"]),
        **({"off_task": harm} if harm else {}),
    }


def show(path: str) -> dict[str, Any]:
    """What a graft file says about itself, and its share of every layer and module, of the tensors that it changes."""
    ref = resolve(path, runs_dir=RUNS)
    if ref.kind != "graft":
        raise ConfigError(f"'{path}' is a model, not a graft. Give a NAME.graft file or a run of `graft learn`.")
    file = ref.grafts[0]
    graft = Graft.load(file)
    sizes = {n: torch.Size(shape).numel() for n, shape in graft.shape.items()}
    rows = share_map({n: len(i) for n, i in graft.index.items()}, sizes)
    rows.sort(key=lambda r: (not r["layer"].isdigit(), int(r["layer"]) if r["layer"].isdigit() else 0, r["module"]))
    facts = {
        "file": str(file),
        "bytes": file.stat().st_size,
        "size": graft.size,
        "head": sum(v.numel() for v in graft.head.values()),
    }
    return {**facts, **graft.manifest, "map": rows}


def draw_map(found: dict[str, Any], stem: Path) -> None:
    """The map of a graft as a figure."""
    from budwood.figures.graft import layer_module_map

    with drawing() as axes:
        title = f"{Path(found['file']).stem}: share of {found['size']:,} weights"
        save(axes.figure, stem, layer_module_map(axes, found["map"], title))

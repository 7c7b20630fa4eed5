"""Is phi-p linear in f and log Z quadratic, and does a better language model make better features?

Shapes: N rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from budwood.config.data import DataConfig
from budwood.config.finetune import EvaluateConfig, Mode
from budwood.config.linear import Family, LinearConfig
from budwood.data.batch import seed_of
from budwood.data.source import load_task
from budwood.errors import ConfigError
from budwood.figures.excess import loss_against_loss
from budwood.figures.save import drawing, save
from budwood.linalg.metrics import spearman
from budwood.linalg.quadratic import linear_r2, quadratic_r2
from budwood.methods.linear.classify import Split, classify
from budwood.methods.linear.families import States, solver_of
from budwood.methods.linear.states import Shop, encoded, load_speaker, states
from budwood.methods.session import Session
from budwood.models.output import vocabulary_of
from budwood.models.reading import reading
from budwood.models.reference import resolve
from budwood.store.files import read_json, write_json
from budwood.train.evaluate import evaluate
from budwood.train.plan import device_for

CONTEXTS = 3000  # most rows of a fit: its kernel is as wide
TEXTS = 500  # most texts on which the language-model loss of a checkpoint is measured
STEP = re.compile(r"checkpoint-(\d+)$")


@dataclass(frozen=True)
class Question:
    """What every classifier of the run is asked."""

    label_N: np.ndarray
    splits: Sequence[Split]
    costs: Sequence[float]


def analyse(
    session: Session, shop: Shop, held: States, label_N: np.ndarray, splits: Sequence[Split], costs: Sequence[float]
) -> dict[str, Any]:
    """Held-out R^2 of the two fits; with checkpoints, task loss against language-model loss."""
    if held.vocabulary is None:
        raise ConfigError("--analyse asks what a model says next, and this one has no language-model head.")
    with session.progress.stage("fits"):
        found: dict[str, Any] = fits(held, splits[0], session.cfg.seed)
    if session.cfg.checkpoints is not None:
        found["checkpoints"] = over_checkpoints(session, shop, Question(label_N, splits, costs))
    return found


def fits(held: States, split: Split, seed: int) -> dict[str, float]:
    """R^2 on test rows of phi-p as a linear, and of log Z as a linear and a quadratic function of f."""
    order = np.random.default_rng(seed_of(seed, "contexts")).permutation(split.train)[:CONTEXTS]
    fit, test = torch.from_numpy(order), torch.from_numpy(split.test)
    f_ND, (mean_ND, logz_N) = held.state_ND, held.mean_and_logz
    pair = lambda y: ((f_ND[fit], y[fit]), (f_ND[test], y[test]))  # noqa: E731
    return {
        "contexts": len(order),
        "held_out": len(split.test),
        "phi_p_linear_r2": linear_r2(*pair(mean_ND)),
        "log_z_linear_r2": linear_r2(*pair(logz_N[:, None])),
        "log_z_quadratic_r2": quadratic_r2(*pair(logz_N[:, None])),
    }


def over_checkpoints(session: Session, shop: Shop, question: Question) -> dict[str, Any]:
    """Every checkpoint's language-model loss and the task loss of its f and phi-p; rank correlation and power."""
    cfg: LinearConfig = session.cfg
    folders = checkpoint_folders(cfg.checkpoints or Path())
    points = []
    with session.progress.stage("checkpoints", len(folders)) as bar:
        for folder in folders:
            note = session.run.file("checkpoints", f"{folder.name}.json")
            if not note.exists():
                write_json(note, _point(cfg, shop, question, folder))
            points.append(read_json(note))
            bar.advance(1)
    with drawing() as axes:
        title = f"{session.task.name}: better language models, better features"
        save(axes.figure, session.run.file("figures", "checkpoints"), loss_against_loss(axes, points, title))
    loss = np.array([p["lm_loss"] for p in points])
    families: tuple[Family, ...] = ("f", "phi-p")
    task = {n: np.array([p[n] for p in points]) for n in families}
    return {
        "points": points,
        "spearman": {n: spearman(loss, task[n]) for n in families},
        "power": {n: power(loss, task[n]) for n in families},
    }


def checkpoint_folders(place: Path) -> list[Path]:
    """The checkpoint-N directories of a run or folder, by N."""
    inside = place / "checkpoints" if (place / "checkpoints").is_dir() else place
    found = [p for p in inside.glob("checkpoint-*") if STEP.search(p.name)] if inside.is_dir() else []
    if len(found) < 3:
        raise ConfigError(
            f"--checkpoints {place} holds {len(found)} checkpoint-N directories; a curve needs at least 3. Make them "
            "with `finetune --mode clm --save-steps K`."
        )
    return sorted(found, key=lambda p: int(STEP.search(p.name).group(1)))  # type: ignore[union-attr]


def _point(cfg: LinearConfig, shop: Shop, question: Question, folder: Path) -> dict[str, Any]:
    """One checkpoint."""
    speaker = load_speaker(resolve(str(folder), offline=True), device_for(cfg.device))
    text = load_task(DataConfig(task=cfg.lm_task, data_dir=cfg.data_dir, limit_eval=TEXTS, offline=cfg.offline))
    mode: Mode = "clm" if speaker.causal else "mlm"
    read_cfg = EvaluateConfig(task=cfg.lm_task)
    read = reading(speaker.loaded, text, read_cfg, mode, cfg.seed)
    loss = evaluate(read, text.rows(text.reported), read_cfg).metrics["lm_loss"]
    prompt, place = shop.asks(cfg.prompts[-1])
    state_ND = states(speaker, encoded(speaker, shop.rows, prompt, place, cfg.max_length), place)
    basis = torch.from_numpy(question.splits[0].train)
    held = States(state_ND, basis, vocabulary_of(speaker.loaded.model), cfg.seed)
    found = {
        n: classify(
            solver_of(n, held, {}, cfg), question.label_N, shop.task.labels, question.splits, cfg.k_fold, question.costs
        )
        for n in ("f", "phi-p")
    }
    scores = {n: s.loss for n, s in found.items()} | {f"{n}_accuracy": s.test for n, s in found.items()}
    return {"checkpoint": folder.name, "lm_loss": loss, **scores}


def power(lm_loss_N: np.ndarray, loss_N: np.ndarray) -> dict[str, float] | None:
    """The power b of excess task loss = a x (excess language-model loss)^b, with its 95 % interval.

    Excess is over the best model; None where fewer than four checkpoints are worse than it in both.
    """
    from scipy.stats import linregress, t

    best = int(lm_loss_N.argmin())
    x, y = lm_loss_N - lm_loss_N[best], loss_N - loss_N[best]
    use = (x > 0) & (y > 0)
    if use.sum() < 4:
        return None
    fit = linregress(np.log(x[use]), np.log(y[use]))
    half = float(t.ppf(0.975, use.sum() - 2) * fit.stderr)
    return {"b": float(fit.slope), "low": float(fit.slope) - half, "high": float(fit.slope) + half}

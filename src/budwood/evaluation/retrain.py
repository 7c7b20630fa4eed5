"""Retraining: a fine-tune run's own recipe repeated on some of its rows, as a job that writes one small file.

A worker loads the base, the rows and their tokens once; each further retrain only puts the base weights back. What is
written: margin [Q], correct [Q], and logits [Q, K] where a query has one answer. A diverged retrain writes NaN.
Shapes: N training rows, F features (windows) of them, Q queries, K classes, B examples of a batch.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from budwood.config.finetune import FinetuneConfig
from budwood.data.batch import Features, budget_batches
from budwood.data.source import load_task
from budwood.data.task import Row, Task
from budwood.engine.jobs import Job
from budwood.errors import ConfigError, DataError, ModelError, StoreError, nearest
from budwood.evaluation.frozen import FeedOfStates, States, keep_states, starting_at
from budwood.methods.finetune import terms_of, training_rows
from budwood.methods.session import RUNS, fingerprint
from budwood.models.load import load, random_weights
from budwood.models.reading import Reading, head_spec, mode_for, reading
from budwood.models.reference import ModelRef, resolve
from budwood.params.tree import named
from budwood.store.files import canonical, read_json
from budwood.train.evaluate import TOKENS, evaluate, evaluating, goodness
from budwood.train.fit import Diverged, Keeping, fit
from budwood.train.plan import device_for, make_plan, prepare_model


@dataclass(frozen=True)
class Recipe:
    """How a model was made: the base, every setting, and which rows; enough to make it again."""

    base: str
    settings: Mapping[str, Any]
    rows: str  # digest of the task
    queries: tuple[str, ...]  # ids of the rows whose margins are measured
    weights: str = ""  # fingerprint of the base; "": any will do

    @property
    def cfg(self) -> FinetuneConfig:
        """The settings of the fine-tuning."""
        return FinetuneConfig(**self.settings)

    @property
    def text(self) -> str:
        """As one string: the key of everything a worker keeps."""
        return canonical({f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def of_run(cls, run: Path | None, name: str) -> Recipe:
        """The recipe of a finished `finetune` run, without queries."""
        manifest = read_json(run / "run.json") if run else {}
        if manifest.get("verb") != "finetune":
            what = f"a run of '{manifest['verb']}'" if manifest.get("verb") else "no run"
            raise ModelError(
                f"'{name}' is {what}; retraining repeats the recipe of a `finetune` run. Fine-tune, then give that "
                "run's directory."
            )
        if manifest["given"].get("objective", "kl") != "kl":
            raise ModelError(
                f"'{name}' was tuned with --objective {manifest['given']['objective']}, and retraining lowers "
                "cross-entropy: its margins would be those of another recipe. Give a run tuned with --objective kl."
            )
        quiet = {"out": None, "config": None, "progress": "none", "dry_run": False, "overwrite": False}
        known = manifest["settings"]
        return cls(manifest["models"][0], {**manifest["given"], **quiet}, known["rows"], (), known["models"][0])

    def model(self) -> ModelRef:
        """The base the run was trained from; one that changed since is refused."""
        cfg = self.cfg
        found = resolve(
            self.base,
            runs_dir=RUNS,
            revision=cfg.revision,
            offline=True,
            trust_remote_code=cfg.trust_remote_code,
            force=cfg.force,
        )
        if self.weights and fingerprint(found) != self.weights:
            raise ModelError(
                f"The base model '{self.base}' is not the one the run was trained from (its files changed since). "
                "Restore them, or fine-tune again."
            )
        return found

    def task(self) -> Task:
        """The rows the run was trained on; rows that changed since are refused."""
        found = load_task(self.cfg)
        if found.digest != self.rows:
            raise DataError(
                f"The rows of task '{found.name}' are not those the run was trained on (their content changed since). "
                "Restore the files, or fine-tune again."
            )
        return found

    def asking(self, queries: Sequence[str]) -> Recipe:
        """The same recipe, measuring these rows."""
        return replace(self, queries=tuple(queries))


def find_rows(task: Task, ids: Sequence[str]) -> list[Row]:
    """Rows by id: of the reported split first, then of the others."""
    order = [task.reported, *(s for s in task.splits if s != task.reported)]
    by_id = {r.id: r for split in reversed(order) for r in task.splits[split]}
    missing = [i for i in ids if i not in by_id]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(ids)} queries are no rows of task '{task.name}', for example '{missing[0]}'."
            f"{nearest(missing[0], by_id)} Score queries of the task the model was trained on."
        )
    return [by_id[i] for i in ids]


@dataclass(frozen=True)
class Outcome:
    """What one retrained model says of the queries."""

    margin_Q: np.ndarray
    correct_Q: np.ndarray
    logits_QK: np.ndarray | None

    @property
    def diverged(self) -> bool:
        """Whether there is no answer."""
        return bool(np.isnan(self.margin_Q).any())


def job(recipe: Recipe, kept_N: np.ndarray, seed: int, directory: Path) -> Job:
    """The retrain on the kept rows with this seed; its file is named by what is computed."""
    if not kept_N.any():
        raise ConfigError("A retrain on no rows at all was asked for. Remove fewer rows.")
    bits = base64.b64encode(np.packbits(kept_N).tobytes()).decode()
    arguments = {"recipe": recipe.text, "kept": bits, "rows": len(kept_N), "seed": seed}
    function = "budwood.evaluation.retrain:retrain"
    return Job(function, arguments, directory / f"{Job(function, arguments, directory).key}.safetensors")


def outcome(job: Job) -> Outcome:
    """The finished job's answer."""
    try:
        found = load_file(job.output)
    except Exception as e:  # safetensors raises its own kinds
        raise StoreError(f"{job.output} cannot be read ({e}). Delete it and run the same command again.") from e
    return Outcome(found["margin"], found["correct"], found.get("logits"))


def retrain(arguments: dict[str, Any], part: Path) -> None:
    """Job: train on the kept rows, measure the queries, write one small file."""
    shop = _open(arguments["recipe"])
    bits = np.frombuffer(base64.b64decode(arguments["kept"]), np.uint8)
    kept_N = np.unpackbits(bits, count=arguments["rows"]).astype(bool)
    try:
        shop.train(kept_N, arguments["seed"])
        found = shop.measure()
    except Diverged:
        found = shop.nothing()
    save_file(found, part)


@dataclass(frozen=True)
class Shop:
    """A worker's base model, tokens and start weights, kept between retrains."""

    recipe: Recipe
    cfg: FinetuneConfig
    read: Reading
    rows: tuple[Row, ...]
    features: Features
    row_F: np.ndarray  # training row of each feature
    asked: Features
    query_F: np.ndarray
    start: Mapping[str, Tensor]
    states: States | None

    def train(self, kept_N: np.ndarray, seed: int, steps: int | None = None) -> None:
        """The recipe on the kept rows; the model holds the result. `steps` cuts it short, to time it."""
        cfg = self.cfg.model_copy(update={"seed": seed, "model_seed": seed})
        if steps is not None:
            cfg = cfg.model_copy(update={"max_steps": steps})
        model = self.read.loaded.model
        self._restart(seed)
        rows = tuple(r for r, kept in zip(self.rows, kept_N) if kept)
        train_rows, selection = training_rows(self.read.task.with_rows("train", rows), cfg)
        if selection:
            ids = {r.id for r in train_rows}
            kept_N = kept_N & np.array([r.id in ids for r in self.rows])
        member = np.flatnonzero(kept_N[self.row_F])
        features = self.features.take(member)
        plan = make_plan(cfg, len(features), int(model.config.hidden_size), seed)
        terms, _ = terms_of(cfg, self.read.loaded, plan)
        select = None
        if plan.eval_steps:
            select = lambda: goodness(evaluate(self.read, selection, cfg).metrics)  # noqa: E731
        keeping, feed = Keeping(select=select), self.read.feed(features)
        if self.states is None or select or terms.others or self.cfg.init == "random":
            fit(model, self.read.objective, feed, plan, keeping, terms)
            return
        with starting_at(model, self.states):
            fit(model, self.read.objective, FeedOfStates(feed, self.states, member), plan, keeping, terms)

    def _restart(self, seed: int) -> None:
        """Base weights back in place; those no checkpoint has are drawn from the seed."""
        fresh = _fresh(self.recipe.text, seed)
        with torch.no_grad():
            for name, parameter in named(self.read.loaded.model).items():
                parameter.copy_(fresh.get(name, self.start[name]))

    def measure(self) -> dict[str, np.ndarray]:
        """Margins, rights and wrongs, and logits of the queries."""
        objective, model, feed = self.read.objective, self.read.loaded.model, self.read.settled.feed(self.asked)
        margin_F = np.zeros(len(self.asked), np.float32)
        logits_FK: np.ndarray | None = None
        with evaluating(model):
            for index in budget_batches(feed.lengths_N, TOKENS):
                batch = feed(index, 0)
                logits_MC, targets = objective.logits(model, batch), objective.targets(batch)
                margin_F[batch.index_B] = objective.margin(logits_MC, targets).float().cpu().numpy()
                if targets.row_M is None and self.read.task.kind == "label":
                    if logits_FK is None:
                        logits_FK = np.zeros((len(self.asked), logits_MC.shape[1]), np.float32)
                    logits_FK[batch.index_B] = logits_MC.float().cpu().numpy()
        count_Q = np.bincount(self.query_F, minlength=len(self.recipe.queries))
        margin_Q = np.bincount(self.query_F, weights=margin_F, minlength=len(count_Q)) / np.maximum(count_Q, 1)
        found = {"margin": margin_Q.astype(np.float32)}
        if logits_FK is None:
            return {**found, "correct": (margin_Q > 0).astype(np.uint8)}
        right_Q = logits_FK.argmax(1) == self.asked.fixed["label"]
        return {**found, "correct": right_Q.astype(np.uint8), "logits": logits_FK}

    def nothing(self) -> dict[str, np.ndarray]:
        """What a diverged retrain has to say."""
        count = len(self.recipe.queries)
        return {"margin": np.full(count, np.nan, np.float32), "correct": np.zeros(count, np.uint8)}


@lru_cache(maxsize=2)
def _open(text: str) -> Shop:
    recipe = Recipe(**json.loads(text))
    cfg = recipe.cfg
    task = recipe.task()
    read = _loaded(recipe, task, cfg, cfg.model_seed or 0)
    prepare_model(read.loaded.model, cfg)
    rows = task.rows("train")
    features, asked = read.encode(rows), read.encode(find_rows(task, recipe.queries))
    start = {n: p.detach().clone() for n, p in named(read.loaded.model).items()}
    places = {r.id: i for i, r in enumerate(rows)}
    row_F = np.array([places[i] for i in features.ids])
    number = {q: i for i, q in enumerate(recipe.queries)}
    query_F = np.array([number[i] for i in asked.ids])
    return Shop(recipe, cfg, read, rows, features, row_F, asked, query_F, start, keep_states(read, features))


def open_shop(recipe: Recipe) -> Shop:
    """The recipe's base model and rows in this process, loaded once."""
    return _open(recipe.text)


@lru_cache(maxsize=16)
def _fresh(text: str, seed: int) -> dict[str, Tensor]:
    """Weights that come from the seed alone: a new head, or all of them for a random start."""
    recipe = Recipe(**json.loads(text))
    shop = _open(text)
    if recipe.cfg.init != "random" and not shop.read.loaded.fresh:
        return {}
    again = _loaded(recipe, shop.read.task, recipe.cfg, seed)
    names = named(again.loaded.model)
    wanted = names if recipe.cfg.init == "random" else again.loaded.fresh
    return {n: names[n].detach().clone() for n in wanted if n in names}


def _loaded(recipe: Recipe, task: Task, cfg: FinetuneConfig, seed: int) -> Reading:
    ref = recipe.model()
    mode = mode_for(cfg, task, ref)
    loaded = load(ref, mode, head_spec(task, cfg), seed=seed, device=device_for(cfg.device))
    if cfg.init == "random":
        loaded = replace(loaded, model=random_weights(loaded.model, seed))
    return reading(loaded, task, cfg, mode, cfg.seed, cfg.reduce)

"""`linear`: states, families, classifiers and their baselines as one run.

Shapes: N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from budwood.config.finetune import EvaluateConfig
from budwood.config.linear import LinearConfig
from budwood.data.batch import seed_of
from budwood.data.opened import Key
from budwood.data.task import Task
from budwood.data.words import WordList, word_list
from budwood.errors import ConfigError, DataError, ModelError
from budwood.figures.families import family_bars
from budwood.figures.save import drawing, save
from budwood.linalg.metrics import accuracy_interval
from budwood.methods.linear.classify import Split, classify
from budwood.methods.linear.families import States, solver_of, solver_of_p
from budwood.methods.linear.saving import save_p
from budwood.methods.linear.states import Shop, collect_states, open_shop, settings_for
from budwood.methods.session import RUNS, Session
from budwood.models.load import load
from budwood.models.output import is_tied, vocabulary_of
from budwood.models.reading import as_tuned, head_spec, mode_for, reading
from budwood.models.reference import resolve
from budwood.store.files import canonical
from budwood.train.baselines import bag_of_words, majority
from budwood.train.evaluate import evaluate
from budwood.train.plan import device_for

POOLED = {"cr": 10, "mpqa": 10}  # sets without a split of their own, scored over random cuts
MANY, GRID, SHORT_GRID = 10_000, tuple(10.0**e for e in range(-6, 4)), tuple(10.0**e for e in range(-3, 3))


def linear(session: Session) -> dict[str, Any]:
    """Train and test accuracy of every family, with and without prompt; returns results and baselines."""
    cfg: LinearConfig = session.cfg
    check_labels(session.task)
    check_tuned(cfg, session.task)
    with session.progress.stage("load"):
        shop = open_shop(Key(canonical(settings_for(session)), session.task))
        check_families(cfg, shop)
        lists = word_lists(cfg, shop)
    label_N = np.array([r.label for r in shop.rows], dtype=np.int64)
    splits = splits_of(cfg, session.task, label_N)
    costs = tuple(sorted(cfg.costs)) or (GRID if len(splits[0].train) < MANY else SHORT_GRID)
    announce(session, shop, lists, splits)
    results, tables = [], {}
    for prompted in cfg.prompts:
        states = states_for(session, shop, prompted, splits)
        tables[prompted] = states
        for family in cfg.families:
            with session.progress.stage(f"{family}{' + prompt' if prompted else ''}"):
                solver = solver_of(family, states, lists, cfg)
                found = classify(solver, label_N, session.task.labels, splits, cfg.k_fold, costs)
                row: dict[str, Any] = {"features": family, "prompt": prompted, "dims": solver.dims, **found.row()}
                if family == "p" and cfg.scale == "unit":
                    raw = solver_of_p(states, False, cfg.penalise_intercept)
                    plain = classify(raw, label_N, session.task.labels, splits, cfg.k_fold, costs)
                    kept = ("train", "test", "C", "unconverged")
                    row["unscaled"] = {k: v for k, v in plain.row().items() if k in kept}
                results.append(row)
                _warn(session, f"{family}{' + prompt' if prompted else ''}", row)
                session.progress.say(f"  {family:<12} test {found.test:.4f}  train {found.train:.4f}  C {found.cost:g}")
        if cfg.save_p:
            save_p(session, shop, states, prompted)
    if cfg.tuned:
        results.append(tuned_row(session))
    baselines = baselines_of(session, label_N, splits)
    metrics = _metrics(session, shop, lists, results, baselines, splits)
    if cfg.analyse:
        from budwood.methods.linear.analyse import analyse

        metrics["analysis"] = analyse(session, shop, tables[cfg.prompts[-1]], label_N, splits, costs)
    with drawing() as axes:
        title = f"{session.models[0].name} on {session.task.name}: frozen features"
        save(axes.figure, session.run.file("figures", "features"), family_bars(axes, results, baselines, title))
    return metrics


def _metrics(
    session: Session,
    shop: Shop,
    lists: dict[str, WordList],
    results: list[dict[str, Any]],
    baselines: dict[str, float],
    splits: Sequence[Split],
) -> dict[str, Any]:
    cfg: LinearConfig = session.cfg
    prompt, place = shop.asks(cfg.prompts[-1])
    return {
        "metric": "accuracy",
        "score": results[0]["test"],
        "split": session.task.reported if len(splits) == 1 else f"{len(splits)} random cuts 90/10",
        "n": len(splits[0].test),
        "train_rows": len(splits[0].train),
        "folds": cfg.k_fold,
        "prompt_text": prompt or "",
        "read": place,
        "word_kind": cfg.word_kind,
        "words": {k: list(w.spelled) for k, w in lists.items()},
        "words_dropped": {k: list(w.dropped) for k, w in lists.items() if w.dropped},
        "majority": baselines["majority"],
        "results": results,
        "baselines": baselines,
    }


def check_labels(task: Task) -> None:
    """Refuse what has no class to tell apart."""
    if task.kind != "label":
        raise DataError(
            f"Task '{task.name}' is of kind '{task.kind}': its rows carry no class label, and `linear` classifies "
            "texts. Use a task with labels, such as tiny-sentiment."
        )
    for split in ("train", task.reported):
        bare = sum(r.label is None for r in task.rows(split))
        if bare:
            raise DataError(f"{bare} rows of split '{split}' of task '{task.name}' have no label. Give labelled rows.")


def check_tuned(cfg: LinearConfig, task: Task) -> None:
    """Refuse to set a fine-tuned run, which has one test set, beside scores over random cuts."""
    if cfg.tuned and cuts_of(cfg, task):
        raise ConfigError(
            f"--tuned is scored on the test rows of '{task.name}', and features on {cuts_of(cfg, task)} random cuts of "
            "all rows: other rows, some of which the run was trained on. Give --pooled 0 for the fixed split."
        )


def cuts_of(cfg: LinearConfig, task: Task) -> int:
    """How many random cuts are scored; 0: the task's own split."""
    return POOLED.get(task.name, 0) if cfg.pooled is None else cfg.pooled


def _warn(session: Session, name: str, row: dict[str, Any]) -> None:
    count = row["unconverged"] + row.get("unscaled", {}).get("unconverged", 0)
    if count:
        session.progress.say(f"  {name}: {count} fits have not converged; their scores may be too low.")


def check_families(cfg: LinearConfig, shop: Shop) -> None:
    """Refuse features that need words from a model without them, and --untied where embeddings are tied."""
    if not shop.speaker.speaks and (wordy := [f for f in cfg.families if f != "f"]):
        raise ModelError(
            f"'{shop.speaker.loaded.ref.text}' has no language-model head, so there is no next word to make "
            f"{', '.join(wordy)} from. Use --features f, or a model with its head."
        )
    if any(shop.asks(p)[1] == "mean" for p in cfg.prompts) and any(f != "f" for f in cfg.families):
        raise ConfigError("--read mean is no place where a word is said. Use it with --features f alone.")
    if cfg.untied and (not shop.speaker.speaks or is_tied(shop.speaker.loaded.model)):
        raise ModelError(
            f"--untied asks for an output embedding of its own, but that of '{shop.speaker.loaded.ref.text}' is its "
            "input embedding. Leave --untied out: the embedding the model uses is always the one that is read."
        )
    if cfg.save_p and not shop.speaker.speaks:
        raise ModelError("--save-p needs a model with a language-model head.")


def word_lists(cfg: LinearConfig, shop: Shop) -> dict[str, WordList]:
    """The lists that the families asked for need."""
    given = {"subset": cfg.subset_words, "class": cfg.class_words, "posneg": cfg.posneg_words}
    for name, words in given.items():
        if words and name not in cfg.families:
            raise ConfigError(f"--{name}-words has no effect without {name} among --features.")
    tokenizer = shop.speaker.loaded.tokenizer
    return {n: word_list(n, shop.task, w, tokenizer) for n, w in given.items() if n in cfg.families}


def splits_of(cfg: LinearConfig, task: Task, label_N: np.ndarray) -> list[Split]:
    """The task's own split, or seeded random cuts 90/10 of all rows."""
    count = cuts_of(cfg, task)
    first = len(task.rows("train"))
    if not count:
        return [Split(np.arange(first), np.arange(first, len(label_N)))]
    orders = [np.random.default_rng(seed_of(cfg.seed, "pooled", i)).permutation(len(label_N)) for i in range(count)]
    held = max(1, len(label_N) // 10)
    return [Split(np.sort(o[held:]), np.sort(o[:held])) for o in orders]


def states_for(session: Session, shop: Shop, prompted: bool, splits: Sequence[Split]) -> States:
    """States of all rows; a basis for p is made of every row that some classifier learns from."""
    basis = np.unique(np.concatenate([s.train for s in splits]))
    words = vocabulary_of(shop.speaker.loaded.model) if shop.speaker.speaks else None
    state_ND = collect_states(session, shop, prompted)
    return States(state_ND, torch.from_numpy(basis), words, seed_of(session.cfg.seed, "projection"))


def baselines_of(session: Session, label_N: np.ndarray, splits: Sequence[Split]) -> dict[str, float]:
    """Majority and bag of words, mean over the splits."""
    rows = (*session.task.rows("train"), *session.task.rows(session.task.reported))
    with session.progress.stage("baselines"):
        common = [majority(label_N[s.train], label_N[s.test]) for s in splits]
        counted = [bag_of_words([rows[i] for i in s.train], [rows[i] for i in s.test]) for s in splits]
    return {"majority": float(np.mean(common)), "bag_of_words": float(np.mean(counted))}


def tuned_row(session: Session) -> dict[str, Any]:
    """Accuracies of a fine-tuned run on the same rows."""
    cfg: LinearConfig = session.cfg
    ref = resolve(cfg.tuned or "", runs_dir=RUNS, offline=cfg.offline)
    read_cfg = as_tuned(EvaluateConfig(task=cfg.task), ref)
    mode = mode_for(read_cfg, session.task, ref)
    loaded = load(ref, mode, head_spec(session.task, read_cfg), device=device_for(cfg.device))
    if any(n.startswith("head.") for n in loaded.fresh):
        raise ModelError(
            f"--tuned {cfg.tuned} has no head trained for the labels of '{session.task.name}'. Give a fine-tuned run "
            "of this task."
        )
    read = reading(loaded, session.task, read_cfg, mode, cfg.seed)
    with session.progress.stage("fine-tuned"):
        train, test = (
            evaluate(read, session.task.rows(s), read_cfg).metrics["accuracy"] for s in ("train", session.task.reported)
        )
    n = len(session.task.rows(session.task.reported))
    low, high = accuracy_interval(round(test * n), n)
    row = {"features": "fine-tuned", "prompt": mode in ("prompt", "causal"), "dims": None, "C": None}
    return {**row, "train": train, "test": test, "low": low, "high": high}


def announce(session: Session, shop: Shop, lists: dict[str, WordList], splits: Sequence[Split]) -> None:
    """What is read, where, and which words count, before anything is computed."""
    cfg, say = session.cfg, session.progress.say
    ref = shop.speaker.loaded.ref
    for prompted in cfg.prompts:
        prompt, place = shop.asks(prompted)
        say(f"{ref.name}: state read at '{place}', {f'prompt {prompt!r}' if prompt else 'no prompt'}")
    for name, words in lists.items():
        dropped = f"; not one token and left out: {', '.join(words.dropped)}" if words.dropped else ""
        say(f"  {name}: {len(words.ids)} tokens ({' '.join(dict.fromkeys(words.spelled))}){dropped}")
    if len(splits) > 1:
        say(f"  {len(splits)} random cuts 90/10 of all {len(shop.rows):,} rows; C is chosen in each, by its rows alone")

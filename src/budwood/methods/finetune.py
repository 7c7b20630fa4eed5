"""Fine-tuning: a model learns a task, is scored, and is saved as a Hugging Face directory."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from budwood.config.data import DataConfig
from budwood.config.finetune import FinetuneConfig, ReadConfig
from budwood.data.batch import seed_of
from budwood.data.source import load_task
from budwood.data.task import Row, Task
from budwood.errors import ConfigError, DataError
from budwood.figures.curve import loss_curve
from budwood.figures.save import drawing, save
from budwood.methods.card import model_card
from budwood.methods.evaluate import keep_records
from budwood.methods.session import Session
from budwood.models.load import Loaded, load, random_weights
from budwood.models.load import save as save_model
from budwood.models.reading import Reading, head_spec, mode_for, reading
from budwood.store.files import write_text, writing_directory
from budwood.train.evaluate import Evaluation, evaluate, goodness
from budwood.train.fit import History, Keeping, Plan, Replay, Terms, fit
from budwood.train.penalty import Holding, make_penalty
from budwood.train.plan import device_for, make_plan, prepare_model
from budwood.train.ranks import ranks, sharded


def finetune(session: Session) -> dict[str, Any]:
    """Train on the train split, score on the reported one; writes model/, records, figures; returns the metrics."""
    cfg: FinetuneConfig = session.cfg
    task, say = session.task, session.progress.say
    with session.progress.stage("load"):
        ref = session.models[0]
        mode = mode_for(cfg, task, ref)
        loaded = load(ref, mode, head_spec(task, cfg), seed=cfg.model_seed or 0, device=device_for(cfg.device))
        if cfg.init == "random":
            loaded = replace(loaded, model=random_weights(loaded.model, cfg.model_seed or 0))
        read = reading(loaded, task, cfg, mode, cfg.seed, cfg.reduce)
        sizes = prepare_model(loaded.model, cfg)
        train_rows, selection_rows = training_rows(task, cfg)
        features = read.encode(train_rows)
    plan = make_plan(cfg, len(features), int(loaded.model.config.hidden_size), cfg.seed)
    penalty, held = make_penalty(loaded.model, holding(cfg))
    terms = Terms(penalty=penalty, replay=replayed(cfg, loaded))
    _announce(session, read, train_rows, plan, sizes)
    if held:
        say(f"  EWC: effective coefficient {held['ewc_effective']:.3g} on {held['ewc_held']:,} weights")
    test_rows = task.rows(task.reported)
    zero = {}
    if mode in ("prompt", "causal") and task.kind in ("label", "regression"):
        zero = {"zero_shot": _scored(session, read, test_rows, "zero-shot").metrics["score"]}
        say(f"zero-shot {task.metric}: {zero['zero_shot']:.4f}")
    history = _train(session, read, features, plan, selection_rows, terms)
    found = _scored(session, read, test_rows, "evaluate")
    metrics = {
        "split": task.reported,
        "mode": mode,
        **found.metrics,
        **zero,
        **sizes,
        "train_rows": len(train_rows),
        "steps": plan.steps,
        "learning_rate": plan.learning_rate,
        "learning_rate_sum": history.rates,
        "train_loss": history.points[-1]["loss"] if history.points else None,
        **({"best_step": history.best_step} if plan.eval_steps else {}),
        **{f"train_{k}": v for k, v in features.info.items() if v and k in ("truncated", "answers_lost", "words_lost")},
        "fresh_weights": len(loaded.fresh),
        **held,
    }
    _keep(session, read, found, history, metrics)
    return metrics


def holding(cfg: FinetuneConfig) -> Holding:
    """What the settings hold weights to."""
    names = Holding.__dataclass_fields__
    return Holding(**{n: getattr(cfg, n) for n in names})


def replayed(cfg: FinetuneConfig, loaded: Loaded) -> Replay | None:
    """Rows of another task to ride along, read by the same model; a model that cannot read them is refused."""
    if cfg.replay is None:
        return None
    task = load_task(DataConfig(task=cfg.replay, data_dir=cfg.data_dir, offline=cfg.offline, data_seed=cfg.data_seed))
    other = ReadConfig(max_length=cfg.max_length, mlm_probability=cfg.mlm_probability)
    mode = mode_for(other, task, loaded.ref)
    if hasattr(loaded.model, "get_output_embeddings") and mode in ("mlm", "clm", "prompt", "causal"):
        able = loaded.model.get_output_embeddings() is not None
    else:
        able = False
    if not able:
        raise ConfigError(
            f"--replay {cfg.replay} (mode {mode}) cannot be read by a model that trains in mode {cfg.mode or 'head'}: "
            "they share no head. Replay text or prompts beside --mode prompt, causal, mlm or clm."
        )
    read = reading(loaded, task, other, mode, cfg.seed, cfg.reduce)
    return Replay(read.objective, read.feed(read.encode(task.rows("train"))), cfg.replay_rows)


def training_rows(task: Task, cfg: FinetuneConfig) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Rows to train on and rows to select on; without a split to spare, a tenth of the training rows is set aside."""
    rows = task.rows("train")
    if cfg.checkpoint == "last":
        return rows, ()
    if task.reported == "test" and task.splits.get("validation"):
        return rows, task.rows("validation")
    groups = list(dict.fromkeys(r.group or r.id for r in rows))  # a document is never on both sides
    order = np.random.default_rng(seed_of(cfg.seed, "selection")).permutation(len(groups))
    held = {groups[i] for i in order[: max(1, len(groups) // 10)]}
    kept = tuple(r for r in rows if (r.group or r.id) not in held)
    if not kept:
        raise DataError(
            f"Task '{task.name}' has too few rows to set some aside for --checkpoint best. Use --checkpoint last."
        )
    return kept, tuple(r for r in rows if (r.group or r.id) in held)


def _announce(session: Session, read: Reading, rows: tuple[Row, ...], plan: Plan, sizes: dict[str, int]) -> None:
    """What will be done, in words, before the first update; the prompt is shown on three rows."""
    cfg, say = session.cfg, session.progress.say
    chosen = "" if cfg.learning_rate else f", chosen for width {read.loaded.model.config.hidden_size}"
    say(
        f"{read.loaded.ref.name}, mode {read.mode}: {len(rows):,} rows of {session.task.name}, {plan.steps:,} updates "
        f"of {plan.batch_size * plan.accumulation} rows, learning rate {plan.learning_rate:.2g}{chosen}, "
        f"{sizes['trained']:,} of {sizes['parameters']:,} weights train"
    )
    for note, text in session.task.notes.items():
        say(f"  {note}: {text}")
    for text in read.examples(rows):
        say(f"  e.g. {text if len(text) <= 200 else text[:197] + '...'}")
    if read.template is not None and read.mode != "head":
        words = read.template.causal_words if read.mode == "causal" else read.template.words
        say(
            f"  label words: {', '.join(f'{a} = {b!r}' for a, b in zip(session.task.labels or ('low', 'high'), words))}"
        )


def _train(
    session: Session, read: Reading, features: Any, plan: Plan, selection_rows: tuple[Row, ...], terms: Terms
) -> History:
    cfg, run = session.cfg, session.run
    model = read.loaded.model

    def checkpoint(step: int) -> None:
        with writing_directory(run.file("checkpoints", f"checkpoint-{step}")) as part:
            save_model(read.loaded, part)

    select = None
    if plan.eval_steps:
        select = lambda: goodness(evaluate(read, selection_rows, cfg, cfg.eval_batch_size).metrics)  # noqa: E731
    with session.progress.stage("train", plan.steps) as bar:
        every = float(os.environ.get("BUDWOOD_SAVE_SECONDS", Keeping.every))
        state = run.file("state.safetensors")
        keeping = Keeping(
            state=state, every=every, checkpoint=checkpoint, select=select, advance=bar.advance, resumed=bar.resumed
        )
        if cfg.parallel == "fsdp" and ranks().size > 1:
            _check_sharded(read, keeping, plan, terms)
            with sharded(model) as parts:
                return fit(parts, read.objective, read.feed(features), plan, replace(keeping, state=None), terms)
        return fit(model, read.objective, read.feed(features), plan, keeping, terms)


def _check_sharded(read: Reading, keeping: Keeping, plan: Plan, terms: Terms) -> None:
    """Refuse what needs whole weights while they lie in parts."""
    wants = {
        "--checkpoint best": keeping.select is not None,
        "--save-steps": plan.save_steps is not None,
        "--replay": terms.replay is not None,
        "a penalty (EWC, --l1-to-base, --l2-to-base)": terms.penalty is not None,
        f"--mode {read.mode}": read.mode not in ("head", "span"),
    }
    asked = [what for what, wanted in wants.items() if wanted]
    if asked:
        raise ConfigError(f"--parallel fsdp does not go with {asked[0]}. Use --parallel ddp.")


def _scored(session: Session, read: Reading, rows: tuple[Row, ...], stage: str) -> Evaluation:
    with session.progress.stage(stage, len(rows)) as bar:
        return evaluate(read, rows, session.cfg, session.cfg.eval_batch_size, bar.advance)


def _keep(session: Session, read: Reading, found: Evaluation, history: History, metrics: dict[str, Any]) -> None:
    """Write everything a finished fine-tuning leaves behind."""
    run = session.run
    with session.progress.stage("save"):
        with writing_directory(run.file("model")) as part:
            save_model(replace(read.loaded, fresh=()), part)
            write_text(part / "README.md", model_card(session, metrics))
        keep_records(session, found)
        if history.points:
            with drawing() as axes:
                table = loss_curve(axes, history.points, f"{read.loaded.ref.name} on {session.task.name}")
                save(axes.figure, run.file("figures", "loss"), table)

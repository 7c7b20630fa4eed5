"""Fine-tuning: a model learns a task, is scored, and is saved as a Hugging Face directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from budwood.config.data import DataConfig
from budwood.config.finetune import FinetuneConfig, ReadConfig
from budwood.data.batch import budget_batches, seed_of
from budwood.data.source import load_task, sampled
from budwood.data.task import Row, Task
from budwood.errors import ConfigError, DataError
from budwood.figures.curve import loss_curve
from budwood.figures.save import drawing, save
from budwood.methods.card import model_card
from budwood.methods.evaluate import keep_records
from budwood.methods.session import Session
from budwood.models.identity import tokenizer_hash
from budwood.models.load import Loaded, load, random_weights
from budwood.models.load import save as save_model
from budwood.models.objective import Objective, Tokens
from budwood.models.output import output_module
from budwood.models.quad import Quad
from budwood.models.reading import Reading, head_spec, mode_for, reading
from budwood.params import tree
from budwood.params.graft import Graft
from budwood.params.graft import check as check_graft
from budwood.params.tree import named
from budwood.store.files import write_text, writing_directory
from budwood.train.evaluate import Evaluation, evaluate, evaluating, goodness
from budwood.train.fit import History, Keeping, Penalty, Plan, Replay, Terms, fit, trainable
from budwood.train.penalty import Holding, Inside, Together, hold
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
        if task.kind == "number":  # a later evaluation asks with as many masks
            session.run.note(reading={"masks": None if cfg.parity else read.encoding.masks})
        sizes = prepare_model(loaded.model, cfg) | _embedding_fixed(loaded, cfg)
        asked = _asked(read, cfg)
        train_rows, selection_rows = training_rows(task, cfg)
        features = read.encode(train_rows)
    plan = make_plan(cfg, len(features), int(loaded.model.config.hidden_size), cfg.seed)
    terms, held = terms_of(cfg, loaded, plan)
    _announce(session, read, train_rows, plan, sizes)
    if held:
        say(f"  EWC: effective coefficient {held['ewc_effective']:.3g} on {held['ewc_held']:,} weights")
    test_rows = task.rows(task.reported)
    zero = {}
    if mode in ("prompt", "causal") and task.kind in ("label", "regression"):
        zero = {"zero_shot": _scored(session, read, test_rows, "zero-shot").metrics["score"]}
        say(f"zero-shot {task.metric}: {zero['zero_shot']:.4f}")
    history = _train(session, replace(read, objective=asked), features, plan, selection_rows, terms)
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
        **_quad_loss(read, asked, test_rows),
    }
    _keep(session, read, found, history, metrics)
    return metrics


def _asked(read: Reading, cfg: FinetuneConfig) -> Objective:
    """What training minimises: the reading's own objective, or its quadratic rival."""
    if cfg.objective == "kl":
        return read.objective
    if read.mode != "clm":
        raise ConfigError(f"--objective quad is for --mode clm, and the mode is {read.mode}. Leave it out.")
    return Quad(cfg.reduce)


def _plain(read: Reading, cfg: FinetuneConfig) -> Objective:
    """What scoring uses, whatever was minimised."""
    return Tokens(lm=True, reduce=cfg.reduce, name="clm") if cfg.objective == "quad" else read.objective


def _embedding_fixed(loaded: Loaded, cfg: FinetuneConfig) -> dict[str, int]:
    """Hold the output embedding where asked to; returns how many weights still train."""
    if cfg.output_embedding == "learned":
        return {}
    output_module(loaded.model).weight.requires_grad_(False)
    return {"trained": sum(p.numel() for p in named(loaded.model).values() if p.requires_grad)}


def _quad_loss(read: Reading, asked: Objective, rows: tuple[Row, ...]) -> dict[str, Any]:
    """The quadratic loss on the reported rows, beside the language-model loss, where it was trained for."""
    if not isinstance(asked, Quad):
        return {}
    feed = read.feed(read.encode(rows))
    total = words = 0.0
    with evaluating(read.loaded.model):
        for index in budget_batches(feed.lengths_N):
            batch = feed(index)
            score_M2 = asked.logits(read.loaded.model, batch).double()
            total += float((score_M2[:, 1] - score_M2[:, 0]).sum())
            words += len(score_M2)
    return {"objective": "quad", "quad_loss": total / words}


def terms_of(cfg: FinetuneConfig, loaded: Loaded, plan: Plan) -> tuple[Terms, Mapping[str, Any]]:
    """What enters an update beside the loss, as the settings ask, and what there is to say about it."""
    grip = hold(loaded.model, _holding(cfg), plan.steps, loaded.fresh, tokenizer_hash(loaded.tokenizer))
    terms = Terms(penalty=_inside(cfg, loaded, grip.penalty), pull=grip.pull, others=_replays(cfg, loaded))
    return terms, grip.facts


def _holding(cfg: FinetuneConfig) -> Holding:
    names = Holding.__dataclass_fields__
    return Holding(**{n: getattr(cfg, n) for n in names})


def _inside(cfg: FinetuneConfig, loaded: Loaded, penalty: Penalty | None) -> Penalty | None:
    """With --inside, nothing but the graft's weights may move."""
    if cfg.inside is None:
        return penalty
    graft = Graft.load(cfg.inside)
    check_graft(graft, loaded.model, force=True)
    if cfg.weight_decay or cfg.momentum:
        raise ConfigError("--inside keeps all other weights still: add --weight-decay 0 and no --momentum.")
    inside = Inside.of(loaded.model, graft.index)
    return inside if penalty is None else Together([penalty, inside])


def _replays(cfg: FinetuneConfig, loaded: Loaded) -> tuple[Replay, ...]:
    """Rows of other tasks that ride along."""
    return tuple(_replay(cfg, loaded, name.strip()) for name in (cfg.replay or "").split(",") if name.strip())


def _replay(cfg: FinetuneConfig, loaded: Loaded, name: str) -> Replay:
    """Rows of another task to ride along, read by the same model; a model that cannot read them is refused."""
    data = DataConfig(task=name, data_dir=cfg.data_dir, offline=cfg.offline, data_seed=cfg.data_seed)
    task = load_task(data)
    if task.kind in ("label", "regression"):  # text rides along whole: it has no classes to sample by
        task = sampled(task, data.model_copy(update={"shots": cfg.shots, "limit": cfg.limit}))
    labelled = task.kind == "label" and task.template is not None
    # a task with labels is asked the way the main one is: by label words
    wish = cfg.mode if labelled and cfg.mode in ("prompt", "causal") else None
    other = ReadConfig(mode=wish, max_length=cfg.max_length, mlm_probability=cfg.mlm_probability)
    mode = mode_for(other, task, loaded.ref)
    if hasattr(loaded.model, "get_output_embeddings") and mode in ("mlm", "clm", "prompt", "causal"):
        able = loaded.model.get_output_embeddings() is not None
    else:
        able = False
    if not able:
        raise ConfigError(
            f"--replay {name} (mode {mode}) cannot be read by a model that trains in mode {cfg.mode or 'head'}: "
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
        judge = replace(read, objective=_plain(read, cfg))
        select = lambda: goodness(evaluate(judge, selection_rows, cfg, cfg.eval_batch_size).metrics)  # noqa: E731
    with session.progress.stage("train", plan.steps) as bar:
        every = float(os.environ.get("BUDWOOD_SAVE_SECONDS", Keeping.every))
        state = run.file("state.safetensors")
        keeping = Keeping(
            state=state,
            every=every,
            checkpoint=checkpoint,
            select=select,
            advance=bar.advance,
            resumed=bar.resumed,
            finished=lambda last: _keep_moments(session, read, plan, last) if cfg.save_second_moments else None,
        )
        if cfg.parallel == "fsdp" and ranks().size > 1:
            _check_sharded(read, keeping, plan, terms)
            with sharded(model) as parts:
                return fit(parts, read.objective, read.feed(features), plan, replace(keeping, state=None), terms)
        return fit(model, read.objective, read.feed(features), plan, keeping, terms)


def _keep_moments(session: Session, read: Reading, plan: Plan, state: Mapping[str, Tensor]) -> None:
    """AdamW's second moments without the bias of their start, under canonical names."""
    own = {id(p): n for n, p in trainable(read.loaded.model).items()}
    grown = 1.0 - plan.rule.beta2**plan.steps
    moments = {
        n: state[f"v:{own[id(p)]}"] / grown if id(p) in own else torch.zeros_like(p)
        for n, p in tree.named(read.loaded.model).items()
    }
    facts = {"artefact": "second moments", "mode": read.mode, "steps": plan.steps, "rows": plan.steps * plan.batch_size}
    tree.save(session.run.file("adam.safetensors"), moments, facts)


def _check_sharded(read: Reading, keeping: Keeping, plan: Plan, terms: Terms) -> None:
    """Refuse what needs whole weights while they lie in parts."""
    wants = {
        "--checkpoint best": keeping.select is not None,
        "--save-steps": plan.save_steps is not None,
        "--replay": bool(terms.others),
        "a penalty (EWC, --l1-to-base, --l2-to-base)": terms.penalty is not None or terms.pull is not None,
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

"""One split as probes see it: stored states, what each should say, which document it is from, control answers.

Shapes: M states (rows, labelled tokens, or all tokens of windows), W windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from budwood.capture.features import Ask, FeatureKind, Stored, config_of, planned, store
from budwood.config.probe import FOLDS, ProbeConfig
from budwood.data.batch import IGNORE, seed_of
from budwood.data.task import Row, Task
from budwood.errors import ConfigError, DataError
from budwood.methods.session import Session
from budwood.models.reading import reads_left_to_right
from budwood.models.reference import ModelRef

PROBED = ("label", "tokens", "span")
UNKNOWN = -1  # the label of a row that has none
MEASURED = ("accuracy", "f1", "macro_f1", "mcc")


@dataclass(frozen=True)
class Side:
    """Stored states of a split. `label_M` and `control_M` are classes; for spans both are empty and `rows` count."""

    stored: Stored
    rows: tuple[Row, ...]
    label_M: np.ndarray
    document_M: np.ndarray
    control_M: np.ndarray
    row_M: np.ndarray


def kind_of(cfg: ProbeConfig, task: Task, ref: ModelRef) -> FeatureKind:
    """Which states a task's probe reads; a task that has nothing to probe is refused."""
    if task.kind not in PROBED:
        raise ConfigError(
            f"Task '{task.name}' (kind '{task.kind}') has no labels for a probe to tell apart. Probes read tasks with "
            "labels, token labels or answer spans, such as tiny-entail, tiny-tags or tiny-qa."
        )
    if task.kind != "label":
        return "target" if task.kind == "tokens" else "token" if cfg.parity else "allowed"
    if cfg.states != "auto":
        return cfg.states
    return "last" if reads_left_to_right(ref) else "cls"


def check(cfg: ProbeConfig, task: Task) -> None:
    """Refuse settings that would do nothing on this kind of task, and metrics that labels alone do not have."""
    span, label = task.kind == "span", task.kind == "label"
    idle = {
        "--erase takes labels out of states": cfg.erase and span,
        "--pvi is about labels": cfg.pvi and span,
        f"--states {cfg.states} is about the one state of a row": cfg.states != "auto" and not label,
        f"--decode {cfg.decode} is about answers to questions": cfg.decode != "hf" and not span,
        "--folds leaves labels out to choose C": cfg.folds != FOLDS and span,
        "--bidaf reads answers to questions": cfg.bidaf and not span,
    }
    given = [words for words, wrong in idle.items() if wrong]
    if given:
        raise ConfigError(f"{given[0]}; task '{task.name}' (kind '{task.kind}') has none. Leave it away.")
    if task.kind in ("label", "tokens") and task.metric not in MEASURED:
        raise ConfigError(
            f"Task '{task.name}' asks for the metric '{task.metric}', which probes are not scored by. They know "
            f"{', '.join(MEASURED)}: give one of these as `metric` in the task's file."
        )


def splits_of(task: Task) -> tuple[str, str]:
    """(split that thresholds are tuned on, split that is reported)."""
    return "validation", task.reported


def side(session: Session, ref: ModelRef, split: str, random: int | None = None) -> Side:
    """The states of a split, made or read back."""
    cfg: ProbeConfig = session.cfg
    kind = kind_of(cfg, session.task, ref)
    ask = Ask(ref.text, config_of(cfg), split, kind, random)
    name = f"features {'random ' if random is not None else ''}{ref.name} {split}"
    with session.progress.stage(name):
        if cfg.online:
            stored = planned(ask, session.task)
        else:
            stored = store(ask, session.task, cfg, most_bytes=1e9 * cfg.feature_budget)
    return dressed(stored, session.task, split, cfg.seed)


def dressed(stored: Stored, task: Task, split: str, seed: int | None) -> Side:
    """Stored states with labels, documents and control labels.

    Without a seed, to be predicted only: no control labels, and a row may have no label (UNKNOWN).
    """
    rows = task.rows(split)
    encoded = stored.encoded
    row_N = encoded.fixed["row"] if "row" in encoded.fixed else np.arange(len(encoded))
    row_M = np.repeat(row_N, np.diff(stored.offsets_N1))
    names = np.array([r.group or r.id for r in rows], dtype=object)
    document_N = np.unique(names, return_inverse=True)[1]
    if task.kind == "span":
        empty = np.empty(0, dtype=np.int64)
        return Side(stored, rows, empty, document_N[row_M], empty, row_M)
    if task.kind == "label":
        label_M = np.array([_label(r, task, seed is None) for r in rows], dtype=np.int64)
        keys: list[Any] = [(r.text, r.pair) for r in rows]
    else:
        kept = encoded.ragged["target"] != IGNORE
        label_M = encoded.ragged["target"][kept].astype(np.int64)
        keys = encoded.ragged["input_ids"][kept].tolist()
    control_M = np.empty(0, dtype=np.int64) if seed is None else control_labels(keys, task, seed)
    return Side(stored, rows, label_M, document_N[row_M], control_M, row_M)


def _label(row: Row, task: Task, lenient: bool) -> int:
    if row.label is None and lenient:
        return UNKNOWN
    if not isinstance(row.label, int):
        raise DataError(f"Row '{row.id}' of task '{task.name}' has no label. Use a labelled split.")
    return row.label


def control_labels(keys: list[Any], task: Task, seed: int) -> np.ndarray:
    """A fixed random class for every distinct key (word type, or text), drawn from the training labels' shares."""
    drawn = [c for r in task.rows("train") for c in (r.label if isinstance(r.label, tuple) else (r.label,))]
    share_K = np.bincount(np.array(drawn, dtype=np.int64), minlength=len(task.labels)) / len(drawn)
    edge_K = np.cumsum(share_K)
    table = {k: seed_of(seed, "control", k) / 2**63 for k in set(keys)}
    return np.minimum(np.searchsorted(edge_K, [table[k] for k in keys], side="right"), len(share_K) - 1)

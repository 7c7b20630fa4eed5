"""The model card beside every model that is written."""

from __future__ import annotations

import shlex
from typing import Any

from budwood.config.options import as_flag
from budwood.methods.session import Session


def model_card(session: Session, metrics: dict[str, Any]) -> str:
    """What the model is, how it was made and how well it does, as the README.md of its directory."""
    task, cfg = session.task, session.cfg
    model = session.models[0]
    kept = (
        "split",
        "metric",
        "score",
        "zero_shot",
        "accuracy",
        "f1",
        "mcc",
        "ece",
        "loss",
        "n",
        "train_rows",
        "steps",
        "learning_rate",
    )
    rows = "\n".join(f"| {k} | {metrics[k]} |" for k in kept if metrics.get(k) is not None)
    base = f"\nbase_model: {model.hub_name}" if model.hub_name else ""
    limited = "\nTrained or scored on a sample of the rows (`--limit`).\n" if "limited" in task.notes else ""
    return f"""---
library_name: transformers
tags: [budwood]{base}
---

# {model.name} fine-tuned on {task.name}

Mode `{metrics["mode"]}`, seed {cfg.seed}. Labels: {", ".join(task.labels) or task.kind}.
{limited}
| | |
|---|---|
{rows}

Rows: content hash `{task.digest}`. Settings: `run.json` beside this directory. Repeat it with

    {command(session)}
"""


def command(session: Session) -> str:
    """The command line that makes this run, from the settings that differ from their defaults."""
    words = ["budwood", *session.verb.split(), *(m.text for m in session.models)]
    fields = type(session.cfg).model_fields
    hidden = {
        "out",
        "dry_run",
        "print_config",
        "json_output",
        "progress",
        "debug",
        "overwrite",
        "threads",
        "workers",
        "engine",
        "retries",
    }
    for name, value in session.cfg.model_dump(mode="json").items():
        default = fields[name].default
        if name in hidden or value in ([], None, list(default) if isinstance(default, tuple) else default):
            continue
        if name in ("model_seed", "data_seed") and value == session.cfg.seed:
            continue
        words += as_flag(name, value)
    return shlex.join(words)

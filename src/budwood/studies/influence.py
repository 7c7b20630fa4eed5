"""A question to the index of a model: the index is made where it is missing, then asked."""

from __future__ import annotations

from typing import Any

from budwood.config.influence import QueryConfig
from budwood.data.task import Task
from budwood.studies.verbs import run_verb


def ask(cfg: QueryConfig, model: str, task: Task | None = None) -> dict[str, Any]:
    """What `influence query` shows, as plain values."""
    from budwood.data.source import load_task
    from budwood.methods.influence.query import answer, index_settings
    from budwood.methods.session import with_seeds

    settings = with_seeds(index_settings(cfg, model))
    made = run_verb("influence index", settings, [model], task)
    return answer(made.run, cfg, model, task or load_task(settings), settings)

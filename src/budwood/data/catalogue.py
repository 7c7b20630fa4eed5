"""Tasks at hand: shipped, in data folders, or on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from budwood.config.data import DataConfig
from budwood.data.prompt import render
from budwood.data.registry import PUBLIC
from budwood.data.source import data_folders, folder_names, load_task, shipped_names
from budwood.data.task import Row, Task

ABOUT = {
    "tiny-text": ("text", "lm_loss"),
    "tiny-tags": ("tokens", "accuracy"),
    "tiny-qa": ("span", "f1"),
    "arithmetic": ("number", "rmsle"),
}


def known_tasks(data_dir: tuple[Path, ...]) -> list[dict[str, Any]]:
    """One row per task: its kind, labels, main metric, and where its rows would come from."""
    rows = []
    for name in shipped_names():
        kind, metric = ABOUT.get(name, ("label", "accuracy"))
        rows.append({"task": name, "kind": kind, "labels": "", "metric": metric, "where": "shipped"})
    folders = data_folders(DataConfig(task="-", data_dir=data_dir))
    for public in PUBLIC.values():
        found = next((str(f / n) for f in folders for n in folder_names(public) if (f / n).is_dir()), None)
        hub = f"hub {public.hub.id}" if public.hub else "not here"
        labels = ", ".join(public.labels) if len(public.labels) <= 4 else f"{len(public.labels)} labels"
        rows.append(
            {"task": public.name, "kind": public.kind, "labels": labels, "metric": public.metric, "where": found or hub}
        )
    return rows


def describe(name: str, data_dir: tuple[Path, ...]) -> dict[str, Any]:
    """A task's splits, labels, wording and first rows."""
    task = load_task(DataConfig(task=name, data_dir=data_dir))
    shown = {
        "task": task.name,
        "kind": task.kind,
        "splits": {k: len(v) for k, v in task.splits.items()},
        "labels": list(task.labels),
        "metric": task.metric,
        "notes": dict(task.notes),
    }
    if task.template:
        shown["prompt"] = {"masked": task.template.masked, "words": task.template.words, "causal": task.template.causal}
    return {**shown, "rows": [_shown(task, row) for row in task.rows(task.reported)[:3]]}


def _shown(task: Task, row: Row) -> dict[str, Any]:
    label = task.labels[row.label] if task.kind == "label" and isinstance(row.label, int) else row.label
    wording = render(task.template, row, "[MASK]", causal=False) if task.template and task.template.masked else row.text
    kept = {"id": row.id, "text": wording or " ".join(row.words or ()), "label": label, "answers": row.answers}
    if task.kind == "span":
        kept["context"] = row.pair
    return {k: v for k, v in kept.items() if v is not None}

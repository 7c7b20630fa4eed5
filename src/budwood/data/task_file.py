"""A `task.yaml` read and checked; its keys are those of `budwood.config.data.TaskFileConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from budwood.config.base import Config
from budwood.config.data import ColumnsConfig, TaskFileConfig, TemplateConfig
from budwood.data.readers.lines import check_file, not_utf8
from budwood.errors import DataError, nearest

# what an evaluation of each kind of task yields
MEASURES: dict[str, tuple[str, ...]] = {
    "label": ("accuracy", "f1", "mcc", "ece", "loss"),
    "regression": ("pearson", "spearman", "mse", "loss"),
    "tokens": ("accuracy", "f1", "macro_f1", "loss"),
    "span": ("f1", "exact", "HasAns_f1", "NoAns_f1", "best_f1", "best_exact"),
    "number": ("rmsle", "exact", "rmse", "parse_rate"),
    "text": ("lm_loss", "perplexity", "token_accuracy"),
}
KEYS: dict[str, type[Config]] = {"columns": ColumnsConfig, "template": TemplateConfig}


def read_task_file(path: Path) -> TaskFileConfig:
    """The settings of a task.yaml; an unknown key is answered with the nearest known one."""
    import yaml

    check_file(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    except yaml.YAMLError as error:
        raise DataError(f"'{path}' is not YAML: {' '.join(str(error).split())}. Correct it there.") from error
    if not isinstance(data, dict):
        raise DataError(
            f"'{path}' should hold keys and values, at least `files: rows.csv`; it holds {type(data).__name__}."
        )
    try:
        sheet = TaskFileConfig.model_validate(data)
    except ValidationError as error:
        raise DataError(_told(path, error)) from None
    if sheet.metric is not None:
        known = {m for kind in ([sheet.kind] if sheet.kind else MEASURES) for m in MEASURES[kind]}
        if sheet.metric not in known:
            raise DataError(
                f"'{path}' asks for the metric '{sheet.metric}', which {sheet.kind or 'no'} tasks have. Known: "
                f"{', '.join(sorted(known))}.{nearest(sheet.metric, known)}"
            )
    strange = [label for label in sheet.labels if isinstance(label, bool)]
    if strange:
        raise DataError(
            f"'{path}' has the label {str(strange[0]).lower()}: YAML reads bare yes, no, on, off as true and false. "
            f"Quote it."
        )
    return sheet


def _told(path: Path, error: ValidationError) -> str:
    """The first complaint in our words."""
    first: Any = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("dict[", "lax-or-strict")))
    known = KEYS.get(str(first["loc"][0]), TaskFileConfig) if len(first["loc"]) > 1 else TaskFileConfig
    if first["type"] == "extra_forbidden":
        names = list(known.model_fields)
        close = nearest(where.split(".")[-1], names)
        return f"'{path}' has the unknown key '{where}'. Known keys are {', '.join(names)}.{close}"
    if first["type"] == "missing":
        return f"'{path}' lacks the key '{where}', as in `files: rows.csv` or `files: {{train: a.csv, test: b.csv}}`."
    return f"'{path}': key '{where}' cannot be used: {first['msg']}."

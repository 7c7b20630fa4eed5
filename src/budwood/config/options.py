"""How a setting is spelled: as an option, as a YAML key, as a keyword."""

from __future__ import annotations

import types
import typing
from typing import Any

from cyclopts import Parameter
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from budwood.config.base import Config
from budwood.errors import ConfigError, nearest

SHELL_ONLY = frozenset(
    {"config", "dry_run", "print_config", "json_output", "debug"}
)  # mean nothing in Python or a recipe


def option_names(name: str, field: FieldInfo) -> list[str]:
    """Every way to write a field as an option, the canonical one first.

    >>> from budwood.config.train import TrainConfig
    >>> option_names("learning_rate", TrainConfig.model_fields["learning_rate"])
    ['--learning-rate', '--lr']
    """
    for extra in field.metadata:
        if isinstance(extra, Parameter) and extra.name:
            return [extra.name] if isinstance(extra.name, str) else list(extra.name)
    return ["--" + name.replace("_", "-")]


def field_names(settings: type[Config]) -> dict[str, str]:
    """Every spelling of every field, with underscores, mapped to the field's name.

    >>> from budwood.config.train import TrainConfig
    >>> field_names(TrainConfig)["lr"]
    'learning_rate'
    """
    fields = settings.model_fields
    spelled = {o.lstrip("-").replace("-", "_"): n for n, f in fields.items() for o in option_names(n, f)}
    return {**spelled, **{n: n for n in fields}}


def is_list(field: FieldInfo) -> bool:
    """Whether a field takes several values."""
    kinds = typing.get_args(field.annotation) if isinstance(field.annotation, types.UnionType) else (field.annotation,)
    return any(typing.get_origin(k) is tuple for k in kinds)


def is_switch(field: FieldInfo) -> bool:
    """Whether a field is on or off and takes no value."""
    return field.annotation is bool


def problems(error: ValidationError, prefix: str = "--") -> str:
    """What is wrong with settings, a sentence each, in the reader's own words."""
    parts = []
    for problem in error.errors():
        message = str(problem["msg"]).removeprefix("Value error, ")
        if not problem["loc"]:
            parts.append(message if message.endswith(("?", ".")) else f"{message}.")
            continue
        name = str(problem["loc"][0])
        option = prefix + (name.replace("_", "-") if prefix else name)
        if problem["type"] == "missing":
            parts.append(f"{option} is missing.")
            continue
        given = problem.get("input")
        known = [w.strip("' ") for w in str(problem.get("ctx", {}).get("expected", "")).replace(" or ", ",").split(",")]
        near = nearest(str(given), known) if problem["type"] == "literal_error" else ""
        parts.append(f"{option} was given {given!r}: {message[0].lower()}{message[1:]}.{near}")
    return " ".join(parts)


def build_settings(settings: type[Config], given: dict[str, Any], who: str) -> Any:
    """Settings from keywords in any spelling; what is unknown, out of range or only for a shell is told by name."""
    names = field_names(settings)
    full = {}
    for key, value in given.items():
        name = names.get(str(key).replace("-", "_"))
        if name is None:
            raise ConfigError(f"{who} has no setting '{key}'.{nearest(str(key), names)}")
        if name in SHELL_ONLY:
            raise ConfigError(f"{who}: '{key}' is for the command line only. Leave it away.")
        full[name] = value
    try:
        return settings(**full)
    except ValidationError as e:
        raise ConfigError(f"{who}: {problems(e, '')}") from e


def in_words(settings: type[Config], given: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a Python caller as words where a setting is of words: queries=8, damping=1e-8.

    In files they stay what they are: YAML has made another number of 0012 by then.
    """
    names = field_names(settings)

    def worded(value: Any) -> Any:
        value = value.item() if hasattr(value, "item") else value
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    found = {}
    for key, value in given.items():
        name = names.get(str(key).replace("-", "_"))
        kind = settings.model_fields[name].annotation if name else None
        if kind in (str, str | None):
            value = worded(value)
        elif kind == tuple[str, ...]:
            value = [worded(v) for v in value] if isinstance(value, list | tuple) else worded(value)
        found[key] = value
    return found


def as_flag(name: str, value: Any) -> list[str]:
    """A setting as the words of a command line.

    >>> as_flag("num_train_epochs", 2), as_flag("freeze", ["head", "embeddings"]), as_flag("overwrite", True)
    (['--num-train-epochs', '2'], ['--freeze', 'head,embeddings'], ['--overwrite'])
    """
    option = "--" + name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [option] if value else []
    return [option, ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)]

"""How a setting is spelled: as an option, as a YAML key, as a keyword."""

from __future__ import annotations

import types
import typing

from cyclopts import Parameter
from pydantic.fields import FieldInfo

from budwood.config.base import Config


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

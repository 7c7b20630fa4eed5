"""The root of all settings: frozen pydantic models that refuse what they do not know."""

from __future__ import annotations

import os
import typing
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic_core.core_schema import ValidationInfo


class Config(BaseModel):
    """Settings of one verb: immutable, no unknown keys, the help text is each field's description."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _lists(cls, value: Any, info: ValidationInfo) -> Any:
        """A list setting may be given as one string, split at its commas, or as one path."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if typing.get_origin(kind) is tuple and typing.get_args(kind)[-1:] == (...,):
            if isinstance(value, str):
                return tuple(v.strip() for v in value.split(",") if v.strip())
            if isinstance(value, os.PathLike | int | float):
                return (value,)
            if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
                return tuple(part.strip() for v in value for part in v.split(",") if part.strip())
        return value

"""The root of all settings: frozen pydantic models that refuse what they do not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Settings of one verb: immutable, no unknown keys, the help text is each field's description."""

    model_config = ConfigDict(frozen=True, extra="forbid")

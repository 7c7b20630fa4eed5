"""Models at hand without network: shipped, made by runs, and in the hub cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from budwood.errors import BudwoodError
from budwood.models.reference import NAMES, resolve


def known_models(runs_dir: Path) -> list[dict[str, Any]]:
    """One row per model: how to name it, its family, its size on disk, where it lies."""
    wishes = [*NAMES, *(str(p.parent) for p in sorted(runs_dir.glob("*/model")) if (p.parent / "run.json").exists())]
    rows = []
    for wish in [*wishes, *_cached()]:
        try:
            ref = resolve(wish, runs_dir=runs_dir, offline=True)
        except BudwoodError as e:
            rows.append({"model": wish, "type": "?", "size": "", "where": str(e).split(".")[0]})
            continue
        size = sum(f.stat().st_size for f in ref.path.glob("*.safetensors")) if ref.path else 0
        rows.append({"model": wish, "type": ref.model_type or "?", "size": f"{size / 1e6:,.1f} MB", "where": ref.kind})
    return rows


def _cached() -> list[str]:
    from huggingface_hub import constants

    hub = Path(constants.HF_HUB_CACHE)
    return (
        [p.name.removeprefix("models--").replace("--", "/") for p in sorted(hub.glob("models--*"))]
        if hub.is_dir()
        else []
    )

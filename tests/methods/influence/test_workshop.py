"""A shop is opened once, and again when its model's files are other ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from budwood.config.influence import FitConfig
from budwood.methods.influence.workshop import open_shop, settings_for
from budwood.models.reference import resolve


def test_a_model_made_anew_in_its_place_is_opened_anew(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve("tiny-bert").source, model)
    settings = settings_for(FitConfig(task="tiny-sentiment", mode="prompt", limit=4, limit_eval=4), str(model))
    first = open_shop(settings)
    assert open_shop(settings) is first
    weights = model / "model.safetensors"
    later = weights.stat().st_mtime_ns + 1_000_000
    os.utime(weights, ns=(later, later))
    assert open_shop(settings) is not first

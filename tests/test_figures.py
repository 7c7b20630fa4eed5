"""Figures: three files each, the same bytes twice, numbers that are the data's."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from budwood.figures.curve import loss_curve
from budwood.figures.reliability import reliability
from budwood.figures.save import drawing, save
from budwood.linalg.metrics import ece

POINTS = [{"step": s, "loss": 1.0 / s, "learning_rate": 1e-3 / s, "grad_norm": 0.5} for s in range(1, 9)]


def test_three_files_with_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with drawing() as axes:
            save(axes.figure, tmp_path / name / "loss", loss_curve(axes, POINTS, "title"))
    for end in ("svg", "png", "csv"):
        first, second = ((tmp_path / n / f"loss.{end}").read_bytes() for n in ("a", "b"))
        assert first == second and len(first) > 100
    rows = list(csv.DictReader((tmp_path / "a" / "loss.csv").open()))
    assert [float(r["loss"]) for r in rows] == [p["loss"] for p in POINTS]


def test_reliability_bins_give_the_calibration_error() -> None:
    rng = np.random.default_rng(0)
    p_NK = rng.dirichlet([1, 1, 1], 400)
    label_N = rng.integers(0, 3, 400)
    with drawing() as axes:
        table = reliability(axes, p_NK.max(1).tolist(), (p_NK.argmax(1) == label_N).tolist(), "t")
    n, acc, conf = (np.array(table[k]) for k in ("n", "accuracy", "confidence"))
    assert n.sum() == 400
    np.testing.assert_allclose((n / 400 * np.abs(acc - conf)).sum(), ece(p_NK, label_N), rtol=1e-9)

"""Groups, hypervolumes and the knee of made-up cells."""

from __future__ import annotations

from typing import Any

import pytest

from budwood.studies.tradeoff import error_of, grouped, hypervolumes, knee


def cell(retain: str, strength: float | None, new: float, kept: float, seed: int = 0) -> dict[str, Any]:
    scored = {"metric": "rmsle", "score": new, "exact": 0.5}
    return {
        "retain": retain,
        "strength": strength,
        "seed": seed,
        "new": scored,
        "kept": {"text": {"metric": "lm_loss", "score": kept}},
    }


PLAIN = cell("none", None, 0.20, 9.0)
SWEEP = [cell("ewc", 1.0, 0.22, 6.0), cell("ewc", 10.0, 0.24, 3.0), cell("ewc", 100.0, 0.60, 1.1)]


def test_medians_and_ranges_over_seeds() -> None:
    (group,) = grouped([cell("ewc", 1.0, x, 10 * x, s) for s, x in enumerate((0.3, 0.1, 0.2))], "text")
    assert (group["new_error"], group["new_error_low"], group["new_error_high"]) == (0.2, 0.1, 0.3)
    assert group["kept_error"] == 2.0 and group["front"] and group["seeds"] == 3


def test_the_knee_is_met_with_its_reason() -> None:
    found = knee(grouped([PLAIN, *SWEEP], "text"), base_kept=1.0, trivial=0.9)
    assert found["met"] is True and found["strength"] == 10.0 and found["avoided"] == pytest.approx(0.75)
    assert "75% of the rise avoided" in found["reason"] and not found["better"]


def test_a_knee_that_is_not_met_names_what_does_better() -> None:
    cells = [PLAIN, cell("ewc", 1.0, 0.22, 8.0), cell("ewc", 10.0, 0.5, 2.0), cell("replay", None, 0.21, 1.0)]
    found = knee(grouped(cells, "text"), base_kept=1.0, trivial=0.9)
    assert found["met"] is False and [b["retain"] for b in found["better"]] == ["replay"]
    assert "no strength" in found["reason"]


def test_without_forgetting_there_is_no_knee() -> None:
    found = knee(grouped([cell("none", None, 0.2, 0.9), *SWEEP], "text"), base_kept=1.0, trivial=0.9)
    assert found["met"] is None and "nothing to hold" in found["reason"]
    assert knee(grouped(SWEEP, "text"), 1.0, 0.9)["met"] is None


def test_a_skill_that_was_not_learned_has_no_knee() -> None:
    found = knee(grouped([PLAIN, *SWEEP], "text"), base_kept=1.0, trivial=0.2)
    assert found["met"] is None and "did not learn the skill" in found["reason"] and "better" not in found


def test_hypervolume_counts_from_plain_training_and_the_trivial_answer() -> None:
    area = hypervolumes([PLAIN, *SWEEP], "text", new_reference=0.8)
    assert area["none"]["0"] == 0.0
    assert area["ewc"]["0"] == pytest.approx((0.8 - 0.22) * 3 + (0.8 - 0.24) * 3 + 0.2 * 1.9)


def test_errors_are_costs() -> None:
    assert error_of({"metric": "f1", "score": 80.0, "full": 100}) == pytest.approx(0.2)  # SQuAD's percent
    assert error_of({"metric": "f1", "score": 0.9, "full": 100}) == pytest.approx(0.991)
    assert error_of({"metric": "mcc", "score": -0.5}) == 1.5

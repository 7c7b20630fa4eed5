"""What `inject` says in sentences."""

from __future__ import annotations

from typing import Any

from budwood.cli.inject import _safe, _sentences


def group(retain: str, strength: float | None, kept: float) -> dict[str, Any]:
    return {"retain": retain, "strength": strength, "new_error": 0.5, "kept_error": kept}


def test_plain_training_that_costs_nothing_is_named_too() -> None:
    groups = [group("none", None, 1.04), group("ewc", 0.1, 1.01), group("l2", 1.0, 1.2)]
    assert _safe(groups, "text", 1.0) == "text error at most 5 % above that before (1.000) with: plain, EWC 0.1."


def test_where_no_way_keeps_the_task_the_nearest_is_named() -> None:
    said = _safe([group("none", None, 3.0), group("ewc", 0.1, 1.5)], "text", 1.0)
    assert said == "text error is more than 5 % above that before (1.000) with every way; nearest: EWC 0.1, x1.50."


def test_plain_training_alone_has_no_hypervolume_and_no_knee() -> None:
    metrics = {
        "groups": [group("none", None, 1.0)],
        "base": {"kept_error": 1.0},
        "reference": {"new_error": 1.0, "kept_error": 1.0, "is": "the commonest label"},
        "main_kept": "text",
        "hypervolume": {"none": {"0": 0.0}},
        "knee": {"met": None, "reason": "it is told from --retain none and ewc together"},
        "warnings": {},
    }
    lines = _sentences(metrics)
    assert len(lines) == 3 and lines[2] == "No knee: it is told from --retain none and ewc together."

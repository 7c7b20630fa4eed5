"""Fine-tuning and evaluation: score beside its baselines, loss curve, calibration, rows that went wrong."""

from __future__ import annotations

from typing import Any

from budwood.report.limits import Limits
from budwood.report.room import Room
from budwood.report.texts import Texts, rows_of
from budwood.report.views.words import LOWER_IS_BETTER, metric_name, number

PLAIN = ("majority", "mse_of_mean", "zero_shot")


def gather(room: Room, texts: Texts, limits: Limits) -> dict[str, Any]:
    """Score, baselines, curves and the rows that went most wrong."""
    m = room.metrics
    return {
        "claim": claim(room),
        "metric": m.get("metric"),
        "score": m.get("score"),
        "interval": [m.get("accuracy_low"), m.get("accuracy_high")] if m.get("metric") == "accuracy" else None,
        "baselines": {k: m[k] for k in PLAIN if m.get(k) is not None},
        "loss": room.csv("figures", "loss.csv"),
        "calibration": room.csv("figures", "calibration.csv"),
        "ece": m.get("ece"),
        "rows": wrong_rows(room, texts, limits.records),
    }


def claim(room: Room) -> str:
    """What was learned, next to what needs no learning."""
    m = room.metrics
    if m.get("score") is None:
        return f"This run of {room.verb} has no score."
    model = " and ".join(room.models) or "The model"
    metric = metric_name(m.get("metric")) + (", lower is better" if m.get("metric") in LOWER_IS_BETTER else "")
    said = f"{model} scores {number(m['score'])} ({metric}) on {number(m.get('n'))} rows of {room.task}"
    beside = []
    if m.get("zero_shot") is not None:
        beside.append(f"{number(m['zero_shot'])} before training")
    if m.get("majority") is not None:
        beside.append(f"{number(m['majority'])} for always naming the commonest label")
    return said + (f"; {' and '.join(beside)}." if beside else ".")


def wrong_rows(room: Room, texts: Texts, most: int) -> dict[str, Any]:
    """The rows with the highest loss, with their text where it is at hand."""
    table = room.records
    if table is None or not {"id", "loss"} <= set(table.column_names):
        return {"items": [], "of": 0}
    order = table.select(["loss"]).append_column("at", [list(range(len(table)))]).sort_by([("loss", "descending")])
    chosen = table.take(order["at"].slice(0, most)).to_pylist()
    rows = rows_of(room)
    known = rows.find([r["id"] for r in chosen], room.metrics.get("split"))
    items = []
    for r in chosen:
        item = {k: r[k] for k in ("id", "label", "predicted", "correct", "confidence", "loss") if k in r}
        items.append({**(texts.row(known[r["id"]]) if r["id"] in known else {}), **item})
    return {"items": items, "of": len(table), "missing": rows.missing}

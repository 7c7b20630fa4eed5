"""Grafts: where the weights lie, size against recovery, calibration before and after, overlap."""

from __future__ import annotations

from typing import Any

from budwood.report.limits import Limits
from budwood.report.room import Room
from budwood.report.texts import Texts
from budwood.report.views.mass import matrices
from budwood.report.views.words import number, percent

KEYS = ("metric", "select", "size", "fraction", "graftable", "base", "tuned", "graft", "recovered", "bytes", "curve")


def gather(room: Room, texts: Texts, limits: Limits) -> dict[str, Any]:
    """The map (layer x module), the curve, and the three states of the model."""
    m = room.metrics
    return {
        "claim": claim(room),
        **{k: m.get(k) for k in (*KEYS, "agreement", "needs", "answer", "n", "ood", "off_task")},
        "map": room.csv("figures", "map.csv"),
        "matrices": matrices(m),
    }


def claim(room: Room) -> str:
    """How few weights carry how much of the gain, and where plain rules stand."""
    m = room.metrics
    if m.get("fraction") is None:
        return f"This run of {room.verb} holds no single graft; its tables are below."
    said = f"{number(m.get('size'))} weights ({percent(m['fraction'])} of {number(m.get('graftable'))}) recover "
    said += f"{percent(m.get('recovered'))} of what tuning on {room.task} gained"
    same = [
        r
        for r in m.get("curve") or []
        if r.get("recovered") is not None and 0.5 <= (r.get("fraction") or 0) / max(m["fraction"], 1e-12) <= 2
    ]
    rivals = {r["select"]: r["recovered"] for r in same if r["select"] in ("movement", "random")}
    beside = [f"{k} {percent(v)}" for k, v in rivals.items()]
    return said + (f"; at about this size, {' and '.join(beside)}." if beside else ".")

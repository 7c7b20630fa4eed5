"""Grafts: where the weights lie, size against recovery, calibration before and after, overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from budwood.report.limits import Limits
from budwood.report.room import Room
from budwood.report.texts import Texts
from budwood.report.views.chance import recovery
from budwood.report.views.mass import matrices
from budwood.report.views.words import number, percent, points

STATES = ("base", "tuned", "all_graftable", "graft")
KEYS = ("metric", "select", "size", "fraction", "graftable", *STATES, "recovered", "bytes", "curve")


def gather(room: Room, texts: Texts, limits: Limits) -> dict[str, Any]:
    """The map (layer x module), the curve, and the three states of the model."""
    m = room.metrics
    return {
        "claim": claim(room),
        **{k: m.get(k) for k in (*KEYS, "agreement", "needs", "answer", "n", "ood", "off_task")},
        "recovery": recovery(m),
        "file": Path(m["file"]).name if isinstance(m.get("file"), str) else None,
        "map": room.csv("figures", "map.csv"),
        "matrices": matrices(room),
    }


def claim(room: Room) -> str:
    """How few weights carry how much of the gain, where plain rules stand; of a gain that chance may make, no share."""
    m = room.metrics
    if m.get("fraction") is None:
        return f"This run of {room.verb} holds no single graft; its tables are below."
    few = f"{number(m.get('size'))} weights ({percent(m['fraction'])} of {number(m.get('graftable'))})"
    sure = recovery(m)
    if sure is not None and not sure["clear"]:
        return (
            f"Tuning on {room.task} changed the score by {points(sure['gain'])} ({sure['rows']:+,} of {number(m['n'])} "
            f"rows), and chance alone may make {points(sure['chance'], False)}: too little to say what share {few} "
            f"bring back. Base {number(m['base']['score'])}, tuned {number(m['tuned']['score'])}, with the graft "
            f"{number(m['graft']['score'])}."
        )
    if sure is not None and sure["gain"] < 0:
        return (
            f"Tuning on {room.task} made the score worse ({points(sure['gain'])}), so there is no gain to bring back: "
            f"base {number(m['base']['score'])}, tuned {number(m['tuned']['score'])}, with the graft of {few} "
            f"{number(m['graft']['score'])}."
        )
    said = f"{few} recover {percent(m.get('recovered'))} of what tuning on {room.task} gained"
    said += f" (95 % interval {percent(sure['low'], 2)} to {percent(sure['high'], 2)})" if sure else ""
    said += f", with a score of {number(m['graft']['score'])}" if isinstance(m.get("graft"), dict) else ""
    same = [
        r
        for r in m.get("curve") or []
        if r.get("recovered") is not None and 0.5 <= (r.get("fraction") or 0) / max(m["fraction"], 1e-12) <= 2
    ]
    rivals = {r["select"]: r["recovered"] for r in same if r["select"] in ("movement", "random")}
    beside = [f"{k} {percent(v)}" for k, v in rivals.items()]
    return said + (f"; at about this size, {' and '.join(beside)}." if beside else ".")

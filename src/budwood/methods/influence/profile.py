"""Where the time of a run went, phase by phase."""

from __future__ import annotations

from typing import Any

from budwood.methods.session import Session
from budwood.store.files import write_json


def profile(session: Session) -> list[dict[str, Any]]:
    """The phase table: calls, mean, total and percent of every phase; printed and stored."""
    seconds = session.progress.seconds
    parts = session.run.path.rglob("parts/*")
    calls = {"covariance": 0, "eigen": 0, "moments": 0, "scores": 0}
    for file in parts:
        for name in calls:
            calls[name] += file.name.startswith(name)
    whole = sum(seconds.values()) or 1.0
    rows = [
        {
            "phase": k,
            "calls": max(1, calls.get(k, 1)),
            "mean": round(v / max(1, calls.get(k, 1)), 3),
            "total": round(v, 3),
            "percent": round(100 * v / whole, 1),
        }
        for k, v in seconds.items()
    ]
    write_json(session.run.file("profile.json"), rows)
    for r in rows:
        times = f"{r['mean']:>9.3f} s mean {r['total']:>9.3f} s {r['percent']:>5.1f} %"
        session.progress.say(f"{r['phase']:<12} {r['calls']:>4} calls {times}")
    return [{k: r[k] for k in ("phase", "calls")} for r in rows]

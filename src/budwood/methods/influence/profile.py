"""Where the time of a run went, phase by phase."""

from __future__ import annotations

from typing import Any

from budwood.methods.session import Session
from budwood.store.files import write_json


def profiled(session: Session, told: dict[str, Any]) -> dict[str, Any]:
    """What a verb has to tell, with --profile the phase table beside it: calls, mean, total and percent of each phase.

    A call is a job (a shard of rows, a part of the eigenbases) or a phase that is done in one go. The table is printed
    and stored in profile.json; it stays out of the metrics, which are the same on every machine and however often a run
    was carried on.
    """
    if not session.cfg.profile:
        return told
    seconds, calls = session.progress.seconds, session.progress.calls
    whole = sum(seconds.values()) or 1.0
    rows = [
        {
            "phase": k,
            "calls": calls[k],
            "mean": round(v / max(1, calls[k]), 3),
            "total": round(v, 3),
            "percent": round(100 * v / whole, 1),
        }
        for k, v in seconds.items()
    ]
    write_json(session.run.file("profile.json"), rows)
    for r in rows:
        times = f"{r['mean']:>9.3f} s mean {r['total']:>9.3f} s {r['percent']:>5.1f} %"
        session.progress.say(f"{r['phase']:<12} {r['calls']:>4} call{'s' if r['calls'] != 1 else ' '} {times}")
    return told

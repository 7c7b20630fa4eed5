"""Training rows by what they do to one query: bars to the right help, bars to the left hurt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HELPS, HURTS = "#a8530a", "#1b5e96"  # as on the pages
LONGEST = 72  # characters of a row's text beside its bar


def row_bars(axes: Any, rows: Sequence[Mapping[str, Any]], title: str) -> dict[str, list[Any]]:
    """One bar per row, the most helpful on top; a row is {id, score} and, where known, {text, pair, label}.

    Returns the numbers drawn.
    """
    scores = [float(r["score"]) for r in rows]
    axes.barh(range(len(rows)), scores, height=0.62, color=[HELPS if s >= 0 else HURTS for s in scores])
    axes.set_yticks(range(len(rows)), [name_of(r) for r in rows], fontsize=8.5)
    axes.invert_yaxis()
    axes.axvline(0, color="#8a8f99", lw=1)
    axes.grid(axis="y", visible=False)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
    axes.set_xlabel("← hurts   score of the training row   helps →")
    axes.figure.suptitle(title, x=0.01, ha="left", size=9.5, weight="bold")  # over the names too: queries are long
    return {"id": [r["id"] for r in rows], "score": scores, "label": [r.get("label", "") for r in rows]}


def name_of(row: Mapping[str, Any]) -> str:
    """A row in one line: the beginning of the text and the label, or the id where no text is known.

    >>> name_of({"id": "r7", "text": "a good film", "label": "positive", "score": 1.0})
    'a good film  → positive'
    >>> name_of({"id": "r7", "score": 1.0})
    'r7'
    """
    texts = [" ".join(str(row[k]).split()) for k in ("text", "pair") if str(row.get(k) or "").strip()]
    texts = texts or [str(row["id"])]
    # a short text leaves its room to the other
    room = max(LONGEST // len(texts), LONGEST - min(map(len, texts)) * (len(texts) - 1))
    short = " / ".join(t if len(t) <= room else f"{t[: room - 1].rstrip()}…" for t in texts)
    # a label of many words (one per token) would push the bars out of the picture
    label = str(row.get("label", ""))[:16]
    return (f"{short}  → {label}" if label else short).replace("$", r"\$")

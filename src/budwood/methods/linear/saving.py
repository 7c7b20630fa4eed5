"""p on disk: the likeliest words and the rest as one number, or all of it, with the size told before.

Shapes: N rows, K likeliest words, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from budwood.config.linear import LinearConfig
from budwood.linalg.vocabulary import slices, top
from budwood.methods.linear.families import States
from budwood.methods.linear.states import Shop, manifest
from budwood.methods.session import Session
from budwood.params import tree
from budwood.store.files import writing

ROWS = 256


def size_of_p(rows: int, vocabulary: int, top_k: int) -> int:
    """Bytes on disk.

    >>> size_of_p(127_600, 50_257, 0), size_of_p(1000, 50_257, 1024)
    (12825586400, 6148000)
    """
    kept = min(top_k, vocabulary)
    return rows * (kept * 6 + 4) if kept else rows * vocabulary * 2


def save_p(session: Session, shop: Shop, states: States, prompted: bool) -> None:
    """Write p/NAME.safetensors (ids int32, p float16, rest float32) or p/NAME.npy (float16 [N, V])."""
    cfg: LinearConfig = session.cfg
    rows, words = len(states.state_ND), len(states.words)
    name = "prompt" if prompted else "plain"
    session.progress.say(f"  --save-p writes {size_of_p(rows, words, cfg.top_k) / 1e6:,.1f} MB (p/{name})")
    with session.progress.stage("save p"):
        if not cfg.top_k:
            with writing(session.run.file("p", f"{name}.npy")) as part:
                _whole(part, states)
            return
        parts = [top(states.words, states.state_ND[b], states.logz_N[b], cfg.top_k) for b in slices(rows, ROWS)]
        ids, p, rest = (torch.cat(x) for x in zip(*parts))
        found = {"ids": ids.int(), "p": p.half(), "rest": rest}
        tree.save(session.run.file("p", f"{name}.safetensors"), found, {**manifest(shop, prompted), "artefact": "p"})


def _whole(part: Path, states: States) -> None:
    """All of p as a memory-mapped array, a few rows at a time."""
    shape = (len(states.state_ND), len(states.words))
    with part.open("wb") as f:
        np.lib.format.write_array_header_1_0(f, {"descr": "<f2", "fortran_order": False, "shape": shape})
        for b in slices(shape[0], ROWS):
            f.write(states.words.prob(states.state_ND[b], states.logz_N[b]).half().numpy().tobytes())

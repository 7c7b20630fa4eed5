"""Memory and time of features over a whole vocabulary: phi-p, and all of p with cross-validation.

python benchmarks/linear.py            # both lines, each in a process of its own
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from budwood.store.memory import peak_mb

WORDS, WIDTH = 50_257, 768


def synthetic(rows: int):  # type: ignore[no-untyped-def]
    """States and an output embedding of GPT-2's size, with labels that p can tell in part."""
    import torch

    from budwood.linalg.vocabulary import Vocabulary

    draw = torch.Generator().manual_seed(0)
    weight = torch.empty(WORDS, WIDTH).normal_(generator=draw).mul_(0.1)
    state = torch.randn(rows, WIDTH, generator=draw)
    label = (state[:, :20].sum(1) + 3 * torch.randn(rows, generator=draw) > 0).long().numpy()
    return Vocabulary(weight), state, label


def phi_p() -> dict[str, float]:
    """Mean embeddings of 2,000 states."""
    from budwood.linalg.vocabulary import conditional_mean

    words, state, _ = synthetic(2000)
    conditional_mean(words, state[:1])  # libraries loaded
    before, began = peak_mb(), time.perf_counter()
    conditional_mean(words, state)
    return {"mb_above_baseline": peak_mb() - before, "seconds": time.perf_counter() - began, "cpu": time.process_time()}


def all_of_p(rows: int = 4000, test: int = 400) -> dict[str, float]:
    """Five folds, ten strengths and the final fit on p of 4,000 rows; both scaled and not."""
    import numpy as np
    import torch

    from budwood.methods.linear.classify import Split, classify
    from budwood.methods.linear.families import States, solver_of_p
    from budwood.methods.linear.run import GRID

    words, state, label = synthetic(rows + test)
    held = States(state, torch.arange(rows), words, 0)
    split = [Split(np.arange(rows), np.arange(rows, rows + test))]
    began, cpu = time.perf_counter(), time.process_time()
    marks = {}
    solver = solver_of_p(held, True, False)
    marks["kernel_cpu"] = time.process_time() - cpu
    found = classify(solver, label, ("no", "yes"), split, 5, GRID)
    return {
        "peak_mb": peak_mb(),
        "seconds": time.perf_counter() - began,
        "cpu": time.process_time() - cpu,
        **marks,
        "test": found.test,
        "C": found.cost,
    }


def measured(name: str) -> dict[str, float]:
    """One of the functions above in a process of its own."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    import torch

    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        print(json.dumps({"phi-p": phi_p, "p": all_of_p}[sys.argv[1]]()))
    else:
        for line in ("phi-p", "p"):
            print(line, json.dumps(measured(line)), flush=True)

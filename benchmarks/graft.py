"""Cost of grafts: a mask step against a training step, memory of learning, putting a graft on against loading.

python benchmarks/graft.py [MODEL]      prints a table, then one JSON object

Seconds are those of this process on one core, so that a busy machine does not blur the ratios. Memory is what the
process holds at its peak while a mask is learned: the blocks of the model, the changes, and everything that comes on
top from the first gradient to the mask. Activations are the same for every way of learning on these rows (a plain
backward pass that keeps no gradient shows how much they are), so copies are given with and without them. The same is
measured around the whole verb, from reading the rows to writing the file; there also the weights that no graft changes
(embeddings, head) come on top, and are given with and without.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from budwood.config.finetune import FinetuneConfig
from budwood.config.graft import GraftLearnConfig
from budwood.data.source import load_task
from budwood.methods.graft.learned import Steps, batches, straight_through
from budwood.methods.graft.pair import Pair, open_pair
from budwood.methods.graft.rules import taking
from budwood.models.grafted import put_grafts, remembered_hash
from budwood.models.load import load, save
from budwood.models.reference import resolve
from budwood.params import mask as masks
from budwood.params.graft import Graft
from budwood.params.tree import named
from budwood.studies.api import run
from budwood.train.fit import Keeping, fit
from budwood.train.plan import make_plan, prepare_model

ROWS, STEPS = 32, 4  # of a mask step; steps in which every training row comes once
VERBS: dict[str, dict[str, Any]] = {"the_verb": {}, "the_verb_with_curve": {"curve": True, "curve_sizes": (0.01, 0.05)}}
ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("BUDWOOD_SHARED", ROOT.parent / "shared"))


def moved(model: str, place: Path) -> str:
    """A copy of a model whose every weight has moved a little."""
    loaded = load(resolve(model), "mlm")
    with torch.no_grad():
        for n, p in named(loaded.model).items():
            p.add_(torch.randn_like(p), alpha=1e-3) if masks.layer_of(n) is not None else None
    save(loaded, place)
    return str(place)


def resident(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(field))


def peak(work: Callable[[], Any]) -> int:
    """Bytes that the process grows by while working."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # nothing that an earlier piece of work left may serve this one
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def memory(pair: Pair) -> tuple[float, float]:
    """(copies of the graftable weights held while learning, copies that are activations)."""
    model, objective, total = pair.read.loaded.model, pair.read.objective, len(pair.delta_P)
    batch_of = batches(pair, Steps(rows=ROWS))
    straight_through(pair, 1, Steps(1, 1))  # what a first pass loads and compiles is nobody's copy

    def backward() -> None:
        with taking(pair, lambda place, grad: None):
            for batch in map(batch_of, range(STEPS)):
                objective.loss(objective.logits(model, batch), objective.targets(batch)).mean().backward()

    learning = peak(lambda: straight_through(pair, max(1, total // 100), Steps(STEPS, ROWS)))
    held = 2 * 4 * total + learning  # the model's own blocks and the changes are there before
    return held / (4 * total), peak(backward) / (4 * total)


def verb_memory(model: str, tuned: str, place: Path, **settings: Any) -> int:
    """Bytes that the process grows by in `graft learn` from its first line to its last."""
    given = {"mode": "prompt", "shots": 64, "limit_eval": 64, "threads": 1}
    wish = {**given, "mask_steps": STEPS, "mask_batch_size": ROWS, "size": "1%", "progress": "none", **settings}
    return peak(
        lambda: run("graft learn", [model, tuned], "tiny-sentiment", {**wish, "out": place / f"verb-{len(settings)}"})
    )


def paced(work: Any) -> list[float]:
    """Seconds of every step that calls back."""
    marks: list[float] = []
    work(lambda n, note: marks.append(time.process_time()))
    return [b - a for a, b in zip(marks, marks[1:])]


def steps(pair: Pair, count: int) -> tuple[float, float]:
    """(best mask step, best training step) on the same number of rows, turn by turn."""
    model, objective = pair.read.loaded.model, pair.read.objective
    cfg = FinetuneConfig(task="x", mode="prompt", freeze=("embeddings", "head"), per_device_train_batch_size=ROWS)
    features = pair.read.encode(pair.task.rows("train"))
    prepare_model(model, cfg)
    mask, train = [], []
    for turn in range(3):
        plan = make_plan(cfg.model_copy(update={"max_steps": 5, "seed": turn}), len(features), 128, turn)
        feed = pair.read.feed(features)
        train += paced(lambda advance: fit(model, objective, feed, plan, Keeping(advance=advance)))  # noqa: B023
        mask += paced(lambda advance: straight_through(pair, count, Steps(5, ROWS, seed=turn, advance=advance)))  # noqa: B023
    median = lambda x: sorted(x)[len(x) // 2]  # noqa: E731
    return median(mask), median(train)


def main() -> None:
    torch.set_num_threads(1)
    given = SHARED / "models" / "minilm-l6-mlm"
    model = sys.argv[1] if len(sys.argv) > 1 else str(given) if given.is_dir() else "tiny-bert"
    cfg = GraftLearnConfig(task="tiny-sentiment", mode="prompt", shots=64, data_seed=0, model_seed=0)
    task = load_task(cfg)
    with tempfile.TemporaryDirectory() as place:
        tuned = moved(model, Path(place) / "tuned")
        pair = open_pair(cfg, resolve(model), resolve(tuned), task)
        total = len(pair.delta_P)
        held, activations = memory(pair)
        rest = sum(p.numel() for p in pair.read.loaded.model.parameters()) - total
        mask, train = steps(pair, max(1, total // 100))
        loading, applying = apply_cost(model, pair, Path(place))
        del pair
        verb = {k: verb_memory(model, tuned, Path(place), **v) / (4 * total) for k, v in VERBS.items()}
    found = {
        "model": Path(model).name,
        "graftable": total,
        "mask_step_seconds": mask,
        "training_step_seconds": train,
        "mask_over_training": mask / train,
        "copies_of_graftable": held - activations,
        "copies_with_activations": held,
        **{f"copies_in_{k}": v - activations - rest / total for k, v in verb.items()},
        **{f"copies_in_{k}_with_all": v for k, v in verb.items()},
        "load_seconds": loading,
        "apply_seconds": applying,
        "apply_over_load": applying / loading,
    }
    for key, value in found.items():
        print(f"  {key:<24} {value:.4g}" if isinstance(value, float) else f"  {key:<24} {value}")
    print(json.dumps(found))


def apply_cost(model: str, pair: Pair, place: Path) -> tuple[float, float]:
    """(best loading, best putting a 0.1 % graft on, file read and base recognised)."""
    loaded = load(resolve(model), "mlm")
    mask = masks.random(pair.sizes, max(1, len(pair.delta_P) // 1000), 0)
    facts = {"base_hash": remembered_hash(loaded.ref, loaded.model), "task": "x"}
    path = place / "x.graft"
    Graft.cut(mask, pair.delta, manifest=facts).save(path)
    ref = resolve(f"{model}+{path}")
    loading, applying = [], []
    for _ in range(5):
        began = time.process_time()
        loaded = load(resolve(model), "mlm")
        loading.append(time.process_time() - began)
        began = time.process_time()
        put_grafts(ref, loaded.model, (), ())
        applying.append(time.process_time() - began)
    return min(loading), min(applying)


if __name__ == "__main__":
    main()

"""Cost of grafts: a mask step against a training step, memory of learning, putting a graft on against loading.

python benchmarks/graft.py [MODEL]      prints a table, then one JSON object
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from budwood.config.finetune import FinetuneConfig
from budwood.config.graft import GraftLearnConfig
from budwood.data.source import load_task
from budwood.methods.graft.learned import Steps, straight_through
from budwood.methods.graft.pair import Pair, open_pair
from budwood.models.grafted import put_grafts, remembered_hash
from budwood.models.load import load, save
from budwood.models.reference import resolve
from budwood.params import mask as masks
from budwood.params.graft import Graft
from budwood.params.tree import named
from budwood.train.fit import Keeping, fit
from budwood.train.plan import make_plan, prepare_model

ROWS = 32
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


def paced(work: Any) -> list[float]:
    """Seconds of every step that calls back."""
    marks: list[float] = []
    work(lambda n, note: marks.append(time.perf_counter()))
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
        mask += paced(lambda advance: straight_through(pair, count, Steps(5, ROWS, 0.5, turn, advance)))  # noqa: B023
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
        start = resident("RssAnon")
        pair = open_pair(cfg, resolve(model), resolve(tuned), task)
        total = len(pair.delta_P)
        outside = sum(p.numel() for p in pair.read.loaded.model.parameters()) - total
        straight_through(pair, max(1, total // 100), Steps(1, 4, 0.5, 0))  # the allocator's first time
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = resident("VmRSS")
        straight_through(pair, max(1, total // 100), Steps(3, 4, 0.5, 0))
        growth = resident("VmHWM") - before
        held = 2 + growth / (4 * total)  # the model's own blocks and the changes are there before
        mask, train = steps(pair, max(1, total // 100))
        loading, applying = apply_cost(model, pair, Path(place))
    found = {
        "model": Path(model).name,
        "graftable": total,
        "mask_step_seconds": mask,
        "training_step_seconds": train,
        "mask_over_training": mask / train,
        "copies_of_graftable": held,
        "resident_at_start_mb": start / 1e6,
        "outside": outside,
        "load_seconds": loading,
        "apply_seconds": applying,
        "apply_over_load": applying / loading,
    }
    for key, value in found.items():
        print(f"  {key:<22} {value:.4g}" if isinstance(value, float) else f"  {key:<22} {value}")
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
        began = time.perf_counter()
        loaded = load(resolve(model), "mlm")
        loading.append(time.perf_counter() - began)
        began = time.perf_counter()
        put_grafts(ref, loaded.model, (), ())
        applying.append(time.perf_counter() - began)
    return min(loading), min(applying)


if __name__ == "__main__":
    main()

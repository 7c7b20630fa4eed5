"""Probes against their peers: ratios of CPU seconds on one thread, both sides in one process.

python benchmarks/probe.py [solver] [decode] [pass] [epochs]
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from show import SHARED
from threadpoolctl import threadpool_limits

COSTS = np.logspace(-6, 3, 10)


@dataclass(frozen=True)
class Ratio:
    """How many times the peer's CPU time is ours, and whether our objective was never worse."""

    name: str
    ours: float
    theirs: float
    note: str = ""
    gap: float = 0.0  # our objective less the peer's, at its largest; of a decoder: 0 where all answers are the same

    @property
    def times(self) -> float:
        return self.theirs / self.ours

    def __str__(self) -> str:
        return f"{self.name}: {self.times:.1f}x ({self.ours:.2f} s against {self.theirs:.2f} s) {self.note}"


@cache
def _touched(gigabytes: int = 2) -> None:
    """On a virtual machine whoever uses a page first pays for it: neither side should."""
    np.ones(gigabytes << 27)


def cpu(work: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds of one thread: waiting threads of either side would count as work."""
    torch.set_num_threads(1)
    _touched()
    with threadpool_limits(1):
        began = time.process_time()
        out = work()
        return time.process_time() - began, out


def layers(count: int = 4, rows: int = 1500, width: int = 256) -> tuple[list[np.ndarray], np.ndarray]:
    """Synthetic layers of a binary task, each telling more of it than the one before."""
    rng = np.random.default_rng(0)
    y_N = rng.integers(0, 2, rows)
    out = []
    for depth in range(count):
        mix = rng.normal(size=(width, width)) * np.exp(rng.normal(size=width))
        hidden = rng.normal(size=(rows, width))
        hidden[:, :8] += 0.25 * (depth + 1) * (2 * y_N - 1)[:, None]
        out.append((hidden @ mix / np.sqrt(width)).astype(np.float32))
    return out, y_N


def objective(weight_D: np.ndarray, bias: float, x_ND: np.ndarray, y_N: np.ndarray, cost: float) -> float:
    score_N = x_ND.astype(np.float64) @ weight_D + bias
    return float(np.mean(np.logaddexp(0, score_N) - y_N * score_N) + weight_D @ weight_D / (2 * cost * len(y_N)))


def solver() -> list[Ratio]:
    """All layers, five folds, ten costs and the final fit, against scikit-learn layer by layer."""
    from sklearn.linear_model import LogisticRegressionCV

    from budwood.linalg.folds import cross_validate, stratified_folds

    many, y_N = layers()
    fold_N = stratified_folds(y_N, 5)
    mine, found = cpu(lambda: [cross_validate(torch.from_numpy(x), y_N, 2, COSTS, fold_N) for x in many])
    out = []
    for name, more in (("lbfgs", {}), ("liblinear", {"intercept_scaling": 1.0})):
        peer = lambda: [  # noqa: E731
            LogisticRegressionCV(Cs=COSTS, cv=5, solver=name, max_iter=200, **more).fit(x, y_N)  # noqa: B023
            for x in many
        ]
        seconds, fits = cpu(peer)
        gap = max(worst_gap(c, f, x, y_N, fold_N) for c, f, x in zip(found, fits, many))
        out.append(Ratio(f"label probes against scikit-learn {name}", mine, seconds, f"objective gap {gap:.1e}", gap))
    return out


def worst_gap(mine: Any, peer: Any, x_ND: np.ndarray, y_N: np.ndarray, fold_N: np.ndarray) -> float:
    """Our objective less scikit-learn's, at its largest over all folds and costs and the fit of all rows at its C."""
    solution = mine.solution
    ours = lambda s, p: (solution.weight_SPKD[s, p, 0].numpy(), float(solution.bias_SPK[s, p, 0]))  # noqa: E731
    chosen = int(np.argmin(np.abs(np.log(COSTS / float(np.ravel(peer.C_)[0])))))
    pairs = [(chosen, slice(None), ours(chosen, 0), (peer.coef_[0], float(peer.intercept_[0])))]
    (path_FSE,) = peer.coefs_paths_.values()
    for f, s in np.ndindex(*path_FSE.shape[:2]):
        pairs.append((s, fold_N != f, ours(s, f + 1), (path_FSE[f, s, :-1], float(path_FSE[f, s, -1]))))
    return max(
        objective(*a, x_ND[rows], y_N[rows], COSTS[s]) - objective(*b, x_ND[rows], y_N[rows], COSTS[s])
        for s, rows, a, b in pairs
    )


def own_head(run: Path, task: str = "tiny-qa") -> tuple[float, float]:
    """Train losses on the same tokens: of a span probe of the last layer (C = 1e5), and of the model's own head."""
    from budwood.capture.features import Ask, open_reading, store
    from budwood.config.probe import FeatureConfig
    from budwood.linalg.choice import Choices, log_chances, solve_choices
    from budwood.methods.probe.labels import Scale
    from budwood.methods.probe.spans import gold
    from budwood.train.evaluate import evaluate

    given = {"task": task, "mode": "span", "threads": 1}
    ask = Ask(str(run), given, "train", "allowed")
    kept, read = store(ask), open_reading(ask)
    starts_W, gold_2W = kept.offsets_N1[:-1], gold(kept.encoded)
    ends_2M = evaluate(read, read.task.rows("train"), FeatureConfig(**given)).ends_2M
    assert ends_2M is not None
    x_MD = kept.layer(kept.layers - 1)
    x_MD = Scale.of(x_MD)(x_MD)
    cost_S2 = np.array([[0.1, 0.1], [10.0, 10.0], [1e5, 1e5]])
    many = Choices(starts_W, gold_2W, np.ones((1, len(starts_W))), np.arange(2), np.zeros(2, int), cost_S2)
    probe_2M = (solve_choices(x_MD, many).weight_SPD[-1] @ x_MD.double().T).numpy()
    head_2M = ends_2M[:, kept.encoded.ragged["allowed"] != 0].astype(np.float64)
    loss = lambda x: float(-np.take_along_axis(log_chances(x, starts_W), gold_2W, axis=1).mean())  # noqa: E731
    return loss(probe_2M), loss(head_2M)


def loop_decode(start_T: Any, end_T: Any, first: int, last: int, reach: int = 17) -> tuple[int, int]:
    """The original's way: a Python loop over starts on tensors, keeping the last of equals."""
    best, pair = -np.inf, (0, 0)
    for j in range(first, last):
        k = j + int(torch.argmax(end_T[j : min(j + reach, last - 1) + 1]))
        if start_T[j] + end_T[k] >= best:
            best, pair = start_T[j] + end_T[k], (j, k)
    return pair


def decode() -> list[Ratio]:
    """The original's rule on 400 windows of 384 tokens, vectorised against its loop."""
    from budwood.data.batch import Features
    from budwood.data.span_decode import ORIGINAL, _best_span

    rng = np.random.default_rng(0)
    count, length, lead = 400, 384, 20
    allowed = np.zeros((count, length), np.int32)
    allowed[:, 0], allowed[:, lead:-1] = 1, 1
    start, end = rng.normal(size=(2, count * length)).astype(np.float32)
    offsets = np.arange(count + 1) * length
    ragged = {"input_ids": np.zeros(count * length, np.int32), "allowed": allowed.ravel()}
    features = Features(tuple(map(str, range(count))), offsets, ragged, {"row": np.arange(count)})
    mine, spans = cpu(lambda: [_best_span(features, np.arange(count), start, end, ORIGINAL) for _ in range(5)][0])
    pieces = [tuple(torch.from_numpy(x[a : a + length]) for x in (start, end)) for a in offsets[:-1]]
    theirs, pairs = cpu(lambda: [loop_decode(s, e, lead, length - 1) for s, e in pieces])
    same = pairs == list(zip(spans.first_S.tolist(), spans.last_S.tolist()))
    return [
        Ratio("decoding against a loop over starts", mine / 5, theirs, f"same spans: {same}", 0.0 if same else np.inf)
    ]


def forward_pass(task: str, rows: int, states: str = "cls") -> list[Ratio]:
    """A whole probe run (one model, no controls) over the bare forward pass; with controls over without.

    Controls: control task, description length, resampled fits; then the random encoder, a second pass, as well.
    """
    from budwood.capture.features import Ask, open_reading
    from budwood.config.probe import ProbeConfig
    from budwood.data.batch import budget_batches
    from budwood.data.source import load_task
    from budwood.studies.verbs import run_verb

    with tempfile.TemporaryDirectory() as place:
        import os

        os.environ["BUDWOOD_CACHE"] = f"{place}/cache"
        model = str(SHARED / "models" / "all-MiniLM-L6-v2")
        data = {"task": task, "data_dir": (SHARED / "data",), "limit": rows, "limit_eval": rows // 4, "threads": 1}
        plain = ProbeConfig(**data, no_controls=True, progress="none", out=Path(place) / "plain")
        whole = load_task(plain)
        read = open_reading(Ask(model, {**data, "data_dir": [str(SHARED / "data")]}, "train", states), whole)

        tuning = ("validation",) if whole.kind == "span" and whole.reported != "validation" else ()

        def bare() -> None:
            with torch.inference_mode():
                for split in dict.fromkeys(("train", *tuning, whole.reported)):
                    encoded = read.encode(whole.rows(split))
                    feed = read.feed(encoded)
                    for index in budget_batches(encoded.lengths_N):
                        read.loaded.model.base_model(**feed(index).inputs)

        alone, _ = cpu(bare)
        single, _ = cpu(lambda: run_verb("probe", plain, [model]))
        out = [Ratio(f"probes of all layers over the forward pass, {task}", alone, single)]
        for name, blank in (("controls over a single probe", False), ("with a random encoder", True)):
            os.environ["BUDWOOD_CACHE"] = f"{place}/cache-{blank}"  # every run makes its own features
            more = {"no_controls": False, "no_random_encoder": not blank, "out": Path(place) / f"more-{blank}"}
            seconds, _ = cpu(lambda: run_verb("probe", plain.model_copy(update=more), [model]))  # noqa: B023
            out.append(Ratio(f"{name}, {task}", single, seconds))
        return out


def epoch_loop(
    model: Any, batches: list[dict[str, Any]], gold: list[Any], layers: int, width: int, epochs: int
) -> None:
    """The original's way: the encoder anew in every epoch, padded; every head of every layer with its own optimiser."""
    heads = [torch.nn.Linear(width, 1) for _ in range(2 * layers)]
    rules = [torch.optim.AdamW(h.parameters(), lr=3e-5, weight_decay=0.0) for h in heads]
    drop = torch.nn.Dropout(0.1)
    for _ in range(epochs):
        for inputs, gold_2B in zip(batches, gold):
            with torch.no_grad():
                states = model(**inputs, output_hidden_states=True).hidden_states[-layers:]
            for n, state_BTD in enumerate(states):
                for end in (0, 1):
                    head, rule = heads[2 * n + end], rules[2 * n + end]
                    loss = torch.nn.functional.cross_entropy(head(drop(state_BTD))[..., 0], gold_2B[end]) / 2
                    rule.zero_grad()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
                    rule.step()


def epochs(rows: int = 256, length: int = 384, count: int = 3) -> list[Ratio]:
    """Span probes of all layers of MiniLM on SQuAD for three epochs, features included, against the original's loop."""
    import os

    from budwood.capture.features import Ask, open_reading, store
    from budwood.capture.supply import Kept
    from budwood.config.probe import FeatureConfig
    from budwood.data.source import load_task
    from budwood.methods.probe.descent import Lesson, Plan, scale_of, train

    given = {"task": "squad2", "data_dir": [str(SHARED / "data")], "limit": rows, "max_length": length, "threads": 1}
    task = load_task(FeatureConfig(**given))
    ask = Ask(str(SHARED / "models" / "all-MiniLM-L6-v2"), given, "train", "token")
    read = open_reading(ask, task)
    encoded, model = read.encode(task.rows("train")), read.loaded.model.base_model
    layers = model.config.num_hidden_layers
    batches, gold = [], []
    for i in range(0, len(encoded), 8):
        batch = read.feed(encoded)(np.arange(i, min(i + 8, len(encoded))))
        ids = torch.nn.functional.pad(batch.inputs["input_ids"], (0, length - batch.inputs["input_ids"].shape[1]))
        batches.append({"input_ids": ids, "attention_mask": (ids != 0).long()})
        gold.append(torch.stack([batch.targets["start"], batch.targets["end"]]))

    def ours() -> None:
        stored = store(ask, task)
        answer = np.stack([encoded.fixed["start"], encoded.fixed["end"]])[None]
        lesson = Lesson(stored.offsets_N1, encoded.lengths_N, answer, 2, True)
        supply = Kept(stored, range(1, layers + 1))
        plan = Plan(tuple(range(1, layers + 1)), count, 3e-5, 8, 0, True)
        train(supply, lesson, scale_of(supply, len(encoded), True), plan, None, lambda state: None)

    with tempfile.TemporaryDirectory() as place:
        os.environ["BUDWOOD_CACHE"] = f"{place}/before"
        before, _ = cpu(ours)
        theirs, _ = cpu(lambda: epoch_loop(model, batches, gold, layers, model.config.hidden_size, count))
        os.environ["BUDWOOD_CACHE"] = f"{place}/after"
        after, _ = cpu(ours)
    mine = (before + after) / 2  # the machine's own speed wanders
    note = f"{len(encoded)} windows, {encoded.lengths_N.mean():.0f} tokens on average, {count} epochs"
    return [Ratio("span probes by AdamW against the original's loop", mine, theirs, note)]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    wanted = sys.argv[1:] or ["solver", "decode", "pass", "epochs"]
    found: list[Ratio] = []
    if "solver" in wanted:
        found += solver()
    if "decode" in wanted:
        found += decode()
    if "pass" in wanted and SHARED.exists():
        found += forward_pass("sst2", 2000) + forward_pass("agnews", 2000) + forward_pass("squad2", 300, "token")
    if "epochs" in wanted and SHARED.exists():
        found += epochs()
    for ratio in found:
        print(ratio)

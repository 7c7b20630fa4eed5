"""Influence against its peers: factors and scores on the same rows, threads and model, and the floor below all.

    python benchmarks/influence.py [--model DIR|4x256|2x768] [--task rte] [--rows 1000] [--queries 64]
                                   [--peer-rows 160] [--peers-python PYTHON]

The floor is a plain forward and backward pass over the same rows, batched by length. Seconds are wall-clock; on a
machine that does other things besides, the processor seconds beside them are the fairer number, and the comparison is
made of them. `4x256` and `2x768` are BERTs of that many layers and that width with random weights. Peers may see fewer
rows (`--peer-rows`), their time being scaled up to all; without it they see all. BUDWOOD_PEER_PYTHON names a Python
that has them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("BUDWOOD_SHARED", ROOT.parent / "shared"))
LONGEST = 128


def model_in(wish: str, place: Path) -> str:
    """A directory with the model: the one given, or random weights of a shape such as 4x256 written to `place`."""
    layers, _, width = wish.partition("x")
    if not (layers.isdigit() and width.isdigit()):
        return wish
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "models" / "all-MiniLM-L6-v2")
    size = int(width)
    shape = {"hidden_size": size, "intermediate_size": 4 * size, "num_attention_heads": size // 64}
    config = BertConfig(vocab_size=len(tokenizer), num_hidden_layers=int(layers), num_labels=2, **shape)
    BertForSequenceClassification(config).save_pretrained(place / wish)
    tokenizer.save_pretrained(place / wish)
    return str(place / wish)


def rows_file(model: str, task: str, rows: int, queries: int, place: Path, peer_rows: int | None = None) -> Path:
    """Token ids and labels of the first rows of a task, cut to 128 tokens, as every tool reads them.

    A task with fewer rows than asked for is gone through again: for timing, a row is a row.
    """
    from transformers import AutoTokenizer

    import budwood as bw

    data = bw.task(task, data_dir=(SHARED / "data" / "glue",))
    tokenizer = AutoTokenizer.from_pretrained(model)

    def encoded(split: str, count: int) -> tuple[list[list[int]], list[int]]:
        there = data.rows(split)
        chosen = [there[i % len(there)] for i in range(count)]
        ids = [tokenizer(r.text, r.pair, truncation=True, max_length=LONGEST)["input_ids"] for r in chosen]
        return ids, [int(r.label) for r in chosen]  # type: ignore[arg-type]

    train, labels = encoded("train", rows)
    asked, asked_labels = encoded("validation", queries)
    file = place / f"rows-{task}-{rows}-{queries}.json"
    found = {"train": train, "train_labels": labels, "queries": asked, "query_labels": asked_labels}
    file.write_text(json.dumps({**found, "peer_rows": peer_rows}))
    return file


def ours(model_dir: str, data: dict[str, Any], strategies: tuple[str, ...]) -> dict[str, Any]:
    """Our phases and the floor in this process, with peak memory of the phases."""
    import torch
    from influence_peers import load

    from budwood.config.influence import FitConfig
    from budwood.data.batch import Features
    from budwood.data.encoding import Encoding
    from budwood.data.task import Row, Task
    from budwood.methods.influence import evidence
    from budwood.methods.influence import factors as made
    from budwood.methods.influence.asked import RESIDENT, better_sided
    from budwood.methods.influence.factors import Factors, settings_of
    from budwood.methods.influence.fit import identity
    from budwood.methods.influence.moments import covariances, second_moments
    from budwood.methods.influence.pairs import Meeting, OnDisk, Resident
    from budwood.methods.influence.precondition import (
        Work,
        bytes_needed,
        live_shares,
        measurement,
        precondition,
        query_blocks,
    )
    from budwood.methods.influence.sided import Sided
    from budwood.methods.influence.workshop import shop_of
    from budwood.models.load import Loaded
    from budwood.models.objective import Head
    from budwood.models.reading import Reading, RowFeed
    from budwood.params import tree
    from budwood.store.files import write_text

    class Plain(Reading):
        def feed(self, features: Features) -> RowFeed:
            return RowFeed(features, 0)

    def features(ids: list[list[int]], labels: list[int]) -> Features:
        names = [str(i) for i in range(len(ids))]
        return Features.from_lists(names, {"input_ids": ids}, {"label": labels})

    train, asked = (features(data[k], data[f"{s}_labels"]) for k, s in (("train", "train"), ("queries", "query")))
    task = Task("bench", "label", {"train": (Row("r"),)}, ("0", "1"))
    read = Plain(Loaded(load(model_dir), None, None, 512, ()), task, "head", Head(), Encoding(), None, None)  # type: ignore[arg-type]
    shop = shop_of(read, train, FitConfig(task="bench", strategy=strategies))
    order = np.argsort(-train.lengths_N, kind="stable")
    phases: dict[str, float] = {}
    cpu: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began, began_cpu = time.perf_counter(), time.process_time()
        found = work()
        phases[name], cpu[name] = time.perf_counter() - began, time.process_time() - began_cpu
        return found

    def floor() -> None:
        for index in shop.batches(train, order):
            batch = read.feed(train)(index, 0)
            read.objective.loss(
                read.objective.logits(shop.model, batch), read.objective.targets(batch)
            ).sum().backward()
            shop.model.zero_grad(set_to_none=True)

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        covariance = timed("covariance", lambda: made.means(made.merged([covariances(shop, order)]), torch.float32))
        eigen = timed("eigen", lambda: made.decompose(covariance))  # noqa: F821
        tree.save(place / "eigen.safetensors", eigen, {})
        bases = Factors(place, shop.maps, {}).bases
        sums = timed("lambda", lambda: second_moments(shop, order, bases, "diagonal" in strategies))  # noqa: F821
        tree.save(place / "moments.safetensors", {k: v / len(order) for k, v in sums.items()}, {})
        facts = {"rows": len(order), "fit_rows": len(order), "evidence": {}, **identity(shop)}
        write_text(place / "factors.json", made.facts_json(shop.maps, facts))
        del covariance, eigen, sums, bases

        def score() -> None:
            settings = settings_of(strategies, ("1e-08",))
            work = Work(len(asked), len(train), float(train.lengths_N.mean()), live_shares(shop))
            ready = precondition(Factors.open(place), settings, work)
            held = bytes_needed(ready, len(asked)) <= RESIDENT
            on_disk = OnDisk.at(place / "queries.bin", ready, len(asked), shop.like)
            blocks = Resident(len(asked), shop.like) if held else on_disk
            put_sides = None
            if better_sided(ready, asked):
                blocks = Sided(len(asked), shop.like)
                put_sides = blocks.put_sides
            question = measurement(read.objective, "margin")
            query_blocks(shop, ready, asked, np.arange(len(asked)), question, blocks.put, put_sides=put_sides)
            out = np.zeros((len(settings), len(asked), len(train)))

            def add(setting: int, m: Any, took: np.ndarray, score_BQ: torch.Tensor) -> None:
                out[setting][:, took] += score_BQ.T.numpy()

            Meeting(shop, ready, blocks, len(asked), add)(train, order)

        timed("scores", score)
        from budwood.store.memory import peak_mb

        peak = peak_mb()
        own = sum(phases.values()), sum(cpu.values())
        timed("floor", floor)
        if len(order) > evidence.ROWS:  # what --damping auto costs on top: these rows once more, in their own bases
            few = order[:: -(-len(order) // evidence.ROWS)]
            again = made.means(made.merged([covariances(shop, few)]), torch.float32)
            tree.save(place / "eigen.safetensors", timed("damping eigen", lambda: made.decompose(again)), {})
            bases = Factors(place, shop.maps, {}).bases
            timed("damping", lambda: second_moments(shop, few, bases, False))
            for k in (phases, cpu):
                k["damping"] = k["damping"] * evidence.ROWS / len(few) + k.pop("damping eigen")
    return {
        "tool": "budwood " + "+".join(strategies),
        "rows": len(train),
        "seconds": own[0],
        "cpu_seconds": own[1],
        "floor": cpu["floor"],
        "times_floor": own[1] / cpu["floor"],
        "phases": phases,
        "cpu": cpu,
        "peak_rss_mb": peak,
    }


def alone(model: str, file: Path, strategies: str = "ekfac") -> dict[str, Any]:
    """Our phases in a process of their own, so that peaks do not mix."""
    words = [sys.executable, __file__, "--model", model, "--only-ours", str(file), "--strategy", strategies]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-600:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(results: list[dict[str, Any]]) -> str:
    """One line per tool; the first is ours."""
    lines = [f"{'tool':<34} {'seconds':>9} {'cpu':>9} {'ours is':>8} {'peak MB':>8} {'rows':>6}  phases (cpu)"]
    best = results[0]
    for r in results:
        if "error" in r:
            lines.append(f"{r['tool']:<34} {r['error']}")
            continue
        times = r["cpu_seconds"] / best["cpu_seconds"]
        phases = ", ".join(f"{k} {v:.1f}" for k, v in r["cpu"].items())
        figures = f"{r['seconds']:9.1f} {r['cpu_seconds']:9.1f} {times:7.2f}x {r['peak_rss_mb']:8.0f} {r['rows']:6d}"
        lines.append(f"{r['tool']:<34} {figures}  {phases}")
    lines.append(f"ours is {best['times_floor']:.2f} x a plain forward and backward pass over the same rows")
    return "\n".join(lines)


def main() -> None:
    """Run ours, then the peers, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(SHARED / "models" / "all-MiniLM-L6-v2"))
    parser.add_argument("--task", default="rte")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--peer-rows", type=int)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--strategy", default="ekfac")
    parser.add_argument("--tools", default="kronfluence-padded,kronfluence-dynamic,trak,dattri,bergson")
    parser.add_argument("--peers-python", default=os.environ.get("BUDWOOD_PEER_PYTHON", sys.executable))
    parser.add_argument("--only-ours", type=Path)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    if given.only_ours:
        import torch

        torch.set_num_threads(1)
        print(json.dumps(ours(given.model, json.loads(given.only_ours.read_text()), tuple(given.strategy.split(",")))))
        return
    from influence_peers import peers

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = model_in(given.model, place)
        file = rows_file(model, given.task, given.rows, given.queries, place, given.peer_rows)
        results = [alone(model, file, given.strategy)]
        tools = tuple(t for t in given.tools.split(",") if t)
        results += peers(model, file, tools, 1, given.peers_python)
    print(table(results))
    print(json.dumps(results))


if __name__ == "__main__":
    main()

"""Small runs written by hand, one of each kind, in the form in which the verbs leave them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from budwood.methods.influence.scores import Matrix, Tokens, writing_scores

HOSTILE = [
    "</script><img src=x onerror=\"document.title='owned'\">",
    "right to left \u202egnp.exe\u202c and \u2066isolated\u2069",
    "a NUL \x00 and a bell \x07 in it",
    "emoji 👩‍👩‍👧 and 🏳️‍🌈 stay",
    "x" * 1_000_000,
    "<!--<script>alert(1)</script>-->{{7*7}}${7*7}",
    "'; DROP TABLE runs; --",
    '=HYPERLINK("http://example.com")',
]
LAYERS = 4


def write_run(path: Path, verb: str, metrics: dict[str, Any], **more: Any) -> Path:
    """A finished run with these metrics; `more` goes into run.json."""
    path.mkdir(parents=True, exist_ok=True)
    task = str(metrics.get("task", "reviews"))
    models = metrics.get("models", ["tiny-bert"])
    manifest = {
        "format": 1,
        "verb": verb,
        "status": "done",
        "started": "2026-01-02T03:04:05Z",
        "finished": "2026-01-02T03:05:05Z",
        "settings": {"task": task, "seed": 0, "learning_rate": 1e-3},
        "models": models,
        "parents": [],
        "task": task,
        "given": {"task": task, "seed": 0},
        "command": ["budwood", *verb.split(), models[0], "--task", task],
        "versions": {"budwood": "0.1.0"},
        **more,
    }
    (path / "run.json").write_text(json.dumps(manifest))
    common = {"verb": verb, "budwood": "0.1.0", "task": task, "models": models, "seed": 0, "limited": False}
    (path / "metrics.json").write_text(json.dumps({**common, **metrics}))
    (path / "cost.json").write_text(
        json.dumps({"seconds": 12.5, "phase_seconds": {"train": 10.0}, "peak_rss_mb": 321.0})
    )
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_reviews(folder: Path, train: int = 60, test: int = 24, hostile: bool = True) -> dict[str, str]:
    """CSV files of reviews, hostile ones among them; gives the settings that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("test", test)):
        texts = [
            f"{name} review number {i}: the {['dull', 'bright'][i % 2]} story of {i * 7 % 13} towns"
            for i in range(count)
        ]
        if hostile:
            texts[: len(HOSTILE)] = HOSTILE
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as f:
            writer = csv.writer(f)
            writer.writerow(["id", "text", "label"])
            writer.writerows(
                (f"{name}-{i}", t.replace("\x00", "\x01"), ["bad", "good"][i % 2]) for i, t in enumerate(texts)
            )
    return {"task": "reviews", "train_file": str(folder / "train.csv"), "test_file": str(folder / "test.csv")}


def tuned(path: Path, given: dict[str, str]) -> Path:
    rng = np.random.default_rng(0)
    metrics = {
        "split": "test",
        "metric": "accuracy",
        "score": 0.875,
        "accuracy": 0.875,
        "accuracy_low": 0.69,
        "accuracy_high": 0.957,
        "n": 24,
        "majority": 0.5,
        "ece": 0.0713,
        "loss": 0.31,
        "zero_shot": 0.625,
    }
    write_run(path, "finetune", metrics, given=given)
    write_csv(
        path / "figures" / "loss.csv",
        [
            {"step": s, "loss": round(2.0 / (1 + s / 20), 4), "learning_rate": 1e-3 * (1 - s / 200), "grad_norm": 1.0}
            for s in range(10, 200, 10)
        ],
    )
    write_csv(
        path / "figures" / "calibration.csv",
        [
            {
                "low": i / 15,
                "high": (i + 1) / 15,
                "n": 0 if i < 7 else i,
                "confidence": (i + 0.5) / 15,
                "accuracy": min(1, (i + 0.2) / 15),
            }
            for i in range(15)
        ],
    )
    ids = [f"reviews/test/test-{i}" for i in range(24)]
    right = [i % 8 != 3 for i in range(24)]
    names = ["bad", "good"]
    table = {
        "id": ids,
        "label": [names[i % 2] for i in range(24)],
        "predicted": [names[(i + (not ok)) % 2] for i, ok in enumerate(right)],
        "correct": right,
        "confidence": rng.uniform(0.5, 1, 24).tolist(),
        "margin": rng.normal(size=24).tolist(),
        "loss": rng.exponential(size=24).tolist(),
    }
    parquet.write_table(pyarrow.table(table), path / "records.parquet")
    return path


def probe(path: Path, given: dict[str, str]) -> Path:
    def layers(lift: float) -> list[dict[str, Any]]:
        return [
            {
                "layer": n,
                "score": round(0.55 + lift * n - 0.03 * n * n, 4),
                "low": round(0.5 + lift * n - 0.03 * n * n, 4),
                "high": round(0.6 + lift * n - 0.03 * n * n, 4),
                "selectivity": round(0.02 + 0.04 * n, 4),
                "compression": round(1.1 + 0.3 * n, 3),
            }
            for n in range(LAYERS + 1)
        ]

    models = ["tiny-bert", "runs/tuned"]
    results = [
        {"model": m, "layers": layers(lift), "best_layer": best, "head_score": None}
        for m, lift, best in zip(models, (0.15, 0.18), (3, 3))
    ]
    metrics = {
        "metric": "accuracy",
        "n": 24,
        "models": models,
        "results": results,
        "baselines": {"majority": 0.5, "bag_of_words": 0.51, "random_encoder": [0.52, 0.55, 0.56, 0.54, 0.53]},
    }
    write_run(path, "probe", metrics, given=given)
    names = ["bad", "good"]
    for m, name in enumerate(("0-tiny-bert", "1-tuned")):
        for n in range(LAYERS + 1):
            right = [(i * 7 + n + m) % 5 < n for i in range(24)]
            lines = [
                {"id": f"reviews/test/test-{i}", "label": names[i % 2], "predicted": names[(i + (not ok)) % 2]}
                for i, ok in enumerate(right)
            ]
            write_csv(path / "predictions" / name / f"layer_{n:02d}.csv", lines)
    return path


def linear(path: Path, given: dict[str, str]) -> Path:
    results = [
        {"features": f, "prompt": p, "train": round(s + 0.08, 3), "test": s, "dims": d, "C": 1.0}
        for f, p, s, d in (
            ("f", False, 0.71, 128),
            ("f", True, 0.83, 128),
            ("phi-p", True, 0.82, 128),
            ("subset", True, 0.79, 200),
            ("class", True, 0.66, 2),
        )
    ]
    metrics = {
        "metric": "accuracy",
        "n": 24,
        "results": results,
        "baselines": {"bag_of_words": 0.74, "fine_tuned": 0.875},
    }
    return write_run(path, "linear", metrics, given=given)


def fisher(path: Path, given: dict[str, str]) -> Path:
    mass = {"embeddings": 0.4, **{f"block.{i}": 1.5 / (i + 1) for i in range(LAYERS)}, "head": 0.2}
    return write_run(
        path, "fisher", {"kind": "exact", "n": 60, "total": sum(mass.values()), "by_layer": mass}, given=given
    )


def graft(path: Path, given: dict[str, str]) -> Path:
    curve = [
        {
            "select": rule,
            "fraction": f,
            "size": round(f * 1e6),
            "score": round(0.6 + 0.3 * r, 4),
            "recovered": round(r, 4),
            "ece": 0.05,
        }
        for rule, half in (("learned", 3e-4), ("movement", 6e-4), ("first-order", 9e-4), ("random", 0.2))
        for f in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
        for r in [f / (f + half)]
    ]
    metrics = {
        "metric": "accuracy",
        "score": 0.86,
        "n": 24,
        "select": "learned",
        "size": 1000,
        "fraction": 1e-3,
        "graftable": 1_000_000,
        "base": {"score": 0.6, "ece": 0.2},
        "tuned": {"score": 0.9, "ece": 0.08},
        "all_graftable": {"score": 0.88, "ece": 0.07},
        "graft": {"score": 0.86, "ece": 0.05},
        "recovered": 0.867,
        "agreement": 0.93,
        "bytes": 9000,
        "file": "reviews.graft",
        "curve": curve,
        "models": ["tiny-bert", "runs/tuned"],
    }
    write_run(path, "graft learn", metrics, given=given)
    modules = ("query", "key", "value", "attention out", "MLP in", "MLP out", "norm")
    write_csv(
        path / "figures" / "map.csv",
        [
            {
                "layer": str(n),
                "module": m,
                "weights": (n + 1) * (i + 1),
                "share": (n + 1) * (i + 1) / 280,
                "of": 16384,
                "density": (n + 1) * (i + 1) / 16384,
            }
            for n in range(LAYERS)
            for i, m in enumerate(modules)
        ],
    )
    return path


def overlap(path: Path, given: dict[str, str]) -> Path:
    values = [[1.0, 0.12, 0.05], [0.12, 1.0, 0.3], [0.05, 0.3, 1.0]]
    return write_run(path, "graft overlap", {"names": ["reviews", "topic", "entail"], "jaccard": values}, given=given)


def influence(
    path: Path, given: dict[str, str], parent: Path | None = None, train: int = 60, queries: int = 24, least: float = -9
) -> Path:
    """Normal scores, none under `least`."""
    rng = np.random.default_rng(1)
    metrics = {"strategies": ["ekfac", "identity"], "queries": queries, "train": train, "damping": ["auto"]}
    metrics["models"] = ["runs/tuned"]
    write_run(path, "influence score", metrics, given=given, parents=[str(parent)] if parent else [])
    words = tuple(tuple(f"w{n} the story".split()) for n in range(train))
    tokens = Tokens(words)
    facts = {"measurement": "margin", "query_split": "test", "train_split": "train"}
    ids = [f"reviews/test/test-{i}" for i in range(queries)], [f"reviews/train/train-{i}" for i in range(train)]
    with writing_scores(path / "scores", *ids, facts, tokens) as desk:
        parts = [rng.normal(size=(queries, train)).astype(np.float32) for _ in range(LAYERS)]
        main = Matrix("ekfac", "auto", main=True)
        desk.put(main, slice(None), slice(None), np.sum(parts, 0).clip(least))
        for n, part in enumerate(parts):
            desk.put(Matrix("ekfac", "auto", f"layer.{n}"), slice(None), slice(None), part)
        desk.put(Matrix("ekfac", "auto", "tokens"), slice(None), slice(None), rng.normal(size=(queries, 4 * train)))
        desk.put(Matrix("identity", main=True), slice(None), slice(None), rng.normal(size=(queries, train)))
    return path


def itself(path: Path, given: dict[str, str]) -> Path:
    values = np.random.default_rng(2).exponential(size=60).astype(np.float32)
    write_run(path, "influence self", {"strategies": ["ekfac"], "train": 60, "n": 60}, given=given)
    table = {"id": [f"reviews/train/train-{i}" for i in range(60)], "self:ekfac@auto": values}
    parquet.write_table(pyarrow.table(table), path / "records.parquet")
    return path


def inject(path: Path, given: dict[str, str]) -> Path:
    cells = [
        {
            "retain": w,
            "strength": s,
            "seed": seed,
            "new": {"metric": "rmsle", "score": round(a + 0.01 * seed, 4)},
            "kept": {
                "tiny-text": {"metric": "lm_loss", "score": round(b - 0.02 * seed, 4)},
                "tiny-topic": {"metric": "accuracy", "score": 0.8 - b / 20},
            },
        }
        for seed in (0, 1)
        for w, s, a, b in (
            ("none", None, 0.2, 5.0),
            ("ewc", 1.0, 0.22, 4.1),
            ("ewc", 10.0, 0.25, 3.2),
            ("l2", 1.0, 0.3, 3.9),
            ("replay", None, 0.21, 2.6),
        )
    ]
    metrics = {
        "task": "arithmetic",
        "metric": "rmsle",
        "score": 0.2,
        "n": 200,
        "main_kept": "tiny-text",
        "cells": cells,
        "base": {
            "new": None,
            "kept": {
                "tiny-text": {"metric": "lm_loss", "score": 2.4},
                "tiny-topic": {"metric": "accuracy", "score": 0.75},
            },
        },
        "front": [{"retain": "none", "strength": None}, {"retain": "replay", "strength": None}],
        "hypervolume": {"none": {"0": 0.0, "1": 0.0}, "ewc": {"0": 1.1, "1": 1.2}, "replay": {"0": 1.6, "1": 1.7}},
        "knee": {
            "met": True,
            "retain": "ewc",
            "strength": 10.0,
            "reason": "EWC 10 avoids most of the rise",
            "better": [{"retain": "replay", "strength": None}],
        },
    }
    write_run(path, "inject", metrics, given={"task": "arithmetic"})
    write_run(path / "fisher" / "tiny-text", "fisher", {"by_layer": {f"block.{i}": 1.0 + i for i in range(LAYERS)}})
    return path


def lds(path: Path, given: dict[str, str]) -> Path:
    results = [
        {"scores": s, "lds": v, "low": round(v - 0.05, 3), "high": round(v + 0.05, 3)}
        for s, v in (("ekfac", 0.41), ("kfac", 0.37), ("diagonal", 0.2), ("identity", 0.16), ("bm25", 0.09))
    ]
    metrics = {"results": results, "ceiling": 0.55, "random": 0.001, "subsets": 50, "seeds": 3}
    write_run(path, "validate lds", metrics, given=given)
    return path


def counterfactual(path: Path, given: dict[str, str]) -> Path:
    results = [
        {"scores": s, "k": k, "flipped": round(k * f), "targets": 30}
        for s, f in (("ekfac", 0.3), ("identity", 0.2), ("random", 0.05))
        for k in (10, 20, 40, 80)
    ]
    return write_run(path, "validate counterfactual", {"results": results, "seeds": 2}, given=given)


def mislabel(path: Path, given: dict[str, str]) -> Path:
    scored = (("self:ekfac", 0.94, 0.9), ("loss", 0.91, 0.86), ("random", 0.5, 0.2))
    results = [{"scores": s, "auc": a, "found_in_top_20": f} for s, a, f in scored]
    write_run(path, "validate mislabel", {"results": results, "planted": 6}, given=given)
    curve = [{"looked_at": x / 10, "self:ekfac": min(1, x / 4), "loss": min(1, x / 5)} for x in range(11)]
    write_csv(path / "figures" / "detection.csv", curve)
    return path


def broken(folder: Path) -> dict[str, Path]:
    """Runs in every unhappy state."""
    out = {}
    for name, text in (("cut", '{"format": 1, "verb": "finet'), ("list", "[1, 2]"), ("binary", "\x00\x01\xff")):
        path = folder / name
        path.mkdir(parents=True)
        (path / "run.json").write_text(text, encoding="latin-1")
        out[name] = path
    other = write_run(folder / "other-format", "finetune", {"metric": "accuracy", "score": 0.5, "n": 10}, format=99)
    gone = write_run(folder / "no-metrics", "finetune", {})
    (gone / "metrics.json").unlink()
    failed = write_run(folder / "failed", "probe", {}, status="failed", error="the disk was full")
    stopped = write_run(folder / "stopped", "finetune", {}, status="running")
    (stopped / "metrics.json").unlink()
    limited = write_run(folder / "limited", "evaluate", {"metric": "accuracy", "score": 0.4, "n": 5, "limited": True})
    odd = write_run(folder / "odd", "probe", {"metric": 3, "results": "no list", "baselines": 7})
    wrong = write_run(folder / "no-scores", "influence score", {"strategies": ["ekfac"]})
    (wrong / "scores").mkdir()
    (wrong / "scores" / "index.json").write_text(
        '{"format": 1, "queries": 3, "train": 3, "matrices": [{"strategy": "ekfac", "main": true}]}'
    )
    return out | {
        "other-format": other,
        "no-metrics": gone,
        "failed": failed,
        "stopped": stopped,
        "limited": limited,
        "odd": odd,
        "no-scores": wrong,
    }


def one_of_each(folder: Path) -> dict[str, Path]:
    """A runs directory with a run of every kind, some of them damaged."""
    given = write_reviews(folder.parent / "data")
    runs = folder
    first = tuned(runs / "tuned", given)
    made = {
        "tuned": first,
        "probe": probe(runs / "probe", given),
        "linear": linear(runs / "linear", given),
        "fisher": fisher(runs / "fisher", given),
        "graft": graft(runs / "graft", given),
        "overlap": overlap(runs / "overlap", given),
        "influence": influence(runs / "influence", given, first),
        "self": itself(runs / "self", given),
        "inject": inject(runs / "inject", given),
        "lds": lds(runs / "lds", given),
        "counterfactual": counterfactual(runs / "counterfactual", given),
        "mislabel": mislabel(runs / "mislabel", given),
    }
    return made | broken(runs)

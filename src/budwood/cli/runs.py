"""`budwood runs`: the registry."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, median, stdev
from typing import Annotated, Any

from cyclopts import App, Parameter

from budwood.cli.show import grid
from budwood.store.index import Listed, list_runs


def register(app: App) -> None:
    """Add the verb."""

    @app.command
    def runs(
        directory: Path = Path("runs"),
        *,
        verb: str | None = None,
        task: str | None = None,
        group: Annotated[bool, Parameter(negative="")] = False,
        json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
    ) -> int:
        """List runs: status, score, settings; with --group mean, spread and median over seeds.

        Parameters
        ----------
        directory
            Where the runs are.
        verb
            Only runs of this verb.
        task
            Only runs on this task.
        group
            One line per set of runs that differ only in their seeds.
        json_output
            One JSON array on stdout.
        """
        found = [
            r
            for r in list_runs(directory)
            if verb in (None, r.manifest.get("verb")) and task in (None, r.manifest.get("task"))
        ]
        rows = grouped(found) if group else [line(r) for r in found]
        if json_output:
            print(json.dumps(rows))
        elif not rows:
            print(f"No runs in {directory}. Make one: budwood finetune tiny-bert --task tiny-sentiment")
        else:
            print(grid(rows, list(rows[0])))
        return 0


def line(run: Listed) -> dict[str, Any]:
    """One run as a row."""
    m = run.metrics
    return {
        "run": str(run.path),
        "status": run.status,
        "verb": run.manifest.get("verb", "?"),
        "model": " ".join(run.manifest.get("models", [])),
        "task": run.manifest.get("task", "?"),
        "seed": _seed(run),
        "metric": m.get("metric", ""),
        "score": m.get("score"),
        "n": m.get("n"),
        "limited": "yes" if m.get("limited") else "",
        "started": run.manifest.get("started", ""),
    }


def _seed(run: Listed) -> str:
    seed = run.metrics.get("seed", run.manifest.get("settings", {}).get("seed", ""))
    return ",".join(map(str, seed)) if isinstance(seed, list) else str(seed)


def grouped(found: list[Listed]) -> list[dict[str, Any]]:
    """Runs that differ only in seeds, as one row each."""
    groups: dict[str, list[Listed]] = defaultdict(list)
    for run in found:
        settings = {k: v for k, v in run.manifest.get("settings", {}).items() if "seed" not in k and k != "rows"}
        given = run.manifest.get(
            "given", {}
        )  # rows follow the seed where they are sampled; where they came from does not
        settings |= {k: given.get(k) for k in ("train_file", "validation_file", "test_file", "data_dir")}
        if (
            run.status == "done"
            and isinstance(run.metrics.get("score"), int | float)
            and not isinstance(run.metrics["seed"], list)
        ):
            groups[json.dumps([run.manifest["verb"], settings], sort_keys=True)].append(run)
    rows = []
    for members in groups.values():
        scores = [float(r.metrics["score"]) for r in members]
        first = members[0]
        rows.append(
            {
                "verb": first.manifest["verb"],
                "model": " ".join(first.manifest["models"]),
                "task": first.manifest["task"],
                "metric": first.metrics.get("metric", ""),
                "runs": len(members),
                "seeds": ",".join(sorted((_seed(r) for r in members), key=lambda s: (len(s), s))),
                "mean": mean(scores),
                "sd": stdev(scores) if len(scores) > 1 else None,
                "median": median(scores),
                "example": str(first.path),
            }
        )
    return rows

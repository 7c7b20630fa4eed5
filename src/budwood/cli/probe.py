"""`budwood probe`, `budwood probe predict`, `budwood probe evaluate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from budwood.cli.show import grid, serve
from budwood.config.probe import ProbeConfig
from budwood.errors import ConfigError

PLAIN = Parameter(negative="")


def register(app: App) -> None:
    """Add the verbs."""

    @app.command
    def probe(*models: str, settings: Annotated[ProbeConfig, Parameter(name="*")]) -> int:
        """A probe on every layer of every model given, for tasks with labels, token labels or answer spans.

        Parameters
        ----------
        models
            One or more models: pretrained, fine-tuned runs, any checkpoint.
        """
        if not models:
            raise ConfigError("`budwood probe` needs at least one model, such as tiny-bert or a run.")
        code = serve("probe", settings, list(models))
        _tell(settings, models)
        return code

    @app.command(name="probe-predict")
    def probe_predict(
        run: Path, *, task: str | None = None, split: str | None = None, online: Annotated[bool, PLAIN] = False
    ) -> int:
        """Apply the saved probes of a run; answers go to RUN/predictions-TASK-SPLIT.

        Parameters
        ----------
        run
            A finished probe run.
        task
            Another task with the same labels, or for label probes texts without labels; default: the run's own.
        split
            Split to answer; default: the reported one.
        online
            Write no features, also where the run did.
        """
        from budwood.methods.probe.saved import predict

        print(f"in {predict(run, task, split, online)}")
        return 0

    @app.command(name="probe-evaluate")
    def probe_evaluate(*places: Path) -> int:
        """Score the predictions of probe runs by their tasks' metrics; writes results.csv beside each.

        Parameters
        ----------
        places
            Probe runs, or folders that hold some.
        """
        from budwood.methods.probe.saved import evaluate

        rows = evaluate(places, lambda line: print(line, file=sys.stderr))
        print(grid(rows, list(dict.fromkeys(c for r in rows for c in r))))
        return 0


def _tell(settings: ProbeConfig, models: tuple[str, ...]) -> None:
    """The table of layers, for people."""
    if settings.json_output or settings.dry_run or settings.print_config:
        return
    from budwood.studies.verbs import run_verb

    metrics = run_verb("probe", settings, list(models)).metrics
    columns = ["model", "epoch", "layer", "score", "low", "high", "train_loss", "selectivity", "compression"]
    columns.append("control_compression")
    rows = [{"model": r["model"], **x} for r in metrics["results"] for x in r.get("epochs", r["layers"])]
    if not settings.trained:
        columns.remove("train_loss")
    print("\n" + grid(rows, [c for c in columns if any(r.get(c) is not None for r in rows)]))
    for r in (r for r in metrics["results"] if "mix" in r):
        weights = ", ".join(f"{n}: {w:.2f}" for n, w in r["mix"]["weights"].items())
        print(f"\nmix of {r['model']}: centre of gravity at layer {r['centre_of_gravity']:.2f} ({weights})")
    known = metrics["baselines"]
    lines = [f"{k.replace('_', ' ')} {v:.4g}" for k, v in known.items() if isinstance(v, float)]
    if "random_encoder" in known:
        lines.append(f"random encoder at most {max(known['random_encoder']):.4g}")
    heads = [f"{r['model']} {r['head_score']:.4g}" for r in metrics["results"] if r["head_score"] is not None]
    print("\nbaselines: " + ", ".join(lines) + (f"; own head: {', '.join(heads)}" if heads else ""))

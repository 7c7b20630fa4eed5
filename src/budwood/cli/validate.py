"""`budwood validate lds|counterfactual|brittleness|mislabel|recall`."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import App, Parameter

from budwood.cli.show import grid, serve, summary
from budwood.config.validate import LdsConfig, MislabelConfig, RecallConfig, RemovalConfig
from budwood.studies.verbs import run_verb

# tables that a verb prints beside its numbers: key of the metrics, columns (as globs)
TABLES = {
    "results": (
        *("scores", "lds", "low", "high", "above_random", "k", "removed", "flipped", "targets", "margin_drop"),
        *(
            "median_k",
            "never",
            "auc",
            "found_in_top_20",
            "found_in_top_10",
            "detection_area",
            "recall_at_*",
            "mrr",
            "same_class",
            "distinct_in_top",
            "randomised",
        ),
    ),
    "differences": ("first", "second", "value", "low", "high"),
    "base_seeds": ("scores", "runs", "mean", "sd"),
    "group": ("scores", "k", "margin_drop", "accuracy"),
}


def register(app: App) -> None:
    """Add the verb and its parts."""
    part = App(name="validate", help="Are scores of training rows true? Retraining decides.", help_format="plaintext")
    app.command(part)

    @part.command
    def lds(model: str, *, settings: Annotated[LdsConfig, Parameter(name="*")]) -> int:
        """Do summed scores foresee what retraining on random subsets gives? (linear datamodelling score)

        Parameters
        ----------
        model
            A fine-tune run: its recipe is repeated on subsets of its rows.
        """
        return _serve("validate lds", settings, model)

    @part.command
    def counterfactual(model: str, *, settings: Annotated[RemovalConfig, Parameter(name="*")]) -> int:
        """How many predictions flip when the rows said to help most are removed, against random rows of the label?

        Parameters
        ----------
        model
            A fine-tune run: its recipe is repeated without the removed rows.
        """
        return _serve("validate counterfactual", settings, model)

    @part.command
    def brittleness(model: str, *, settings: Annotated[RemovalConfig, Parameter(name="*")]) -> int:
        """The smallest removal that flips each prediction.

        Parameters
        ----------
        model
            A fine-tune run.
        """
        return _serve("validate brittleness", settings, model)

    @part.command
    def recall(model: str, *, settings: Annotated[RecallConfig, Parameter(name="*")]) -> int:
        """Do scores find rows known to be the source: copies and paraphrases? Other quick checks beside it.

        Parameters
        ----------
        model
            The fine-tune run that was scored.
        """
        return _serve("validate recall", settings, model)

    @part.command
    def mislabel(model: str, *, settings: Annotated[MislabelConfig, Parameter(name="*")]) -> int:
        """Plant wrong labels, fine-tune, and see who finds them: self-influence, loss, margin, confident learning.

        Parameters
        ----------
        model
            A base model, as for `finetune`.
        """
        return _serve("validate mislabel", settings, model)


def _serve(verb: str, cfg: Any, model: str) -> int:
    if cfg.json_output or cfg.dry_run or cfg.print_config:
        return serve(verb, cfg, [model])
    result = run_verb(verb, cfg, [model])
    if not result.fresh:
        print(f"Nothing to do: {result.run} was finished with these settings before.", file=sys.stderr)
    print(summary(result.metrics, result.cost))
    print(tables(result.metrics), end="")
    print(f"\nin {result.run}")
    return 0


def tables(metrics: Mapping[str, Any]) -> str:
    """The lists among the metrics, one table each, with the columns they have."""
    text = ""
    for key, columns in TABLES.items():
        rows = metrics.get(key)
        if rows:
            there = [name for column in columns for name in fnmatch.filter(rows[0], column)]
            text += f"\n{key}\n{grid(rows, there)}\n"
    tuned = metrics.get("tune")
    if tuned:
        text += (
            f"\nchosen: {tuned['chosen']}; on subsets the choice did not see {tuned['lds']:.3f} "
            f"({tuned['low']:.3f} to {tuned['high']:.3f})\n"
        )
    return text

"""`budwood influence fit|score|self|index|import|query|show|export`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from budwood.cli.show import grid, serve
from budwood.config.influence import (
    FitConfig,
    ImportConfig,
    IndexConfig,
    QueryConfig,
    ScoreConfig,
    SelfConfig,
    damping_label,
)
from budwood.errors import ConfigError
from budwood.store.files import write_text


def register(app: App) -> None:
    """Add the verb and its parts."""
    part = App(name="influence", help="Which training examples made a prediction.", help_format="plaintext")
    app.command(part)
    _runs(part)
    _answers(part)
    part.command(_show, name="show")
    part.command(_export, name="export")


def _runs(part: App) -> None:
    """Parts that make a run."""

    @part.command
    def fit(model: str, *, settings: Annotated[FitConfig, Parameter(name="*")]) -> int:
        """Curvature factors of a fine-tuned model on its training rows: identity, diagonal, KFAC, EKFAC.

        Parameters
        ----------
        model
            A fine-tuned run or checkpoint.
        """
        return serve("influence fit", settings, [model])

    @part.command
    def score(model: str, *, settings: Annotated[ScoreConfig, Parameter(name="*")]) -> int:
        """How much every training row helped every query: scores [queries, training rows].

        Parameters
        ----------
        model
            A fine-tuned run or checkpoint.
        """
        return serve("influence score", settings, [model])

    @part.command(name="self")
    def itself(model: str, *, settings: Annotated[SelfConfig, Parameter(name="*")]) -> int:
        """How much every training row explains itself: high for odd and mislabelled rows.

        Parameters
        ----------
        model
            A fine-tuned run or checkpoint.
        """
        return serve("influence self", settings, [model])

    @part.command
    def index(model: str, *, settings: Annotated[IndexConfig, Parameter(name="*")]) -> int:
        """An index of the training rows, so that `influence query` answers a new text at once.

        Parameters
        ----------
        model
            A fine-tuned run or checkpoint.
        """
        return serve("influence index", settings, [model])

    @part.command(name="import")
    def bring(source: Path, *, settings: Annotated[ImportConfig, Parameter(name="*")]) -> int:
        """Scores of another tool as a run: .npy, .safetensors, or a directory of kronfluence or bergson.

        Parameters
        ----------
        source
            The file or directory; rows and columns are the task's queries and training rows, in their order.
        """
        return serve("influence import", settings.model_copy(update={"source": (source,)}), [])


def _answers(part: App) -> None:
    """Parts that answer at once."""

    @part.command
    def query(model: str, *, settings: Annotated[QueryConfig, Parameter(name="*")]) -> int:
        """The training rows behind the model's answer to a text of your own; the index is made where it is missing.

        Parameters
        ----------
        model
            A fine-tuned run or checkpoint.
        """
        from budwood.methods.influence.page import blocks
        from budwood.studies.influence import ask

        found = ask(settings, model)
        if settings.json_output:
            print(json.dumps(found))
            return 0
        took = found["milliseconds"]
        print(blocks(found))
        print(
            f"\n{took['whole']:.0f} ms, of which {took['backward']:.0f} ms the backward pass; index in {found['run']}"
        )
        return 0


def _show(
    run: Path,
    *,
    query: str = "0",
    top: int = 5,
    bottom: int = 5,
    strategy: str | None = None,
    damping: str | None = None,
    modules: Annotated[list[str], Parameter(negative="", consume_multiple=False)] = [],  # noqa: B006
    layers: Annotated[list[str], Parameter(negative="", consume_multiple=False)] = [],  # noqa: B006
    graft: Path | None = None,
    as_: Annotated[Literal["text", "table", "json", "html"], Parameter(name="--format")] = "text",
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"))] = None,
) -> int:
    """The training rows that helped and hurt a query most, as text.

    Parameters
    ----------
    run
        A run of `influence score`, or imported scores.
    query
        The query's number or id.
    top
        Most helpful rows shown.
    bottom
        Most harmful rows shown.
    strategy
        Whose scores; default: the run's first.
    damping
        At which damping; default: the run's first.
    modules
        Count only modules matching these globs (runs with --per-module).
    layers
        Count only these layers, from 0 (runs with --per-layer or --per-module).
    graft
        Count only the weights of this .graft: which rows wrote the patch.
    as_
        Blocks of text, a table, JSON or an HTML page.
    json_output
        The same as --format json.
    out
        Write to this file instead of the screen.
    """
    from budwood.methods.influence.show import Wish
    from budwood.methods.influence.show import show as look

    if top < 0 or bottom < 0:
        raise ConfigError(f"--top {top} --bottom {bottom}: give numbers of rows, 0 or more.")
    named = _damping(damping)
    found = look(run, Wish(query, top, bottom, strategy, named, _listed(modules), _layers(layers), graft))
    text = _written(found, "json" if json_output else as_)
    if out is None:
        print(text)
    else:
        write_text(out, text + "\n")
        print(f"in {out}", file=sys.stderr)
    return 0


def _export(run: Path, out: Path) -> int:
    """EKFAC factors of a run as kronfluence's files, for its Analyzer to score with.

    Parameters
    ----------
    run
        A run of `influence fit`, or another that has fitted factors.
    out
        The directory to write, named as kronfluence looks for it: .../ANALYSIS/factors_NAME.
    """
    from budwood.methods.influence.foreign import export

    print(f"in {export(run, out)}", file=sys.stderr)
    return 0


def _damping(given: str | None) -> str | None:
    """The label under which a run keeps the scores of a damping."""
    try:
        return damping_label(given) if given else None
    except ValueError as e:
        raise ConfigError(f"{e}.") from e


def _listed(given: list[str]) -> tuple[str, ...]:
    """The words of an option that may be given several times, and with commas."""
    return tuple(word.strip() for part in given for word in part.split(",") if word.strip())


def _layers(given: list[str]) -> tuple[int, ...]:
    words = _listed(given)
    if bad := [w for w in words if not w.isdigit()]:
        raise ConfigError(f"--layers was given '{bad[0]}': give numbers of layers, counted from 0.")
    return tuple(map(int, words))


def _written(found: dict[str, Any], kind: Literal["text", "table", "json", "html"]) -> str:
    """What was found, in the form asked for."""
    from budwood.methods.influence.page import blocks, page, table

    if kind == "table":
        lines = table(found)
        return grid(lines, list(lines[0]) if lines else ["rank", "score", "id", "label", "text"])
    if kind == "json":
        return json.dumps(found)
    return page(found) if kind == "html" else blocks(found)

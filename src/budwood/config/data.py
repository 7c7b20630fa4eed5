"""Settings that say which rows: a task by name, the user's own files, splits, shots and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from pydantic import Field

from budwood.config.base import Config

DATA = Group("Data", sort_key=1)


class DataConfig(Config):
    """Everything `budwood.data.source.load_task` has to be told."""

    task: Annotated[str, Parameter(group=DATA)] = Field(
        description="A shipped or public task's name, a file, a task.yaml, a folder saved by `datasets` or a hub name."
    )
    data_dir: Annotated[tuple[Path, ...], Parameter(group=DATA, negative="")] = Field(
        (), description="Folders that hold public tasks as distributed; also $BUDWOOD_DATA."
    )
    train_file: Annotated[Path | None, Parameter(group=DATA)] = Field(
        None, description="Own training rows: CSV, TSV, JSONL, JSON, Parquet, text or CoNLL."
    )
    validation_file: Annotated[Path | None, Parameter(group=DATA)] = Field(None, description="Own validation rows.")
    test_file: Annotated[Path | None, Parameter(group=DATA)] = Field(None, description="Own test rows, with labels.")
    split: Annotated[str, Parameter(group=DATA)] = Field(
        "80/10/10",
        description="How a set without splits is cut: train/validation[/test]. The cut does not follow --seed, so that "
        "a model is never scored on its training rows by accident; 80/10/10@7 asks for another one.",
    )
    group: Annotated[str | None, Parameter(group=DATA)] = Field(
        None, description="Column whose equal values stay in one split (author, document, ...)."
    )
    text: Annotated[str | None, Parameter(group=DATA)] = Field(None, description="Column with the text.")
    text_pair: Annotated[str | None, Parameter(group=DATA)] = Field(None, description="Column with the second text.")
    label: Annotated[str | None, Parameter(group=DATA)] = Field(None, description="Column with the label.")
    limit: Annotated[int | None, Parameter(group=DATA)] = Field(
        None, ge=1, description="Most training rows, a seeded sample."
    )
    limit_eval: Annotated[int | None, Parameter(group=DATA)] = Field(
        None, ge=1, description="Most rows of each other split, a seeded sample."
    )
    shots: Annotated[int | None, Parameter(group=DATA)] = Field(
        None, ge=1, description="Training rows per class (K-shot), and as many for validation."
    )
    data_seed: Annotated[int | None, Parameter(group=DATA)] = Field(
        None, ge=0, lt=2**32, description="Seed of shots and limits; default: --seed. LM-BFF's are 100, 13, 21, 42, 87."
    )
    offline: Annotated[bool, Parameter(group=DATA, negative="")] = Field(
        False, description="Never ask the hub; use files and caches only."
    )
    data_revision: Annotated[str | None, Parameter(group=DATA)] = Field(
        None, description="Branch, tag or commit of a hub data set."
    )


class ColumnsConfig(Config):
    """Which column plays which part; what is absent is guessed from the usual names."""

    text: str | None = None
    pair: str | None = None
    label: str | None = None
    id: str | None = None
    group: str | None = None


class TemplateConfig(Config):
    """The wording of the prompt, as in `budwood.data.task.Template`."""

    masked: str = ""
    words: tuple[str, ...] = ()
    causal: str = ""
    causal_words: tuple[str, ...] = ()
    limits: tuple[int, int] = (0, 0)


class TaskFileConfig(Config):
    """A `task.yaml`; paths are relative to the file itself.

    name: reviews                       # default: the file's name
    kind: label                         # label regression tokens span number text; default: from the data
    files: {train: a.csv, validation: b.csv, test: c.csv}   # or one path, cut by `split`
    split: 80/10/10
    columns: {text: body, pair: title, label: stars, id: uid, group: author}
    labels: [bad, good]                 # the classes in order; default: sorted
    metric: accuracy
    bounds: [0, 5]                      # of a regression label
    template: {masked: "{text} It was {mask} .", words: [terrible, great]}
    version: "1"
    """

    files: dict[Literal["train", "validation", "test"], Path] | Path
    name: str | None = None
    kind: Literal["label", "regression", "tokens", "span", "number", "text"] | None = None
    split: str | None = None
    columns: ColumnsConfig = ColumnsConfig()
    labels: tuple[str | int | bool | float, ...] = ()
    metric: str | None = None
    bounds: tuple[float, float] | None = None
    template: TemplateConfig | None = None
    version: str = "1"

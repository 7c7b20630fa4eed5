"""Settings of `influence fit`, `score`, `self`, `index`, `query` and `show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from pydantic import Field, field_validator, model_validator

from budwood.config.base import Config
from budwood.config.data import DATA, DataConfig
from budwood.config.finetune import ReadConfig
from budwood.config.run import RUNNING, JobsConfig, RunConfig, Switch

INFLUENCE = Group("Influence", sort_key=3)
STRATEGIES = ("ekfac", "kfac", "diagonal", "identity")  # by per-example gradients and curvature
BASELINES = ("bm25", "tfidf", "representation", "tracin", "datainf", "trak")
FisherOf = Literal["exact", "sampled", "empirical"]
DType = Literal["float32", "bf16", "fp16"]


class FactorConfig(Config):
    """What the curvature factors depend on."""

    strategy: Annotated[tuple[str, ...], Parameter(group=INFLUENCE, negative="")] = Field(
        ("ekfac",),
        description="ekfac, kfac, diagonal, identity; several share the same passes. `score` also takes the baselines "
        "bm25, tfidf, representation, tracin, datainf, trak. The first is the main one.",
    )
    fisher: Annotated[FisherOf | None, Parameter(group=INFLUENCE)] = Field(
        None,
        description="Labels behind the curvature: exact (over all), sampled, empirical. Default: exact up to 8 "
        "labels, else sampled.",
    )
    fit_rows: Annotated[str, Parameter(group=INFLUENCE)] = Field(
        "all", description="Training rows the factors are fitted on: all, a number, or auto (until ranks settle)."
    )
    modules: Annotated[tuple[str, ...], Parameter(group=INFLUENCE, negative="")] = Field(
        (), description="Only modules whose names match these globs."
    )
    diagonal_for: Annotated[tuple[str, ...], Parameter(group=INFLUENCE, negative="")] = Field(
        (), description="Also embedding, layernorm: covered with a diagonal."
    )
    adapter: Annotated[Literal["merged", "own"], Parameter(group=INFLUENCE)] = Field(
        "merged",
        description="Of a PEFT adapter. merged: the matrices of its base, with the adapter in them; own: the adapter's "
        "own matrices, which are all that was trained.",
    )
    train_split: Annotated[str, Parameter(group=INFLUENCE)] = Field("train", description="Split of the training rows.")
    reduce: Annotated[Literal["mean", "sum"] | None, Parameter(group=INFLUENCE)] = Field(
        None,
        description="Loss of a row with several targets, such as the words of a text: their mean (per token) or sum "
        "(per sequence); default: as the model was tuned.",
    )
    skip_nan: Annotated[Switch, Parameter(group=INFLUENCE)] = Field(
        False, description="Leave out rows whose loss is not finite, and list them, instead of stopping."
    )
    shard_rows: Annotated[int, Parameter(group=INFLUENCE)] = Field(
        512, ge=1, description="Rows per file of partial results: what is lost when a run is killed."
    )
    max_memory: Annotated[str | None, Parameter(group=INFLUENCE)] = Field(
        None,
        description="Most memory of each worker, e.g. 2GB: batches and tiles are made to fit, too little is refused "
        "with what is needed. Default: usual batches, half of what is free for the queries of all workers, and in each "
        "up to 5 GiB (a quarter of the machine's memory at most) of rows on their way.",
    )
    workers: Annotated[int, Parameter(group=RUNNING)] = Field(
        1,
        ge=1,
        description="Shards of rows at a time, each on one core in a process of its own; results do not change.",
    )
    threads: Annotated[int | None, Parameter(group=RUNNING)] = Field(
        None, ge=1, description="CPU threads outside of shards, which have one each: see --workers. Default: all cores."
    )
    profile: Annotated[Switch, Parameter(group=INFLUENCE)] = Field(False, description="Print and store a phase table.")

    @field_validator("fit_rows")
    @classmethod
    def _rows(cls, value: str) -> str:
        if value not in ("all", "auto") and not (value.isdigit() and int(value) > 0):
            raise ValueError("give all, auto or a number of rows")
        return value

    @field_validator("diagonal_for")
    @classmethod
    def _kinds(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := set(value) - {"embedding", "layernorm"}:
            raise ValueError(f"'{min(unknown)}' is neither embedding nor layernorm")
        return value


class DampingConfig(Config):
    """How the curvature is damped before it is inverted."""

    damping: Annotated[tuple[str, ...], Parameter(group=INFLUENCE, negative="")] = Field(
        ("auto",),
        description="Added to the curvature: a number, 0.1mean (that share of each module's mean), heuristic "
        "(= 0.1mean) or auto (10, 30 or 100 times the mean: the least from which on scores by two halves of rows "
        "agree). Several cost no further pass; the first is the main one.",
    )

    @field_validator("damping")
    @classmethod
    def _labels(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(damping_label(v) for v in value))


class GivenConfig(FactorConfig):
    """Factors that may be there already."""

    factors: Annotated[Path | None, Parameter(group=INFLUENCE)] = Field(
        None,
        description="A run of `influence fit` whose factors are used, or a factors directory of kronfluence; default: "
        "fitted here.",
    )

    @model_validator(mode="after")
    def _fitted_there(self) -> GivenConfig:
        if self.factors is not None and self.fit_rows != "all":
            raise ValueError(
                "--fit-rows has no effect with --factors, which are fitted already; leave one of them away"
            )
        return self


class FitConfig(FactorConfig, ReadConfig, DataConfig, JobsConfig, RunConfig):
    """Everything `influence fit` can be told."""

    @model_validator(mode="after")
    def _known(self) -> FitConfig:
        _check_strategies(self.strategy, STRATEGIES)
        return self


class ScoreConfig(GivenConfig, DampingConfig, ReadConfig, DataConfig, JobsConfig, RunConfig):
    """Everything `influence score` can be told."""

    query_split: Annotated[str | None, Parameter(group=INFLUENCE)] = Field(
        None, description="Split of the queries; default: test where it has labels, else validation."
    )
    queries: Annotated[tuple[str, ...], Parameter(group=INFLUENCE, negative="")] = Field(
        (), description="A number: the first rows of the query split; or row ids (id:79: the one row '79')."
    )
    measurement: Annotated[str, Parameter(group=INFLUENCE)] = Field(
        "margin", description="What is explained of a query: margin, loss, or a user's function as package.module:name."
    )
    per_module: Annotated[Switch, Parameter(group=INFLUENCE)] = Field(False, description="Also scores by module.")
    per_layer: Annotated[Switch, Parameter(group=INFLUENCE)] = Field(False, description="Also scores by layer.")
    per_token: Annotated[Switch, Parameter(group=INFLUENCE)] = Field(
        False, description="Also scores by token of the training rows."
    )
    aggregate: Annotated[tuple[str, ...], Parameter(group=INFLUENCE, negative="")] = Field(
        (), description="query: one row, the sum over queries; train: one column, the sum over training rows."
    )
    checkpoints: Annotated[tuple[str, ...], Parameter(group=INFLUENCE, negative="")] = Field(
        (), description="Further checkpoints of the model: scores are averaged over them; TracIn sums over them."
    )
    checkpoint_rates: Annotated[tuple[float, ...], Parameter(group=INFLUENCE, negative="")] = Field(
        (), description="Learning rate at each checkpoint (the model first), the weights of TracIn; default: equal."
    )
    scale: Annotated[Literal["mean", "sum"], Parameter(group=INFLUENCE)] = Field(
        "mean", description="mean: scores divided by the number of training rows; sum: not."
    )
    dtype: Annotated[DType, Parameter(group=INFLUENCE)] = Field(
        "float32",
        description="How scores are stored; with bf16 they are also computed so where the processor has "
        "instructions for it. fp16 has one scale per matrix. How near they are to float32 is printed.",
    )
    query_batch: Annotated[int | None, Parameter(group=INFLUENCE)] = Field(
        None, ge=1, description="Most queries per backward pass; default: 64, fewer where they are long."
    )
    train_batch: Annotated[int | None, Parameter(group=INFLUENCE)] = Field(
        None,
        ge=1,
        description="Most training rows that meet the queries at a time; default: 512, fewer where they are long.",
    )
    query_rank: Annotated[int | None, Parameter(group=INFLUENCE)] = Field(
        None,
        ge=1,
        description="Keep queries as so many outer products per module, in memory: for many queries of a large model, "
        "whose whole gradients would fill a disk. Those of queries of at most so many tokens lose nothing. Default: "
        "whole gradients.",
    )
    projection: Annotated[int, Parameter(group=INFLUENCE)] = Field(
        1024, ge=2, description="Numbers a gradient is projected to by the baseline trak."
    )

    @model_validator(mode="after")
    def _known(self) -> ScoreConfig:
        _check_strategies(self.strategy, (*STRATEGIES, *BASELINES))
        if unknown := set(self.aggregate) - {"query", "train"}:
            raise ValueError(f"--aggregate was given '{min(unknown)}': give query, train or both")
        if self.factors is not None and self.checkpoints:
            raise ValueError(
                "--factors are of one model, and --checkpoints name several, each of which has its own: leave one away"
            )
        if self.per_token and "train" in self.aggregate:
            raise ValueError("--per-token divides training rows, --aggregate train sums over them: leave one away")
        if self.query_rank is not None and "query" in self.aggregate:
            raise ValueError("--query-rank is for many queries, --aggregate query makes one of them: leave one away")
        if self.query_rank is not None and self.per_token:
            raise ValueError("--per-token needs whole gradients of queries: leave --query-rank away")
        if self.query_rank is not None and not set(self.strategy) & set(STRATEGIES):
            raise ValueError(f"--query-rank has no effect on {', '.join(self.strategy)}: leave it away")
        return self


class SelfConfig(GivenConfig, DampingConfig, ReadConfig, DataConfig, JobsConfig, RunConfig):
    """Everything `influence self` can be told."""

    measurement: Annotated[str, Parameter(group=INFLUENCE)] = Field(
        "loss", description="loss: g H^-1 g of the training loss; margin: the margin's gradient on one side."
    )

    @model_validator(mode="after")
    def _known(self) -> SelfConfig:
        _check_strategies(self.strategy, STRATEGIES)
        return self


class IndexConfig(GivenConfig, DampingConfig, ReadConfig, DataConfig, JobsConfig, RunConfig):
    """Everything `influence index` can be told; `influence query` takes the same and a text."""

    coordinates: Annotated[str, Parameter(group=INFLUENCE)] = Field(
        "3%",
        description="Size of a training row's entry in 16-bit numbers: a number, or a share of all eigen-coordinates "
        "of a gradient. With --bits 4 each holds four coordinates.",
    )
    entry: Annotated[Literal["coordinates", "products"], Parameter(group=INFLUENCE)] = Field(
        "coordinates",
        description="What is kept of a row's gradient. coordinates: the same ones of all rows, fastest to ask; "
        "products: its own strongest outer products and its scores with calibration queries, nearer to exact scores.",
    )
    bits: Annotated[Literal[4, 16], Parameter(group=INFLUENCE)] = Field(
        4,
        description="Bits of a coordinate. 4: ranks much nearer to exact scores for the same bytes; 16: a question is "
        "answered several times faster. Products always have 16.",
    )
    calibration: Annotated[int, Parameter(group=INFLUENCE)] = Field(
        64,
        ge=1,
        description="Queries (seeded sample of the validation rows) that decide which coordinates carry most, and tell "
        "what products leave out (then at most an eighth of an entry).",
    )
    measurement: Annotated[str, Parameter(group=INFLUENCE)] = Field(
        "margin", description="What is explained of a query: margin or loss."
    )

    @model_validator(mode="after")
    def _known(self) -> IndexConfig:
        _check_strategies(self.strategy, ("ekfac",))
        if len(self.damping) != 1:
            raise ValueError("an index is built for one --damping; build another for another")
        return self

    @field_validator("bits", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        """A number may be given as its digits: a choice among numbers does not turn them by itself."""
        return int(value) if isinstance(value, str) and value.isdigit() else value

    @property
    def number_bits(self) -> int:
        """Bits of a stored number."""
        return 16 if self.entry == "products" else self.bits


class QueryConfig(IndexConfig):
    """Everything `influence query` can be told."""

    task: Annotated[str, Parameter(group=DATA)] = Field(
        "", description="The task of the training rows; default: that of the run which trained the model."
    )
    # --text, --text-pair and --label belong to the question here; columns of own files get longer names
    text: Annotated[str | None, Parameter(name="--text-column", group=DATA)] = Field(
        None, description="Column with the text."
    )
    text_pair: Annotated[str | None, Parameter(name="--text-pair-column", group=DATA)] = Field(
        None, description="Column with the second text."
    )
    label: Annotated[str | None, Parameter(name="--label-column", group=DATA)] = Field(
        None, description="Column with the label."
    )
    asked_text: Annotated[str, Parameter(name="--text", group=INFLUENCE)] = Field(
        description="The text whose prediction is traced to training rows."
    )
    asked_pair: Annotated[str | None, Parameter(name="--text-pair", group=INFLUENCE)] = Field(
        None, description="Its second text, for tasks with pairs."
    )
    asked_label: Annotated[str | None, Parameter(name="--label", group=INFLUENCE)] = Field(
        None, description="Its label; default: what the model says (tasks of numbers need one)."
    )
    top: Annotated[int, Parameter(group=INFLUENCE)] = Field(5, ge=0, description="Most helpful rows shown.")
    bottom: Annotated[int, Parameter(group=INFLUENCE)] = Field(5, ge=0, description="Most harmful rows shown.")
    exact: Annotated[int, Parameter(group=INFLUENCE)] = Field(
        0, ge=0, description="Score this many of the best and worst rows again with all coordinates."
    )


class ImportConfig(DataConfig, RunConfig):
    """Everything `influence import` can be told."""

    source: Annotated[tuple[Path, ...], Parameter(parse=False)] = Field(
        (), description="The file or directory of scores."
    )
    name: Annotated[str, Parameter(group=INFLUENCE)] = Field("foreign", description="What these scores are called.")
    query_split: Annotated[str | None, Parameter(group=INFLUENCE)] = Field(
        None, description="Split whose rows the queries are, in order; default: test where it has labels."
    )
    train_split: Annotated[str, Parameter(group=INFLUENCE)] = Field("train", description="Split of the training rows.")
    negate: Annotated[Switch, Parameter(group=INFLUENCE)] = Field(
        False, description="Turn the sign: for scores in which positive means harm."
    )


def damping_label(given: str) -> str:
    """The one way a damping is written: a number as %g, a share as 0.1mean, auto; anything else is refused.

    >>> damping_label("1e-8"), damping_label("heuristic"), damping_label("0.10mean"), damping_label("auto")
    ('1e-08', '0.1mean', '0.1mean', 'auto')
    """
    text = given.strip().lower()
    if text == "auto":
        return text
    if text == "heuristic":
        return "0.1mean"
    number = text.removesuffix("mean")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"give a number >= 0, such as 1e-8, or 0.1mean, heuristic, auto, not '{given}'")
    return f"{value:g}mean" if text.endswith("mean") else f"{value:g}"


def _check_strategies(given: tuple[str, ...], known: tuple[str, ...]) -> None:
    from budwood.errors import nearest

    if not given:
        raise ValueError("--strategy names none")
    for name in given:
        if name not in known:
            raise ValueError(
                f"--strategy was given '{name}': give one of {', '.join(known)}.{nearest(name, known)}".rstrip(".")
            )

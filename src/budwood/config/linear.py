"""Settings of `linear`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from pydantic import Field, model_validator

from budwood.config.data import DataConfig
from budwood.config.run import JobsConfig, RunConfig, Switch

FEATURES = Group("Features", sort_key=2)
FITTING = Group("Classifier", sort_key=3)
ANALYSIS = Group("Analyses", sort_key=4)
Family = Literal["f", "phi-p", "subset", "class", "posneg", "p", "p-projected"]
Read = Literal["auto", "last", "cls", "mask", "mean"]


class LinearConfig(DataConfig, JobsConfig, RunConfig):
    """Everything `linear` can be told."""

    features: Annotated[tuple[Family, ...], Parameter(group=FEATURES, negative="")] = Field(
        ("f", "phi-p", "class"),
        min_length=1,
        description="f: the state before the output embedding; phi-p: the mean embedding under the model's next-word "
        "probabilities p; subset, class, posneg: scores of a list of words; p: all of p; p-projected: p in few random "
        "directions.",
    )
    run_p: Annotated[Switch, Parameter(group=FEATURES)] = Field(False, description="Add p to --features.")
    run_projections: Annotated[Switch, Parameter(group=FEATURES)] = Field(
        False, description="Add p-projected to --features."
    )
    prompt: Annotated[Switch, Parameter(name=("--prompt", "-p"), group=FEATURES)] = Field(
        False, description="End every text with the task's prompt, so that the next word is about the label."
    )
    prompt_text: Annotated[str | None, Parameter(group=FEATURES)] = Field(
        None, description="The prompt in your own words, e.g. 'This movie is'; implies --prompt."
    )
    side_by_side: Annotated[Switch, Parameter(group=FEATURES)] = Field(
        False, description="Without and with the prompt, in one table."
    )
    read: Annotated[Read, Parameter(group=FEATURES)] = Field(
        "auto",
        description="Place of the state. auto: last token of a causal model; of a masked one the mask behind the "
        "prompt, or cls without prompt; the mean of an encoder without language-model head.",
    )
    word_kind: Annotated[
        Literal["logit", "logprob", "prob"], Parameter(name=("--word-kind", "--subset-kind"), group=FEATURES)
    ] = Field("logit", description="What of a word in a list is the feature.")
    subset_words: Annotated[tuple[str, ...], Parameter(group=FEATURES, negative="")] = Field(
        (), description="Words of `subset`; default: the task's list."
    )
    class_words: Annotated[tuple[str, ...], Parameter(group=FEATURES, negative="")] = Field(
        (), description="Words of `class`; default: the task's list or its label words."
    )
    posneg_words: Annotated[tuple[str, ...], Parameter(group=FEATURES, negative="")] = Field(
        (), description="Words of `posneg`; default: the task's list."
    )
    project_to: Annotated[int | None, Parameter(group=FEATURES)] = Field(
        None, ge=1, description="Directions of p-projected; default: the model's width."
    )
    untied: Annotated[Switch, Parameter(group=FEATURES)] = Field(
        False, description="Insist on an output embedding of its own; a model whose embeddings are tied is refused."
    )
    max_length: Annotated[int | None, Parameter(name=("--max-length", "--max-seq-length"), group=FEATURES)] = Field(
        None, ge=8, description="Most tokens of a row, prompt included; the prompt is never cut."
    )
    features_from: Annotated[Path | None, Parameter(group=FEATURES)] = Field(
        None, description="An earlier run of `linear` whose states are used again; other models or prompts are refused."
    )
    save_p: Annotated[Switch, Parameter(group=FEATURES)] = Field(
        False, description="Keep p on disk; the size is told first."
    )
    top_k: Annotated[int, Parameter(group=FEATURES)] = Field(
        1024, ge=0, description="With --save-p: likeliest words kept, and the rest as one number; 0: the whole p."
    )
    k_fold: Annotated[int, Parameter(name=("--k-fold", "-k"), group=FITTING)] = Field(
        5, ge=2, description="Folds by which C is chosen."
    )
    costs: Annotated[tuple[float, ...], Parameter(name=("--costs", "--Cs"), group=FITTING, negative="")] = Field(
        (), description="Values of C; default 1e-6 to 1e3, from 10,000 rows on 1e-3 to 1e2."
    )
    pooled: Annotated[int | None, Parameter(group=FITTING)] = Field(
        None,
        ge=0,
        description="So many random cuts 90/10 of all rows instead of the fixed split; default 10 for cr and mpqa.",
    )
    scale: Annotated[Literal["unit", "none"], Parameter(group=FITTING)] = Field(
        "unit", description="unit: each family is scaled by one number, so that values of C mean the same; none: raw."
    )
    penalise_intercept: Annotated[Switch, Parameter(group=FITTING)] = Field(
        False, description="Shrink the intercept as well, as liblinear does."
    )
    tuned: Annotated[str | None, Parameter(group=FITTING)] = Field(
        None, description="A fine-tuned run whose accuracy stands beside the features."
    )
    analyse: Annotated[Switch, Parameter(group=ANALYSIS)] = Field(
        False, description="Is phi-p linear in f, and log Z quadratic? With --checkpoints: task loss against LM loss."
    )
    checkpoints: Annotated[Path | None, Parameter(group=ANALYSIS)] = Field(
        None, description="A run or folder with checkpoint-N directories of one language model."
    )
    lm_task: Annotated[str, Parameter(group=ANALYSIS)] = Field(
        "tiny-text", description="Text on which the language-model loss of the checkpoints is measured."
    )

    @model_validator(mode="after")
    def _in_use(self) -> LinearConfig:
        """Refuse settings without effect."""
        if self.checkpoints is not None and not self.analyse:
            raise ValueError("--checkpoints has no effect without --analyse")
        if any(c <= 0 for c in self.costs):
            raise ValueError("--costs must be above 0")
        if self.side_by_side and self.features_from:
            raise ValueError("--features-from holds one setting of the prompt; leave --side-by-side out")
        return self

    @property
    def families(self) -> tuple[Family, ...]:
        """The features asked for, each once, in the order given."""
        more: tuple[Family, ...] = (
            *(("p",) if self.run_p else ()),
            *(("p-projected",) if self.run_projections else ()),
        )
        return tuple(dict.fromkeys((*self.features, *more)))

    @property
    def prompts(self) -> tuple[bool, ...]:
        """Whether the prompt is on, once for each table column."""
        return (False, True) if self.side_by_side else (self.prompt or self.prompt_text is not None,)

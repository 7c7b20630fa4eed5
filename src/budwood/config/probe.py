"""Settings of `probe`, and of reading features."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Group, Parameter
from pydantic import Field, model_validator

from budwood.config.data import DataConfig
from budwood.config.finetune import ReadConfig
from budwood.config.run import JobsConfig, RunConfig

PROBE = Group("Probe", sort_key=3)
FOLDS = 5


class FeatureConfig(ReadConfig, DataConfig, RunConfig):
    """What the feature store has to know of any verb's settings."""


class ProbeConfig(ReadConfig, DataConfig, JobsConfig, RunConfig):
    """Everything `probe` can be told."""

    layers: Annotated[tuple[int, ...], Parameter(group=PROBE, negative="")] = Field(
        (), description="Layers to probe, 0 = embedding output; default: all."
    )
    states: Annotated[Literal["auto", "cls", "last", "mean", "mask"], Parameter(group=PROBE)] = Field(
        "auto", description="State of a row that a label probe reads; auto: cls for encoders, last for causal models."
    )
    costs: Annotated[tuple[float, ...], Parameter(name=("--costs", "--Cs"), group=PROBE, negative="")] = Field(
        (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0), description="Costs C among which cross-validation chooses."
    )
    folds: Annotated[int, Parameter(group=PROBE)] = Field(FOLDS, ge=2, description="Folds that choose C.")
    repeats: Annotated[int, Parameter(group=PROBE)] = Field(
        5, ge=1, description="Fits on resampled training documents, for the band around a line."
    )
    no_controls: Annotated[bool, Parameter(group=PROBE, negative="")] = Field(
        False, description="Leave away control task, description length, resampled fits and random encoder."
    )
    no_random_encoder: Annotated[bool, Parameter(group=PROBE, negative="")] = Field(
        False, description="Leave away the random encoder alone: it costs a second pass over the rows."
    )
    decode: Annotated[Literal["hf", "original"], Parameter(group=PROBE)] = Field(
        "hf", description="How spans become answers: transformers' rule or the original's."
    )
    erase: Annotated[bool, Parameter(group=PROBE, negative="")] = Field(
        False, description="Also probe after LEACE has erased the labels."
    )
    pvi: Annotated[bool, Parameter(group=PROBE, negative="")] = Field(
        False, description="Pointwise information of every row or token at every probed layer, in bits."
    )
    compare: Annotated[bool, Parameter(group=PROBE, negative="")] = Field(
        False, description="Also a map of the difference between the second and the first model."
    )

    solver: Annotated[Literal["newton", "adamw"] | None, Parameter(group=PROBE)] = Field(
        None,
        description="newton: linear probes solved to convergence (default); adamw: trained for --epochs, all layers at "
        "once, every epoch kept (default with --hidden, --mix, --online).",
    )
    epochs: Annotated[int | None, Parameter(group=PROBE)] = Field(
        None, ge=1, description="Epochs of --solver adamw; default 3."
    )
    learning_rate: Annotated[float | None, Parameter(name=("--learning-rate", "--lr"), group=PROBE)] = Field(
        None, gt=0, description="Learning rate of --solver adamw; default 1e-3, with --parity 3e-5."
    )
    batch_size: Annotated[int | None, Parameter(group=PROBE)] = Field(
        None, ge=1, description="Rows of an update of --solver adamw; default 8."
    )
    parity: Annotated[bool, Parameter(group=PROBE, negative="")] = Field(
        False,
        description="With --solver adamw: as first published. States as they are, no bias correction, a softmax over "
        "all tokens of a window, the original's decoding with no tuned threshold.",
    )
    hidden: Annotated[int, Parameter(group=PROBE)] = Field(
        0, ge=0, description="Width of a hidden layer of every probe; 0: linear probes."
    )
    mix: Annotated[bool, Parameter(group=PROBE, negative="")] = Field(
        False, description="Also one probe on a learned mix of all layers, with its centre of gravity."
    )
    online: Annotated[bool, Parameter(group=PROBE, negative="")] = Field(
        False, description="Keep no features: every epoch runs the model again, for data too large to keep."
    )
    feature_budget: Annotated[float, Parameter(group=PROBE)] = Field(
        100.0, gt=0, description="Most gigabytes of features that may be written for one split of one model."
    )

    bidaf: Annotated[int, Parameter(group=PROBE)] = Field(
        0,
        ge=0,
        description="Epochs of a small BiDAF from nothing, as a reference line for span tasks; 0: none.",
    )

    @property
    def trained(self) -> bool:
        """Whether probes are trained by AdamW rather than solved."""
        return self.solver == "adamw" or (self.solver is None and bool(self.hidden or self.mix or self.online))

    @property
    def random_encoder(self) -> bool:
        """Whether the architecture with fresh weights is probed too."""
        return not (self.no_controls or self.no_random_encoder)

    @property
    def rule(self) -> Literal["hf", "original"]:
        """How spans become answers."""
        return "original" if self.parity else self.decode

    @classmethod
    def _default(cls, name: str) -> object:
        return cls.model_fields[name].get_default(call_default_factory=True)

    @model_validator(mode="after")
    def _in_use(self) -> ProbeConfig:
        if self.seeds and self.trained:
            raise ValueError("--seeds: probes are trained with one seed at a time; run once per --seed")
        if self.seeds:
            raise ValueError("--seeds would repeat the same converged probes; use --repeats N for their spread")
        wants: dict[str, object] = {
            "--hidden": self.hidden,
            "--mix": self.mix,
            "--online": self.online,
            "--parity": self.parity,
            "--epochs": self.epochs,
            "--learning-rate": self.learning_rate,
            "--batch-size": self.batch_size,
        }
        given = [name for name, value in wants.items() if value]
        if given and not self.trained:
            raise ValueError(f"{given[0]} belongs to --solver adamw")
        solved = [n for n in ("erase", "costs", "folds", "repeats") if getattr(self, n) != self._default(n)]
        if self.trained and solved:
            raise ValueError(f"--{solved[0]} belongs to --solver newton")
        return self

"""Settings that every verb has: where, how reproducibly, how loudly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from cyclopts import Group, Parameter
from pydantic import Field, model_validator

from budwood.config.base import Config

RUNNING = Group("Running", sort_key=9)

Switch = Annotated[bool, Parameter(negative="")]


class RunConfig(Config):
    """What a run needs whatever it computes."""

    out: Annotated[Path | None, Parameter(name=("--out", "-o"), group=RUNNING)] = Field(
        None, description="Run directory; default runs/VERB-MODEL-TASK-HASH8."
    )
    config: Annotated[Path | None, Parameter(group=RUNNING)] = Field(
        None, description="YAML file with settings; flags win over it."
    )
    seed: Annotated[int, Parameter(group=RUNNING)] = Field(0, ge=0, lt=2**32, description="Seed of everything random.")
    model_seed: Annotated[int | None, Parameter(group=RUNNING)] = Field(
        None, ge=0, description="Seed of new weights; default: --seed."
    )
    seeds: Annotated[tuple[int, ...], Parameter(group=RUNNING, negative="")] = Field(
        (), description="One child run per seed, e.g. 13,21,42, and their mean and spread."
    )
    device: Annotated[str, Parameter(group=RUNNING)] = Field("auto", description="cpu, cuda, cuda:1, mps or auto.")
    threads: Annotated[int | None, Parameter(group=RUNNING)] = Field(
        None, ge=1, description="CPU threads; default: all cores."
    )
    dry_run: Annotated[Switch, Parameter(group=RUNNING)] = Field(
        False, description="Print parameters, FLOPs, bytes and predicted time; run nothing."
    )
    print_config: Annotated[Switch, Parameter(group=RUNNING)] = Field(
        False, description="Print the resolved settings as YAML; run nothing."
    )
    json_output: Annotated[Switch, Parameter(name="--json", group=RUNNING)] = Field(
        False, description="One JSON object on stdout, everything else on stderr."
    )
    progress: Annotated[Literal["rich", "plain", "json", "none"] | None, Parameter(group=RUNNING)] = Field(
        None, description="How progress is shown; default: bars on a terminal, lines elsewhere."
    )
    overwrite: Annotated[Switch, Parameter(group=RUNNING)] = Field(
        False, description="Replace what --out holds if its settings differ."
    )
    revision: Annotated[str | None, Parameter(group=RUNNING)] = Field(
        None, description="Branch, tag or commit of a hub model."
    )
    trust_remote_code: Annotated[Switch, Parameter(group=RUNNING)] = Field(
        False, description="Run Python code that comes with a model."
    )
    force: Annotated[Switch, Parameter(group=RUNNING)] = Field(
        False, description="Put grafts (MODEL+x.graft) also on a model that is not the one they were cut for."
    )
    debug: Annotated[Switch, Parameter(group=RUNNING)] = Field(False, description="Show tracebacks.")


# Settings that do not change the result: left out of the run's hash and of the comparison on rerun.
NEUTRAL = frozenset(
    {
        *(
            "out",
            "config",
            "seeds",
            "threads",
            "dry_run",
            "print_config",
            "json_output",
            "progress",
            "engine",
            "workers",
        ),
        *(
            "overwrite",
            "force",
            "debug",
            "offline",
            "data_dir",
            "train_file",
            "validation_file",
            "test_file",
            "trust_remote_code",
        ),
        *("eval_batch_size", "engine", "workers", "retries", "resources", "parallel", "feature_budget"),
    }
)


class JobsConfig(Config):
    """For verbs whose work is a list of jobs."""

    engine: Annotated[Literal["local", "ray"], Parameter(group=RUNNING)] = Field(
        "local", description="Where jobs run: on this machine, or on the Ray cluster at $RAY_ADDRESS (else its own)."
    )
    workers: Annotated[int, Parameter(group=RUNNING)] = Field(1, ge=1, description="Jobs at a time.")
    retries: Annotated[int, Parameter(group=RUNNING)] = Field(
        3, ge=0, description="Times a job is tried again when its worker is lost."
    )
    resources: Annotated[tuple[str, ...], Parameter(group=RUNNING, negative="")] = Field(
        (),
        description="What Ray sets aside for each job, e.g. gpus=0.5,memory=4GB; cpus is 1, other names are the "
        "cluster's own.",
    )

    @model_validator(mode="after")
    def _jobs(self) -> Self:
        if self.resources and self.engine != "ray":
            raise ValueError("--resources is for --engine ray; jobs on this machine share it as they are")
        resources_of(self.resources)
        return self


def resources_of(wish: Sequence[str]) -> dict[str, float]:
    """Amounts by name, memory in bytes.

    >>> resources_of(["gpus=0.5", "memory=4GB"])
    {'gpus': 0.5, 'memory': 4000000000}
    """
    found: dict[str, float] = {}
    for text in wish:
        name, _, amount = text.partition("=")
        value = bytes_of(amount) if name == "memory" else _number(amount)
        if not name or not value or name in ("CPU", "GPU") or (name != "memory" and not _shared(value)):
            raise ValueError(
                f"--resources was given '{text}'; it takes NAME=AMOUNT, such as gpus=0.5 or memory=4GB: a whole number "
                "or a share of one (from 0.0001), of cpus, gpus, memory or what the cluster itself names"
            )
        found[name] = value
    return found


def _shared(amount: float) -> bool:
    """Whether Ray can deal it out: whole ones, or a part of one."""
    return 1e-4 <= amount < 1 or amount == int(amount)


def bytes_of(text: str) -> int | None:
    """A size in bytes; None where it is none.

    >>> bytes_of("1.5GB"), bytes_of("800"), bytes_of("much")
    (1500000000, 800, None)
    """
    units = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
    text = text.strip().lower()
    unit = units.get(text[-2:], 0)
    value = _number(text[:-2] if unit else text)
    return int(value * (unit or 1)) if value else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None

"""The table of verbs that make runs: settings class and method of each; nothing heavy is imported until one is run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from budwood.errors import ConfigError, nearest

if TYPE_CHECKING:
    from budwood.config.base import Config
    from budwood.data.task import Task
    from budwood.methods.result import Result


@dataclass(frozen=True)
class Verb:
    """One verb: where its settings class and its method live, as "module:name"."""

    name: str
    config: str
    method: str
    estimate: str  # what --dry-run prints
    models: bool = True  # whether it is given models (else artefacts only)

    @property
    def settings(self) -> type[Config]:
        """The settings class."""
        found: type[Config] = _load(self.config)
        return found


VERBS = {
    v.name: v
    for v in (
        Verb(
            "finetune",
            "budwood.config.finetune:FinetuneConfig",
            "budwood.methods.finetune:finetune",
            "budwood.methods.estimate:finetune",
        ),
        Verb(
            "evaluate",
            "budwood.config.finetune:EvaluateConfig",
            "budwood.methods.evaluate:evaluate",
            "budwood.methods.estimate:evaluate",
        ),
        Verb(
            "fisher",
            "budwood.config.fisher:FisherConfig",
            "budwood.methods.fisher:fisher",
            "budwood.methods.estimate:fisher",
        ),
        Verb(
            "linear",
            "budwood.config.linear:LinearConfig",
            "budwood.methods.linear.run:linear",
            "budwood.methods.linear.estimate:linear",
        ),
        Verb(
            "fisher compare",
            "budwood.config.compare:FisherCompareConfig",
            "budwood.methods.fisher_compare:fisher_compare",
            "budwood.methods.estimate:comparison",
            models=False,
        ),
        Verb(
            "weights compare",
            "budwood.config.compare:WeightsCompareConfig",
            "budwood.methods.weights_compare:weights_compare",
            "budwood.methods.estimate:comparison",
        ),
        Verb(
            "inject",
            "budwood.config.inject:InjectConfig",
            "budwood.studies.inject:inject",
            "budwood.studies.inject:estimate",
        ),
        Verb(
            "graft learn",
            "budwood.config.graft:GraftLearnConfig",
            "budwood.methods.graft.learn:learn",
            "budwood.methods.graft.estimate:learn",
        ),
        *(
            Verb(
                f"graft {word}",
                f"budwood.config.graft:Graft{word.title()}Config",
                f"budwood.methods.graft.compare:{word}",
                "budwood.methods.graft.estimate:compare",
            )
            for word in ("overlap", "stitch", "subtract")
        ),
        *(
            Verb(
                f"graft {word}",
                "budwood.config.graft:GraftStudyConfig",
                f"budwood.studies.grafting:{word}",
                "budwood.methods.graft.estimate:compare",
            )
            for word in ("localise", "multitask", "continual")
        ),
        Verb(
            "probe",
            "budwood.config.probe:ProbeConfig",
            "budwood.methods.probe.verb:probe",
            "budwood.methods.probe.estimate:probe",
        ),
        *(
            Verb(
                f"influence {part}",
                f"budwood.config.influence:{config}",
                f"budwood.methods.influence.{part}:{part}",
                f"budwood.methods.influence.estimate:{part}",
            )
            for part, config in (("fit", "FitConfig"), ("score", "ScoreConfig"))
        ),
        Verb(
            "influence index",
            "budwood.config.influence:IndexConfig",
            "budwood.methods.influence.index:index",
            "budwood.methods.influence.index:estimate",
        ),
        Verb(
            "influence import",
            "budwood.config.influence:ImportConfig",
            "budwood.methods.influence.foreign:bring",
            "budwood.methods.influence.foreign:estimate",
            models=False,
        ),
        Verb(
            "influence self",
            "budwood.config.influence:SelfConfig",
            "budwood.methods.influence.itself:itself",
            "budwood.methods.influence.estimate:itself",
        ),
        *(
            Verb(
                f"validate {part}",
                f"budwood.config.validate:{config}",
                f"budwood.evaluation.{module}:validate_{part}",
                f"budwood.evaluation.estimate:{part}",
            )
            for part, config, module in (
                ("lds", "LdsConfig", "datamodel"),
                ("counterfactual", "RemovalConfig", "counterfactual"),
                ("brittleness", "RemovalConfig", "counterfactual"),
                ("recall", "RecallConfig", "recall"),
                ("mislabel", "MislabelConfig", "mislabel"),
            )
        ),
    )
}


def verb_named(name: str) -> Verb:
    """The verb, or an error with the nearest name."""
    if name not in VERBS:
        raise ConfigError(
            f"There is no verb '{name}' that makes runs.{nearest(name, VERBS)} Known: {', '.join(VERBS)}."
        )
    return VERBS[name]


def run_verb(name: str, cfg: Any, models: Sequence[str], task: Task | None = None) -> Result:
    """Carry out one verb with complete settings."""
    from budwood.methods.session import carry_out

    method = _Lazy(verb_named(name).method)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # torchrun
        from budwood.methods.lockstep import in_step

        found = in_step(name, cfg, method, lambda own, work: carry_out(name, own, models, work, task))
        if found is None:
            raise SystemExit(0)  # the first process speaks for all
        return found
    return carry_out(name, cfg, models, method, task)


def estimate(name: str, cfg: Any, models: Sequence[str]) -> dict[str, Any]:
    """Parameters, FLOPs, bytes and predicted seconds of what `run_verb` would do."""
    from budwood.methods.session import prepare, with_seeds

    refs, task = prepare(with_seeds(cfg), models, None)
    figures: dict[str, Any] = _load(verb_named(name).estimate)(with_seeds(cfg), refs, task)
    return figures


@dataclass(frozen=True)
class _Lazy:
    """A method that is imported when it is called: a finished run answers without importing torch."""

    dotted: str

    def __call__(self, session: Any) -> dict[str, Any]:
        metrics: dict[str, Any] = _load(self.dotted)(session)
        return metrics


def _load(dotted: str) -> Any:
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)

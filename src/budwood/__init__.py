"""budwood: where does a skill live in a language model?

>>> import budwood as bw
>>> bw.task("tiny-sentiment").labels
('negative', 'positive')

The functions are the verbs of the command line with the same settings, e.g.
`bw.finetune("tiny-bert", "tiny-sentiment", mode="prompt", shots=16)`. Importing budwood does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from budwood.data.task import Task
    from budwood.methods.influence.answer import Influence
    from budwood.methods.result import Result
    from budwood.params.graft import Graft

__all__ = [
    "Graft",
    "evaluate",
    "finetune",
    "fisher",
    "graft",
    "influence",
    "inject",
    "linear",
    "probe",
    "task",
    "validate",
]


def task(name: str, **settings: Any) -> Task:
    """A task by any reference the command line takes; settings as in `budwood finetune --help`, group Data."""
    from budwood.config.data import DataConfig
    from budwood.config.options import build_settings
    from budwood.data.source import load_task

    return load_task(build_settings(DataConfig, {**settings, "task": name}, "task()"))


def finetune(model: Any, task: str | Task, **settings: Any) -> Result:
    """Teach a model a task and score it; the result has `.metrics`, `.table`, `.model` and `.plot()`."""
    return _run("finetune", model, task, settings)


def evaluate(model: Any, task: str | Task, **settings: Any) -> Result:
    """Score a model on a task as it is."""
    return _run("evaluate", model, task, settings)


def fisher(model: Any, task: str | Task, **settings: Any) -> Result:
    """Diagonal Fisher information of a model on a task; the artefact is `result.run / "fisher.safetensors"`."""
    return _run("fisher", model, task, settings)


def linear(model: Any, task: str | Task, **settings: Any) -> Result:
    """Linear classifiers on frozen features; `.metrics["results"]` has one row per features and prompt."""
    return _run("linear", model, task, settings)


def inject(model: Any, task: str | Task, **settings: Any) -> Result:
    """Teach a model a new skill in every way of keeping others; `.metrics` has cells, front, hypervolume and knee."""
    return _run("inject", model, task, settings)


def graft(base: Any, tuned: Any, task: str | Task, **settings: Any) -> Result:
    """The few weights of `tuned` that carry the skill (`graft learn`); the file is `result.metrics["file"]`."""
    return _run("graft learn", [base, tuned], task, settings)


def influence(model: Any, task: str | Task, **settings: Any) -> Influence:
    """Which training rows made the model's answers: `.scores`, `.top(query=79)`, `.bottom(79)`, `.plot(query=79)`."""
    from budwood.data.task import Task
    from budwood.methods.influence.answer import Influence

    result = _run("influence score", model, task, settings)
    return Influence(**vars(result), task=task if isinstance(task, Task) else None)


def probe(models: Any, task: str | Task, **settings: Any) -> Result:
    """A probe on every layer of one model or of a list of models; layers are in `result.metrics["results"]`."""
    return _run("probe", models, task, settings)


def validate(check: str, model: Any, task: str | Task, **settings: Any) -> Result:
    """Check scores by retraining; `check` is lds, counterfactual, brittleness, mislabel or recall."""
    return _run(f"validate {check}", model, task, settings)


def __getattr__(name: str) -> Any:
    if name == "Graft":  # Graft.load(path).apply(model)
        from budwood.params.graft import Graft

        return Graft
    raise AttributeError(f"module 'budwood' has no attribute {name!r}")


def _run(verb: str, model: Any, task: str | Task, settings: dict[str, Any]) -> Result:
    from budwood.studies.api import run

    return run(verb, model, task, settings)

"""The verbs as Python functions: keyword settings are checked as flags are, models may be objects."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from budwood.config.options import field_names
from budwood.data.task import Task
from budwood.errors import ConfigError, ModelError, nearest
from budwood.methods.result import Result
from budwood.store.files import cache_dir
from budwood.studies.verbs import run_verb, verb_named


def run(verb: str, model: Any, task: str | Task, settings: dict[str, Any]) -> Result:
    """Carry out a verb from Python; short option names such as `lr` and `epochs` work as on the command line."""
    cls = verb_named(verb).settings
    names = field_names(cls)
    full: dict[str, Any] = {"progress": "none"}
    for key, value in settings.items():
        if key not in names:
            raise ConfigError(f"{verb}() has no setting '{key}'.{nearest(key, names)}")
        full[names[key]] = tuple(value) if isinstance(value, list) else value
    name = task.name if isinstance(task, Task) else task
    try:
        cfg = cls(**{**full, "task": name})
    except ValidationError as e:
        problem = e.errors()[0]
        raise ConfigError(f"{verb}(): {'.'.join(map(str, problem['loc']))}: {problem['msg']}.") from e
    return run_verb(verb, cfg, [reference(model)], task if isinstance(task, Task) else None)


def reference(model: Any) -> str:
    """A model reference: names and results as they are; a loaded Hugging Face model is written to the cache once."""
    if isinstance(model, str):
        return model
    if isinstance(model, Result):
        return str(model.run)
    if hasattr(model, "__fspath__"):
        return str(model)
    if not hasattr(model, "save_pretrained"):
        raise ModelError(
            f"A {type(model).__name__} is no model. Give a name, a directory, a Result or a Hugging Face model."
        )
    from transformers import AutoTokenizer

    from budwood.models.load import model_hash

    place = cache_dir() / "models" / model_hash(model)
    if not (place / "tokenizer_config.json").exists():
        from budwood.store.files import writing_directory

        origin = getattr(model, "name_or_path", "") or model.config._name_or_path
        with writing_directory(place) as part:
            model.save_pretrained(part)
            AutoTokenizer.from_pretrained(origin).save_pretrained(part)
    return str(place)

"""The verbs as Python functions: keyword settings are checked as flags are, models may be objects."""

from __future__ import annotations

from typing import Any

from budwood.config.options import build_settings, in_words
from budwood.data.task import Task
from budwood.errors import ConfigError, ModelError
from budwood.methods.result import Result
from budwood.store.files import cache_dir
from budwood.studies.verbs import run_verb, verb_named


def run(verb: str, model: Any, task: str | Task, settings: dict[str, Any]) -> Result:
    """Carry out a verb from Python; short option names such as `lr` and `epochs` work as on the command line."""
    name = task.name if isinstance(task, Task) else task
    if isinstance(task, Task):
        files = {
            "data_dir",
            "train_file",
            "validation_file",
            "test_file",
            "split",
            "group",
            "text",
            "text_pair",
            "label",
        }
        if clash := files & set(settings):
            raise ConfigError(
                f"{verb}() got a task object, which has its rows: '{min(clash)}' has no effect. Leave it away."
            )
    known = verb_named(verb).settings
    cfg = build_settings(known, in_words(known, {"progress": "none", **settings, "task": name}), f"{verb}()")
    models = model if isinstance(model, list | tuple) else [model]
    return run_verb(verb, cfg, [reference(m) for m in models], task if isinstance(task, Task) else None)


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

    from budwood.models.identity import model_hash

    place = cache_dir() / "models" / model_hash(model)
    if not (place / "tokenizer_config.json").exists():
        from budwood.store.files import writing_directory

        origin = getattr(model, "name_or_path", "") or model.config._name_or_path
        with writing_directory(place) as part:
            model.save_pretrained(part)
            AutoTokenizer.from_pretrained(origin).save_pretrained(part)
    return str(place)

"""Recipes: a YAML list of verbs, each step a run of its own, later steps naming earlier ones."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from budwood.config.options import as_flag, build_settings, field_names
from budwood.errors import ConfigError, nearest
from budwood.store.files import read_json
from budwood.studies.verbs import run_verb, verb_named

RECIPES = Path(__file__).parents[1] / "recipes"
REFERENCE = re.compile(r"\{(\w[\w.-]*)\}")
EVERY = re.compile(r"\{(\w[\w.-]*-)\*\}")


@dataclass(frozen=True)
class Wishes:
    """What the command line asks of a recipe."""

    small: bool = False
    data_dir: Path | None = None
    model: str | None = None
    out: Path | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Step:
    """One verb with its settings; `models` may name earlier steps as {id}."""

    id: str
    verb: str
    models: tuple[str, ...]
    settings: Mapping[str, Any]
    says: str = ""


@dataclass(frozen=True)
class Script:
    """A recipe ready to run."""

    name: str
    about: str
    steps: tuple[Step, ...]
    out: Path


def known_recipes() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(p.stem for p in RECIPES.glob("*.yaml"))


def read_recipe(name: str, wishes: Wishes | None = None) -> Script:
    """A shipped recipe or a YAML file, checked as a whole before its first step runs.

    The file has `about`, `defaults` (settings of every step), `small` (settings that replace them with --small) and
    `steps`: a list of {id, verb, model or models, and the verb's own settings}. A step with `matrix` (setting: list of
    values) stands for one step per combination, called id-value-value; "{id-*}" in a list names them all.
    """
    import yaml

    wishes = wishes or Wishes()
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"There is no recipe '{name}'.{nearest(name, known_recipes())} Known: {', '.join(known_recipes())}."
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as e:
        raise ConfigError(f"{path} is not YAML: {e}") from e
    if not isinstance(content, dict) or not isinstance(content.get("steps"), list):
        raise ConfigError(
            f"{path} is no recipe: it needs a list 'steps', each with 'id', 'verb' and the verb's settings."
        )
    unknown = set(content) - {"name", "about", "defaults", "small", "steps"}
    if unknown:
        raise ConfigError(
            f"Unknown key '{min(unknown)}' in {path}. A recipe has name, about, defaults, small and steps."
        )
    steps = _steps(content, path, wishes)
    title = str(content.get("name", path.stem))
    size = "-small" if wishes.small else ""
    script = Script(title, str(content.get("about", "")), steps, wishes.out or Path("runs") / f"recipe-{title}{size}")
    _check(script, path)
    return script


def _steps(content: Mapping[str, Any], path: Path, wishes: Wishes) -> tuple[Step, ...]:
    shared = {**(content.get("defaults") or {}), **((content.get("small") or {}) if wishes.small else {})}
    steps = []
    used = {"model", "models"}
    for place, own in enumerate(_spread(content["steps"], path, wishes.small)):
        verb, name, says = str(own.pop("verb", "")), str(own.pop("id", f"step{place + 1}")), str(own.pop("says", ""))
        models = own.pop("models", own.pop("model", shared.get("models", shared.get("model", ()))))
        models = [models] if isinstance(models, str) else list(models)
        if not verb_named(verb).models:
            models = []
        elif not models:
            raise ConfigError(
                f"{path}: step '{name}' ({verb}) has no model. Add `model: tiny-bert` or `model: '{{earlier}}'`."
            )
        if wishes.model:
            models = [m if REFERENCE.search(m) else wishes.model for m in models]
        fields = field_names(verb_named(verb).settings)
        fitting = {k: v for k, v in shared.items() if k.replace("-", "_") in fields}
        used |= set(fitting)
        settings: dict[str, Any] = {**fitting, **own}
        if wishes.data_dir is not None and "data_dir" in fields:
            settings["data_dir"] = (wishes.data_dir,)
        if wishes.overwrite:
            settings["overwrite"] = True
        steps.append(Step(name, verb, tuple(map(str, models)), settings, says))
    if lost := sorted(set(shared) - used):
        known = {n for s in steps for n in field_names(verb_named(s.verb).settings)}
        raise ConfigError(
            f"{path}: no step has the setting '{lost[0]}' of `defaults` or `small`.{nearest(lost[0], known)}"
        )
    return tuple(steps)


def _spread(raw: list[Mapping[str, Any]], path: Path, small: bool) -> list[dict[str, Any]]:
    """The steps with every `matrix` written out, and "{id-*}" replaced by all steps it stands for."""
    steps: list[dict[str, Any]] = []
    for given in raw:
        own = {**given, **((given.get("small") or {}) if small else {})}
        own.pop("small", None)
        matrix = own.pop("matrix", None) or {}
        if not isinstance(matrix, Mapping) or not all(isinstance(v, list) and v for v in matrix.values()):
            raise ConfigError(f"{path}: `matrix` of step '{own.get('id')}' must give a list for every setting.")
        if matrix and "id" not in own:
            raise ConfigError(f"{path}: a step with `matrix` needs an id, from which those of its runs are made.")
        own = {k: _all_of(v, [s["id"] for s in steps if "id" in s]) for k, v in own.items()}
        for values in product(*matrix.values()):
            name = {"id": "-".join(map(str, (own["id"], *values)))} if matrix else {}
            steps.append({**own, **dict(zip(matrix, values, strict=True)), **name})
    return steps


def _all_of(value: Any, known: list[str]) -> Any:
    """A list in which "{id-*}" became every known step of that beginning.

    >>> _all_of(["{tune-*}", "tiny-bert"], ["tune-1", "tune-2", "fisher"])
    ['{tune-1}', '{tune-2}', 'tiny-bert']
    """
    if not isinstance(value, list):
        return value
    out: list[Any] = []
    for x in value:
        found = EVERY.fullmatch(x) if isinstance(x, str) else None
        out += [f"{{{n}}}" for n in known if n.startswith(found[1])] if found else [x]
    return out


def _check(script: Script, path: Path) -> None:
    """Every step's settings are complete and every reference names an earlier step."""
    seen: set[str] = set()
    for step in script.steps:
        if step.id in seen:
            raise ConfigError(f"{path}: two steps are called '{step.id}'. Give each its own id.")
        for name in (n for m in (*step.models, *_named(step)) for n in REFERENCE.findall(m)):
            if name not in seen:
                raise ConfigError(
                    f"{path}: step '{step.id}' names '{{{name}}}', which is no earlier step.{nearest(name, seen)}"
                )
        _settings(step, script.out, path)
        seen.add(step.id)


def _named(step: Step) -> list[str]:
    """Every value among a step's settings that names an earlier step's run."""
    given = [x for v in step.settings.values() for x in (v if isinstance(v, list | tuple) else [v])]
    return [x for x in given if isinstance(x, str) and REFERENCE.fullmatch(x)]


def _found(step: Step, out: Path) -> dict[str, Any]:
    """A step's settings with the runs of earlier steps in the place of their names, as with models."""
    return {
        k: [_placed(x, out) for x in v] if isinstance(v, list | tuple) else _placed(v, out)
        for k, v in step.settings.items()
    }


def _placed(value: Any, out: Path) -> Any:
    found = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return str(out / found[1]) if found else value


def _settings(step: Step, out: Path, path: Path | None = None) -> Any:
    who = f"{path}: step '{step.id}' ({step.verb})" if path else f"Step '{step.id}' ({step.verb})"
    return build_settings(verb_named(step.verb).settings, {**_found(step, out), "out": out / step.id}, who)


def commands(script: Script) -> list[str]:
    """The steps as command lines."""
    lines = []
    for step in script.steps:
        models = [REFERENCE.sub(lambda m: str(script.out / m[1]), x) for x in step.models]
        settings = _found(step, script.out)
        for words in ("fishers", "source"):  # given as words, not as options
            given = settings.pop(words, [])
            models += [str(x) for x in (given if isinstance(given, list | tuple) else [given])]
        flags = [w for k, v in settings.items() for w in as_flag(k, v)]
        lines.append(shlex.join(["budwood", *step.verb.split(), *models, *flags, "--out", str(script.out / step.id)]))
    return lines


def run_recipe(script: Script) -> list[dict[str, Any]]:
    """Run every step that is not done yet, in order; one row per step."""
    rows = []
    for step in script.steps:
        models = [REFERENCE.sub(lambda m: str(script.out / m[1]), x) for x in step.models]
        result = run_verb(step.verb, _settings(step, script.out), models)
        m = result.metrics
        cost = read_json(result.run / "cost.json")
        rows.append(
            {
                "step": step.id,
                "says": step.says,
                "verb": step.verb,
                "model": " ".join(step.models),
                "task": m["task"],
                "metric": m.get("metric", ""),
                "score": m.get("score"),
                "seconds": cost.get("seconds"),
                "run": str(result.run),
                "metrics": m,
            }
        )
    return rows

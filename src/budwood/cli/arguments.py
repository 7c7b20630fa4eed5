"""Words of the command line before they are parsed: YAML settings and comma-separated lists become plain options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from budwood.config.base import Config
from budwood.config.options import field_names, is_list, is_switch, option_names, problems
from budwood.errors import ConfigError, nearest


def expand(words: Sequence[str], settings: type[Config]) -> list[str]:
    """The words with --config FILE replaced by the file's settings and lists split at their commas.

    Options on the command line win over the file.

    >>> from budwood.config.run import RunConfig
    >>> expand(["--seeds", "1,2", "--seed=3"], RunConfig)
    ['--seeds', '1', '--seeds', '2', '--seed', '3']
    """
    by_option = {o: (name, f) for name, f in settings.model_fields.items() for o in option_names(name, f)}
    loose: list[str] = []  # models, and what nobody knows
    spelled: dict[str, list[str]] = {}
    files: list[str] = []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option == "--config":
            files.append(value if equals else next(rest, ""))
        elif option not in by_option:
            loose.append(word)
        else:
            name, field = by_option[option]
            own = [word] if is_switch(field) else _spell(option, value if equals else next(rest, None), field)
            # a list grows, anything else is what was said last
            spelled[name] = [*spelled.get(name, []), *own] if is_list(field) else own
    positional = bool(loose) and not loose[0].startswith("-")
    out = [*loose, *(w for own in spelled.values() for w in own)]
    for file in files:
        out += _from_yaml(Path(file), settings, set(spelled), positional)
    return out


def _spell(option: str, value: str | None, field: FieldInfo) -> list[str]:
    if value is None:
        return [option]
    if is_list(field):
        return [w for v in value.split(",") if v.strip() for w in _pair(option, v.strip())]
    return _pair(option, value)


def _pair(option: str, value: str) -> list[str]:
    """An option and its value; "--lr -1" must reach the range check as a value, not as an unknown option."""
    return [f"{option}={value}"] if value.startswith("-") else [option, value]


def _from_yaml(file: Path, settings: type[Config], given: set[str], positional: bool) -> Iterator[str]:
    names = field_names(settings)
    for key, value in read_yaml(file).items():
        plain = str(key).replace("-", "_")
        if plain in ("model", "models"):
            if not positional:
                yield from [value] if isinstance(value, str) else value
            continue
        if plain not in names:
            raise ConfigError(
                f"Unknown key '{key}' in {file}.{nearest(plain, names)} `budwood VERB --help` lists them."
            )
        name = names[plain]
        if name in given or value is None:
            continue
        option = option_names(name, settings.model_fields[name])[0]
        if isinstance(value, bool):
            if value:
                yield option
            continue
        for v in value if isinstance(value, list) else [value]:
            yield f"{option}={v}"


def read_yaml(file: Path) -> dict[str, Any]:
    """A YAML mapping from a file; anything else is an error that says so."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise ConfigError(f"There is no file {file} (given by --config). Give the path of a YAML file.") from e
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file} cannot be read ({e}). Give a UTF-8 YAML file.") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{file} is not YAML: {e}") from e
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds a {type(content).__name__}, not settings. Write one 'key: value' per line.")
    return content


def explain(e: Exception, verb: str) -> str:
    """One paragraph for a wrong option, without the vocabulary of the libraries that found it."""
    inner = next((x for x in (e, e.__cause__, e.__context__) if isinstance(x, ValidationError)), None)
    help_page = f"`budwood {verb} --help` shows what can be given."
    if inner is None:
        return f"{' '.join(str(e).split())} {help_page}"
    return f"{problems(inner)} {help_page}"

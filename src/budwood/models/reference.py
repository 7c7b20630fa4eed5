"""Model references: what a person types, resolved to files before torch is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from budwood.data.hub import PATIENCE, offline_mode, reachable
from budwood.errors import ModelError, StoreError, nearest
from budwood.store.files import digest, stamps
from budwood.store.index import find_run

Kind = Literal["shipped", "directory", "adapter", "run", "hub", "graft"]

SHIPPED = Path(__file__).parent / "shipped"
NAMES = ("tiny-bert", "tiny-gpt")
GRAFTS = re.compile(r"(?P<base>.*?)(?P<grafts>(?:\+[^+]*\.graft)*)", re.DOTALL)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)


@dataclass(frozen=True)
class ModelRef:
    """A model that can be loaded. `path` is a Hugging Face directory (None: still on the hub)."""

    text: str
    kind: Kind
    path: Path | None = None
    hub_name: str | None = None
    revision: str | None = None
    grafts: tuple[Path, ...] = ()
    model_type: str | None = None
    base: ModelRef | None = None  # of an adapter
    run: Path | None = None  # the run directory, of a run
    trust_remote_code: bool = False
    force: bool = False  # put grafts on whatever model this is

    @property
    def name(self) -> str:
        """A short name for tables and directories.

        >>> ModelRef("../models/bert-small/", "directory", Path("../models/bert-small")).name
        'bert-small'
        """
        base, grafts = split_grafts(self.text)
        short = Path(base.rstrip("/")).name if self.kind != "hub" else base.replace("/", "--")
        return "+".join([short.removeprefix("run:"), *(Path(g).stem for g in grafts)])

    @property
    def source(self) -> str:
        """What Hugging Face loaders are given."""
        return str(self.path) if self.path is not None else str(self.hub_name)


@dataclass(frozen=True)
class Where:
    """Where and how references are looked up."""

    runs_dir: Path
    revision: str | None
    offline: bool
    trust_remote_code: bool


def split_grafts(reference: str) -> tuple[str, tuple[str, ...]]:
    """The base and the patches: a `+` splits only before a part that ends in `.graft`.

    >>> split_grafts("c++/bert+rte.graft+sst2.graft")
    ('c++/bert', ('rte.graft', 'sst2.graft'))
    """
    found = GRAFTS.fullmatch(reference)
    assert found is not None  # both groups may be empty, so every text matches
    return found["base"], tuple(found["grafts"].split("+")[1:])


def resolve(
    reference: str,
    *,
    runs_dir: Path = Path("runs"),
    revision: str | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
    force: bool = False,
) -> ModelRef:
    """The model behind a reference, found and checked; nothing heavy is imported and no weights are read."""
    where = Where(Path(runs_dir), revision, offline, trust_remote_code)
    base, grafts = split_grafts(reference.strip())
    if not base:
        raise ModelError(
            f"'{reference}' names no model. Give one of {', '.join(NAMES)}, a directory, a run or a hub name."
        )
    ref = _resolve_base(base, where)
    return replace(ref, text=reference.strip(), grafts=(*ref.grafts, *(_graft(g) for g in grafts)), force=force)


def _resolve_base(text: str, where: Where) -> ModelRef:
    if text.startswith("run:"):
        return _run(text, _run_by_id(text.removeprefix("run:"), where.runs_dir), where)
    if text in NAMES and not (Path(text) / "config.json").is_file():
        return _shipped(text)
    path = Path(text).expanduser()
    if path.is_dir():
        return _directory(text, path, where)
    if path.suffix == ".graft":
        return ModelRef(text, "graft", grafts=(_graft(text),))
    if path.is_file():
        raise ModelError(
            f"'{text}' is a file; a model is a directory with config.json and model.safetensors. Give the directory."
        )
    looks_like_path = text.startswith((".", "/", "~")) or not HUB_NAME.fullmatch(text)
    if looks_like_path:
        raise ModelError(f"There is no directory '{text}'.{nearest(path.name, _neighbours(path, where))} {_forms()}")
    if (where.runs_dir / text / "run.json").is_file():
        return _run(text, where.runs_dir / text, where)
    return _hub(text, where)


def _forms() -> str:
    return (
        f"A model is one of {', '.join(NAMES)}, a Hugging Face directory, a run (its directory or run:ID) or a hub "
        "name; `budwood models` lists what is at hand."
    )


def _neighbours(path: Path, where: Where) -> list[str]:
    """Names a person may have meant: the shipped models, runs, and directories beside the one given."""
    beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
    return [*NAMES, *_run_ids(where.runs_dir), *beside]


def _shipped(name: str) -> ModelRef:
    path = SHIPPED / name
    if not (path / "config.json").is_file():
        raise ModelError(
            f"The shipped model '{name}' is missing from this installation ({path}). Install budwood again."
        )
    return ModelRef(name, "shipped", path, model_type=_config(path).get("model_type"))


def _directory(text: str, path: Path, where: Where) -> ModelRef:
    if (path / "run.json").is_file():
        return _run(text, path, where)
    if (path / "adapter_config.json").is_file():
        return _adapter(text, path, where)
    model_type = check_directory(path)
    return ModelRef(text, "directory", path, model_type=model_type, trust_remote_code=where.trust_remote_code)


def check_directory(path: Path) -> str:
    """The model type of a Hugging Face directory; a directory that is no model is an error saying what is missing."""
    if not (path / "config.json").is_file():
        inside = sorted(p.name for p in path.glob("checkpoint-*") if (p / "config.json").is_file())
        hint = f" It holds {', '.join(inside[:5])}: give one of these." if inside else ""
        raise ModelError(
            f"'{path}' is no model: config.json is missing.{hint} A Hugging Face directory holds config.json, "
            "model.safetensors and the tokenizer's files (as save_pretrained writes them)."
        )
    model_type = _config(path).get("model_type")
    if not model_type:
        raise ModelError(f"'{path / 'config.json'}' names no \"model_type\", so the architecture is unknown. Add it.")
    _check_weights(path)
    return str(model_type)


def _check_weights(path: Path) -> None:
    for single in ("model.safetensors", "pytorch_model.bin"):  # transformers reads .bin with weights_only=True
        if (path / single).is_file():
            return
        index = path / f"{single}.index.json"
        if index.is_file():
            shards = set(_json(index).get("weight_map", {}).values())
            lost = sorted(s for s in shards if not (path / s).is_file())
            if lost:
                raise ModelError(f"'{path}' is incomplete: {lost[0]} is missing ({len(lost)} of {len(shards)} shards).")
            return
    others = sorted(
        p.name for p in path.iterdir() if p.suffix in (".h5", ".msgpack", ".gguf", ".pt", ".pth", ".ckpt", ".bin")
    )
    if others:
        raise ModelError(
            f"'{path}' has its weights only as {others[0]}, which is not read here. Load them where they were made and "
            "write them with `model.save_pretrained(DIR)` (safetensors)."
        )
    raise ModelError(f"'{path}' is no model: it has config.json but no weights (model.safetensors).")


def _adapter(text: str, path: Path, where: Where) -> ModelRef:
    if not any((path / f"adapter_model.{end}").is_file() for end in ("safetensors", "bin")):
        raise ModelError(f"'{path}' is an adapter without weights: adapter_model.safetensors is missing.")
    base = _json(path / "adapter_config.json").get("base_model_name_or_path")
    if not base:
        raise ModelError(
            f"'{path / 'adapter_config.json'}' does not name its base model. Set \"base_model_name_or_path\" to a "
            "directory or hub name."
        )
    beside = path / base
    own = replace(where, revision=_json(path / "adapter_config.json").get("revision"))
    try:
        base_ref = _resolve_base(str(beside) if beside.is_dir() else base, own)
    except ModelError as error:
        raise ModelError(f"The base of adapter '{path}' cannot be used. {error}") from error
    return ModelRef(text, "adapter", path, model_type=base_ref.model_type, base=base_ref)


def _run(text: str, run: Path, where: Where) -> ModelRef:
    model = run / "model"
    patches = sorted(run.glob("*.graft"))
    if not model.is_dir() and len(patches) == 1:
        return ModelRef(text, "graft", grafts=(patches[0],), run=run)
    if not model.is_dir():
        verb = _json(run / "run.json").get("verb", "?") if (run / "run.json").is_file() else "?"
        raise ModelError(
            f"The run '{run}' (verb '{verb}') holds no model/ directory. Give a run that made a model and is done "
            "(finetune, inject, graft stitch)."
        )
    inner = _directory(str(model), model, where)
    return replace(inner, text=text, kind="run" if inner.kind == "directory" else inner.kind, run=run)


def _run_ids(runs_dir: Path) -> list[str]:
    return sorted(p.parent.name for p in runs_dir.glob("*/run.json")) if runs_dir.is_dir() else []


def _run_by_id(wish: str, runs_dir: Path) -> Path:
    try:
        return find_run(f"run:{wish}", runs_dir)
    except StoreError as error:
        raise ModelError(str(error)) from None


def _graft(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.exists():
        beside = [p.name for p in path.parent.glob("*.graft")] if path.parent.is_dir() else []
        raise ModelError(
            f"There is no graft '{text}'.{nearest(path.name, beside)} `graft learn` writes NAME.graft files."
        )
    return path


def _hub(name: str, where: Where) -> ModelRef:
    found = _cached(name, where.revision) or _downloaded(name, where)
    kind, trust = check_directory(found), where.trust_remote_code
    return ModelRef(name, "hub", found, name, where.revision, model_type=kind, trust_remote_code=trust)


def _downloaded(name: str, where: Where) -> Path:
    """The directory of a hub model that is not in the cache, or why there is none."""
    near = nearest(name, [*NAMES, *_run_ids(where.runs_dir)])
    advice = f"Give a local directory, run `hf download {name}` where there is network, or use tiny-bert."
    missing = f"'{name}' is neither a directory, a run nor in the local hub cache, and"
    if offline_mode(where.offline):
        raise ModelError(f"{missing} work is offline.{near} {advice}")
    if not reachable():
        raise ModelError(f"{missing} the hub does not answer within {PATIENCE:g} s.{near} {advice}")
    return _fetched(name, where.revision, near)


def _cached(name: str, revision: str | None) -> Path | None:
    """The snapshot directory of a hub model in the local cache, if config and weights are there."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    snapshot = Path(config).parent
    weights = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
    return snapshot if any((snapshot / w).is_file() for w in weights) else None


def _fetched(name: str, revision: str | None, near: str) -> Path:
    """The snapshot of a hub model, fetched whole, so that its content names the run from the first time on."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.py"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"The hub does not give '{name}' ({reason}).{near} {_forms()}") from error


def _config(path: Path) -> dict[str, Any]:
    return _json(path / "config.json")


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(
            f"'{path}' is not readable JSON ({error}). The directory is damaged; copy or save it again."
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"'{path}' holds no JSON object. The directory is damaged; copy or save it again.")
    return value


def stamp(ref: ModelRef) -> str:
    """Changes whenever a file of the model does, by names, sizes and times: enough for what one process remembers."""
    files = sorted(p for p in ref.path.iterdir() if p.is_file()) if ref.path else []
    told = [*files, *ref.grafts, *((ref.run / "run.json",) if ref.run else ())]
    return digest([[str(p) for p in told], stamps(told), stamp(ref.base) if ref.base else ""])


def tokenizer_places(ref: ModelRef) -> Iterator[str]:
    """Where the tokenizer may be: with the weights, beside a Trainer's checkpoint, with an adapter's base."""
    if ref.path is None:
        yield ref.source
        return
    beside = (ref.path.parent,) if ref.path.name.startswith("checkpoint-") else ()
    for place in (ref.path, *beside):
        if any((place / f).is_file() for f in TOKENIZER_FILES):
            yield str(place)
    if ref.base is not None:
        yield from tokenizer_places(ref.base)

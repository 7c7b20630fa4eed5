"""Scores and factors of other tools: read as ours, ours written as theirs.

Shapes: Q queries, N training rows, O out, I in (with the bias's 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from budwood.capture.stream import Map
from budwood.config.influence import STRATEGIES, FitConfig, ImportConfig
from budwood.data.task import Task
from budwood.errors import ConfigError, DataError, StoreError
from budwood.methods.influence import factors as made
from budwood.methods.influence.factors import Factors
from budwood.methods.influence.fit import identity
from budwood.methods.influence.scores import Matrix, writing_scores
from budwood.methods.influence.workshop import Shop, open_shop, settings_for
from budwood.methods.session import Session
from budwood.models.reference import ModelRef
from budwood.params import tree
from budwood.params.tree import canonical, prefixes
from budwood.store.files import file_digest, read_json, write_json, write_text, writing_directory

WHOLE = "all_modules"  # kronfluence's key of scores over all modules
PAIRWISE = "pairwise_scores.safetensors"


def bring(session: Session) -> dict[str, Any]:
    """`influence import`: a foreign score matrix as RUN/scores, its rows and columns named by the task's rows."""
    cfg: ImportConfig = session.cfg
    parts = read_scores(cfg.source[0])
    queries = session.task.rows(cfg.query_split or session.task.reported)
    train = session.task.rows(cfg.train_split)
    shape = next(iter(parts.values())).shape
    wanted = (min(len(queries), shape[0]), len(train))
    if shape != wanted or shape[0] > len(queries):
        raise DataError(
            f"{cfg.source[0]} holds scores of {shape[0]} queries x {shape[1]} training rows; task "
            f"'{session.task.name}' has {len(queries)} rows of {cfg.query_split or session.task.reported} and "
            f"{len(train)} of {cfg.train_split}. Give the split and --limit the scores were made with (rows "
            "are matched by their order)."
        )
    sign = -1.0 if cfg.negate else 1.0
    facts = {
        "measurement": "",
        "sign": "positive = the training row helps the query",
        "scale": "as imported",
        "source": cfg.source[0].name,
        "query_split": cfg.query_split or session.task.reported,
        "train_split": cfg.train_split,
    }
    ids = [r.id for r in queries[: shape[0]]], [r.id for r in train]
    with writing_scores(session.run.file("scores"), *ids, facts) as desk:
        whole = parts.get(WHOLE)
        total = whole if whole is not None else np.sum([np.asarray(p, np.float64) for p in parts.values()], axis=0)
        desk.put(Matrix(cfg.name, main=True), slice(None), slice(None), sign * np.asarray(total))
        for module, value in parts.items():
            if module != WHOLE:
                desk.put(Matrix(cfg.name, "", module), slice(None), slice(None), sign * value)
    return {"strategies": [cfg.name], "queries": shape[0], "train": shape[1], "n": shape[1], "damping": []}


def estimate(cfg: ImportConfig, models: tuple[ModelRef, ...], task: Task) -> dict[str, Any]:
    """Figures of an import: what it reads and writes."""
    parts = read_scores(cfg.source[0])
    queries, train = next(iter(parts.values())).shape
    return {"queries": queries, "train": train, "matrices": len(parts), "disk_bytes": 4 * queries * train * len(parts)}


def read_scores(path: Path) -> dict[str, np.ndarray]:
    """Scores [Q, N] by module ("all_modules": the whole) from .npy, .safetensors, a kronfluence or bergson folder."""
    if not path.exists():
        raise StoreError(f"There is no file or directory {path}. Give a .npy, a .safetensors or a scores directory.")
    if (path / "scores.bin").exists():
        found = {WHOLE: _bergson(path)}
    elif path.is_dir():
        if not (path / PAIRWISE).exists():
            raise StoreError(f"{path} holds neither {PAIRWISE} (kronfluence) nor scores.bin (bergson).")
        found = _safetensors(path / PAIRWISE)
    elif path.suffix == ".npy":
        try:
            found = {WHOLE: np.load(path, mmap_mode="r", allow_pickle=False)}
        except ValueError as e:
            raise StoreError(f"{path} cannot be read without running code in it ({e}). Save a plain array.") from e
    elif path.suffix == ".safetensors":
        found = _safetensors(path)
    else:
        raise StoreError(f"{path} is neither .npy nor .safetensors. Convert it: `np.save('scores.npy', scores)`.")
    for name, value in found.items():
        if value.ndim == 3:  # by token of the training rows: their sum is the row's score
            found[name] = value = np.asarray(value, np.float64).sum(2)
        if value.ndim != 2 or value.dtype.kind != "f":
            raise StoreError(f"{path}: '{name}' is {list(value.shape)} of {value.dtype}, not queries x training rows.")
        if not np.isfinite(value).all():
            raise StoreError(f"{path}: '{name}' has {int((~np.isfinite(value)).sum()):,} scores that are not finite.")
    return found


def _safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, framework="pt") as f:
            return {k: f.get_tensor(k).float().numpy() for k in f.keys()}  # noqa: SIM118
    except SafetensorError as e:
        raise StoreError(f"{path} is not a readable safetensors file ({e}).") from e


def _bergson(path: Path) -> np.ndarray:
    """Bergson's structured file: one record per training row (or token), a score and a "written" flag per query."""
    info = read_json(path / "info.json")
    layout: Any = info["dtype"]
    if not isinstance(layout, dict):  # JSON has no tuples
        layout = [tuple(field) for field in layout]
    kind: Any = np.dtype(layout)
    records = np.memmap(path / "scores.bin", dtype=kind, mode="r")
    count = int(info["num_scores"])
    missing = sum(int((~records[f"written_{i}"].astype(bool)).sum()) for i in range(count))
    if missing:
        raise StoreError(f"{path} is unfinished: {missing:,} scores were never written. Let bergson finish first.")
    score_QX = np.stack([np.asarray(records[f"score_{i}"], np.float32) for i in range(count)])
    if not info.get("attribute_tokens"):
        return score_QX
    offsets = np.load(path / "offsets.npy", allow_pickle=False)
    total_Q = np.concatenate([np.zeros((count, 1)), np.cumsum(score_QX, axis=1, dtype=np.float64)], axis=1)
    return (total_Q[:, offsets[1:]] - total_Q[:, offsets[:-1]]).astype(np.float32)


def module_names(model: nn.Module, maps: Sequence[Map]) -> dict[str, str]:
    """The model's own name of every map (kronfluence's keys) by our name."""
    backbone, wrapper = prefixes(model)
    ours = {canonical(f"{n}.weight", backbone, wrapper).removesuffix(".weight"): n for n, _ in model.named_modules()}
    if lost := [m.name for m in maps if m.name not in ours]:
        raise StoreError(
            f"'{lost[0]}' is a matrix that its module applies itself (nn.MultiheadAttention does so with its input "
            f"projections), not a module of its own{f'; so are {len(lost) - 1} more' if len(lost) > 1 else ''}. "
            "kronfluence knows only modules. Leave it out: fit with --modules."
        )
    return {m.name: ours[m.name] for m in maps}


FILES = {  # kronfluence's file -> our tensor of a map; Lambda and covariances are sums there
    "activation_covariance": lambda m: f"A/{m.source}",
    "gradient_covariance": lambda m: f"G/{m.name}",
    "activation_eigenvectors": lambda m: f"qA/{m.source}",
    "activation_eigenvalues": lambda m: f"lA/{m.source}",
    "gradient_eigenvectors": lambda m: f"qG/{m.name}",
    "gradient_eigenvalues": lambda m: f"lG/{m.name}",
    "lambda_matrix": lambda m: f"ekfac/{m.name}",
}
OURS = "budwood.json"  # what kronfluence's files have no place for
COUNTS = {
    "activation_covariance": "num_activation_covariance_processed",
    "gradient_covariance": "num_gradient_covariance_processed",
    "lambda_matrix": "num_lambda_processed",
}


def write_kronfluence(factors: Factors, model: nn.Module, out: Path) -> None:
    """Our EKFAC factors as a kronfluence `factors_NAME` directory that its Analyzer loads.

    It keeps sums and counts, we keep means: means over one example give the same factors. Embeddings and norms, which
    it does not know, stay out.
    """
    maps = [m for m in factors.maps if not m.diagonal]
    names = module_names(model, maps)
    with writing_directory(out) as part:
        for file, key in FILES.items():
            tensors = {names[m.name]: factors.tensor(key(m)).contiguous() for m in maps}
            save_file(tensors, part / f"{file}.safetensors")
        for count in COUNTS.values():
            ones = {names[m.name]: torch.ones(1, dtype=torch.int64) for m in maps}
            save_file(ones, part / f"{count}.safetensors")
        told = {"strategy": "ekfac", "use_empirical_fisher": factors.facts.get("fisher") == "empirical"}
        write_json(part / "factor_arguments.json", told)  # without it the Analyzer does not find the rest
        own = {k: v for k, v in factors.facts.items() if k not in ("evidence", "growth", "skipped", "strategies")}
        write_json(part / OURS, {"of": _digests(part), "facts": own})


def _digests(path: Path) -> dict[str, str]:
    """What the tensors of a directory are."""
    return {f: file_digest(path / f"{f}.safetensors") for f in FILES if (path / f"{f}.safetensors").exists()}


def _noted(path: Path) -> dict[str, Any]:
    """What `write_kronfluence` has noted of these tensors; nothing where they were fitted by others."""
    file = path / OURS
    note: dict[str, Any] = read_json(file) if file.exists() else {"of": {}, "facts": {}}
    return note["facts"] if _digests(path).items() <= note["of"].items() else {}


def is_kronfluence(path: Path) -> bool:
    """Whether a directory holds kronfluence's factors."""
    return any((path / f"{file}.safetensors").exists() for file in ("lambda_matrix", "activation_eigenvectors"))


def read_kronfluence(path: Path, shop: Shop, out: Path) -> Factors:
    """A kronfluence `factors_NAME` directory as factors of our model at `out`; modules are matched by name.

    Its strategies are those whose files are there: ekfac has all of them, kfac no Lambda, diagonal nothing else.
    """
    names, rows = module_names(shop.model, shop.maps), len(shop.train)
    _check_labels(path, shop)
    turned, moments = ((path / f"{f}.safetensors").exists() for f in ("activation_eigenvectors", "lambda_matrix"))
    kind = "ekfac" if turned else "diagonal"
    files = [f for f in FILES if (moments if f == "lambda_matrix" else turned)]
    tensors: dict[str, Tensor] = {}
    for file in files:
        theirs = _tensors(path / f"{file}.safetensors")
        count = _tensors(path / f"{COUNTS[file]}.safetensors") if file in COUNTS else {}
        for m in shop.maps:
            value = _of(theirs, names[m.name], path / file)
            if count:
                # a count has no place among 16-bit numbers
                value = value.double() / _of(count, names[m.name], path / file).double().clamp_min(1)
            if not torch.isfinite(value).all():
                raise StoreError(
                    f"{path}: the {file} of '{names[m.name]}' has numbers that are not finite. Fit it anew."
                )
            key = f"{kind}/{m.name}" if file == "lambda_matrix" else FILES[file](m)
            wanted = _shape(file, m)
            if tuple(value.shape) != wanted:
                raise StoreError(
                    f"{path}: '{names[m.name]}' has a {file} of {list(value.shape)}, and for this model's module it is "
                    f"{list(wanted)}. The factors are of another model."
                )
            tensors.setdefault(key, value.to(shop.like.dtype))
    groups = {"covariance": ("A", "G"), "eigen": ("qA", "lA", "qG", "lG"), "moments": ("ekfac", "diagonal")}
    for file, kinds in groups.items():
        if mine := {k: v for k, v in tensors.items() if k.split("/")[0] in kinds}:
            tree.save(out / f"{file}.safetensors", mine, {"artefact": f"influence {file}", "from": "kronfluence"})
    strategies = ["kfac"] * turned + [kind] * moments
    nothing: dict[str, Any] = {"evidence": {}, "growth": [], "skipped": []}
    fitted = _rows_of_fit(path) if moments else rows
    facts = {"rows": rows, "fit_rows": fitted, "strategies": sorted(strategies), **nothing, **identity(shop)}
    write_text(out / "factors.json", made.facts_json(shop.maps, facts))
    return Factors.open(out)


def _rows_of_fit(path: Path) -> int:
    """How many rows Lambda is of; what `write_kronfluence` leaves are means, as if of one row."""
    if noted := _noted(path):
        return int(noted["fit_rows"])
    return max(int(n.max()) for n in _tensors(path / f"{COUNTS['lambda_matrix']}.safetensors").values())


def _shape(file: str, m: Map) -> tuple[int, ...]:
    """The shape of a map's tensor in one of kronfluence's files."""
    if file == "lambda_matrix":
        return m.out, m.columns
    wide = m.columns if file.startswith("activation") else m.out
    return (wide,) if file.endswith("eigenvalues") else (wide, wide)


def _check_labels(path: Path, shop: Shop) -> None:
    """Refuse factors whose labels are not those asked for: they are part of what the scores are of."""
    if noted := _noted(path):  # kronfluence has no word for exact labels, nor for the model
        if other := made.differing(noted, identity(shop)):
            raise ConfigError(f"The factors in {path} are of another model or other settings:\n" + "\n".join(other))
        return
    file = path / "factor_arguments.json"
    if not file.exists():
        return
    theirs = "empirical" if read_json(file).get("use_empirical_fisher") else "sampled"
    if theirs != shop.labels:
        raise ConfigError(f"The factors in {path} are of {theirs} labels, not {shop.labels}. Give --fisher {theirs}.")


def export(run: Path, out: Path) -> Path:
    """`influence export`: the EKFAC factors of a run as kronfluence's directory `out`."""
    if out.exists():
        raise StoreError(f"{out} is there already. Give the name of a directory that is not.")
    if not (run / "run.json").exists():
        raise StoreError(f"There is no run {run}. Give a run of `influence fit`.")
    found, factors = read_json(run / "run.json"), Factors.open(run)
    shop = open_shop(settings_for(FitConfig(**_own(found["given"])), found["models"][0]))
    factors.check(identity(shop))
    write_kronfluence(factors, shop.model, out)
    return out


def _own(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run of `fit`, `score`, `self` or `index` that its factors depend on."""
    own = {k: v for k, v in given.items() if k in FitConfig.model_fields}
    return {**own, "strategy": [s for s in own.get("strategy", ()) if s in STRATEGIES] or ["ekfac"]}


def _tensors(path: Path) -> Mapping[str, Tensor]:
    if not path.exists():
        raise StoreError(f"There is no {path}: kronfluence's directory of factors is not whole.")
    return tree.load(path)[0]


def _of(tensors: Mapping[str, Tensor], name: str, where: Path) -> Tensor:
    if name not in tensors:
        raise StoreError(f"{where} has no module '{name}'. The factors are of another model, or of fewer modules.")
    return tensors[name]

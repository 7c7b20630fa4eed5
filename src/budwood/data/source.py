"""A task reference becomes a task: found, read, cut, sampled.

Order of search: the shipped world, `arithmetic`, a `task.yaml`, the user's own files, a file or saved folder given as
the task, a public name in the data folders, the hub.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from budwood.config.data import DataConfig, TaskFileConfig
from budwood.data import hub as hubs
from budwood.data.labels import Wanted
from budwood.data.readers import READERS, Harvest
from budwood.data.readers.lines import PICKLED, check_file, refuse_pickle
from budwood.data.readers.passages import is_heading
from budwood.data.readers.table import ROWS, Table, is_saved, read_saved, read_shards, read_table
from budwood.data.registry import PUBLIC, Hub, PublicTask
from budwood.data.split import PARTS, by_source, few_shot, limit, parse_cut
from budwood.data.task import Task, Template
from budwood.data.task_file import read_task_file
from budwood.data.user import tables_to_task
from budwood.errors import DataError, nearest

VARIABLE = "BUDWOOD_DATA"
GENERATED = "arithmetic"
ALIASES = {"dev": "validation", "valid": "validation", "val": "validation", "eval": "validation"}


@dataclass(frozen=True)
class Place:
    """Where a task was found: exactly one of the fields below `name` is set."""

    name: str
    shipped: bool = False
    own: Mapping[str, Path] = field(default_factory=dict)  # the user's files by split, "all" for a single one
    sheet: TaskFileConfig | None = None
    saved: Path | None = None
    folders: tuple[Path, ...] = ()  # of a public task, most likely first
    hub: Hub | None = None


def load_task(cfg: DataConfig) -> Task:
    """The task that the settings name, with its splits, K-shot sample and limits applied."""
    return sampled(_read(locate(cfg), cfg), cfg)


def sampled(task: Task, cfg: DataConfig) -> Task:
    """A task with the K-shot sample and the limits of the settings applied."""
    if cfg.shots is not None:
        task = few_shot(task, cfg.shots, cfg.data_seed or 0)
    return limit(task, cfg.limit, cfg.limit_eval, cfg.data_seed or 0)


def resolve_task(cfg: DataConfig) -> None:
    """Raise what `load_task` would for an unknown name, a missing file or an unreachable hub; reads no rows."""
    locate(cfg)


def shipped_names() -> tuple[str, ...]:
    """Tasks that need no file."""
    from budwood.data import world

    return (*world.NAMES, GENERATED)


def locate(cfg: DataConfig) -> Place:
    """Where the task is; looks at names and files, not into them."""
    parse_cut(cfg.split)
    given = {"train": cfg.train_file, "validation": cfg.validation_file, "test": cfg.test_file}
    own = {split: path for split, path in given.items() if path is not None}
    path = Path(cfg.task)
    if cfg.task in shipped_names():
        _refuse_columns(cfg, "is shipped")
        if own:
            raise DataError(
                f"'{cfg.task}' is a shipped task and has its own rows. Give your files another task name, any word "
                f"will do."
            )
        return Place(cfg.task, shipped=True)
    if path.suffix.lower() in (".yaml", ".yml"):
        return _locate_sheet(path, cfg, own)
    if path.suffix.lower() in (*ROWS, *PICKLED):
        if "train" in own:
            raise DataError(
                f"The training rows are given twice: as --task '{path}' and as --train-file '{own['train']}'. Give one."
            )
        return _locate_own(path.stem, {"train": path, **own})
    if own:
        return _locate_own(path.name or cfg.task, own)
    if path.is_dir() and cfg.task not in PUBLIC:
        return _locate_folder(path)
    if cfg.task in PUBLIC:
        _refuse_columns(cfg, "is a public task")
        return _locate_public(PUBLIC[cfg.task], cfg)
    if hubs.is_hub_id(cfg.task) and not path.parent.is_dir():
        hub = Hub(cfg.task)
        hubs.check_hub(hub, cfg.data_revision, cfg.offline)
        return Place(path.name, hub=hub)
    raise _unknown(cfg.task)


def _unknown(task: str) -> DataError:
    names = (*shipped_names(), *PUBLIC)
    close = nearest(task, names) or nearest(task.lower(), names)
    return DataError(
        f"There is no task '{task}'.{close} A task is a shipped one ({', '.join(shipped_names())}), a public one "
        f"({', '.join(PUBLIC)}), a file ending in {', '.join(ROWS[:6])} or .yaml, a folder saved by `datasets`, or a "
        f"hub name org/name. With --train-file it may be any word."
    )


def _refuse_columns(cfg: DataConfig, why: str) -> None:
    flags = {"--text": cfg.text, "--text-pair": cfg.text_pair, "--label": cfg.label, "--group": cfg.group}
    given = [flag for flag, value in flags.items() if value is not None]
    own = cfg.train_file or cfg.validation_file or cfg.test_file
    if given and not own:
        raise DataError(
            f"{', '.join(given)} names a column of your own file, but '{cfg.task}' {why}. Leave it away, or give your "
            f"file with --train-file."
        )


def _locate_sheet(path: Path, cfg: DataConfig, own: Mapping[str, Path]) -> Place:
    if own:
        raise DataError(f"'{path}' says which files to read, and --{next(iter(own))}-file does too. Give one of them.")
    sheet = read_task_file(path)
    files = sheet.files if isinstance(sheet.files, dict) else {"all": sheet.files}
    if "train" in files and len(files) == 1:
        files = {"all": files["train"]}
    parse_cut(sheet.split or cfg.split)
    found = {split: check_file(path.parent / file) for split, file in files.items()}
    return Place(sheet.name or path.stem, own=found, sheet=sheet)


def _locate_own(name: str, own: Mapping[str, Path]) -> Place:
    for path in own.values():
        if not (path.is_dir() and is_saved(path)):
            check_file(path)
            if path.suffix.lower() not in ROWS:
                raise DataError(
                    f"'{path}' ends in '{path.suffix}'. A file of rows ends in one of "
                    f"{', '.join(ROWS)}.{nearest(path.suffix, ROWS)}"
                )
    order = [split for split in ("train", "validation", "test") if split in own]
    return Place(name, own={"all": own["train"]} if order == ["train"] else {split: own[split] for split in order})


def _locate_folder(path: Path) -> Place:
    """A folder given as the task: saved by `datasets`, Parquet files, or a public set under a name it is known by."""
    if is_saved(path) or any(path.glob("*.parquet")) or any(path.glob("data/*.parquet")):
        return Place(path.name, saved=path)
    for public in PUBLIC.values():
        if path.name.lower() in {name.lower() for name in (public.name, *public.folders)}:
            return Place(public.name, folders=(path,))
    held = sorted(p.name for p in path.iterdir())
    raise DataError(
        f"'{path}' is a folder, but neither one that `datasets` saved nor a public set under its usual name; it holds "
        f"{', '.join(held[:8]) or 'nothing'}. Name the files with --train-file and --validation-file, or the task with "
        f"--task NAME --data-dir '{path.parent}'."
    )


def _locate_public(public: PublicTask, cfg: DataConfig) -> Place:
    folders = data_folders(cfg)
    found = tuple(
        place for folder in folders for name in folder_names(public) if (place := _inside(folder, name)) is not None
    )
    if found:
        return Place(public.name, folders=tuple(dict.fromkeys(found)))
    sought = (
        f"looked for {', '.join(folder_names(public))} in {', '.join(map(str, folders))}"
        if folders
        else "no --data-dir was given"
    )
    if public.hub is None:
        raise DataError(
            f"Task '{public.name}' was not found: {sought}, and no hub id is known for it. Give --data-dir FOLDER."
        )
    try:
        hubs.check_hub(public.hub, cfg.data_revision, cfg.offline)
    except DataError as error:
        raise DataError(f"Task '{public.name}' was not found: {sought}. On the hub: {error}") from None
    return Place(public.name, hub=public.hub)


def data_folders(cfg: DataConfig) -> list[Path]:
    """The folders that hold public sets: the settings' first, then the environment's; a missing one is an error."""
    listed = [Path(p) for p in os.environ.get(VARIABLE, "").split(os.pathsep) if p]
    folders = [Path(p) for entry in cfg.data_dir for p in str(entry).split(os.pathsep) if p] + listed
    for folder in folders:
        if not folder.is_dir():
            source = f"${VARIABLE}" if folder in listed else "--data-dir"
            raise DataError(
                f"{source} names '{folder}', which is no folder. Expected one that holds folders such as glue/SST-2."
            )
    return folders


def folder_names(public: PublicTask) -> tuple[str, ...]:
    """Names under which a task's folder may lie in a data folder, most likely first; compared without case."""
    names = [public.name, *public.folders]
    names += [f"glue/{name}" for name in names] if public.reader in ("glue", "cola") else []
    repository = public.hub.id.split("/")[-1] if public.hub else ""
    if public.hub and repository not in PUBLIC:  # SetFit/sst2 is not what a folder sst2 holds
        names.append(f"{repository}/{public.hub.config}" if public.hub.config else repository)
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(name.lower(), name)
    return tuple(first.values())


def _inside(folder: Path, name: str) -> Path | None:
    for part in name.split("/"):
        inner = {p.name.lower(): p for p in sorted(folder.iterdir(), reverse=True) if p.is_dir()}
        if part.lower() not in inner:
            return None
        folder = inner[part.lower()]
    return folder


def _read(place: Place, cfg: DataConfig) -> Task:
    if place.shipped:
        return _shipped(place.name)
    if place.folders:
        return _read_public(PUBLIC[place.name], place.folders, cfg)
    public = PUBLIC.get(place.name)
    if public is not None and place.hub is not None and place.hub == public.hub:
        tables = hubs.load_hub(place.hub, cfg.data_revision, cfg.offline)
        return _finish_public(*_public_tables(tables, public), cfg)
    if place.hub is not None:
        tables = _renamed(hubs.load_hub(place.hub, cfg.data_revision, cfg.offline))
    elif place.saved is not None:
        tables = _renamed(read_saved(place.saved) if is_saved(place.saved) else read_shards(place.saved, {}))
    else:
        tables = {split: _own_table(path) for split, path in place.own.items()}
    if list(tables) == ["train"]:
        tables = {"all": tables["train"]}
    return _own_task(tables, place, cfg)


def _shipped(name: str) -> Task:
    """A task without files. Its rows never follow --seed: a later evaluation must not meet training rows."""
    from budwood.data import arithmetic, world

    return arithmetic.generate() if name == GENERATED else world.load(name)


def _own_table(path: Path) -> Table:
    if not path.is_dir():
        return read_table(path)
    tables = read_saved(path)
    if len(tables) > 1:
        raise DataError(
            f"'{path}' holds the splits {', '.join(tables)}; one was expected. Give the folder itself as --task."
        )
    return next(iter(tables.values()))


def _renamed(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Tables under train, validation, test or all; empty ones and other splits are left aside."""
    named = {ALIASES.get(split, split): table for split, table in tables.items() if len(table)}
    for split in ("validation", "test"):
        close = [name for name in named if name.startswith(split)]
        if split not in named and close:
            named[split] = named[close[0]]
    kept = {split: named[split] for split in (*PARTS, "all") if split in named}
    if not kept and named:
        kept = {"all": next(iter(named.values()))} if len(named) == 1 else {}
    if not kept:
        raise DataError(
            f"No split with rows among {', '.join(tables) or 'none'}. Expected train, validation and test, or one set."
        )
    return kept


def _own_task(tables: Mapping[str, Table], place: Place, cfg: DataConfig) -> Task:
    sheet = place.sheet
    wanted = Wanted(place.name, cfg.text, cfg.text_pair, cfg.label, group=cfg.group)
    if sheet is not None:
        columns = sheet.columns
        wanted = replace(
            wanted,
            text=cfg.text or columns.text,
            pair=cfg.text_pair or columns.pair,
            label=cfg.label or columns.label,
            id=columns.id,
            group=cfg.group or columns.group,
            kind=sheet.kind,
            labels=tuple(str(label) for label in sheet.labels),
        )
    harvest, task = tables_to_task(tables, wanted)
    how = parse_cut((sheet and sheet.split) or cfg.split)
    if list(harvest.splits) == ["all"]:
        splits, told = by_source(harvest.splits, how, f"'{tables['all'].path}'")
    else:
        splits, told = {name: tuple(rows) for name, rows in harvest.splits.items()}, ""
    notes = harvest.told() | ({"split": told} if told else {})
    task = replace(task, splits=splits, notes=notes)
    if sheet is None:
        return task
    template = Template(**sheet.template.model_dump()) if sheet.template else task.template
    _check_words(template, task)
    return replace(
        task,
        metric=sheet.metric or task.metric,
        bounds=sheet.bounds or task.bounds,
        template=template,
        version=sheet.version,
    )


def _check_words(template: Template | None, task: Task) -> None:
    for words in (template.words, template.causal_words) if template and task.kind == "label" else ():
        if words and len(words) != len(task.labels):
            raise DataError(
                f"The template of task '{task.name}' has {len(words)} label words ({', '.join(words)}) for "
                f"{len(task.labels)} labels ({', '.join(task.labels)}). Give one word per label, in this order."
            )


def _read_public(public: PublicTask, folders: tuple[Path, ...], cfg: DataConfig) -> Task:
    for folder in folders:
        harvest = READERS[public.reader](folder, public)
        if harvest is not None:
            return _finish_public(harvest, public, cfg)
        tables = (
            _renamed(read_saved(folder))
            if is_saved(folder)
            else read_shards(folder, dict(public.hub.splits) if public.hub else {})
        )
        if tables:
            return _finish_public(*_public_tables(tables, public), cfg)
    for path in sorted(folders[0].iterdir()):
        if path.is_file() and path.suffix.lower() in PICKLED:
            refuse_pickle(path)
    held = sorted(p.name for p in folders[0].iterdir())
    raise DataError(
        f"'{folders[0]}' holds no labelled file of task '{public.name}' under a name that the set is distributed with; "
        f"it holds {', '.join(held[:8]) or 'nothing'}. Put the distributed files there, or name yours with "
        f"--train-file and --validation-file."
    )


def _public_tables(tables: Mapping[str, Table], public: PublicTask) -> tuple[Harvest, PublicTask]:
    """Rows of a public task out of the columns that the hub gives it."""
    hub = public.hub or Hub(public.name)
    known = {name.lower() for name in public.labels} | {code.lower() for code, _ in public.codes}
    adapted = {}
    for split, table in tables.items():
        names = table.classes.get(hub.label or "", ())
        if public.kind == "label" and len(names) == len(public.labels) and not known & {name.lower() for name in names}:
            table = replace(table, classes={**table.classes, hub.label or "": public.labels})
        adapted[split] = table
    labels = public.labels if public.kind == "tokens" else ()
    wanted = Wanted(
        public.name, hub.text, hub.pair, hub.label, kind="text" if public.kind == "text" else None, labels=labels
    )
    harvest, _ = tables_to_task(adapted, wanted)
    if public.reader == "wikitext":
        for split, rows in harvest.splits.items():
            harvest.splits[split] = [row for row in rows if not is_heading(row.text)]
    return harvest, public


def _finish_public(harvest: Harvest, public: PublicTask, cfg: DataConfig) -> Task:
    """The task with the registry's facts; a set without a train split is cut, premises and passages kept whole."""
    splits: dict[str, list] = harvest.splits
    if "train" not in splits and public.cut_by:
        splits = {
            name: [replace(row, group=getattr(row, public.cut_by)) for row in rows] for name, rows in splits.items()
        }
    parts, told = by_source(splits, parse_cut(cfg.split), f"task '{public.name}'")
    for split, rows in parts.items():
        if not rows:
            raise DataError(f"Split '{split}' of task '{public.name}' is empty. Fetch its files again.")
    return Task(
        public.name,
        public.kind,
        parts,
        public.labels,
        public.metric,
        public.template,
        public.bounds,
        public.version,
        harvest.told() | ({"split": told} if told else {}),
    )

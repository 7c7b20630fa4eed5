"""Data sets of the Hugging Face hub: from its caches, or over the network where there is one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from budwood.data.readers.table import Table, from_datasets, read_shards
from budwood.data.registry import PUBLIC, Hub
from budwood.errors import DataError

PATIENCE = 1.5  # seconds to wait for an answer of the hub's host
CONVERTED = "refs/convert/parquet"  # where the hub keeps sets that are distributed as a script


def is_hub_id(name: str) -> bool:
    """Whether a name has the form org/name."""
    org, slash, rest = name.partition("/")
    return bool(slash and org and rest) and "/" not in rest and not name.startswith(".")


def reachable() -> bool:
    """Whether the hub's host, or the proxy before it, takes a connection within `PATIENCE` seconds, names included."""
    from huggingface_hub import constants

    endpoint = urlsplit(getproxies().get("https") or constants.ENDPOINT)
    address = (endpoint.hostname or "", endpoint.port or (80 if endpoint.scheme == "http" else 443))
    answered: list[bool] = []

    def knock() -> None:
        try:
            socket.create_connection(address, PATIENCE).close()
            answered.append(True)
        except OSError:
            answered.append(False)

    thread = threading.Thread(target=knock, daemon=True)  # looking up a name has no time limit of its own
    thread.start()
    thread.join(PATIENCE)
    return answered == [True]


def offline_mode(offline: bool) -> bool:
    """Whether the user or the environment forbids the network."""
    from huggingface_hub import constants

    told = os.environ.get("HF_DATASETS_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    asked = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    return offline or told or asked or bool(constants.HF_HUB_OFFLINE)


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(os.environ.get("HF_HUB_CACHE", constants.HF_HUB_CACHE))


def _datasets_cache() -> Path:
    from huggingface_hub import constants

    return Path(os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets"))


def snapshot(hub: Hub, revision: str | None) -> Path | None:
    """The folder in which `hf download` left the set's files, if it did."""
    home = _hub_cache() / f"datasets--{hub.id.replace('/', '--')}"
    mark = home / "refs" / (revision or "main")
    commit = mark.read_text().strip() if mark.is_file() else revision or ""
    folder = home / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def prepared(hub: Hub) -> bool:
    """Whether `datasets` has prepared the set on this machine before."""
    return (_datasets_cache() / hub.id.replace("/", "___")).is_dir()


def check_hub(hub: Hub, revision: str | None, offline: bool) -> None:
    """Raise unless the set is in a cache or the hub can be asked."""
    if snapshot(hub, revision) is not None or prepared(hub):
        return
    if offline_mode(offline):
        raise DataError(
            f"'{hub.id}' is in no local cache, and the hub may not be asked (--offline or HF_HUB_OFFLINE). "
            f"{_advice(hub)}"
        )
    if not reachable():
        raise DataError(
            f"'{hub.id}' is in no local cache, and the hub did not answer within {PATIENCE} seconds. {_advice(hub)}"
        )


def _advice(hub: Hub) -> str:
    public = any(task.hub is not None and task.hub.id == hub.id for task in PUBLIC.values())
    place = f"name its parent with --data-dir {hub.id.split('/')[0]}" if public else "give its path as --task"
    given = "--data-dir FOLDER with the set as distributed, or your own files with" if public else "your own files with"
    return (
        f"Give {given} --train-file; or run `hf download --repo-type dataset {hub.id} --local-dir {hub.id}` on a "
        f"machine with a network, bring that folder here and {place}."
    )


def load_hub(hub: Hub, revision: str | None, offline: bool) -> dict[str, Table]:
    """Tables by split, from `hf download`'s files, `datasets`' cache or the hub, in this order."""
    check_hub(hub, revision, offline)
    folder = snapshot(hub, revision)
    tables = read_shards(folder / (hub.config or "."), dict(hub.splits)) if folder is not None else {}
    if tables:
        return tables
    quiet = offline_mode(offline) or not reachable()
    return _by_name(from_datasets(_load(hub, revision, quiet), Path(hub.id)), hub)


def _load(hub: Hub, revision: str | None, quiet: bool) -> object:
    import datasets

    with _without_network(quiet):
        try:
            return datasets.load_dataset(hub.id, hub.config, revision=revision)
        except RuntimeError as error:
            if "script" not in str(error).lower() or revision is not None:
                raise _failed(hub, error) from error
        except (OSError, ValueError) as error:
            raise _failed(hub, error) from error
        try:
            return datasets.load_dataset(hub.id, hub.config, revision=CONVERTED)
        except (OSError, ValueError, RuntimeError) as error:
            raise _failed(hub, error) from error


def _failed(hub: Hub, error: Exception) -> DataError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return DataError(f"`datasets` could not load '{hub.id}': {reason}. {_advice(hub)}")


def _by_name(tables: dict[str, Table], hub: Hub) -> dict[str, Table]:
    """The same tables under our names of the splits; other splits of the set are left aside."""
    theirs = {name: dict(hub.splits).get(name, name) for name in ("train", "validation", "test")}
    found = {ours: tables[name] for ours, name in theirs.items() if name in tables}
    if not found and len(tables) == 1:
        return {"all": next(iter(tables.values()))}
    return found or tables


@contextmanager
def _without_network(quiet: bool) -> Iterator[None]:
    """Inside, `datasets` looks into its cache only; its switch is read at import, so the constants are set."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    try:
        if quiet:
            datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before

"""Files that appear whole or not at all, and content hashes of what lies on disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from budwood.errors import StoreError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary neighbour of `path` that replaces it when the block ends well, and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # a killed process's leftovers: `sweep`
    try:
        with told(path):
            yield part
            with part.open("rb") as f:
                os.fsync(f.fileno())
            part.chmod(0o666 & ~_umask())
            part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def writing_directory(path: Path) -> Iterator[Path]:
    """A temporary neighbouring directory that becomes `path` when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        with told(path):
            yield part
            for file in part.rglob("*"):
                if file.is_file():
                    file.chmod(0o666 & ~_umask())
            old = path.with_name(f".{path.name}.{os.getpid()}.old")
            if path.exists():
                path.rename(old)
            part.rename(path)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove what killed processes left half-written; for a directory that nobody else is writing to."""
    for left in [*directory.rglob(".*.part"), *directory.rglob(".*.old")]:
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Failures of the disk become errors that say what to do, whichever library met them."""
    try:
        yield
    except OSError as e:
        raise disk_error(e, path) from e
    except Exception as e:
        code = re.search(r"os error (\d+)", str(e))  # safetensors wraps the system's error in one of its own
        if code is None:
            raise
        number = int(code[1])
        raise disk_error(OSError(number, os.strerror(number)), path) from e


def disk_error(e: OSError, path: Path) -> Exception:
    """The same failure told to the person at the keyboard, where it is theirs to fix."""
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(path.parent).free / 1e6
            return StoreError(
                f"No space left while writing {path} ({free:,.0f} MB free there). Nothing half-written was kept: free "
                "some space or choose another place with --out, then run the same command again."
            )
        return StoreError(f"No space left while writing {path}. Free some space or choose another --out.")
    if e.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return StoreError(f"{path} cannot be written ({e.strerror}). Choose a place you may write to with --out.")
    return e


def write_text(path: Path, text: str) -> None:
    """Write a text file whole."""
    with writing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole: keys as given, two spaces, no NaN."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON; a file that is none is named."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise StoreError(f"{path} is not readable JSON ({e}). Delete it or restore it from a copy.") from e


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: the same value always gives the same string.

    >>> canonical({"b": 1, "a": (2, 3)})
    '{"a":[2,3],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def digest(value: Any, size: int = 16) -> str:
    """Hex hash of a JSON-like value."""
    return hashlib.blake2b(canonical(value).encode(), digest_size=size).hexdigest()


def stamps(files: Iterable[Path]) -> tuple[tuple[int, int], ...]:
    """Time of change and size of every file, (0, 0) of one that is not there: other ones mean other content."""
    found = []
    for file in files:
        try:
            stat = file.stat()
            found.append((stat.st_mtime_ns, stat.st_size))
        except OSError:
            found.append((0, 0))
    return tuple(found)


def file_digest(path: Path) -> str:
    """Hex hash of a file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def cache_dir() -> Path:
    """Where content-addressed caches live: $BUDWOOD_CACHE, else the user's cache directory."""
    given = os.environ.get("BUDWOOD_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "budwood"

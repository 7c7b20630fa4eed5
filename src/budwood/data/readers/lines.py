"""Text files line by line: UTF-8 or a plain refusal, never a pickle."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from budwood.errors import DataError

PICKLED = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib")


def refuse_pickle(path: Path) -> None:
    """Raise for a file that unpickling would have to run, showing how its owner can convert it."""
    try:
        with path.open("rb") as file:
            head = file.read(2)
    except PermissionError as error:
        raise DataError(f"'{path}' may not be read by this user. Ask its owner, or change its mode.") from error
    protocol = head[:1] == b"\x80" and head[1:] in (b"\x02", b"\x03", b"\x04", b"\x05")
    if path.suffix.lower() not in PICKLED and not protocol:
        return
    command, then = _conversion(path)
    raise DataError(
        f"'{path}' is pickled data, and reading a pickle runs whatever code it holds, so it is never opened here. "
        f"Expected CSV, TSV, JSONL, JSON or Parquet. If you trust the file, convert it once: {command} and then give "
        f"{then}."
    )


def _conversion(path: Path) -> tuple[str, str]:
    """A command that converts a pickle, and what to give afterwards; texts and labels side by side become one CSV."""
    if path.name in ("tr_inp.pkl", "te_inp.pkl", "tr_labels.pkl", "te_labels.pkl"):
        home = path.parent
        return (
            f"python -c \"import csv, pickle; read = lambda n: pickle.load(open(f'{home}/{{n}}.pkl', 'rb')); "
            f"[csv.writer(open(f'{home}/{{to}}.csv', 'w', newline='')).writerows([('text', 'label'), *zip(read(s + "
            f"'_inp'), read(s + '_labels'))]) for s, to in (('tr', 'train'), ('te', 'test'))]\"",
            f"--train-file '{home}/train.csv' --test-file '{home}/test.csv'",
        )
    target = path.with_suffix(".jsonl")
    return (
        f"python -c \"import pandas as pd; pd.DataFrame(pd.read_pickle('{path}')).to_json('{target}', "
        f"orient='records', lines=True)\"",
        f"'{target}'",
    )


def check_file(path: Path) -> Path:
    """The same path if it is a file that may be read."""
    if not path.exists():
        beside = sorted(p.name for p in path.parent.iterdir() if p.is_file()) if path.parent.is_dir() else []
        hint = f" That folder holds: {', '.join(beside[:8])}." if beside else ""
        raise DataError(f"There is no file '{path}'. Check the path; it is taken from the current folder.{hint}")
    if path.is_dir():
        raise DataError(f"'{path}' is a folder where a file was expected. Give one file of it.")
    refuse_pickle(path)
    if path.stat().st_size == 0:
        raise DataError(f"'{path}' is empty. Give a file with at least one row.")
    return path


def _bad_byte(path: Path) -> tuple[int, int]:
    """Position and value of the first byte that is not UTF-8."""
    data = path.read_bytes()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start, data[error.start]
    raise AssertionError(f"{path} is UTF-8 after all")


def read_lines(path: Path) -> Iterator[str]:
    """Lines without their line ends; only a line feed ends a line, so U+2028 inside a text stays there."""
    check_file(path)
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for line in file:
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error


def read_old_lines(path: Path) -> list[str]:
    """Lines of a file of a corpus older than UTF-8: Latin-1 where it is not UTF-8."""
    data = check_file(path).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]


def not_utf8(path: Path) -> DataError:
    """The error for a text file in another encoding, with the place of its first foreign byte."""
    at, byte = _bad_byte(path)
    converted = path.with_name(f"{path.stem}-utf8{path.suffix}")
    return DataError(
        f"'{path}' is not UTF-8: byte {at:,} is 0x{byte:02x}. Convert it first, for example `iconv -f latin1 -t utf-8 "
        f"'{path}' > '{converted}'` (put its real encoding for latin1), and give that file."
    )


def read_csv(path: Path, delimiter: str = ",", quoted: bool = True) -> Iterator[list[str]]:
    """Records of a delimited file; blank lines are not records."""
    check_file(path)
    csv.field_size_limit(2**31 - 1)  # a document may be longer than the module's 128 KB
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from (
                record
                for record in csv.reader(
                    file, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
                )
                if record
            )
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    except csv.Error as error:
        raise DataError(f"'{path}' cannot be read as a delimited file: {error}. Check its quotes.") from error


def first_line(path: Path) -> str:
    """The first line of a file, or the empty string."""
    return next(iter(read_lines(path)), "")


def find(folder: Path, *names: str) -> Path | None:
    """The first file of the folder whose name matches one of the patterns, in the order of the patterns, any case.

    A pattern is a name or holds one `*`.
    """
    files = sorted(p for p in folder.iterdir() if p.is_file())
    for name in names:
        for path in files:
            if _matches(path.name.lower(), name.lower()):
                return path
    return None


def _matches(name: str, pattern: str) -> bool:
    if "*" not in pattern:
        return name == pattern
    before, after = pattern.split("*", 1)
    return len(name) >= len(before) + len(after) and name.startswith(before) and name.endswith(after)


def some(values: Sequence[object], most: int = 8) -> str:
    """The first few values for an error message."""
    shown = ", ".join(repr(v) for v in values[:most])
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")

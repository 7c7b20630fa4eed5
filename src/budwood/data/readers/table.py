"""Files of the user as named columns: CSV, TSV, JSONL, JSON, Parquet, text, CoNLL, and what `datasets` saved."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from budwood.data.readers.lines import check_file, read_csv, read_lines, some
from budwood.data.readers.passages import (
    STORY_END,
    is_squad,
    load_json,
    squad_columns,
    story_rows,
    tagged_sentences,
)
from budwood.errors import DataError, nearest

TAGGED = (".conll", ".bio", ".iob", ".iob2")
ROWS = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".txt", *TAGGED)
SNIFFED = 10_000  # lines looked at to learn whether a text is made of stories
UNKNOWN_CLASS = -1  # what `datasets` writes for a row without a label


@dataclass(frozen=True)
class Table:
    """Columns of equal length under their names; `classes` names the values of columns of class indices."""

    path: Path
    columns: Mapping[str, Sequence[Any]]
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def column(self, name: str, flag: str) -> Sequence[Any]:
        """A column by its exact name; the error lists what there is."""
        if name not in self.columns:
            raise DataError(
                f"'{self.path}' has no column '{name}' (asked for by {flag}). Its columns are "
                f"{some(list(self.columns), 20)}.{nearest(name, self.columns)}"
            )
        return self.columns[name]


def read_table(path: Path) -> Table:
    """The table in a file, by the file's ending."""
    suffix = check_file(path).suffix.lower()
    if suffix == ".csv":
        return _from_records(path, list(read_csv(path)), {})
    if suffix == ".tsv":
        return _read_tsv(path)
    if suffix in (".jsonl", ".ndjson"):
        return _from_objects(path, _json_lines(path))
    if suffix == ".json":
        data = load_json(path)
        return Table(path, squad_columns(data)) if is_squad(data) else _from_objects(path, json_records(path, data))
    if suffix == ".parquet":
        return read_parquet([path])
    if suffix == ".txt":
        return _read_plain(path)
    if suffix in TAGGED:
        sentences = list(tagged_sentences(path))
        return Table(path, {"tokens": [words for words, _, _ in sentences], "tags": [tags for _, tags, _ in sentences]})
    raise DataError(
        f"'{path}' ends in '{suffix}'. A file of rows ends in one of {', '.join(ROWS)}.{nearest(suffix, ROWS)}"
    )


def _read_plain(path: Path) -> Table:
    """A text per line, or per story where the file has end-of-text marks."""
    marked = any(STORY_END in line for line in islice(read_lines(path), SNIFFED))
    texts = (
        [row.text for row in story_rows(path, "")] if marked else [line for line in read_lines(path) if line.strip()]
    )
    return Table(path, {"text": texts}, notes={"rows": "stories between end-of-text marks" if marked else "lines"})


def _from_records(path: Path, records: list[list[str]], notes: dict[str, str]) -> Table:
    header = [name.strip() for name in records[0]] if records else []
    if len(records) < 2:
        raise DataError(f"'{path}' holds a header and no row. Give a file with at least one row.")
    if len(set(header)) != len(header):
        twice = sorted({name for name in header if header.count(name) > 1})
        raise DataError(f"'{path}' has the column {some(twice)} more than once. Rename one in its first line.")
    for number, record in enumerate(records):
        if len(record) != len(header):
            raise DataError(
                f"Record {number + 1} of '{path}' has {len(record)} columns and the header {len(header)}: "
                f"{some(header)}. A text that holds the separator must stand in double quotes."
            )
    columns = {name: [record[i] for record in records[1:]] for i, name in enumerate(header)}
    return Table(path, columns, notes=notes)


def _read_tsv(path: Path) -> Table:
    """Tab-separated: quotes are plain characters (GLUE) unless every quoted cell is quoted as CSV does (pandas)."""
    quoted = _tsv_is_quoted(path)
    records = list(read_csv(path, "\t", quoted))
    return _from_records(path, records, {"quotes": "cells in double quotes were unquoted"} if quoted else {})


def _tsv_is_quoted(path: Path) -> bool:
    seen = 0
    for line in read_lines(path):
        for cell in line.split("\t"):
            if cell[:1] == '"':
                inner = cell[1:-1]
                if len(cell) < 2 or cell[-1] != '"' or '"' in inner.replace('""', ""):
                    return False
                seen += 1
    return seen > 0


def _json_lines(path: Path) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(read_lines(path)):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"Line {number + 1} of '{path}' is not JSON: {error.msg} at column {error.colno}."
            ) from error
        if not isinstance(record, dict):
            raise DataError(
                f"Line {number + 1} of '{path}' is {type(record).__name__}; expected one JSON object per line."
            )
        records.append(record)
    return records


def json_records(path: Path, data: object) -> list[dict[str, Any]]:
    """The records of a JSON file: a list of objects, bare or under the key "data"."""
    if isinstance(data, dict) and isinstance(data.get("data"), list):
        data = data["data"]
    if not isinstance(data, list) or not all(isinstance(record, dict) for record in data):
        raise DataError(
            f"'{path}' is JSON, but neither a list of objects nor SQuAD's form. Expected [{{...}}, {{...}}]."
        )
    return data


def _from_objects(path: Path, records: list[dict[str, Any]]) -> Table:
    if not records:
        raise DataError(f"'{path}' holds no row. Give a file with at least one.")
    names = list(dict.fromkeys(name for record in records for name in record))
    return Table(path, {name: [record.get(name) for record in records] for name in names})


def read_parquet(paths: Sequence[Path]) -> Table:
    """One table from the shards of a split; class names come from the features that `datasets` writes into the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        tables = [pq.ParquetFile(check_file(path)).read() for path in paths]
        table = pa.concat_tables(tables, promote_options="default")
    except pa.ArrowException as error:
        raise DataError(f"'{paths[0]}' is no Parquet file that can be read: {str(error).splitlines()[0]}") from error
    described = (table.schema.metadata or {}).get(b"huggingface")
    features = json.loads(described)["info"]["features"] if described else {}
    if not len(table):
        raise DataError(f"'{paths[0]}' holds no row. Give a file with at least one.")
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    return Table(paths[0], columns, _class_names(features))


def _class_names(features: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Names of the classes of every column of classes, or of lists of classes."""
    names = {}
    for column, feature in features.items():
        inner = feature.get("feature", feature) if isinstance(feature, dict) else feature
        if isinstance(inner, dict) and inner.get("_type") == "ClassLabel":
            names[column] = tuple(inner["names"])
    return names


def is_saved(folder: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote this folder."""
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def read_saved(folder: Path) -> dict[str, Table]:
    """Tables by split of a folder that `datasets` saved; "all" where it holds a single set."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"'{folder}' looks like a folder saved by `datasets`, but cannot be read: {str(error).splitlines()[0]} "
            f"Save it again with `save_to_disk`."
        ) from error
    return from_datasets(loaded, folder)


def from_datasets(loaded: Any, path: Path) -> dict[str, Table]:
    """Tables by split of a `Dataset` or `DatasetDict`."""
    parts = dict(loaded) if hasattr(loaded, "keys") else {"all": loaded}
    tables = {}
    for split, part in parts.items():
        classes = _class_names(part.features.to_dict())
        table = part.with_format("arrow")[:] if len(part) else None
        columns = {name: table.column(name).to_pylist() for name in table.column_names} if table is not None else {}
        tables[split] = Table(path, columns, classes)
    return tables


SHARDS = {  # beginnings of the names of a split's Parquet shards, most exact first
    "train": ("train",),
    "validation": ("validation", "valid", "dev"),
    "test": ("test",),
}


def read_shards(folder: Path, prefer: Mapping[str, str]) -> dict[str, Table]:
    """Tables by split of a folder with Parquet files as the hub keeps them; {} where there are none.

    `prefer` names another beginning for a split, such as validation_mismatched.
    """
    patterns = ("*.parquet", "data/*.parquet", "*/*.parquet")
    files = next((found for pattern in patterns if (found := sorted(folder.glob(pattern)))), [])
    if len({path.parent for path in files}) > 1:  # several configurations: not one set
        return {}
    tables = {}
    for split, beginnings in SHARDS.items():
        for beginning in (prefer.get(split, beginnings[0]), *beginnings):
            shards = [path for path in files if path.name.startswith(beginning)]
            if shards:
                tables[split] = read_parquet(shards)
                break
    return tables

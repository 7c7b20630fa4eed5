"""Small tables in every form, and what a task loaded from them shows."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from budwood.config.data import DataConfig
from budwood.data.source import load_task
from budwood.errors import DataError

RECORDS = [{"text": f'text {i} , "so"', "label": ["bad", "good"][i % 2], "who": f"w{i // 4}"} for i in range(40)]


def write_table(path: Path, records: list[dict]) -> Path:
    names = list(records[0])
    if path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, delimiter="," if path.suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(records)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(records), path)
    return path


def facts(task) -> dict:
    return {split: [(r.text, r.pair, r.label) for r in rows] for split, rows in task.splits.items()}


def error_of(**settings) -> str:
    """The refusal of these settings: one paragraph."""
    with pytest.raises(DataError) as caught:
        load_task(DataConfig(**settings))
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?", ")"))
    return message


def sheet(tmp_path: Path, text: str) -> str:
    write_table(tmp_path / "rows.csv", RECORDS)
    path = tmp_path / "shop.yaml"
    path.write_text(text)
    return str(path)

"""Task references that cannot be used, each answered in one paragraph, and what resolving may not do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from budwood.config.data import DataConfig
from budwood.data.source import load_task, resolve_task
from budwood.errors import DataError
from tests.data.tables_for_tests import RECORDS, error_of, facts, sheet, write_table


def test_unknown_names():
    assert "Did you mean 'tiny-sentiment'" in error_of(task="tiny-sentment")
    assert "Did you mean 'sst2'" in error_of(task="SST2")
    assert "There is no task 'zzzz'. A task is a shipped one" in error_of(task="zzzz")


def test_missing_places(tmp_path):
    write_table(tmp_path / "rows.csv", RECORDS)
    assert "There is no file" in error_of(task=str(tmp_path / "row.csv"))
    assert "rows.csv" in error_of(task="x", train_file=tmp_path / "row.csv")
    assert "names '/no/such', which is no folder" in error_of(task="sst2", data_dir=(Path("/no/such"),))
    assert "looked for mpqa" in error_of(task="mpqa", data_dir=(tmp_path,))
    assert "is a folder, but neither" in error_of(task=str(tmp_path))
    assert "ends in '.xls'" in error_of(
        task="x", train_file=write_table(tmp_path / "a.csv", RECORDS).rename(tmp_path / "a.xls")
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"text": "txt"},
            "has no column 'txt' (asked for by --text). Its columns are 'text', 'label', 'who'. Did you mean 'text'",
        ),
        ({"label": "lable"}, "Did you mean 'label'?"),
        ({"group": "whom"}, "(asked for by --group)"),
        ({"split": "80/30"}, "adds up to 110"),
    ],
)
def test_missing_columns(tmp_path, settings, message):
    assert message in error_of(task=str(write_table(tmp_path / "a.csv", RECORDS)), **settings)


def test_columns_that_cannot_be_guessed(tmp_path):
    message = error_of(task=str(write_table(tmp_path / "a.csv", [{"texts": "a", "lab": "b"}])))
    assert "No column of" in message
    assert "Its columns are 'texts', 'lab'" in message
    assert "Did you mean 'text'?" in message
    assert "--text COLUMN" in message
    message = error_of(task=str(write_table(tmp_path / "b.csv", [{"text": "a", "kind": "b"}])))
    assert "looks like the label" in message
    assert "--label COLUMN" in message


def test_a_label_never_seen_in_train(tmp_path):
    train = write_table(tmp_path / "a.csv", RECORDS)
    dev = write_table(tmp_path / "b.csv", [{"text": "a", "label": "goood"}])
    message = error_of(task="x", train_file=train, validation_file=dev)
    zeros = write_table(tmp_path / "c.csv", [{"text": "a", "label": 0}, {"text": "b", "label": 0}])
    ones = write_table(tmp_path / "d.csv", [{"text": "a", "label": 1}])
    assert "which no train row has" in error_of(task="sst2", train_file=zeros, validation_file=ones)
    assert (
        "(validation) has the label 'goood', which no train row has. Train has 'bad', 'good'. Did you mean 'good'?"
        in message
    )


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"text": "a", "label": ["x", "y"]}] * 4, "a multi-label task. Multi-label tasks are not supported"),
        ([{"text": "a", "label": "x"}] * 4, "All rows of"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": None}], "1 of 2 rows of"),
        ([{"text": "", "label": "x"}] * 4, "has an empty text"),
        ([{"text": "a", "label": None}] * 4, "has a label in 'label'"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], "leaves 'validation' empty"),
        ([{"tokens": ["a", "b"], "tags": ["X"]}] * 4, "has 2 words and 1 labels"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, records, message):
    assert message in error_of(task=str(write_table(tmp_path / "a.jsonl", records)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "is empty"),
        ("a.csv", b"text,label\n", "holds a header and no row"),
        ("a.csv", b"text,label\na,b,c\n", "Record 2 of"),
        ("a.csv", b"text,text\na,b\n", "has the column 'text' more than once"),
        ("a.csv", "text,label\ncaf\xe9,1\n".encode("latin-1"), "is not UTF-8: byte 14 is 0xe9"),
        ("a.jsonl", b'{"text": 1}\n{"text"\n', "Line 2 of"),
        ("a.jsonl", b"[1]\n", "expected one JSON object per line"),
        ("a.json", b"{}", "neither a list of objects nor SQuAD's form"),
        ("a.json", b'{"a": 1}\n{"a": 2}', "should end in .jsonl"),
        ("a.parquet", b"PAR1 not really", "is no Parquet file"),
        ("a.conll", b"alone\n", "has one column"),
        ("a.pkl", b"\x80\x04]\x94.", "pd.read_pickle("),
        ("a.csv", b"\x80\x04]\x94.", "is pickled data"),
        ("a.pt", b"PK", "is pickled data"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in error_of(task=str(tmp_path / name))
    assert message in error_of(task="x", train_file=tmp_path / name)


def converted(message: str) -> None:
    """Run the conversion command that a message shows."""
    command = re.search(r'python -c "(.*)" and then give', message)
    subprocess.run([sys.executable, "-c", command[1]], check=True)


def test_the_conversion_commands_work(tmp_path):
    import pickle

    (tmp_path / "a.pkl").write_bytes(pickle.dumps(RECORDS))
    converted(error_of(task=str(tmp_path / "a.pkl")))
    reference = load_task(DataConfig(task=str(write_table(tmp_path / "b.csv", RECORDS))))
    assert facts(load_task(DataConfig(task=str(tmp_path / "a.jsonl")))) == facts(reference)
    home = tmp_path / "data" / "mpqa"
    home.mkdir(parents=True)
    for part in ("tr", "te"):
        (home / f"{part}_inp.pkl").write_bytes(pickle.dumps(["a , b", "c"]))
        (home / f"{part}_labels.pkl").write_bytes(pickle.dumps([1, 0]))
    message = error_of(task="mpqa", data_dir=(tmp_path / "data",))
    converted(message)
    files = re.search(r"--train-file '(.*)' --test-file '(.*)'", message)
    task = load_task(DataConfig(task="mpqa", train_file=Path(files[1]), test_file=Path(files[2])))
    assert facts(task) == {"train": [("a , b", None, 1), ("c", None, 0)], "test": [("a , b", None, 1), ("c", None, 0)]}
    assert task.template.words == ("terrible", "great")


def test_contradictions(tmp_path):
    path = write_table(tmp_path / "a.csv", RECORDS)
    assert "is a shipped task and has its own rows" in error_of(task="tiny-topic", train_file=path)
    assert "given twice" in error_of(task=str(path), train_file=path)
    assert "names a column of your own file" in error_of(task="sst2", text="x")
    assert "says which files to read" in error_of(task=sheet(tmp_path, "files: rows.csv\n"), test_file=path)


def test_the_shipped_and_the_generated():
    assert load_task(DataConfig(task="tiny-topic", limit=20, limit_eval=10)).notes["limited"].startswith("train 20 of")
    numbers = load_task(DataConfig(task="arithmetic", data_seed=4))
    assert numbers.kind == "number"
    assert numbers.digest == load_task(DataConfig(task="arithmetic")).digest


def test_resolving_reads_nothing_and_imports_nothing_heavy(tmp_path):
    write_table(tmp_path / "a.csv", RECORDS)
    code = (
        "import sys; from budwood.config.data import DataConfig; from budwood.data.source import resolve_task\n"
        f"resolve_task(DataConfig(task={str(tmp_path / 'a.csv')!r})); resolve_task(DataConfig(task='tiny-topic'))\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pandas', 'pyarrow', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(DataError, match="There is no file"):
        resolve_task(DataConfig(task=str(tmp_path / "b.csv")))
    with pytest.raises(DataError, match="Did you mean"):
        resolve_task(DataConfig(task="tiny-topc"))

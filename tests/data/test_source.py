"""Task references: the user's own files in every form, task.yaml, saved folders, the hub, and each refusal."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from budwood.config.data import DataConfig
from budwood.data import hub as hubs
from budwood.data.registry import Hub
from budwood.data.source import load_task, resolve_task
from budwood.data.split import limit
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


# --- the user's own files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".json", ".parquet"])
def test_every_form_of_table_gives_the_same_task(tmp_path, suffix):
    reference = load_task(DataConfig(task=str(write_table(tmp_path / "reference.csv", RECORDS))))
    task = load_task(DataConfig(task=str(write_table(tmp_path / f"mine{suffix}", RECORDS))))
    assert facts(task) == facts(reference)
    assert task.name == "mine"
    assert task.labels == ("bad", "good")
    assert task.notes["columns"] == "guessed text = 'text', label = 'label'"
    assert {k: len(v) for k, v in task.splits.items()} == {"train": 32, "validation": 4, "test": 4}
    assert sorted(t for part in facts(task).values() for t, _, _ in part) == sorted(r["text"] for r in RECORDS)


@pytest.mark.parametrize("name", ["sst2", "rte", "stsb", "cola", "snli"])
def test_public_folder_and_own_csv_of_its_rows_are_the_same(shared, tmp_path, name):
    public = load_task(DataConfig(task=name, data_dir=(shared / "data",), split="90/10"))
    files = {}
    for split, rows in public.splits.items():
        records = [{"sentence1": r.text, "sentence2": r.pair, "label": r.label} for r in rows]
        if public.labels and name in ("rte", "snli"):
            records = [record | {"label": public.labels[record["label"]]} for record in records]
        if rows[0].pair is None:
            records = [{"sentence": record["sentence1"], "label": record["label"]} for record in records]
        files[f"{split}_file"] = write_table(tmp_path / f"{split}.csv", records)
    own = load_task(DataConfig(task="mine", **files))
    assert facts(own) == facts(public)
    assert own.kind == public.kind
    few = {"limit": 50, "limit_eval": 20, "data_seed": 3}
    assert facts(limit(own, 50, 20, 3)) == facts(limit(public, 50, 20, 3))
    assert facts(load_task(DataConfig(task="mine", **few, **files))) == facts(limit(own, 50, 20, 3))
    named = load_task(DataConfig(task=name, **files))
    assert facts(named) == facts(public)
    assert (named.labels, named.metric, named.template) == (public.labels, public.metric, public.template)


def test_own_splits_ids_and_columns(tmp_path):
    records = [{"uid": f"u{i}", "body": f"b{i}", "head": f"h{i}", "stars": 10 - i % 3} for i in range(9)]
    train, test = write_table(tmp_path / "a.csv", records), write_table(tmp_path / "b.jsonl", records[:3])
    task = load_task(
        DataConfig(task="shop", train_file=train, test_file=test, text="body", text_pair="head", label="stars")
    )
    assert task.labels == ("8", "9", "10")
    assert [(r.id, r.text, r.pair, r.label) for r in task.rows("test")] == [
        ("shop/test/u0", "b0", "h0", 2),
        ("shop/test/u1", "b1", "h1", 1),
        ("shop/test/u2", "b2", "h2", 0),
    ]
    assert task.reported == "test"
    assert "split" not in task.notes


def test_a_test_file_alone_is_enough_to_evaluate(tmp_path):
    task = load_task(DataConfig(task="x", test_file=write_table(tmp_path / "a.csv", RECORDS)))
    assert list(task.splits) == ["test"]
    assert len(task.rows("test")) == 40


def test_groups_stay_together(tmp_path):
    path = write_table(tmp_path / "a.csv", RECORDS)
    task = load_task(DataConfig(task=str(path), group="who", split="60/20/20"))
    seen = [{r.group for r in rows} for rows in task.splits.values()]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 10
    assert "groups kept whole" in task.notes["split"]


def test_the_cut_does_not_follow_the_data_seed(tmp_path):
    path = str(write_table(tmp_path / "a.csv", RECORDS))
    assert load_task(DataConfig(task=path, data_seed=9)).digest == load_task(DataConfig(task=path)).digest
    assert load_task(DataConfig(task=path, split="80/10/10@9")).digest != load_task(DataConfig(task=path)).digest


def test_numbers_are_classes_or_a_quantity(tmp_path):
    whole = [{"text": "a", "label": i % 11} for i in range(200)]
    assert load_task(DataConfig(task=str(write_table(tmp_path / "a.csv", whole)))).labels == tuple(map(str, range(11)))
    floats = [{"text": "a", "label": f"{i % 2}.0"} for i in range(40)]
    assert load_task(DataConfig(task=str(write_table(tmp_path / "b.csv", floats)))).labels == ("0", "1")
    many = [{"text": "a", "label": i / 7} for i in range(40)]
    task = load_task(DataConfig(task=str(write_table(tmp_path / "c.csv", many))))
    assert (task.kind, task.metric, task.labels) == ("regression", "pearson", ())
    assert task.rows("train")[1].label in {i / 7 for i in range(40)}
    true = [{"text": "a", "label": i % 2 == 0} for i in range(40)]
    assert load_task(DataConfig(task=str(write_table(tmp_path / "d.jsonl", true)))).labels == ("False", "True")


def test_empty_texts_are_counted(tmp_path):
    records = [*RECORDS, {"text": None, "label": "bad", "who": "w"}, {"text": "  ", "label": "bad", "who": "w"}]
    for suffix in (".csv", ".jsonl", ".parquet"):
        task = load_task(DataConfig(task=str(write_table(tmp_path / f"a{suffix}", records))))
        assert task.notes["left out"] == "all: 2 rows with an empty text"


@pytest.mark.parametrize("quoted", [True, False])
def test_tsv_with_and_without_quoting(tmp_path, quoted):
    path = tmp_path / "a.tsv"
    cell = '"say ""hi"""' if quoted else '"say" hi'
    path.write_text("text\tlabel\n" + f"{cell}\t0\nplain\t1\n" * 20)
    texts = {r.text for r in load_task(DataConfig(task=str(path))).rows("train")}
    assert texts == ({'say "hi"', "plain"} if quoted else {'"say" hi', "plain"})


def test_plain_text_stories_conll_and_squad_files(tmp_path):
    plain = tmp_path / "a.txt"
    plain.write_text("one line\n\n" + "two\u2028lines\n" * 30)
    task = load_task(DataConfig(task=str(plain)))
    assert (task.kind, task.metric) == ("text", "lm_loss")
    assert sum(map(len, task.splits.values())) == 31
    plain.write_text("a\nb\n<|endoftext|>\n" * 20)
    assert load_task(DataConfig(task=str(plain))).rows("train")[0].text == "a\nb"
    tagged = tmp_path / "a.conll"
    tagged.write_text("the DET\ncat NOUN\n\nsat VERB\n\n" * 20)
    task = load_task(DataConfig(task=str(tagged)))
    assert (task.kind, task.labels) == ("tokens", ("DET", "NOUN", "VERB"))
    assert {(r.words, r.label) for r in task.rows("train")} == {(("the", "cat"), (0, 1)), (("sat",), (2,))}
    from tests.data.test_readers import squad_file

    task = load_task(DataConfig(task=str(squad_file(tmp_path / "q.json"))))
    assert (task.kind, task.metric) == ("span", "f1")
    assert len(task.rows("train")) % 2 == 0


def test_lists_of_tokens(tmp_path):
    records = [{"tokens": ["a", "b"], "ner_tags": ["X", "O"]} for _ in range(20)]
    task = load_task(DataConfig(task=str(write_table(tmp_path / "a.jsonl", records))))
    assert (task.kind, task.labels, task.rows("train")[0].label) == ("tokens", ("O", "X"), (1, 0))


# --- task.yaml ------------------------------------------------------------------------------------------------------


def sheet(tmp_path: Path, text: str) -> str:
    write_table(tmp_path / "rows.csv", RECORDS)
    path = tmp_path / "shop.yaml"
    path.write_text(text)
    return str(path)


def test_task_file(tmp_path):
    text = """
files: rows.csv
split: 50/50
columns: {text: text, group: who}
labels: [good, bad]
metric: f1
template: {masked: "{text} It was {mask} .", words: [great, terrible], limits: [110, 0]}
version: "3"
"""
    task = load_task(DataConfig(task=sheet(tmp_path, text)))
    assert (task.name, task.labels, task.metric, task.version) == ("shop", ("good", "bad"), "f1", "3")
    assert task.template.words == ("great", "terrible")
    assert task.template.limits == (110, 0)
    assert {r.label for r in task.rows("train") if RECORDS[int(r.text.split()[1])]["label"] == "good"} == {0}
    assert list(task.splits) == ["train", "validation"]


def test_task_file_with_a_file_per_split_and_a_kind(tmp_path):
    numbers = [{"text": f"t{i}", "label": i % 3} for i in range(9)]
    write_table(tmp_path / "v.csv", numbers)
    text = "name: n\nkind: regression\nbounds: [0, 2]\nfiles: {train: v.csv, validation: v.csv}\n"
    task = load_task(DataConfig(task=sheet(tmp_path, text)))
    assert (task.kind, task.bounds, task.rows("validation")[2].label) == ("regression", (0.0, 2.0), 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("files: rows.csv\nlabls: [a]\n", "unknown key 'labls'.*Did you mean 'labels'"),
        ("files: rows.csv\ncolumns: {txt: a}\n", "unknown key 'columns.txt'.*Did you mean 'text'"),
        ("name: x\n", "lacks the key 'files'"),
        ("files: rows.csv\nkind: words\n", "key 'kind' cannot be used"),
        ("files: gone.csv\n", "There is no file '.*gone.csv'.*rows.csv, shop.yaml"),
        ("files: rows.csv\nlabels: [no, yes]\n", "has the label false: YAML reads"),
        ("files: rows.csv\nlabels: [good, evil]\n", "lists the labels 'good', 'evil', but the rows also have 'bad'"),
        ("files: rows.csv\ntemplate: {masked: '{text} {mask}', words: [a, b, c]}\n", "3 label words .* for 2 labels"),
        ("- a\n", "should hold keys and values"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_bad_task_files(tmp_path, text, message):
    assert re.search(message, error_of(task=sheet(tmp_path, text)))


# --- saved folders and the hub --------------------------------------------------------------------------------------


def hub_rows(n: int = 12):
    import datasets

    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["negative", "positive"])}
    )
    data = {"sentence": [f"s {i} " for i in range(n)], "label": [i % 2 for i in range(n)]}
    return datasets.Dataset.from_dict(data, features=features)


def test_saved_folders(tmp_path):
    import datasets

    rows = hub_rows()
    blind = rows.map(lambda _: {"label": -1})
    datasets.DatasetDict(train=rows, dev=rows.select(range(4)), test=blind).save_to_disk(tmp_path / "mine")
    task = load_task(DataConfig(task=str(tmp_path / "mine")))
    assert task.labels == ("negative", "positive")
    assert facts(task)["validation"] == [("s 0", None, 0), ("s 1", None, 1), ("s 2", None, 0), ("s 3", None, 1)]
    assert "test" not in task.splits
    assert "no labels" in task.notes["unlabelled"]
    rows.save_to_disk(tmp_path / "single")
    assert list(load_task(DataConfig(task=str(tmp_path / "single"), split="50/50")).splits) == ["train", "validation"]
    datasets.DatasetDict(train=rows, validation=rows).save_to_disk(tmp_path / "data" / "sst2")
    public = load_task(DataConfig(task="sst2", data_dir=(tmp_path / "data",)))
    assert public.template is not None
    assert public.rows("train")[3].label == 1


def test_parquet_as_the_hub_keeps_it(tmp_path):
    folder = tmp_path / "glue" / "sst2"
    folder.mkdir(parents=True)
    hub_rows(12).to_parquet(folder / "train-00000-of-00002.parquet")
    hub_rows(4).to_parquet(folder / "train-00001-of-00002.parquet")
    hub_rows(4).to_parquet(folder / "validation-00000-of-00001.parquet")
    task = load_task(DataConfig(task="sst2", data_dir=(tmp_path,)))
    assert {k: len(v) for k, v in task.splits.items()} == {"train": 16, "validation": 4}
    assert task.rows("train")[0].text == "s 0"


def test_files_of_hf_download_are_used_offline(tmp_path, monkeypatch):
    home = tmp_path / "datasets--nyu-mll--glue"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc")
    (home / "snapshots" / "abc" / "sst2").mkdir(parents=True)
    hub_rows().to_parquet(home / "snapshots" / "abc" / "sst2" / "train-00000-of-00001.parquet")
    hub_rows().to_parquet(home / "snapshots" / "abc" / "sst2" / "validation-00000-of-00001.parquet")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    task = load_task(DataConfig(task="sst2", offline=True))
    assert task.rows("validation")[1].label == 1


def test_public_columns_of_the_hub(tmp_path):
    import datasets

    squad = {"id": ["a", "b"], "title": ["T", "U"], "context": ["in Oslo", "x"], "question": ["where", "why"]}
    answers = [{"text": ["Oslo"], "answer_start": [3]}, {"text": [], "answer_start": []}]
    rows = datasets.Dataset.from_dict({**squad, "answers": answers})
    datasets.DatasetDict(train=rows, validation=rows).save_to_disk(tmp_path / "squad_v2")
    task = load_task(DataConfig(task="squad2", data_dir=(tmp_path,)))
    assert [r.answers for r in task.rows("train")] == [(("Oslo", 3),), ()]
    names = datasets.ClassLabel(names=["entailment", "neutral", "contradiction"])
    text = datasets.Value("string")
    features = datasets.Features({"premise": text, "hypothesis": text, "label": names})
    nli = {"premise": ["p"] * 4, "hypothesis": list("wxyz"), "label": [0, 1, 2, -1]}
    rows = datasets.Dataset.from_dict(nli, features=features)
    datasets.DatasetDict(train=rows, validation=rows).save_to_disk(tmp_path / "snli")
    task = load_task(DataConfig(task="snli", data_dir=(tmp_path,)))
    assert [task.labels[r.label] for r in task.rows("train")] == ["entailment", "neutral", "contradiction"]
    assert "1 rows without a gold label (-1)" in task.notes["left out"]
    wiki = datasets.Dataset.from_dict({"text": ["", " = T = \n", " a b . \n"]})
    datasets.DatasetDict(train=wiki, validation=wiki, test=wiki).save_to_disk(tmp_path / "wikitext-2")
    assert [r.text for r in load_task(DataConfig(task="wikitext-2", data_dir=(tmp_path,))).rows("train")] == ["a b ."]
    tags = datasets.Features(
        {"tokens": datasets.List(text), "ner_tags": datasets.List(datasets.ClassLabel(names=["O", "B-PER"]))}
    )
    rows = datasets.Dataset.from_dict({"tokens": [["Al", "sat"]], "ner_tags": [[1, 0]]}, features=tags)
    datasets.DatasetDict(train=rows, validation=rows).save_to_disk(tmp_path / "conll2003")
    assert load_task(DataConfig(task="conll", data_dir=(tmp_path,))).rows("train")[0].label == (1, 0)


@pytest.fixture
def no_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "no-datasets"))


@pytest.mark.parametrize("name", ["qqp", "some-org/some-set"])
def test_offline_answers_at_once(no_caches, name):
    start = time.perf_counter()
    message = error_of(task=name, offline=True)
    assert time.perf_counter() - start < 2.0
    assert "may not be asked (--offline or HF_HUB_OFFLINE)" in message
    assert "hf download --repo-type dataset" in message
    assert ("--data-dir nyu-mll" if name == "qqp" else "give its path as --task") in message


def test_a_downloaded_folder_is_a_task_by_its_path(tmp_path, monkeypatch):
    folder = tmp_path / "some-org" / "films" / "data"
    folder.mkdir(parents=True)
    hub_rows(20).to_parquet(folder / "train-00000-of-00001.parquet")
    hub_rows(4).to_parquet(folder / "test-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)
    task = load_task(DataConfig(task="some-org/films"))
    assert {k: len(v) for k, v in task.splits.items()} == {"train": 20, "test": 4}
    assert task.name == "films"


def test_an_unreachable_hub_answers_within_two_seconds(no_caches, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hubs.socket, "create_connection", lambda *_: time.sleep(30))
    start = time.perf_counter()
    message = error_of(task="qqp")
    assert time.perf_counter() - start < 2.0
    assert "the hub did not answer within 1.5 seconds" in message


def test_a_reachable_hub_is_asked_for_the_right_set(no_caches, monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, config, revision):
        asked.append((name, config, revision))
        if revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found x.py")
        return datasets.DatasetDict(train=hub_rows(), validation=hub_rows())

    monkeypatch.setattr(hubs, "reachable", lambda: True)
    monkeypatch.setattr(hubs, "offline_mode", lambda _: False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load_task(DataConfig(task="sst2"))
    assert asked == [("nyu-mll/glue", "sst2", None), ("nyu-mll/glue", "sst2", "refs/convert/parquet")]
    assert task.rows("train")[1].label == 1
    own = load_task(DataConfig(task="some-org/films", data_revision="v1"))
    assert asked[-1] == ("some-org/films", None, "v1")
    assert (own.name, own.labels) == ("films", ("negative", "positive"))

    def broken(name, config, revision):
        raise ValueError("BuilderConfig 'x' not found.\nAvailable: ['y']")

    monkeypatch.setattr(datasets, "load_dataset", broken)
    assert "could not load 'nyu-mll/glue': BuilderConfig 'x' not found. Give" in error_of(task="sst2")


def test_the_switch_of_datasets_is_put_back():
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    with hubs._without_network(True):
        assert datasets.config.HF_HUB_OFFLINE is True
    assert datasets.config.HF_HUB_OFFLINE is before
    assert hubs.snapshot(Hub("no/such"), None) is None


# --- refusals -------------------------------------------------------------------------------------------------------


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

"""The user's own files in every form, and task.yaml."""

from __future__ import annotations

import re

import pytest

from budwood.config.data import DataConfig
from budwood.data.source import load_task
from budwood.data.split import limit
from tests.data.tables_for_tests import RECORDS, error_of, facts, sheet, write_table


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

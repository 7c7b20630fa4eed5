"""Folders that `datasets` saved, files of the hub, its caches, and a hub that does not answer."""

from __future__ import annotations

import time

import pytest

from budwood.config.data import DataConfig
from budwood.data import hub as hubs
from budwood.data.registry import Hub
from budwood.data.source import load_task
from tests.data.tables_for_tests import error_of, facts


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

    def silent(*_: object) -> None:
        time.sleep(30)
        raise TimeoutError

    monkeypatch.setattr(hubs.socket, "create_connection", silent)
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
    assert load_task(DataConfig(task="some-org/sst2", label="label", data_revision="v1")).notes["columns"]
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

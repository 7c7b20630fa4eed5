"""The table of public tasks is complete and consistent."""

from __future__ import annotations

import pytest

from budwood.data.prompt import causal_parts, masked_parts
from budwood.data.readers import READERS
from budwood.data.readers.glue import LAYOUTS
from budwood.data.registry import PUBLIC
from budwood.data.source import folder_names

PROMISED = (
    *(
        "cola",
        "sst2",
        "mrpc",
        "rte",
        "qnli",
        "qqp",
        "mnli",
        "mnli-mm",
        "wnli",
        "stsb",
        "snli",
        "sick",
        "sst5",
        "sst2-6920",
    ),
    *("mr", "cr", "mpqa", "subj", "trec", "agnews", "imdb", "dbpedia", "yahoo", "squad2", "conll", "wikitext-2"),
    "arithmetic-published",
)


def test_every_promised_task_is_there():
    assert set(PROMISED) <= set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_row_fits_together(name):
    task = PUBLIC[name]
    assert task.name == name
    assert task.reader in READERS
    assert task.reader != "glue" or name in LAYOUTS
    assert all(label in task.labels for _, label in task.codes)
    if task.kind == "label":
        assert len(task.labels) >= 2
        assert task.template is not None
        assert len(task.template.words) == len(task.template.causal_words) == len(task.labels)
        assert len(set(task.template.words)) == len(task.labels)
    if task.template is not None:
        slots = {part.kind for part in masked_parts(task.template)}
        assert "mask" in slots
        assert "text" in slots
        assert causal_parts(task.template)


def test_metrics_are_those_of_the_benchmarks():
    got = {name: PUBLIC[name].metric for name in ("cola", "stsb", "mrpc", "qqp", "sst2", "rte", "mnli", "squad2")}
    assert got == {
        **{"cola": "mcc", "stsb": "pearson", "mrpc": "f1", "qqp": "f1"},
        **{"sst2": "accuracy", "rte": "accuracy", "mnli": "accuracy", "squad2": "f1"},
    }


def test_wordings_of_the_original_study():
    words = {
        name: dict(zip(PUBLIC[name].labels, PUBLIC[name].template.words)) for name in ("rte", "mnli", "subj", "cola")
    }
    assert words == {
        "rte": {"not_entailment": "No", "entailment": "Yes"},
        "mnli": {"contradiction": "No", "entailment": "Yes", "neutral": "Maybe"},
        "subj": {"subjective": "subjective", "objective": "objective"},
        "cola": {"unacceptable": "incorrect", "acceptable": "correct"},
    }
    assert PUBLIC["mnli"].template.masked == "{text|chop} ? {mask} , {pair|lower}"
    assert PUBLIC["mrpc"].template.masked == "{text} {mask} , {pair|lower}"
    assert PUBLIC["rte"].template.limits == (240, 0)
    assert PUBLIC["rte"].template.causal == "{text}\n question: {pair} true or false?\n answer:"


def test_a_folder_name_belongs_to_one_form_of_a_set():
    assert "sst2" not in folder_names(PUBLIC["sst2-6920"])
    assert {"sst2", "SST-2", "glue/SST-2"} <= set(folder_names(PUBLIC["sst2"]))

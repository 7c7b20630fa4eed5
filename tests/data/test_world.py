"""The shipped world: same seed same rows, balanced labels, nothing of the test split in training or plain text."""

from __future__ import annotations

import re
import time
from collections import Counter

import numpy as np
import pytest

from budwood.data import world
from budwood.data.task import Row, Task
from budwood.data.world import entail, grammar, qa, sentiment, tags, topic
from budwood.data.world.facts import FACTS
from budwood.data.world.leak import WIDTH, leaking, stretches
from budwood.data.world.lexicon import POOLS, Draw, Patterns, cut, plural
from budwood.errors import DataError

LABELLED = ("tiny-sentiment", "tiny-topic", "tiny-entail", "tiny-grammar")
ROWS = (*LABELLED, "tiny-tags", "tiny-qa")


def words_of(row: Row) -> list[str]:
    return " ".join(stretches(row)).split()


def all_words(task: Task, split: str) -> set[str]:
    return {w for row in task.rows(split) for w in words_of(row)}


@pytest.fixture(scope="module")
def text() -> Task:
    return world.load("tiny-text")


def test_names_and_unknown_name() -> None:
    assert set(world.NAMES) == {"tiny-text", *ROWS}
    with pytest.raises(DataError, match="Did you mean 'tiny-sentiment'"):
        world.load("tiny-sentment")


@pytest.mark.parametrize("name", ROWS)
def test_loads_fast_and_without_plain_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("plain text was generated")

    monkeypatch.setattr(world.text, "passages", forbidden)
    world._load.cache_clear()
    started = time.process_time()
    world.load(name, seed=5)
    assert time.process_time() - started < 2.0  # a second on a free machine


@pytest.mark.parametrize("name", ROWS)
def test_same_seed_same_rows_and_the_test_split_never_changes(name: str) -> None:
    first = world.load(name, seed=3)
    world._load.cache_clear()
    again, other = world.load(name, seed=3), world.load(name, seed=4)
    assert first.digest == again.digest
    assert first.rows("train") != other.rows("train")
    assert first.rows("test") == other.rows("test")


@pytest.mark.parametrize("name", ROWS)
def test_sizes_ids_and_no_row_twice(name: str) -> None:
    task = world.load(name)
    sizes = {split: len(rows) for split, rows in task.splits.items()}
    assert 4000 <= sizes["train"] <= 15000 and sizes["validation"] == 1000 and sizes["test"] >= 1000
    ids = [row.id for rows in task.splits.values() for row in rows]
    assert len(set(ids)) == len(ids)
    assert task.rows("test")[17].id == f"{name}/test/17"
    for rows in task.splits.values():
        assert len({(r.text, r.pair, r.words, r.label) for r in rows}) == len(rows)


@pytest.mark.parametrize("name", LABELLED)
def test_labels_are_balanced(name: str) -> None:
    task = world.load(name)
    for rows in task.splits.values():
        counts = Counter(row.label for row in rows)
        assert set(counts) == set(range(len(task.labels))) and max(counts.values()) - min(counts.values()) <= 1
    assert task.template is not None
    assert len(task.template.words) == len(task.template.causal_words) == len(task.labels)


HELD_KINDS = {
    "tiny-sentiment": ("person", "place", "film"),
    "tiny-topic": ("person", "place"),
    "tiny-entail": ("person", "place"),
    "tiny-grammar": ("person", "place"),
    "tiny-tags": ("person", "place"),
    "tiny-qa": ("person", "place", "river", "film"),
}


@pytest.mark.parametrize("name", ROWS)
def test_test_entities_are_not_in_training(name: str) -> None:
    task = world.load(name)
    for kind in HELD_KINDS[name]:
        seen, held = set(POOLS["seen"][kind]), set(POOLS["held"][kind])
        assert not seen & held
        for split, other in (("train", held), ("validation", held), ("test", seen)):
            if kind == "film":  # three words
                joined = "\n".join(" ".join(words_of(row)) for row in task.rows(split))
                assert not any(title in joined for title in other)
            else:
                assert not all_words(task, split) & other
        if kind != "film":
            assert all_words(task, "test") & held


def pattern_sets() -> list[Patterns]:
    facts = [p for kind in FACTS.values() for fact in kind for p in (fact.said, fact.asked)]
    own = [sentiment.PLAIN, sentiment.NEGATED, sentiment.CONTRAST, sentiment.SETTING, topic.PATTERNS, entail.PREMISE]
    return [*own, grammar.PATTERNS, tags.PATTERNS, *facts]


def as_regex(pattern: str) -> re.Pattern[str]:
    bare = re.sub(r"/[A-Z]+", "", pattern)
    parts = re.split(r"\{\w+\}", bare)
    return re.compile(r"(?<!\S)" + r"[^.?]+?".join(re.sub(r"\ba\b", "an?", re.escape(p)) for p in parts) + r"(?!\S)")


def test_test_patterns_are_held_out() -> None:
    for patterns in pattern_sets():
        assert patterns.by_part["held"]
        assert not set(patterns.by_part["held"]) & set(patterns.by_part["all"])


@pytest.mark.parametrize("name", ["tiny-tags", "tiny-topic"])
def test_held_patterns_do_not_occur_in_training(name: str) -> None:
    held = {"tiny-tags": tags.PATTERNS, "tiny-topic": topic.PATTERNS}[name].by_part["held"]
    joined = {s: "\n".join(" ".join(words_of(r)) for r in world.load(name).rows(s)) for s in ("train", "test")}
    for pattern in held:
        assert as_regex(pattern).search(joined["test"])
        assert not as_regex(pattern).search(joined["train"])


def test_no_eight_words_of_a_test_row_in_plain_text(text: Task) -> None:
    forbidden = set()
    for name in ROWS:
        for row in world.load(name).rows("test"):
            for stretch in stretches(row):
                w = stretch.lower().split()
                forbidden |= {tuple(w[i : i + WIDTH]) for i in range(len(w) - WIDTH + 1)}
    assert len(forbidden) > 20000
    for split in text.splits:
        for row in text.rows(split):
            w = row.text.lower().split()
            assert not forbidden.intersection(zip(*(w[k:] for k in range(WIDTH)), strict=False)), row.id


def test_leaking_agrees_with_a_slow_oracle() -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["a", "B", "c"], rng.integers(1, 40))) for _ in range(300)]
    rows = [Row("r", " ".join(rng.choice(["a", "b", "c"], 9)), pair="c " * 8) for _ in range(40)]
    grams = {tuple(s.split()[i : i + 8]) for r in rows for s in stretches(r) for i in range(len(s.split()) - 7)}
    slow = {
        n
        for n, t in enumerate(texts)
        if any(tuple(t.lower().split()[i : i + 8]) in grams for i in range(len(t.split()) - 7))
    }
    assert leaking(texts, rows) == slow and 0 < len(slow) < 300
    assert leaking(["a b"], rows) == set()


def test_plain_text_passages(text: Task) -> None:
    lengths = [len(row.text.split()) for row in text.rows("train")]
    assert min(lengths) >= 60 and max(lengths) <= 120 and sum(lengths) > 1_000_000
    joined = " ".join(row.text for row in text.rows("train")[:3000])
    for phrase in (
        "it was great .",
        "it was terrible .",
        " not at all ",
        " but ",
        "? yes .",
        "? no .",
        " so ",
        "this is about food .",
    ):
        assert phrase in joined
    assert not re.search(r"\d [+-] \d", joined)
    words = set(joined.split())
    for name in LABELLED:
        template = world.load(name).template
        assert template is not None and set(template.words) <= words


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_answers_are_where_they_are_said_to_be(split: str) -> None:
    rows = world.load("tiny-qa").rows(split)
    for row in rows:
        assert row.pair is not None and row.answers is not None
        for answer, at in row.answers:
            assert row.pair[at : at + len(answer)] == answer
            assert row.pair[at - 1 : at] in ("", " ") and row.pair[at + len(answer)] == " "
    assert abs(np.mean([not row.answers for row in rows]) - 1 / 3) < 0.01


def test_unanswerable_questions_have_no_answer_in_the_paragraph() -> None:
    draw = Draw(7, "seen")
    asked = 0
    for _ in range(500):
        _, stated, names = qa.paragraph(draw, 3, 3)
        question = qa.unanswered(draw, stated, names)
        if question is None:
            continue
        asked += 1
        known = {fact.replace("{e}", s.entity) for s in stated for fact in s.fact.asked.by_part["seen"]}
        assert question not in known
    assert asked > 300


def test_squad_document_holds_the_same_rows() -> None:
    rows, document = world.load("tiny-qa").rows("test"), world.squad_json("test")
    questions = [(p["context"], q) for article in document["data"] for p in article["paragraphs"] for q in p["qas"]]
    assert document["version"] == "v2.0" and len(questions) == len(rows)
    for row, (context, q) in zip(rows, questions, strict=True):
        assert (row.id, row.text, row.pair) == (q["id"], q["question"], context)
        assert q["is_impossible"] == (not row.answers)
        assert tuple((a["text"], a["answer_start"]) for a in q["answers"]) == row.answers


@pytest.mark.parametrize(("name", "most"), [("tiny-sentiment", 0.80), ("tiny-entail", 0.62), ("tiny-grammar", 0.62)])
def test_counting_words_is_not_enough(name: str, most: float) -> None:
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    task = world.load(name)
    texts = {s: [" ".join(words_of(r)) for r in task.rows(s)] for s in ("train", "validation", "test")}
    label = {s: [r.label for r in task.rows(s)] for s in texts}
    counter = CountVectorizer().fit(texts["train"])
    model = LogisticRegression(max_iter=300).fit(counter.transform(texts["train"]), label["train"])
    for split in ("validation", "test"):
        assert model.score(counter.transform(texts[split]), label[split]) <= most


def test_a_word_alone_does_not_tell_its_class() -> None:
    task = world.load("tiny-tags")
    counts: dict[str, Counter[int]] = {}
    for row in task.rows("train"):
        for word, label in zip(row.words or (), row.label, strict=True):  # type: ignore[arg-type]
            counts.setdefault(word, Counter())[label] += 1
    best = {word: c.most_common(1)[0][0] for word, c in counts.items()}
    right = [best.get(w) == y for r in task.rows("validation") for w, y in zip(r.words or (), r.label, strict=True)]  # type: ignore[arg-type]
    assert 0.80 < np.mean(right) < 0.95


def test_lexicon_rules() -> None:
    assert cut("abcdefgh", "held") == ("d", "h")
    assert [plural(n) for n in ("lamp", "box", "shelf", "roof", "knife", "bench")] == [
        "lamps", "boxes", "shelves", "roofs", "knives", "benches",
    ]  # fmt: skip
    assert Draw(0, "seen").fill("a {x} map and a {y} one", {"x": "old", "y": "useful"}) == "an old map and a useful one"
    with pytest.raises(KeyError):
        Draw(0, "seen").word("nonsense")
    for _ in range(20):
        a, b = Draw(_, "held").fill("{animal} {animal2}").split()
        assert a != b

"""Longer texts: SQuAD 2.0 JSON, CoNLL columns, WikiText, stories, and the published sums."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from budwood.data.readers.harvest import Harvest, coder
from budwood.data.readers.lines import check_file, find, not_utf8, read_lines
from budwood.data.registry import PublicTask
from budwood.data.task import Row
from budwood.errors import DataError

HEADING = re.compile(r"=( =)* .* =( =)*")
STORY_END = "<|endoftext|>"


def squad(folder: Path, task: PublicTask) -> Harvest | None:
    """Questions with their contexts; the article is the group. A file without any answer is no split."""
    harvest = Harvest(task.name)
    for split, names in (
        ("train", ("train-v2.0.json", "train.json")),
        ("validation", ("dev-v2.0.json", "dev.json")),
        ("test", ("test-v2.0.json", "test.json")),
    ):
        path = find(folder, *names)
        if path is None:
            continue
        rows = squad_rows(path)
        if any(row.answers for row in rows):
            harvest.start(split).extend(rows)
        else:
            harvest.unlabelled(path)
    return harvest if harvest.splits else None


def squad_rows(path: Path) -> list[Row]:
    """Rows of one SQuAD file. Context and answers keep every character: answers are found by position."""
    data = load_json(path)
    if not is_squad(data):
        raise DataError(
            f"'{path}' is no SQuAD file: expected an object with data > paragraphs > qas, as SQuAD 2.0 has it."
        )
    return squad_from_columns(squad_columns(data), path)


def squad_columns(data: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Parsed SQuAD JSON as the columns that `datasets` gives the set."""
    columns: dict[str, list[Any]] = {name: [] for name in ("id", "title", "context", "question", "answers")}
    for number, article in enumerate(data["data"]):
        title = article.get("title") or f"article {number}"
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                answers = () if question.get("is_impossible") else question.get("answers", ())
                given = {"text": [a["text"] for a in answers], "answer_start": [a["answer_start"] for a in answers]}
                values = (str(question["id"]), title, paragraph["context"], question["question"], given)
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
    return columns


def squad_from_columns(columns: Mapping[str, Sequence[Any]], path: Path) -> list[Row]:
    """Rows of question, context and answers; ids and titles where there are any."""
    count = len(columns["question"])
    ids = columns.get("id", range(count))
    titles = columns.get("title", [None] * count)
    if not count:
        raise DataError(f"'{path}' holds no questions. Give a file with at least one.")
    rows, seen = [], set()
    for name, title, context, question, given in zip(
        ids, titles, columns["context"], columns["question"], columns["answers"]
    ):
        answers = tuple(zip(given["text"], map(int, given["answer_start"]), strict=True)) if given else ()
        for text, start in answers:
            if context[start : start + len(text)] != text:
                raise DataError(
                    f"Question '{name}' of '{path}': the answer {text!r} is not at character {start} of its context. "
                    f"Correct answer_start; it counts characters, not bytes."
                )
        if name in seen:
            raise DataError(
                f"Question id '{name}' occurs twice in '{path}'. Ids must be unique: predictions go by them."
            )
        seen.add(name)
        rows.append(Row(str(name), question.strip(), context, answers=answers, group=title))
    return rows


def is_squad(data: object) -> bool:
    """Whether parsed JSON has the shape of SQuAD."""
    if not isinstance(data, dict) or not isinstance(data.get("data"), list):
        return False
    return all(isinstance(article, dict) and "paragraphs" in article for article in data["data"])


def load_json(path: Path) -> Any:
    """Parsed JSON of a UTF-8 file."""
    check_file(path)
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"'{path}' is not JSON: {error.msg} at line {error.lineno}, column {error.colno}. A file with one JSON "
            f"object per line should end in .jsonl."
        ) from error


def conll(folder: Path, task: PublicTask) -> Harvest | None:
    """Sentences of words with a class each; the document is the group."""
    harvest = Harvest(task.name)
    code = coder(task)
    for split, names in (
        ("train", ("eng.train", "train.txt", "train.conll")),
        ("validation", ("eng.testa", "valid.txt", "dev.txt", "validation.txt", "dev.conll")),
        ("test", ("eng.testb", "test.txt", "test.conll")),
    ):
        path = find(folder, *names)
        if path is not None:
            rows = harvest.start(split)
            for number, (words, tags, document) in enumerate(tagged_sentences(path)):
                labels = tuple(code(tag, path, number) for tag in tags)
                rows.append(
                    Row(
                        f"{task.name}/{split}/{number}",
                        " ".join(words),
                        label=labels,
                        words=tuple(words),
                        group=document,
                    )
                )
    return harvest if harvest.splits else None


def tagged_sentences(path: Path) -> Iterator[tuple[list[str], list[str], str | None]]:
    """Words, tags and document of each sentence: a word per line, its tag in the last column, a blank line between."""
    words: list[str] = []
    tags: list[str] = []
    documents = 0
    for number, line in enumerate(read_lines(path)):
        cells = line.split()
        if not cells or cells[0] == "-DOCSTART-":
            if words:
                yield words, tags, f"document {documents}" if documents else None
                words, tags = [], []
            documents += bool(cells)
        elif len(cells) < 2:
            raise DataError(
                f"Line {number + 1} of '{path}' has one column; expected a word and, in the last column, its tag."
            )
        else:
            words.append(cells[0])
            tags.append(cells[-1])
    if words:
        yield words, tags, f"document {documents}" if documents else None


def is_heading(text: str) -> bool:
    """Whether a stripped line of WikiText is a heading.

    >>> is_heading("= = Description = ="), is_heading("x = 2")
    (True, False)
    """
    return HEADING.fullmatch(text) is not None


def wikitext(folder: Path, task: PublicTask) -> Harvest | None:
    """Paragraphs of WikiText; headings and blank lines are no rows, the article is the group."""
    harvest = Harvest(task.name)
    for split, names in (
        ("train", ("wiki.train.tokens", "wiki.train.raw", "train.txt")),
        ("validation", ("wiki.valid.tokens", "wiki.valid.raw", "valid.txt", "validation.txt")),
        ("test", ("wiki.test.tokens", "wiki.test.raw", "test.txt")),
    ):
        path = find(folder, *names)
        if path is None:
            continue
        rows, article = harvest.start(split), 0
        for number, line in enumerate(read_lines(path)):
            text = line.strip()
            if is_heading(text):
                article += not text.startswith("= =")
            elif text:
                rows.append(Row(f"{task.name}/{split}/{number}", text, group=f"{split} article {article}"))
    return harvest if harvest.splits else None


def stories(folder: Path, task: PublicTask) -> Harvest | None:
    """Stories between end-of-text marks."""
    harvest = Harvest(task.name)
    for split, names in (
        ("train", ("*-train.txt", "train.txt")),
        ("validation", ("*-valid.txt", "valid.txt")),
    ):
        path = find(folder, *names)
        if path is not None:
            harvest.start(split).extend(story_rows(path, f"{task.name}/{split}"))
    alone = find(folder, "*.txt")
    if not harvest.splits and alone is not None and alone.stem.lower() not in ("readme", "license"):
        harvest.start("all").extend(story_rows(alone, f"{task.name}/all"))
    return harvest if harvest.splits else None


def story_rows(path: Path, prefix: str) -> Iterator[Row]:
    """One row per story; read line by line, for the published file has gigabytes."""
    number, lines = 0, []
    for line in read_lines(path):
        before, mark, after = line.partition(STORY_END)
        lines.append(before)
        if mark:
            text = "\n".join(lines).strip()
            if text:
                yield Row(f"{prefix}/{number}", text)
                number += 1
            lines = [after]
    text = "\n".join(lines).strip()
    if text:
        yield Row(f"{prefix}/{number}", text)


def sums(folder: Path, task: PublicTask) -> Harvest | None:
    """Lines `a op b = c` of the published study."""
    if find(folder, "train.txt") is None:
        return None
    from budwood.data.arithmetic import read

    published = read(folder, task.name)
    return Harvest(task.name, {split: list(rows) for split, rows in published.splits.items()}, dict(published.notes))

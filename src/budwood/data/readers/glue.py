"""Tab-separated sets with a header as GLUE, SNLI, SICK and HANS distribute them, and CoLA without one."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from budwood.data.readers.harvest import Harvest, coder
from budwood.data.readers.lines import find, first_line, read_lines, some
from budwood.data.registry import PublicTask
from budwood.data.task import Row
from budwood.errors import DataError, nearest

MOST_BROKEN = 100  # lines with too few columns; more means a damaged file


@dataclass(frozen=True)
class Layout:
    """Columns by their header names, and the names of the files."""

    text: str
    label: str
    pair: str | None = None
    id: str | None = None
    train: tuple[str, ...] = ("train.tsv", "train.txt")
    validation: tuple[str, ...] = ("dev.tsv", "validation.tsv", "valid.tsv")
    test: tuple[str, ...] = ("test.tsv",)


_NLI = Layout("sentence1", "gold_label", "sentence2", "index")
LAYOUTS = {
    "sst2": Layout("sentence", "label"),
    "mrpc": Layout(
        "#1 String",
        "Quality",
        "#2 String",
        train=("train.tsv", "msr_paraphrase_train.txt"),
        test=("msr_paraphrase_test.txt", "test.tsv"),
    ),
    "rte": Layout("sentence1", "label", "sentence2", "index"),
    "wnli": Layout("sentence1", "label", "sentence2", "index"),
    "qnli": Layout("question", "label", "sentence", "index"),
    "qqp": Layout("question1", "is_duplicate", "question2"),
    "stsb": Layout("sentence1", "score", "sentence2", "index"),
    "snli": _NLI,
    "mnli": Layout(
        *("sentence1", "gold_label", "sentence2", "index"),
        validation=("dev_matched.tsv", "validation_matched.tsv", "validation-matched.tsv"),
        test=("test_matched.tsv",),
    ),
    "mnli-mm": Layout(
        *("sentence1", "gold_label", "sentence2", "index"),
        validation=("dev_mismatched.tsv", "validation_mismatched.tsv", "validation-mismatched.tsv"),
        test=("test_mismatched.tsv",),
    ),
    "hans": Layout(
        *("sentence1", "gold_label", "sentence2", "pairID"),
        train=("heuristics_train_set.txt", "train.tsv"),
        validation=("heuristics_evaluation_set.txt", "dev.tsv"),
    ),
    "sick": Layout(
        *("sentence_A", "entailment_judgment", "sentence_B", "pair_ID"),
        train=("SICK_train.txt", "train.tsv"),
        validation=("SICK_dev.txt", "SICK_trial.txt", "dev.tsv"),
        test=("SICK_test_annotated.txt", "SICK_test.txt", "test.tsv"),
    ),
}


def glue(folder: Path, task: PublicTask) -> Harvest | None:
    """Rows of every labelled file of a folder in GLUE's form; None where the folder holds none of its files."""
    layout = LAYOUTS[task.name]
    harvest = Harvest(task.name)
    for split in ("train", "validation", "test"):
        path = find(folder, *getattr(layout, split))
        if path is None:
            continue
        if split == "test" and layout.label not in first_line(path).split("\t"):
            harvest.unlabelled(path)
            continue
        _header_tsv(path, split, task, layout, harvest)
    return harvest if harvest.splits else None


def _header_tsv(path: Path, split: str, task: PublicTask, layout: Layout, harvest: Harvest) -> None:
    """Add the rows of one file. Quotes are plain characters in these files: a record is a line."""
    lines = read_lines(path)
    header = next(lines, "").split("\t")
    text_at, label_at = _column(path, header, layout.text), _column(path, header, layout.label)
    pair_at = _column(path, header, layout.pair) if layout.pair else None
    id_at = header.index(layout.id) if layout.id in header else None
    width, code, rows = len(header), coder(task), harvest.start(split)
    for line, record in enumerate(lines):
        cells = record.split("\t")
        if len(cells) < width and len(cells) <= max(text_at, label_at, pair_at or 0):
            harvest.leave_out(split, "lines with missing columns", line)
            continue
        raw, text = cells[label_at], cells[text_at].strip()
        pair = None if pair_at is None else cells[pair_at].strip()
        if raw == "-":
            harvest.leave_out(split, "rows without a gold label ('-')")
        elif not text or pair == "":
            harvest.leave_out(split, "rows with an empty text", line)
        else:
            label = _number(raw, path, line) if task.kind == "regression" else code(raw, path, line)
            key = cells[id_at] if id_at is not None else line
            rows.append(Row(f"{task.name}/{split}/{key}", text, pair, label))
    if harvest.left_out.get(split, Counter())["lines with missing columns"] > MOST_BROKEN:
        raise DataError(
            f"More than {MOST_BROKEN} lines of '{path}' have fewer columns than its header's {width}. It should be "
            f"tab-separated without quoting, as distributed. Fetch it again."
        )


def _column(path: Path, header: list[str], name: str) -> int:
    if name not in header:
        raise DataError(
            f"'{path}' has no column '{name}'. Its columns are {some(header)}.{nearest(name, header)} Expected the "
            f"file as it is distributed; a file of another form can be given as your own with --train-file, --text and "
            f"--label."
        )
    return header.index(name)


def _number(raw: str, path: Path, line: int) -> float:
    try:
        return float(raw)
    except ValueError:
        raise DataError(f"Row {line} of '{path}' has the label {raw!r} where a number was expected.") from None


def cola(folder: Path, task: PublicTask) -> Harvest | None:
    """CoLA: source, label, star, sentence; no header."""
    harvest, code = Harvest(task.name), coder(task)
    for split, names in (
        ("train", ("train.tsv", "in_domain_train.tsv")),
        ("validation", ("dev.tsv", "in_domain_dev.tsv")),
    ):
        path = find(folder, *names)
        if path is None:
            continue
        rows = harvest.start(split)
        for line, record in enumerate(read_lines(path)):
            cells = record.split("\t")
            if len(cells) != 4:
                raise DataError(
                    f"Line {line + 1} of '{path}' has {len(cells)} columns; CoLA's files have 4 and no header."
                )
            rows.append(Row(f"cola/{split}/{line}", cells[3].strip(), None, code(cells[1], path, line)))
    test = find(folder, "test.tsv")
    if test is not None:
        harvest.unlabelled(test)
    return harvest if harvest.splits else None


def anli(folder: Path, task: PublicTask) -> Harvest | None:
    """ANLI: three rounds of JSON lines, one after another."""
    harvest, code = Harvest(task.name), coder(task)
    for split, name in (("train", "train.jsonl"), ("validation", "dev.jsonl"), ("test", "test.jsonl")):
        for turn in ("R1", "R2", "R3"):
            path = folder / turn / name
            if not path.exists():
                continue
            rows = harvest.start(split)
            for line, record in enumerate(read_lines(path)):
                row = json.loads(record)
                text, pair = row["context"].strip(), row["hypothesis"].strip()
                rows.append(Row(f"anli/{split}/{turn}/{line}", text, pair, code(row["label"], path, line), group=text))
    return harvest if harvest.splits else None

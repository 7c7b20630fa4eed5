"""Sets of single texts: LM-BFF's CSV, `label<TAB>text`, `.pos` and `.neg` files, CSV of topics, folders of reviews."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from budwood.data.readers.harvest import Harvest, coder
from budwood.data.readers.lines import find, first_line, read_csv, read_lines, read_old_lines
from budwood.data.registry import PublicTask
from budwood.data.task import Row
from budwood.errors import DataError

SPLITS = {  # patterns of file names, most exact first
    "train": ("train.csv", "train.tsv", "train.txt", "*_train.csv", "*_train.tsv", "*_train.txt", "*_train", "*train"),
    "validation": ("dev.csv", "dev.tsv", "dev.txt", "*_dev.csv", "*_dev.tsv", "*_dev.txt", "*_dev", "*dev"),
    "test": ("test.csv", "test.tsv", "test.txt", "*_test.csv", "*_test.tsv", "*_test.txt", "*_test", "*test"),
}
# one file per class: (ending or name, class index)
CLASS_FILES = {
    "subj": (("*.subjective", 0), ("quote*.5000", 0), ("*.objective", 1), ("plot*.5000", 1)),
}
POS_NEG = (("*.neg", 0), ("*.pos", 1))
TREC = (("train", ("train_5500.label",)), ("test", ("TREC_10.label",)))


def sentences(folder: Path, task: PublicTask) -> Harvest | None:
    """Rows of a folder that holds one of the forms above; None where it holds none."""
    harvest = Harvest(task.name)
    for split, names in SPLITS.items():
        path = find(folder, *names)
        if path is not None:
            _labelled_lines(path, split, task, harvest)
    return harvest if harvest.splits else _class_files(folder, task) or _trec(folder, task)


def _labelled_lines(path: Path, split: str, task: PublicTask, harvest: Harvest) -> None:
    """Add rows of a file with a label and a text in each line, whichever comes first, header or not."""
    code, rows = coder(task), harvest.start(split)
    flipped: bool | None = None
    header = 0
    for line, (first, second) in enumerate(_pairs(path)):
        if line == 0 and "label" in (first.lower(), second.lower()):
            flipped, header = second.lower() == "label", 1
            continue
        if flipped is None:
            flipped = _is_label(second, task) and not _is_label(first, task)
        raw, text = (second, first) if flipped else (first, second)
        if text.strip():
            rows.append(Row(f"{task.name}/{split}/{line - header}", text.strip(), None, code(raw, path, line)))
        else:
            harvest.leave_out(split, "rows with an empty text", line - header)


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Two cells per line: cut at the first tab where there is one (then quotes mean nothing), else CSV."""
    if "\t" in first_line(path):
        for number, line in enumerate(read_lines(path)):
            if not line:
                continue
            first, tab, second = line.partition("\t")
            if not tab:
                raise DataError(f"Line {number + 1} of '{path}' has no tab; expected `label<TAB>text` in every line.")
            yield first, second
    else:
        for number, record in enumerate(read_csv(path)):
            if len(record) < 2:
                raise DataError(f"Record {number + 1} of '{path}' has one column; expected a label and a text.")
            yield (record[0], record[1]) if len(record) == 2 else (record[0], _join(record[1:]))


def _is_label(cell: str, task: PublicTask) -> bool:
    known = {name.lower() for name in task.labels} | {code.lower() for code, _ in task.codes}
    return cell.strip().isdigit() or cell.strip().lower() in known


def _class_files(folder: Path, task: PublicTask) -> Harvest | None:
    """One text per line, one file per class; such a set comes in one piece."""
    harvest, seen = Harvest(task.name), set()
    for pattern, label in CLASS_FILES.get(task.name, POS_NEG):
        path = find(folder, pattern)
        if path is None:
            continue
        seen.add(label)
        rows = harvest.start("all")
        mark = path.suffix[1:] if path.suffix[1:].isalpha() else path.stem
        for line, text in enumerate(read_old_lines(path)):
            if text.strip():
                rows.append(Row(f"{task.name}/{mark}/{line}", text.strip(), None, label))
            else:
                harvest.leave_out("all", f"empty lines of {path.name}")
    if harvest.splits and len(seen) < 2:
        raise DataError(f"'{folder}' holds the file of one class only. Task '{task.name}' needs a file for each class.")
    return harvest if harvest.splits else None


def _trec(folder: Path, task: PublicTask) -> Harvest | None:
    """TREC's own files: `DESC:manner How did ...`, Latin-1; the part before the colon is the class."""
    harvest, code = Harvest(task.name), coder(task)
    for split, names in TREC:
        path = find(folder, *names)
        if path is None:
            continue
        rows = harvest.start(split)
        for line, record in enumerate(read_old_lines(path)):
            label, _, text = record.partition(" ")
            rows.append(Row(f"{task.name}/{split}/{line}", text.strip(), None, code(label.split(":")[0], path, line)))
    return harvest if harvest.splits else None


def topics(folder: Path, task: PublicTask) -> Harvest | None:
    """Headerless CSV with a label counted from 1, then title and body, which are joined by a space.

    A folder `subset/` (text, then a label counted from 0) stands in where the full training file is absent.
    """
    harvest, code = Harvest(task.name), coder(task)
    train, test = find(folder, "train.csv"), find(folder, "test.csv")
    if train is None and (folder / "subset" / "train.csv").exists():
        harvest.notes["source"] = "subset/ (the full train.csv is absent)"
        for split in ("train", "test"):
            part, rows = folder / "subset" / f"{split}.csv", harvest.start(split)
            for line, record in enumerate(read_csv(part)):
                rows.append(Row(f"{task.name}/{split}/{line}", record[0].strip(), None, code(record[-1], part, line)))
        return harvest
    for split, path in (("train", train), ("test", test)):
        if path is None:
            continue
        rows = harvest.start(split)
        for line, record in enumerate(read_csv(path)):
            if not record[0].isdigit() or not 1 <= int(record[0]) <= len(task.labels):
                raise DataError(
                    f"Row {line} of '{path}' begins with {record[0][:40]!r}; expected a label from 1 to "
                    f"{len(task.labels)}, then the texts, without a header, as the set is distributed."
                )
            rows.append(Row(f"{task.name}/{split}/{line}", _join(record[1:]), None, int(record[0]) - 1))
    return harvest if harvest.splits else None


def _join(parts: list[str]) -> str:
    return " ".join(part.strip() for part in parts if part.strip())


def reviews(folder: Path, task: PublicTask) -> Harvest | None:
    """IMDB: one review per file in train/neg, train/pos, test/neg, test/pos, ordered by their numbers."""
    harvest = Harvest(task.name)
    for split in ("train", "test"):
        for label, name in enumerate(("neg", "pos")):
            texts = folder / split / name
            if not texts.is_dir():
                continue
            rows = harvest.start(split)
            for path in sorted(texts.glob("*.txt"), key=lambda p: [int(n) for n in re.findall(r"\d+", p.stem)]):
                text = "\n".join(read_lines(path)).strip()
                rows.append(Row(f"{task.name}/{split}/{name}/{path.stem}", text, None, label))
    return harvest if harvest.splits else sentences(folder, task)

"""Tables become rows: columns asked for or guessed, labels turned into classes or numbers.

Everything guessed is said in the task's notes; what cannot be guessed is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from budwood.data.labels import METRICS, Wanted, cell_text, labelled_task, refuse_lists, token_task
from budwood.data.readers.harvest import Harvest
from budwood.data.readers.lines import some
from budwood.data.readers.passages import squad_from_columns
from budwood.data.readers.table import UNKNOWN_CLASS, Table
from budwood.data.task import Row, Task
from budwood.errors import DataError, nearest

# names of columns, most telling first; compared without case
PAIRS = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2")),
    *(("sentence_a", "sentence_b"), ("question", "sentence"), ("#1 string", "#2 string"), ("text", "text_pair")),
)
TEXTS = (
    *("text", "sentence", "sentence1", "review", "question", "premise", "content", "document", "body", "comment"),
    *("tweet", "message", "headline", "title", "description", "passage", "tokens", "words", "input"),
)
LABELS = (
    *(
        "label",
        "labels",
        "gold_label",
        "target",
        "class",
        "category",
        "sentiment",
        "polarity",
        "score",
        "rating",
        "stars",
    ),
    *("is_duplicate", "quality", "entailment_judgment", "topic", "coarse_label", "ner_tags", "tags", "y"),
)
IDS = ("id", "idx", "guid", "uid", "index")


def tables_to_task(tables: Mapping[str, Table], wanted: Wanted) -> tuple[Harvest, Task]:
    """Rows of all tables and a task without splits: its kind, labels and metric.

    The names of classes are those of the train table (or of the only one), sorted, whole numbers by value; a class that
    the other tables have and train has not is an error.
    """
    harvest = Harvest(wanted.name)
    first = tables.get("train") or next(iter(tables.values()))
    for table in tables.values():
        harvest.notes |= table.notes
    if wanted.kind == "span" or (wanted.kind is None and {"question", "context", "answers"} <= set(first.columns)):
        return harvest, _span_task(tables, wanted, harvest)
    wanted = _guess(first, wanted, harvest)
    raw = {split: _rows(table, split, wanted, harvest) for split, table in tables.items()}
    for split in [s for s, labels in raw.items() if labels and all(v is None for v in labels)]:
        if split in ("train", "all"):
            raise DataError(
                f"No row of '{tables[split].path}' ({split}) has a label in '{wanted.label}'. Training needs labels."
            )
        harvest.notes["unlabelled"] = f"no split made of {split}: it has no labels"
        del raw[split], harvest.splits[split]
    if wanted.label is None:
        return harvest, Task(wanted.name, "text", {}, metric=METRICS["text"])
    if any(row.words is not None for rows in harvest.splits.values() for row in rows[:1]):
        return harvest, token_task(tables, raw, wanted, harvest)
    refuse_lists(tables, raw, wanted)
    return harvest, labelled_task(tables, raw, wanted, harvest)


def _span_task(tables: Mapping[str, Table], wanted: Wanted, harvest: Harvest) -> Task:
    """Questions on contexts, in the columns of SQuAD; a table without any answer is no split."""
    for split, table in tables.items():
        for name in ("question", "context", "answers"):
            table.column(name, "a span task")
        rows = squad_from_columns(table.columns, table.path)
        if split in ("train", "all") or any(row.answers for row in rows):
            harvest.start(split).extend(rows)
        else:
            harvest.unlabelled(table.path)
    return Task(wanted.name, "span", {}, metric=METRICS["span"])


def _guess(table: Table, wanted: Wanted, harvest: Harvest) -> Wanted:
    """The same wishes with every column named; an asked-for column that is absent is an error."""
    for part in ("text", "pair", "label", "id", "group"):
        given = getattr(wanted, part)
        for name in (given,) if isinstance(given, str) else given or ():
            table.column(name, wanted.flag(part))
    lower = {name.lower(): name for name in table.columns}
    guessed: dict[str, str] = {}
    if wanted.text is None:
        guessed |= _guess_texts(table, lower, wanted)
    if wanted.label is None and wanted.kind != "text":
        free = {low: name for low, name in lower.items() if name not in (guessed.get("text"), guessed.get("pair"))}
        found = next((free[low] for low in LABELS if low in free), None)
        if found is not None:
            guessed["label"] = found
        elif len(table.columns) > 1 or wanted.kind not in (None, "text"):
            _cannot_guess(table, "label", wanted, LABELS)
    if guessed:
        told = ", ".join(f"{part} = '{name}'" for part, name in guessed.items())
        harvest.notes["columns"] = f"guessed {told}"
    return replace(
        wanted,
        text=guessed.get("text", wanted.text),
        pair=guessed.get("pair", wanted.pair),
        label=guessed.get("label", wanted.label),
    )


def _guess_texts(table: Table, lower: Mapping[str, str], wanted: Wanted) -> dict[str, str]:
    taken = (wanted.label, wanted.pair, wanted.group)
    if wanted.pair is None:
        for text, pair in PAIRS:
            if text in lower and pair in lower and lower[text] not in taken and lower[pair] not in taken:
                return {"text": lower[text], "pair": lower[pair]}
    found = next((lower[low] for low in TEXTS if low in lower and lower[low] not in taken), None)
    if found is None and len(table.columns) == 1 and not wanted.label:
        found = next(iter(table.columns))
    if found is None:
        _cannot_guess(table, "text", wanted, TEXTS)
    return {"text": str(found)}


def _cannot_guess(table: Table, part: str, wanted: Wanted, usual: Sequence[str]) -> None:
    close = next((hint for name in table.columns if (hint := nearest(str(name).lower(), usual[:6], 1))), "")
    raise DataError(
        f"No column of '{table.path}' looks like the {part}. Its columns are {some(list(table.columns), 20)}; expected "
        f"a name such as {some(usual, 4)}.{close} Name the column with {wanted.flag(part)} COLUMN. (A file without a "
        f"header needs one: its first line is taken as the names.)"
    )


def _rows(table: Table, split: str, wanted: Wanted, harvest: Harvest) -> list[Any]:
    """Add the rows of one table and return their labels as they stand; rows without a text are counted, not kept."""
    texts = [table.column(name, wanted.flag("text")) for name in _names(wanted.text)]
    pairs = table.column(wanted.pair, wanted.flag("pair")) if wanted.pair else None
    labels = table.column(wanted.label, wanted.flag("label")) if wanted.label else None
    groups = table.column(wanted.group, wanted.flag("group")) if wanted.group else None
    names = table.classes.get(wanted.label or "", ())
    ids = _ids(table, wanted)
    blank = bool(names) and labels is not None and all(label == UNKNOWN_CLASS for label in labels)
    undecided = (wanted.label or "").lower() == "gold_label"  # annotators of these sets disagree on some rows
    rows, raw = harvest.start(split), []
    for line in range(len(table)):
        words = texts[0][line] if isinstance(texts[0][line], list | tuple) else None
        text = _joined(words) if words is not None else _joined([column[line] for column in texts])
        pair = None if pairs is None else cell_text(pairs[line])
        if not text or pair == "":
            harvest.leave_out(split, "rows with an empty text", line)
            continue
        if labels is not None and (
            (undecided and labels[line] == "-") or (names and not blank and labels[line] == UNKNOWN_CLASS)
        ):
            harvest.leave_out(split, f"rows without a gold label ({labels[line]!r})")
            continue
        group = None if groups is None else str(groups[line])
        kept = tuple(str(word) for word in words) if words is not None else None
        rows.append(Row(f"{wanted.name}/{split}/{ids[line]}", text, pair, words=kept, group=group))
        raw.append(None if labels is None else _named(labels[line], names))
    if not rows:
        raise DataError(
            f"Every row of '{table.path}' ({split}) has an empty text in {some(_names(wanted.text))}. Name another "
            f"column."
        )
    return raw if labels is not None else []


def _names(text: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text or ()


def _joined(parts: Sequence[Any]) -> str:
    return " ".join(text for part in parts if (text := cell_text(part)))


def _named(value: Any, names: tuple[str, ...]) -> Any:
    """A label with the name of its class where the table has names; None where it has no label."""
    if isinstance(value, list | tuple):
        return [_named(v, names) for v in value]
    if names and isinstance(value, int) and not isinstance(value, bool):
        return None if value == UNKNOWN_CLASS else names[value]
    return None if cell_text(value) == "" else value


def _ids(table: Table, wanted: Wanted) -> Sequence[Any]:
    """The ids of the table where every row has its own, else the numbers of the rows."""
    for name in (wanted.id,) if wanted.id else [n for n in table.columns if n.lower() in IDS]:
        values = table.column(name, wanted.flag("id"))
        if all(cell_text(v) for v in values) and len({str(v) for v in values}) == len(values):
            return values
        if wanted.id:
            raise DataError(
                f"Column '{name}' of '{table.path}' does not give every row an id of its own. Leave `id` away."
            )
    return range(len(table))

"""Labels as they stand in a user's table become classes, numbers or a class per word."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from budwood.data.readers.harvest import Harvest
from budwood.data.readers.lines import some
from budwood.data.readers.table import Table
from budwood.data.registry import PUBLIC, PublicTask
from budwood.data.task import Kind, Row, Task
from budwood.errors import DataError, nearest

FEW = 12  # more distinct values than this, not all whole, are a quantity and not classes
METRICS: Mapping[Kind, str] = {
    **{"label": "accuracy", "regression": "pearson", "tokens": "accuracy"},
    **{"span": "f1", "number": "exact", "text": "lm_loss"},
}


@dataclass(frozen=True)
class Wanted:
    """What the user said about the table; None is guessed."""

    name: str
    text: str | tuple[str, ...] | None = None
    pair: str | None = None
    label: str | None = None
    id: str | None = None
    group: str | None = None
    kind: Kind | None = None
    labels: tuple[str, ...] = ()
    flags: Mapping[str, str] = field(
        default_factory=lambda: {"text": "--text", "pair": "--text-pair", "label": "--label", "group": "--group"}
    )

    def flag(self, part: str) -> str:
        """How the user names this column."""
        return self.flags.get(part, f"columns: {part}")


def cell_text(value: Any) -> str:
    """A cell as text; a missing value (null, NaN) is the empty string."""
    if isinstance(value, str):
        return value.strip()
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)


def refuse_lists(tables: Mapping[str, Table], raw: Mapping[str, list[Any]], wanted: Wanted) -> None:
    """Raise for labels that are lists: a multi-label task."""
    for split, labels in raw.items():
        for label in labels:
            if isinstance(label, list | tuple | dict):
                raise DataError(
                    f"Column '{wanted.label}' of '{tables[split].path}' holds lists, such as {label!r}: a multi-label "
                    f"task. Multi-label tasks are not supported. Give one label per row, for example one column and "
                    f"one task for each label."
                )


def _complete(tables: Mapping[str, Table], raw: Mapping[str, list[Any]], wanted: Wanted) -> None:
    for split, labels in raw.items():
        missing = [i for i, label in enumerate(labels) if label is None]
        if missing:
            raise DataError(
                f"{len(missing):,} of {len(labels):,} rows of '{tables[split].path}' ({split}) have no label in "
                f"'{wanted.label}', the first is row {missing[0]}. Remove them or label them."
            )


def labelled_task(tables: Mapping[str, Table], raw: Mapping[str, list[Any]], wanted: Wanted, harvest: Harvest) -> Task:
    """A task with one label per row, a class or a number; the rows of the harvest get their labels."""
    _complete(tables, raw, wanted)
    public = _public(wanted, raw)
    if public is not None:
        harvest.notes["task"] = f"labels, metric and wording of the public task '{public.name}'"
    every = [label for labels in raw.values() for label in labels]
    kind = wanted.kind or (public.kind if public else None) or _kind_of(every)
    if kind in ("regression", "number"):
        numbers = {split: [_number(v, tables[split], wanted) for v in labels] for split, labels in raw.items()}
        _set_labels(harvest, numbers, float if kind == "regression" else int)
        known = numbers.get("train") or next(iter(numbers.values()))
        bounds = public.bounds if public else (min(known), max(known))
        metric, template = (public.metric, public.template) if public else (METRICS[kind], None)
        return Task(
            wanted.name, kind, {}, metric=metric, template=template, bounds=bounds if kind == "regression" else None
        )
    if kind != "label":
        raise DataError(
            f"Task '{wanted.name}' says kind: {kind}, but '{wanted.label}' holds one label per row: use kind: label."
        )
    classes = _classes(tables, raw, wanted)
    if public is not None:
        code = _public_codes(public)
        coded = {split: [code[cell_text(v).lower()] for v in labels] for split, labels in raw.items()}
        _set_labels(harvest, coded, int)
        return Task(wanted.name, "label", {}, public.labels, public.metric, public.template)
    index = {name: i for i, name in enumerate(classes)}
    _set_labels(harvest, {split: [index[_name(v)] for v in labels] for split, labels in raw.items()}, int)
    return Task(wanted.name, "label", {}, tuple(classes), METRICS["label"])


def _set_labels(harvest: Harvest, labels: Mapping[str, Sequence[float]], kind: Callable[[float], int | float]) -> None:
    for split, values in labels.items():
        rows = zip(harvest.splits[split], values, strict=True)
        harvest.splits[split] = [Row(r.id, r.text, r.pair, kind(v), group=r.group) for r, v in rows]


def _public_codes(public: PublicTask) -> dict[str, int]:
    """Labels as files of a public task may have them, in lower case; NLI's integers are too ambiguous to be taken."""
    codes = {name.lower(): i for i, name in enumerate(public.labels)}
    if not any(code.isdigit() for code, _ in public.codes):
        codes |= {str(i): i for i in range(len(public.labels))}
    return codes | {code.lower(): public.labels.index(name) for code, name in public.codes if not code.isdigit()}


def _public(wanted: Wanted, raw: Mapping[str, list[Any]]) -> PublicTask | None:
    """The public task of that name, where the user's labels are its labels."""
    public = PUBLIC.get(wanted.name)
    if public is None or wanted.kind is not None or wanted.labels or public.kind not in ("label", "regression"):
        return None
    if public.kind == "regression":
        return public if all(_float(v) is not None for labels in raw.values() for v in labels) else None
    known = _public_codes(public)
    return public if all(cell_text(v).lower() in known for labels in raw.values() for v in labels) else None


def _float(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _number(value: Any, table: Table, wanted: Wanted) -> float:
    number = _float(value)
    if number is None:
        raise DataError(f"Column '{wanted.label}' of '{table.path}' holds {value!r} where a number was expected.")
    return number


def _kind_of(labels: Sequence[Any]) -> Kind:
    """Classes, or a quantity: numbers that are not all whole and have many different values."""
    distinct = {label for label in labels if not isinstance(label, bool)}
    numbers = {_float(label) for label in distinct}
    quantity = None not in numbers and len(numbers) > FEW and any(n != int(n) for n in numbers if n is not None)
    return "regression" if quantity else "label"


@lru_cache(maxsize=65_536, typed=True)
def _name(value: Any) -> str:
    """The name of a class: 1, "1" and 1.0 are one class.

    >>> _name(" 1"), _name(1.0), _name("good"), _name(True)
    ('1', '1', 'good', 'True')
    """
    text = str(value).strip()
    number = _float(text) if text[:1] in "-+.0123456789" else None
    return str(int(number)) if number is not None and number == int(number) else text


def _classes(tables: Mapping[str, Table], raw: Mapping[str, list[Any]], wanted: Wanted) -> list[str]:
    """Names of the classes in order; a class of another split that train lacks is an error."""
    home = "train" if "train" in raw else next(iter(raw))
    known = {_name(label) for label in raw[home]}
    for split, labels in raw.items():
        for row, label in enumerate(labels):
            if _name(label) not in known:
                raise DataError(
                    f"Row {row} of '{tables[split].path}' ({split}) has the label {label!r}, which no {home} row has. "
                    f"{home.capitalize()} has {some(sorted(known), 12)}.{nearest(_name(label), known)} Correct the "
                    f"label, or add training rows of that class."
                )
    if len(known) < 2 and not wanted.labels and home != "test":
        raise DataError(
            f"All rows of '{tables[home].path}' have the label {some(sorted(known))} in '{wanted.label}'. Two are "
            f"needed."
        )
    return _ordered(known, wanted, tables[home].classes.get(wanted.label or "", ()))


def _ordered(known: set[str], wanted: Wanted, names: tuple[str, ...]) -> list[str]:
    """Classes in the order that the user or the table gives them, else sorted, numbers by value."""
    order = [_name(label) for label in (wanted.labels or names)]
    strange = sorted(known - set(order))
    if wanted.labels and strange:
        raise DataError(
            f"Task '{wanted.name}' lists the labels {some(order, 12)}, but the rows also have "
            f"{some(strange)}.{nearest(strange[0], order)} Add them to `labels` or correct the rows."
        )
    if order and not strange:
        return order
    numbers = {name: _float(name) for name in known}
    if all(number is not None for number in numbers.values()):
        return sorted(known, key=lambda name: numbers[name] or 0.0)
    return sorted(known)


def token_task(tables: Mapping[str, Table], raw: Mapping[str, list[Any]], wanted: Wanted, harvest: Harvest) -> Task:
    """A class per word; both columns hold lists of one length."""
    _complete(tables, raw, wanted)
    home = "train" if "train" in raw else next(iter(raw))
    for split, labels in raw.items():
        for number, (row, tags) in enumerate(zip(harvest.splits[split], labels, strict=True)):
            if not isinstance(tags, list | tuple) or len(tags) != len(row.words or ()):
                raise DataError(
                    f"Row {number} of '{tables[split].path}' ({split}) has {len(row.words or ())} words and "
                    f"{len(tags) if isinstance(tags, list | tuple) else 'no list of'} labels. A token task needs one "
                    f"label per word."
                )
    known = {_name(tag) for tags in raw[home] for tag in tags}
    classes = _ordered(known, wanted, tables[home].classes.get(wanted.label or "", ()))
    index = {name: i for i, name in enumerate(classes)}
    for split, labels in raw.items():
        strange = sorted({_name(tag) for tags in labels for tag in tags} - set(index))
        if strange:
            raise DataError(
                f"'{tables[split].path}' ({split}) has the labels {some(strange)}, which no {home} row has."
            )
        coded = [tuple(index[_name(tag)] for tag in tags) for tags in labels]
        harvest.splits[split] = [replace(row, label=c) for row, c in zip(harvest.splits[split], coded, strict=True)]
    return Task(wanted.name, "tokens", {}, tuple(classes), METRICS["tokens"])

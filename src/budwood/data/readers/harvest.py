"""What a reader brings home: rows by split, and an account of what it left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from budwood.data.readers.lines import some
from budwood.data.registry import PublicTask
from budwood.data.task import Row
from budwood.errors import DataError

LEFT_OUT_OF_TRAIN = "train lines left out"  # note with their positions: K-shot sampling counts all lines of the file


@dataclass
class Harvest:
    """Rows in file order under train, validation, test, or "all" for a set that comes in one piece.

    `left_out` counts, by split and reason, the lines that became no row; `positions` are those of the train file.
    """

    name: str
    splits: dict[str, list[Row]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, Counter[str]] = field(default_factory=dict)
    positions: list[int] = field(default_factory=list)

    def start(self, split: str) -> list[Row]:
        """The list that takes the rows of a split."""
        return self.splits.setdefault(split, [])

    def leave_out(self, split: str, why: str, position: int | None = None) -> None:
        """Count a line that became no row; `position` where the line still counts in its file's order."""
        self.left_out.setdefault(split, Counter())[why] += 1
        if position is not None and split == "train":
            self.positions.append(position)

    def unlabelled(self, path: Path) -> None:
        """Note a file without labels: it is no split."""
        known = self.notes.get("unlabelled")
        self.notes["unlabelled"] = f"{known}, {path.name}" if known else f"no split made of {path.name}"

    def told(self) -> dict[str, str]:
        """The notes, with the account of what was left out."""
        notes = dict(self.notes)
        if self.left_out:
            notes["left out"] = "; ".join(
                f"{split}: {', '.join(f'{n:,} {why}' for why, n in counts.items())}"
                for split, counts in self.left_out.items()
            )
        if self.positions:
            notes[LEFT_OUT_OF_TRAIN] = " ".join(map(str, self.positions))
        return notes


def coder(task: PublicTask) -> Callable[[str, Path, int], int]:
    """A function from a label as it stands in a file to the index of its class.

    A label is one of the task's codes, a class's name in any case, or its index.
    """
    codes = {str(i): i for i in range(len(task.labels))}
    codes |= {name.lower(): i for i, name in enumerate(task.labels)}
    codes |= {code.lower(): task.labels.index(name) for code, name in task.codes}
    exact = dict(codes)

    def code(raw: str, path: Path, line: int) -> int:
        index = exact.get(raw)
        if index is None:
            index = codes.get(raw.strip().lower())
            if index is None:
                raise DataError(
                    f"Row {line} of '{path}' has the label {raw!r}, which task '{task.name}' does not know. Expected "
                    f"one of {some(sorted(codes), 12)}. Check that the file is the one distributed for this task, or "
                    f"give it as your own with --train-file."
                )
            exact[raw] = index
        return index

    return code

"""Scores: how much every training row helped every query, as matrices on disk that are read by row.

RUN/scores/
  STRATEGY.npy                       [Q, N] of the main setting
  STRATEGY@DAMPING[.MODULE].npy      of the others; .tokens: [Q, M] over all tokens of all training rows
  index.json query_ids.json train_ids.json [tokens.json]
Shapes: Q queries, N training rows, M tokens of all training rows (with one leading column each: see `Tokens`).
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from budwood.errors import StoreError, nearest
from budwood.linalg.ranking import top_k
from budwood.store.files import read_json, write_json, writing_directory

FORMAT = 1
TOKENS = "tokens"
LAYER = re.compile(r"layer\.\d+|head")
Stored = Literal["float32", "float16", "bfloat16", "float64"]
STORED: dict[str, Stored] = {"float32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # by --dtype


@dataclass(frozen=True)
class Matrix:
    """What one file holds. `module`: the part of the model ("" = all of it, "tokens" = all of it token by token).

    `damping` is the label it is known by ("1e-08", "0.1mean", "auto"; "" where a strategy has none); the numbers used
    and anything else worth telling go to `facts`. The main matrix of a strategy is the one people see by default.
    """

    strategy: str
    damping: str = ""
    module: str = ""
    main: bool = False
    dtype: Stored = "float32"
    facts: Mapping[str, Any] = field(default_factory=dict)
    unit: float = 1.0  # what a 1 in the file stands for

    def kept(self, values: np.ndarray) -> np.ndarray:
        """Numbers as they come back from disk."""
        return unpack(pack(values, self.dtype, self.unit), self.dtype, self.unit)

    @property
    def name(self) -> str:
        """The file's stem.

        >>> Matrix("ekfac", "1e-08", main=True).name, Matrix("ekfac", "1e-08", "layer.0").name
        ('ekfac', 'ekfac@1e-08.layer.0')
        """
        if self.main and not self.module:
            return self.strategy
        damping = f"@{self.damping}" if self.damping else ""
        return f"{self.strategy}{damping}{'.' + self.module.replace('/', '_') if self.module else ''}"


@dataclass(frozen=True)
class Tokens:
    """How the columns of a "tokens" matrix belong to training rows.

    Row n has a leading column, the share of modules that see one position only (a pooler, a classifier), then one
    column per token, spelled in `words[n]`.
    """

    words: tuple[tuple[str, ...], ...]

    @cached_property
    def offsets_N1(self) -> np.ndarray:
        """Where each row's columns begin, and the end of the last.

        >>> Tokens((("a",), ("b", "c"))).offsets_N1.tolist()
        [0, 2, 5]
        """
        return np.concatenate([[0], np.cumsum([len(w) + 1 for w in self.words])]).astype(np.int64)


@dataclass(frozen=True)
class Desk:
    """Score matrices being written: tiles of any shape in any order, float32 or float64 in, stored as wished."""

    path: Path
    shape: tuple[int, int]
    tokens: Tokens | None
    _open: dict[str, tuple[Matrix, np.memmap]] = field(default_factory=dict)

    def add(self, matrix: Matrix) -> None:
        """Make room for a matrix of zeros; known already: nothing happens."""
        if matrix.name in self._open:
            return
        width = self.shape[1]
        if matrix.module == TOKENS:
            assert self.tokens is not None, "a tokens matrix needs the words of the training rows"
            width = int(self.tokens.offsets_N1[-1])
        kind = np.uint16 if matrix.dtype == "bfloat16" else np.dtype(matrix.dtype)
        file = self.path / f"{matrix.name}.npy"
        room = np.lib.format.open_memmap(file, mode="w+", dtype=kind, shape=(self.shape[0], width))
        self._open[matrix.name] = (matrix, room)

    def put(self, matrix: Matrix, rows: slice | np.ndarray, columns: slice | np.ndarray, tile: np.ndarray) -> None:
        """Write one tile; rows and columns are slices or index arrays."""
        self.add(matrix)
        both_arrays = isinstance(rows, np.ndarray) and isinstance(columns, np.ndarray)
        place = np.ix_(rows, columns) if both_arrays else (rows, columns)  # type: ignore[arg-type]
        self._open[matrix.name][1][place] = pack(np.asarray(tile), matrix.dtype, self._open[matrix.name][0].unit)

    def close(self, facts: Mapping[str, Any]) -> None:
        """Write the index of what was added."""
        for _, room in self._open.values():
            room.flush()
        listed = [asdict(m) | {"file": f"{m.name}.npy"} for m, _ in self._open.values()]
        index = {"format": FORMAT, "queries": self.shape[0], "train": self.shape[1], **facts, "matrices": listed}
        write_json(self.path / "index.json", index)


@contextlib.contextmanager
def writing_scores(
    path: Path,
    query_ids: Sequence[str],
    train_ids: Sequence[str],
    facts: Mapping[str, Any] | None = None,
    tokens: Tokens | None = None,
) -> Iterator[Desk]:
    """A desk whose matrices appear as the directory `path` when the block ends well, and not at all otherwise.

    `facts` go into index.json; usual keys: measurement, sign, scale, model, model_hash, task, query_split, train_split.
    """
    _check_ids(query_ids, "query")
    _check_ids(train_ids, "training")
    if tokens is not None:
        assert len(tokens.words) == len(train_ids)
    with writing_directory(path) as part:
        desk = Desk(part, (len(query_ids), len(train_ids)), tokens)
        yield desk
        desk.close(facts or {})
        write_json(part / "query_ids.json", list(query_ids))
        write_json(part / "train_ids.json", list(train_ids))
        if tokens is not None:
            write_json(part / "tokens.json", [list(w) for w in tokens.words])


def _check_ids(ids: Sequence[str], what: str) -> None:
    seen: set[str] = set()
    for i in ids:
        if i in seen:
            raise StoreError(f"The {what} id '{i}' stands for two rows; scores need one id per row.")
        seen.add(i)


@dataclass(frozen=True)
class Scores:
    """Score matrices of one run; nothing is read until a row is asked for."""

    path: Path
    matrices: tuple[Matrix, ...]
    facts: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> Scores:
        """From a run directory or the `scores` directory inside it."""
        path = Path(path)
        place = path if (path / "index.json").exists() else path / "scores"
        if not (place / "index.json").exists():
            raise StoreError(f"{path} holds no scores (there is no {place / 'index.json'}). {_instead(path)}")
        index = read_json(place / "index.json")
        known = Matrix.__dataclass_fields__
        listed = tuple(Matrix(**{k: v for k, v in m.items() if k in known}) for m in index.pop("matrices"))
        found = cls(place, listed, index)
        found._check()
        return found

    def _check(self) -> None:
        for what, ids in (("queries", self.query_ids), ("train", self.train_ids)):
            if self.facts.get(what) != len(ids):
                raise StoreError(
                    f"{self.path}/index.json tells of {self.facts.get(what)} {what}, its list of ids of {len(ids)}. "
                    "The directory was changed by hand: score again."
                )

    @cached_property
    def query_ids(self) -> tuple[str, ...]:
        """Ids of the rows of the matrices."""
        return tuple(read_json(self.path / "query_ids.json"))

    @cached_property
    def train_ids(self) -> tuple[str, ...]:
        """Ids of the columns of the matrices."""
        return tuple(read_json(self.path / "train_ids.json"))

    @cached_property
    def tokens(self) -> Tokens | None:
        """The words of the training rows, where scores by token were made."""
        file = self.path / "tokens.json"
        return Tokens(tuple(tuple(w) for w in read_json(file))) if file.exists() else None

    @property
    def strategies(self) -> tuple[str, ...]:
        """Strategies in the order they were made."""
        return tuple(dict.fromkeys(m.strategy for m in self.matrices))

    def find(self, strategy: str | None = None, damping: str | None = None, module: str = "") -> Matrix:
        """The matrix of a strategy (None: the first), a damping label (None: the main one) and a module."""
        strategy = strategy or self.matrices[0].strategy
        mine = [m for m in self.matrices if m.strategy == strategy]
        if not mine:
            raise StoreError(
                f"{self.path} has no scores of strategy '{strategy}'.{nearest(strategy, self.strategies)} It has: "
                f"{', '.join(self.strategies)}."
            )
        main = next((m.damping for m in mine if m.main), mine[0].damping)
        damping = main if damping is None else damping
        for m in mine:
            if m.damping == damping and m.module == module:
                return m
        there = sorted({m.damping for m in mine if m.module == module})
        what = "scores by token" if module == TOKENS else f"scores of module '{module}'" if module else "scores"
        option = {"": "", TOKENS: " Score with --per-token."}.get(module, " Score with --per-module.")
        known = f" It has them for damping {', '.join(there)}." if there else option
        raise StoreError(f"{self.path} has no {what} of {strategy} at damping '{damping}'.{known}")

    def memmap(self, matrix: Matrix | None = None) -> np.ndarray:
        """The whole matrix as it lies on disk (bfloat16 as its bits); rows are read when touched."""
        matrix = matrix or self.find()
        values = np.load(self.path / f"{matrix.name}.npy", mmap_mode="r", allow_pickle=False)
        width = int(self.tokens.offsets_N1[-1]) if matrix.module == TOKENS and self.tokens else len(self.train_ids)
        if values.shape != (len(self.query_ids), width):
            raise StoreError(
                f"{self.path / matrix.name}.npy is {list(values.shape)}, the ids say "
                f"{[len(self.query_ids), width]}. The file was changed by hand: score again."
            )
        return values

    def rows(self, queries: Sequence[int], matrix: Matrix | None = None) -> np.ndarray:
        """Some rows of a matrix as float32 (float64 where it is stored so)."""
        matrix = matrix or self.find()
        return unpack(np.asarray(self.memmap(matrix)[list(queries)]), matrix.dtype, self._unit(matrix))

    def _unit(self, matrix: Matrix) -> float:
        """The unit of a matrix that may be known by its name alone."""
        return next((m.unit for m in self.matrices if m.name == matrix.name), matrix.unit)

    def row(self, query: int, matrix: Matrix | None = None) -> np.ndarray:
        """One query's scores of all training rows."""
        return self.rows([query], matrix)[0]

    def whole(self, matrix: Matrix | None = None) -> np.ndarray:
        """Everything, in memory."""
        return self.rows(range(len(self.query_ids)), matrix)

    def query(self, wish: str | int) -> int:
        """The row of a query given by its id or its number."""
        text = str(wish)
        if text in self.query_ids:
            return self.query_ids.index(text)
        if text.isdigit() and int(text) < len(self.query_ids):
            return int(text)
        raise StoreError(
            f"There is no query '{wish}': {self.path} has {len(self.query_ids):,}, numbered 0 to "
            f"{len(self.query_ids) - 1}, with ids such as '{self.query_ids[0]}'.{nearest(text, self.query_ids)}"
        )

    def modules(self, matrix: Matrix | None = None) -> tuple[str, ...]:
        """Modules whose own scores lie beside a matrix."""
        return tuple(m for m in self._beside(matrix) if not LAYER.fullmatch(m))

    def layers(self, matrix: Matrix | None = None) -> tuple[str, ...]:
        """Layers ("layer.0", ..., "head") whose own scores lie beside a matrix."""
        return tuple(m for m in self._beside(matrix) if LAYER.fullmatch(m))

    def _beside(self, matrix: Matrix | None) -> list[str]:
        of = matrix or self.find()
        listed = (m for m in self.matrices if (m.strategy, m.damping) == (of.strategy, of.damping))
        return [m.module for m in listed if m.module not in ("", TOKENS)]

    def within(self, query: int, patterns: Sequence[str], matrix: Matrix | None = None) -> np.ndarray:
        """One query's scores counting only modules that match one of the glob patterns."""
        of = matrix or self.find()
        return sum_of([self.row(query, replace_module(of, m)) for m in self.matching(patterns, of)])

    def matching(self, patterns: Sequence[str], matrix: Matrix | None = None) -> tuple[str, ...]:
        """Modules that match; a pattern without any is refused."""
        every = self.modules(matrix)
        if not every:
            raise StoreError(f"{self.path} has no scores by module. Score with --per-module.")
        for pattern in patterns:
            if not fnmatch.filter(every, pattern):
                raise StoreError(
                    f"'{pattern}' matches none of the {len(every)} modules (such as '{every[0]}', '{every[-1]}')."
                    f"{nearest(pattern.strip('*'), every)} Patterns are globs: '*' stands for any text."
                )
        return tuple(m for m in every if any(fnmatch.fnmatchcase(m, p) for p in patterns))

    def top(self, query: int, k: int, matrix: Matrix | None = None) -> list[tuple[int, float]]:
        """The k training rows that help a query most, as (column, score)."""
        return best(self.row(query, matrix), k)

    def bottom(self, query: int, k: int, matrix: Matrix | None = None) -> list[tuple[int, float]]:
        """The k training rows that hurt a query most, worst first."""
        return [(n, -s) for n, s in best(-self.row(query, matrix), k)]

    def token_row(self, query: int, train: int, matrix: Matrix | None = None) -> tuple[tuple[str, ...], np.ndarray]:
        """Words of a training row and the share of each in its score; the first is the leading column's."""
        of = matrix or self.find()
        if self.tokens is None:
            raise StoreError(f"{self.path} has no scores by token. Score with --per-token.")
        own = replace_module(of, TOKENS)
        first, last = self.tokens.offsets_N1[train : train + 2]
        values = unpack(np.asarray(self.memmap(own)[query, first:last]), own.dtype, self._unit(own))
        return ("", *self.tokens.words[train]), values


def _instead(path: Path) -> str:
    """What to do about a run without scores."""
    told = read_json(path / "run.json") if (path / "run.json").exists() else {}
    if told.get("verb") == "influence score" and told.get("status") != "done":
        return "It is not finished: give the command that began it again."
    if told.get("verb") == "influence self":
        return (
            f"Rows that explain themselves are in its records.parquet, and with their texts in `budwood report {path}`."
        )
    return "Give a run of `budwood influence score`."


def best(score_N: np.ndarray, k: int) -> list[tuple[int, float]]:
    """The k largest, largest first, as (column, score).

    >>> best(np.array([1.0, 3.0, 2.0]), 2)
    [(1, 3.0), (2, 2.0)]
    """
    return [(int(n), float(score_N[n])) for n in top_k(score_N, k)[0]]


def replace_module(matrix: Matrix, module: str) -> Matrix:
    """The matrix of a module beside a given one."""
    return replace(matrix, module=module)


def sum_of(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of arrays, added in float64 in their order."""
    total = np.zeros(parts[0].shape, np.float64)
    for part in parts:
        total += part
    return total.astype(parts[0].dtype)


def unit_for(values: np.ndarray, dtype: Stored) -> float:
    """What a stored 1 should stand for: float16 ends at 65,504 and at 6e-8, so its largest is put near the upper end.

    >>> unit_for(np.array([1e6, -3.0]), "float16"), unit_for(np.array([1e6]), "bfloat16")
    (32.0, 1.0)
    """
    most = float(np.abs(values).max(initial=0.0))
    if dtype != "float16" or not 0 < most < float("inf"):
        return 1.0
    return float(2.0 ** (math.frexp(most)[1] - 15))


def pack(values: np.ndarray, dtype: Stored, unit: float = 1.0) -> np.ndarray:
    """Numbers as they lie on disk; bfloat16 is the upper half of a float32, rounded to nearest even.

    >>> unpack(pack(np.array([1.0, -2.5], np.float32), "bfloat16"), "bfloat16").tolist()
    [1.0, -2.5]
    """
    if unit != 1.0:
        values = values / unit
    if dtype == "float16" and np.abs(values).max(initial=0.0) > np.finfo(np.float16).max:
        raise StoreError(
            f"A score of {np.abs(values).max() * unit:.3g} is too large for float16, which ends at 65,504. Store "
            "bf16 or float32."
        )
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def unpack(stored: np.ndarray, dtype: Stored, unit: float = 1.0) -> np.ndarray:
    """Numbers from disk as float32 (float64 stays)."""
    if dtype == "bfloat16":
        found = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        found = np.asarray(stored, dtype=np.float64 if dtype == "float64" else np.float32)
    return found if unit == 1.0 else (found * found.dtype.type(unit))

"""What `bw.influence` gives back: scores, the rows that matter to a query, a picture of them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budwood.config.influence import damping_label
from budwood.data.task import Task
from budwood.errors import StoreError
from budwood.methods.result import Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

    from budwood.methods.influence.scores import Scores


@dataclass(frozen=True)
class Influence(Result):
    """A finished `influence score`; `task` has the rows where they were given as an object."""

    task: Task | None = field(default=None, repr=False, compare=False)

    @property
    def scores(self) -> Scores:
        """The score matrices: `.whole()` is [queries, training rows], `.row(79)` one query's; read when asked for."""
        from budwood.methods.influence.scores import Scores

        if (self.run / "seeds").is_dir():
            children = ", ".join(str(p) for p in sorted((self.run / "seeds").iterdir()))
            raise StoreError(f"{self.run} has one run per seed, each with scores of its own: {children}.")
        return Scores.open(self.run)

    def top(self, query: int | str = 0, k: int = 5, **wish: Any) -> pandas.DataFrame:
        """The k training rows that help a query most, best first: id, score, label, text.

        `query` is a number or an id; `wish` as in `influence show`: strategy, damping, layers, modules, graft. What
        there is to note of them (rows that are gone, a graft of another model) is warned of.
        """
        return _table(self._shown(query, k, 0, wish)["top"])

    def bottom(self, query: int | str = 0, k: int = 5, **wish: Any) -> pandas.DataFrame:
        """The k training rows that hurt a query most, worst first."""
        return _table(self._shown(query, 0, k, wish)["bottom"])

    def plot(self, query: int | str | None = 0, k: int = 5, **wish: Any) -> Axes:  # type: ignore[override]
        """The rows that help and hurt a query most, as bars: a run of scores has a picture per query, not by name."""
        import matplotlib
        from matplotlib import pyplot

        from budwood.figures.rows import name_of, row_bars
        from budwood.figures.save import STYLE

        found = self._shown(0 if query is None else query, k, k, wish)
        both = {r["number"]: r for r in [*found["top"], *reversed(found["bottom"])]}  # of few rows, some are in both
        asked = found["query"]
        with matplotlib.rc_context(STYLE):
            _, axes = pyplot.subplots(figsize=(9.6, 1.2 + 0.3 * len(both)), layout="constrained")
            row_bars(axes, list(both.values()), f"{found['strategy']}, query {asked['number']}: {name_of(asked)}")
        return axes

    def __str__(self) -> str:
        told = self.metrics
        size = f"{told['queries']:,.0f} queries x {told['train']:,.0f} rows"
        return f"{self.run}: {size}, {', '.join(told.get('strategies', ()))}"

    def _shown(self, query: int | str, top: int, bottom: int, wish: dict[str, Any]) -> dict[str, Any]:
        from budwood.methods.influence.show import Wish, show

        known = [k for k in Wish.__dataclass_fields__ if k not in ("query", "top", "bottom")]
        if unknown := set(wish) - set(known):
            raise StoreError(f"There is no setting '{min(unknown)}' here. There are: {', '.join(known)}.")
        given = dict(wish)
        for key, kind in (("modules", str), ("layers", int)):
            if isinstance(given.get(key), kind):
                given[key] = (given[key],)
        if given.get("damping") is not None:
            given["damping"] = damping_label(str(given["damping"]))
        if given.get("graft") is not None:
            given["graft"] = Path(given["graft"])
        assert self.scores  # says what there is instead
        found = show(self.run, Wish(str(query), top, bottom, **given), self.task)
        if found["note"]:
            warnings.warn(found["note"], stacklevel=3)
        return found


def _table(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    import pandas

    keys = [k for k in ("id", "score", "label", "text", "pair") if k in ("id", "score") or any(k in r for r in rows)]
    return pandas.DataFrame([{k: r.get(k) for k in keys} for r in rows], columns=keys)

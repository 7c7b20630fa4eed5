"""What every verb gives back: metrics, cost, a table, a picture."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budwood.errors import StoreError

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Result:
    """A finished run: everything is read from its directory when asked for."""

    run: Path
    metrics: dict[str, Any]
    cost: dict[str, Any] = field(default_factory=dict)
    fresh: bool = True  # False: the run was there already and nothing was done

    @property
    def table(self) -> pandas.DataFrame:
        """The per-example records, one row each."""
        import pandas

        path = self.run / "records.parquet"
        return pandas.read_parquet(path) if path.exists() else pandas.DataFrame([self.metrics])

    @property
    def model(self) -> Path:
        """The trained model's directory; give it to any verb or to `from_pretrained`."""
        return self.run / "model"

    @property
    def figures(self) -> list[Path]:
        """The figures of the run."""
        return sorted((self.run / "figures").glob("*.svg"))

    def plot(self, name: str | None = None) -> Axes:
        """Show one figure of the run (the first by default) on matplotlib axes."""
        from matplotlib import pyplot

        wanted = [p for p in sorted((self.run / "figures").glob("*.png")) if name in (None, p.stem)]
        if not wanted:
            there = ", ".join(p.stem for p in self.figures) or "none"
            raise StoreError(f"The run {self.run} has no figure '{name or ''}'. It has: {there}.")
        _, axes = pyplot.subplots(layout="constrained")
        axes.imshow(pyplot.imread(wanted[0]))
        axes.set_axis_off()
        return axes

    def __str__(self) -> str:
        return f"{self.metrics.get('verb')} {self.run}: {self.metrics.get('metric')} = {self.metrics.get('score')}"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>"
            for k, v in self.metrics.items()
        )
        pictures = "".join(p.read_text() for p in self.figures[:2])
        return f"<table>{rows}</table><div>{pictures}</div>"

"""A figure and its numbers on disk: NAME.svg, NAME.png, NAME.csv, the same bytes each time."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budwood.store.files import write_text, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#1f2430"
COLOURS = ("#2f6690", "#c8553d", "#3a7d44", "#8f5aa8", "#b8860b", "#5b8e9b")  # told apart by colour-blind eyes too

STYLE = {
    "svg.hashsalt": "budwood",
    "svg.fonttype": "path",
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8f99",
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.color": "#e6e8ec",
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.dpi": 160,
}


@contextlib.contextmanager
def drawing(width: float = 6.4, height: float = 3.4) -> Iterator[Any]:
    """A figure with one set of axes in the house style, closed at the end."""
    with panels(1, width, height) as axes:
        yield axes[0]


@contextlib.contextmanager
def panels(count: int, width: float = 4.2, height: float = 3.4) -> Iterator[list[Any]]:
    """A figure with axes side by side in the house style, each of this size, closed at the end."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from cycler import cycler
    from matplotlib import pyplot

    with matplotlib.rc_context({**STYLE, "axes.prop_cycle": cycler(color=COLOURS)}):
        figure, axes = pyplot.subplots(1, count, figsize=(width * count, height), layout="constrained", squeeze=False)
        try:
            yield list(axes[0])
        finally:
            pyplot.close(figure)


def save(figure: Figure, stem: Path, table: Mapping[str, Sequence[Any]]) -> list[Path]:
    """Write stem.svg, stem.png and stem.csv (the numbers drawn); returns the three paths."""
    import matplotlib

    paths = [stem.with_suffix(s) for s in (".svg", ".png", ".csv")]
    with matplotlib.rc_context(STYLE):
        for path, meta in ((paths[0], {"Date": None, "Creator": "budwood"}), (paths[1], {"Software": "budwood"})):
            with writing(path) as part:
                figure.savefig(part, format=path.suffix[1:], metadata=meta)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table)
    writer.writerows(zip(*table.values(), strict=True))
    write_text(paths[2], text.getvalue())
    return paths

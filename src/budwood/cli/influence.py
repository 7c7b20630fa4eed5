"""`budwood influence fit|score|self|index|query|show`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from budwood.cli.show import serve
from budwood.config.influence import FitConfig, ScoreConfig, SelfConfig


def register(app: App) -> None:
    """Add the verb and its parts."""
    part = App(name="influence", help="Which training examples made a prediction.", help_format="plaintext")
    app.command(part)

    @part.command
    def fit(model: str, *, settings: Annotated[FitConfig, Parameter(name="*")]) -> int:
        """Curvature factors of a fine-tuned model on its training rows: identity, diagonal, KFAC, EKFAC.

        Parameters
        ----------
        model
            A fine-tuned run or checkpoint.
        """
        return serve("influence fit", settings, [model])

    @part.command
    def score(model: str, *, settings: Annotated[ScoreConfig, Parameter(name="*")]) -> int:
        """How much every training row helped every query: scores [queries, training rows].

        Parameters
        ----------
        model
            A fine-tuned run or checkpoint.
        """
        return serve("influence score", settings, [model])

    @part.command(name="self")
    def itself(model: str, *, settings: Annotated[SelfConfig, Parameter(name="*")]) -> int:
        """How much every training row explains itself: high for odd and mislabelled rows.

        Parameters
        ----------
        model
            A fine-tuned run or checkpoint.
        """
        return serve("influence self", settings, [model])

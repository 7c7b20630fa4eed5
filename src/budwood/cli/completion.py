"""`budwood completion`: shell completion."""

from __future__ import annotations

from typing import Literal

from cyclopts import App


def register(app: App) -> None:
    """Add the verb."""

    @app.command
    def completion(shell: Literal["bash", "zsh", "fish"]) -> int:
        """Print a completion script, e.g. `eval "$(budwood completion bash)"`.

        Parameters
        ----------
        shell
            Which shell.
        """
        print(app.generate_completion(shell=shell))
        return 0

"""One fine-tuning by several processes: the first keeps the run, the others only compute."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from budwood.errors import ConfigError
from budwood.methods.result import Result
from budwood.methods.session import Method, Session
from budwood.train.ranks import joined, tell


@dataclass
class Announced:
    """A method that tells the other processes to begin when it begins itself."""

    method: Method
    begun: bool = False

    def __call__(self, session: Session) -> dict[str, Any]:
        """Tell, then work."""
        self.begun = tell(True)
        return self.method(session)


def in_step(
    verb: str,
    cfg: Any,
    method: Method,
    carry: Callable[[Any, Method], Result],
) -> Result | None:
    """`carry` in all processes of a torchrun group; the result in the first one, None in the others."""
    if verb != "finetune":
        raise ConfigError(
            f"Several processes train one model in `finetune`; `{verb}` has --workers. Start it without torchrun."
        )
    if cfg.seeds:
        raise ConfigError("--seeds trains several models; under torchrun give one --seed at a time.")
    with joined() as group:
        if group.rank == 0:
            mine = Announced(method)
            try:
                return carry(cfg, mine)
            finally:
                if not mine.begun:  # done before, or refused: nobody waits for an update that never comes
                    tell(False)
        if not tell(False):
            return None
        with tempfile.TemporaryDirectory() as scratch:
            quiet = {"out": Path(scratch) / "rank", "progress": "none", "threads": cfg.threads or 1}
            carry(cfg.model_copy(update=quiet), method)
        return None

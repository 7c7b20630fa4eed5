"""The most memory this process has held."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_mb() -> float:
    """Megabytes of this process at its largest.

    Linux's own account where there is one: `ru_maxrss` also counts the process that started this one, so a small
    command of a large program would look as large as the program.

    >>> peak_mb() > 1
    True
    """
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024**2 if sys.platform == "darwin" else 1024)

"""Memory: the most that this process has held, what could be had now, and what becomes of what is freed."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

STATUS, MACHINE = Path("/proc/self/status"), Path("/proc/meminfo")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of glibc's parameters
OWN_MAPPING = 1 << 25  # bytes from which memory is always the system's own


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


def available_bytes() -> int:
    """Memory that could be had now: what is free, and what the system would give up of files it has read.

    >>> available_bytes() > 0
    True
    """
    if (found := _machine("MemAvailable:")) is not None:
        return found
    free = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(free) * os.sysconf("SC_PAGE_SIZE")


def installed_bytes() -> int:
    """The memory of this machine.

    >>> installed_bytes() >= available_bytes()
    True
    """
    found = _machine("MemTotal:")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if found is None else found


def _machine(what: str) -> int | None:
    """A figure of the system's own account of its memory, where there is one."""
    if MACHINE.exists():
        for line in MACHINE.read_text(encoding="ascii").splitlines():
            if line.startswith(what):
                return int(line.split()[1]) * 1024
    return None


def keep_freed(most: int) -> bool:
    """Let the allocator keep up to `most` bytes of what is freed last, so that one batch takes the memory of the one
    before; never less than it would keep by itself. It holds for the whole process.

    Giving it back to the system and asking for it anew took a twelfth of the time of covariances. True where the
    allocator is glibc's and was told so.
    """
    if not sys.platform.startswith("linux"):
        return False
    limits = (TRIM_THRESHOLD, max(most, 2 * OWN_MAPPING)), (MMAP_THRESHOLD, OWN_MAPPING)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*x) for x in limits)

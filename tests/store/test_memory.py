"""Memory that is freed and asked for again."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from budwood.store import memory
from budwood.store.memory import keep_freed

FAULTS = """
import resource
import torch
from budwood.store.memory import keep_freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        held = [torch.ones(1_000_000) for _ in range(40)]  # 160 MB, freed together as a batch's are
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

{keep}
faults()
print(faults())
"""


def faults(keep: str) -> int:
    """Pages that the system had to hand over anew, in a process of its own: the setting is the whole process's.

    It begins with an allocator that gives all back at once; left to itself it does so sometimes, as the heap lies.
    """
    own = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    command = [sys.executable, "-c", FAULTS.format(keep=keep)]
    return int(subprocess.run(command, env=own, capture_output=True, text=True, check=True).stdout)


def test_files_that_the_system_keeps_in_memory_can_be_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal: 900 kB\nMemFree: 100 kB\nMemAvailable: 700 kB\n")
    monkeypatch.setattr(memory, "MACHINE", told)
    assert memory.available_bytes() == 700 * 1024
    told.unlink()
    assert memory.available_bytes() > 1 << 20  # as systems without that file tell it


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
def test_memory_that_is_freed_is_taken_again() -> None:
    assert faults("assert keep_freed(1 << 30)") < faults("") / 10


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems' allocators are left alone")
def test_no_more_is_kept_than_asked_for_and_no_less_than_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    allocator = SimpleNamespace(mallopt=lambda *pair: told.append(pair) or 1)  # type: ignore[func-returns-value]
    monkeypatch.setattr(ctypes, "CDLL", lambda _: allocator)
    assert keep_freed(1 << 28) and keep_freed(0)
    assert [size for which, size in told if which == memory.TRIM_THRESHOLD] == [1 << 28, 64 << 20]

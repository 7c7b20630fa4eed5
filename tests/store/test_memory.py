"""Memory that is freed and asked for again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
def test_memory_that_is_freed_is_taken_again() -> None:
    assert faults("assert keep_freed(1 << 30)") < faults("") / 10

"""What a process keeps of the memory that it frees."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import ctypes
import resource
from deadreckon.lab.memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(1 << 26) for _ in range(40)]
    for block in blocks:
        for place in range(0, 1 << 26, 1 << 22):
            ctypes.memset(block + place, 1, 1)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
keep_freed_memory()
faults()
print(faults())
"""


def faults(environment: dict[str, str]) -> tuple[int, int]:
    """By default, and with freed memory kept."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    fresh, kept = (int(line) for line in done.stdout.split())
    return fresh, kept


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_is_kept() -> None:
    """2.5 GiB, of which 640 places are written to: fresh pages are faults, kept ones are not."""
    fresh, kept = faults({})
    assert fresh >= 640 and kept < 32


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_the_environment_may_choose() -> None:
    assert min(faults({"MALLOC_TRIM_THRESHOLD_": "131072"})) >= 640

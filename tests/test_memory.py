"""What a process keeps of the memory that it frees."""

from __future__ import annotations

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
    for _ in range(4):
        block = libc.malloc(1 << 26)
        ctypes.memset(block, 1, 1 << 26)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_is_kept() -> None:
    """Fresh pages are faults, of 4 KiB or 2 MiB each; memory that was kept has none but a few of the interpreter."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    fresh, kept = (int(line) for line in done.stdout.split())
    assert fresh >= 4 * 32 and kept < 32

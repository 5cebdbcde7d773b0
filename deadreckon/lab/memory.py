"""The memory of a process that trains on a CPU."""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # glibc's numbers of these parameters
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")  # who sets these variables has chosen


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next tensor; elsewhere, and where the environment sets it, nothing changes.

    By default whatever takes 32 MiB or more is returned to the system when it is freed, and the next tensor of a step
    gets pages that the system first has to zero, 4 KiB at a time: up to half the time of a step, or more.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "gnu_get_libc_version") and not os.environ.keys() & VARIABLES:
        libc.mallopt(MMAP_MAX, 0)
        libc.mallopt(TRIM_THRESHOLD, -1)  # never

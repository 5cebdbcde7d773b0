"""Parallel compilation of an operator's kernels: PaTH has two dozen, of a second or two each, one after the other.

An operator that may be taped (`tape.py`) reads no tensor's data. So before its first call it is run once with launches
that only compile, on as many threads as there are cores (Triton compiles without the GIL), and the results are
discarded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import triton

SWITCH = "DEADRECKON_AHEAD"  # in the environment: 0 to do without
_state = threading.local()  # backward passes have threads of their own


def wanted() -> bool:
    """Whether operators compile their kernels ahead of their first call."""
    return os.environ.get(SWITCH, "1") != "0"


def compiling() -> bool:
    """Whether this thread's launches only compile."""
    return getattr(_state, "on", False)


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """A region in which launches only compile; when it ends, all kernels are compiled."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
        _state.on = True
        try:
            yield
        finally:
            _state.on = False

"""Kernels of an operator, compiled all at once: PaTH has two dozen, of a second or two each, one after the other.

An operator that may be put on tape does not read what is in a tensor. So it can be gone through before its first call
with launches that only compile, by as many threads as there are cores (Triton compiles without Python's lock), and what
it computes then is thrown away.
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
    """Whether operators are to be gone through first."""
    return os.environ.get(SWITCH, "1") != "0"


def compiling() -> bool:
    """Whether this thread's launches only compile."""
    return getattr(_state, "on", False)


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Launches in here compile kernels, which are there when it ends."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
        _state.on = True
        try:
            yield
        finally:
            _state.on = False

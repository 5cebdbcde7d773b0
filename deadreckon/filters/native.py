"""Histogram filters and superpositions in C: `advance` and `retreat` as in `chunked.py`, row by row.

A row is one cursor of one sequence, and its histogram stays in the CPU's cache over all tokens; PyTorch's operations
would each load it again. Threads work on separate rows, so results are bit-identical for any number of threads.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL, c_double, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deadreckon.filters.chunked import work_type
from deadreckon.filters.library import LibraryError, NoCompilerError, load
from deadreckon.filters.operators import filter_operator, superposition_operator

GRAIN = 1 << 16  # least numbers of work per thread
PARTS = 4  # tasks per thread, for load balancing
SOURCE = Path(__file__).with_name("histogram.c")


def _one_thread() -> None:
    """Prevents a deadlock: a forked child has none of its parent's threads, and PyTorch would wait for them."""
    torch.set_num_threads(1)


@cache
def _library(dtype: torch.dtype) -> CDLL | LibraryError:
    real, integer, kind = ("float", "int32_t", c_float) if dtype == torch.float32 else ("double", "int64_t", c_double)
    try:
        library = load(SOURCE, f"-DREAL={real}", f"-DINTEGER={integer}")
    except LibraryError as reason:
        if not isinstance(reason, NoCompilerError):
            warnings.warn(f"histogram filters run on PyTorch: the faster path would need {reason}", stacklevel=2)
        return reason
    for function, others in (library.advance, 3), (library.retreat, 8):
        function.argtypes = [*[c_void_p] * 5, kind, *[c_int64] * 2, *[c_void_p] * others, *[c_int64] * 8]
        function.restype = None
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_one_thread)
    return library


@torch.compiler.assume_constant_result
def reason_against(dtype: torch.dtype) -> str | None:
    """What is missing for a filter of this dtype, or None. The first call compiles, which takes about a second."""
    library = _library(torch.float64 if dtype == torch.float64 else torch.float32)
    return str(library) if isinstance(library, LibraryError) else None


def _for_all_rows(name: str, room: int, tensors: list[Tensor | None], eps: float, first: int, steps: int) -> None:
    """Calls a C function on all rows, in threads; the first tensors are reset, move, gamma, copy and state."""
    reset, state = tensors[0], tensors[4]
    assert reset is not None
    assert state is not None
    batch, cursors, positions = state.shape
    sizes = reset.shape[1], cursors, positions, *state.stride()
    function: Callable[..., None] = getattr(_library(state.dtype), name)
    at = [None if x is None else x.data_ptr() for x in tensors]

    def run(begin: int, end: int) -> None:
        scratch = state.new_empty(room * positions)
        function(*at[:5], eps, first, steps, *at[5:], scratch.data_ptr(), begin, end, *sizes)

    rows = batch * cursors
    threads = min(torch.get_num_threads(), rows * steps * positions // GRAIN)
    if threads <= 1:
        return run(0, rows)
    edges = [rows * part // (threads * PARTS) for part in range(threads * PARTS + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, edges[:-1], edges[1:]))  # a list, so that exceptions of threads are raised here


def advance(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, state: Tensor, eps: float,
    first: int, steps: int, out: Tensor, final: Tensor | None,
) -> None:  # fmt: skip
    """See `chunked.py`. All tensors but state are contiguous, and all but out have the dtype of state."""
    same_dtype = out if out.dtype == state.dtype else torch.empty_like(out, dtype=state.dtype)
    _for_all_rows("advance", 2, [reset, move, gamma, copy, state, same_dtype, final], eps, first, steps)
    if same_dtype is not out:
        out.copy_(same_dtype)


def retreat(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, state: Tensor, eps: float,
    first: int, steps: int, out: Tensor, grad: Tensor, carry: Tensor,
    grad_reset: Tensor, grad_move: Tensor, grad_gamma: Tensor, grad_copy: Tensor | None,
) -> None:  # fmt: skip
    """See `chunked.py`. All tensors but state are contiguous, and all but grad have the dtype of state."""
    inputs = [reset, move, gamma, copy, state, out, grad.to(state.dtype)]
    results = [carry, grad_reset, grad_move, grad_gamma, grad_copy]
    _for_all_rows("retreat", 3, [*inputs, *results], eps, first, steps)


_filter = filter_operator("deadreckon::histogram_filter_native", advance, retreat)
_superpose = superposition_operator("deadreckon::superpose_native", advance, retreat)


def filter_native(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, initial: Tensor, eps: float
) -> Tensor:
    """See :func:`deadreckon.histogram_filter`. Call it only where `reason_against` gives None."""
    return _filter(*_alike(reset, move, gamma, copy, initial), eps).to(reset.dtype)


def superpose_native(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, initial: Tensor, table: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See :func:`deadreckon.superpose`. Call it only where `reason_against` gives None."""
    return _superpose(*_alike(reset, move, gamma, copy, initial), table, eps)


def _alike(reset: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """The tensors, cast to the dtype that histograms are computed in."""
    return [None if x is None else x.to(work_type(reset)) for x in (reset, *others)]

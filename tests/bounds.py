"""Bounds checking for interpreted kernels: every load and store must be within the memory of their arguments.

On a GPU, out-of-bounds memory may be another tensor, or nothing at all; an interpreted kernel corrupts the heap, which
is found out much later. `CHECK_BOUNDS=1 pytest tests/test_fused.py` checks every access, which takes some time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from triton.runtime import interpreter

from deadreckon.ops.streaming import fused, kernels
from deadreckon.ops.triton.kernel import Kernel


def check() -> None:
    """Turns bounds checking on."""
    checked = Checked(interpreter._interpreter)
    interpreter._interpreter = checked
    launch, place = Kernel.launch, kernels.placed

    def launch_within(self: Kernel, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        checked.kernel = self.function.fn.__name__
        checked.memory = _joined([*_ends(arguments).items(), *checked.placed.items()])
        try:
            launch(self, grid, *arguments, **constants)
        finally:
            checked.memory = None

    def place_known(x: Tensor | None, base: Tensor, *alignment: int) -> int:
        """Kernels of decoding find segments by their addresses."""
        checked.placed |= _ends((x, base))
        return place(x, base, *alignment)

    Kernel.launch = launch_within  # type: ignore[method-assign]
    kernels.placed = fused.placed = place_known


def _ends(arguments: tuple[Any, ...]) -> dict[int, int]:
    """Addresses where the memory of tensors begins and ends."""
    stores = [x.untyped_storage() for x in _tensors(arguments)]
    return {store.data_ptr(): store.data_ptr() + store.nbytes() for store in stores}


def _joined(stretches: list[tuple[int, int]]) -> Any:
    """Merges ranges of memory, in order, (n, 2), none inside another: a segment's memory may be in use again."""
    joined = list[list[int]]()
    for begin, end in sorted(stretches):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([begin, end])
    return np.array(joined, dtype=np.uint64)


def _tensors(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    for x in arguments:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from _tensors(x)


class Checked:
    """The interpreter's loads and stores, with bounds checking."""

    def __init__(self, truly: Any) -> None:
        self.truly, self.kernel = truly, ""
        self.memory: Any = None  # that the kernel running has, (tensors, 2): from where to where, in order
        self.placed: dict[int, int] = {}  # what segments have, likewise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.truly, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._look(pointers, mask, np.dtype(dtype).itemsize, "read")
        return self.truly.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._look(pointers, mask, value.dtype.itemsize, "written")
        return self.truly.store(pointers, value, mask)

    def _look(self, pointers: Any, mask: Any, width: int, what: str) -> None:
        if self.memory is None:
            return
        there = np.asarray(pointers)[np.broadcast_to(mask, pointers.shape)].astype(np.uint64)
        which = np.searchsorted(self.memory[:, 0], there, side="right") - 1
        outside = (which < 0) | (there + np.uint64(width) > self.memory[np.maximum(which, 0), 1])
        if outside.any():
            raise IndexError(f"{self.kernel}: {outside.sum()} numbers are {what} outside of all arguments")

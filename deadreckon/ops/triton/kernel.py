"""Kernels with a low launch overhead: Triton binds and inspects some thirty arguments again at every launch.

A call of PaTH on a packed row of 65 536 tokens is ninety launches, forward and backward. Half of the host time was
Triton's, most of it to look up the compiled kernel for the arguments. Here that is cached, by types, numbers and
alignment.

Tiles are made for an H100. A GPU with less shared memory runs the same kernels with fewer pipeline stages
(`num_stages`), if it has to: the same numbers, a little slower.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources

from deadreckon.ops.triton.ahead import compiling
from deadreckon.ops.triton.tape import recorder

STAGES = 3  # Triton's own number of them
NUMBERS = frozenset({int, float, bool, type(None)})  # arguments that are their own kind
MOST = 4096  # kinds of calls that are remembered of a kernel: lengths may all be different


def _kind(argument: Any) -> Any:
    """What Triton may specialise a kernel on, or more: the values of numbers, the dtype and alignment of tensors."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15
    return _kinds(argument) if isinstance(argument, tuple) else argument


def _kinds(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The kinds of all arguments: most are numbers, which take no call."""
    return tuple([x if type(x) in NUMBERS else _kind(x) for x in arguments])


class Kernel:
    """A decorator on top of ``triton.jit``: launched as before, ``kernel[grid](*arguments, **constants)``.

    Arguments in order, tensors first; constants and options by name.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compiled: dict[Any, tuple[CompiledKernel, list[Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Runs the kernel that is compiled for such arguments; compiles it, if there is none yet."""
        if compiling():
            self.function.warmup(*arguments, grid=grid, **constants)
            return
        tape = recorder()
        if tape is None:
            self._launch(grid, arguments, constants)
            return
        with tape.aside():
            run, rest, compiled = self._launch(grid, arguments, constants)
        tape.launch(run, (*arguments, *rest), by_address=compiled)

    def _launch(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> tuple[Any, list[Any], bool]:
        """Launches it; returns a function that launches it again, the rest of its arguments, and if it is compiled."""
        key = arguments[0].get_device(), _kinds(arguments), tuple(constants.items())
        known = self.compiled.get(key)
        if known is not None:
            kernel, rest = known
            run = kernel[(*grid, 1, 1)[:3]]
            run(*arguments, *rest)
            return run, rest, True
        kernel = self._first_launch(grid, arguments, constants)
        if not isinstance(kernel, CompiledKernel):
            return partial(self._interpret, grid, constants), [], False
        if len(self.compiled) == MOST:
            self.compiled.clear()
        rest = [constants[name] for name in self.function.arg_names[len(arguments) :]]
        self.compiled[key] = kernel, rest
        return kernel[(*grid, 1, 1)[:3]], rest, True

    def _interpret(self, grid: tuple[int, ...], constants: dict[str, Any], *arguments: Any, stream: None) -> None:
        self.function[grid](*arguments, **constants)

    def _first_launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        try:
            return self.function[grid](*arguments, **constants)
        except OutOfResources:
            stages = constants.get("num_stages", STAGES)
            if stages == 1:
                raise
            return self._first_launch(grid, arguments, {**constants, "num_stages": stages - 1})

"""Tapes: the kernel launches of an operator, recorded once for each kind of call and then replayed.

PaTH-FoX, forward and backward, is some fifty kernels and a few operations of PyTorch, with views, grids and buffers
that follow from shapes alone. Computing these in Python takes several times as long as the launches themselves, and a
fast GPU waits for the host. So the second call of a kind is recorded: buffers with their sizes, kernels with their
arguments as places in buffers, PyTorch's operations. From the third on it is replayed.

    inputs ─┐                         ┌─ new buffer 3: (16, 4097, 64), bfloat16
            ├─ tape, by kind of call ─┤  kernel, grid, (input 0 + 0, buffer 3 + 128, 4096, …)
    key  ───┘                         └─ operation: buffer 5 = cumsum(buffer 4), drop 4

A kind of call: dtypes, shapes, strides and alignment of tensors, which of them share memory, all else by its value.
A tape holds no tensor: buffers are allocated in every call and freed after their last use, in stream order, by
PyTorch's allocator. So a replay is as safe as the call that was recorded, also during CUDA graph capture.

A function may be taped if what it does follows from the kind of call: it does not read tensor data.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from deadreckon.ops.triton.ahead import compiled_ahead, wanted

SWITCH = "DEADRECKON_TAPES"  # in the environment: 0 to do without
MOST = 256  # kinds of calls that are remembered of a function: lengths may all be different

_aten = torch.ops.aten
_ALLOCATIONS = frozenset({
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
})  # fmt: skip
_recorders = threading.local()  # backward passes have threads of their own


def recorder() -> Recorder | None:
    """The recorder that is active in this thread, if any."""
    return getattr(_recorders, "current", None)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a buffer a tensor is."""

    buffer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int  # in elements
    type: torch.dtype


class _Room(NamedTuple):
    """A buffer to allocate."""

    buffer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    type: torch.dtype

    def play(self, call: _Call) -> None:
        x = torch.empty_strided(self.size, self.stride, dtype=self.type, device=call.device)
        call.buffers[self.buffer] = x
        call.starts[self.buffer] = x.data_ptr()


class _Launch(NamedTuple):
    """A kernel and its arguments, addresses left out."""

    run: Callable[..., Any]
    arguments: list[Any]
    tensors: list[tuple[int, int, int]]  # which argument, buffer, start in bytes
    others: list[int]  # arguments with places in them

    def play(self, call: _Call) -> None:
        arguments, starts = self.arguments.copy(), call.starts
        for at, buffer, start in self.tensors:
            arguments[at] = starts[buffer] + start
        for at in self.others:
            arguments[at] = _mapped(arguments[at], call.given)
        self.run(*arguments, stream=call.stream)


class _Operation(NamedTuple):
    """An operation of PyTorch, with places for tensors, and the buffers of its results."""

    function: Callable[..., Any]
    arguments: list[Any]
    others: list[int]  # arguments with places in them
    options: dict[str, Any]
    results: list[tuple[int, int]]  # which of the results, which buffer

    def play(self, call: _Call) -> None:
        arguments = self.arguments.copy()
        for at in self.others:
            x = arguments[at]
            arguments[at] = call.tensor(x) if type(x) is Place else _mapped(x, call.tensor)
        results = self.function(*arguments, **self.options)
        for which, buffer in self.results:
            call.hold(buffer, results if isinstance(results, Tensor) else results[which])


class _Call:
    """Buffers of one call."""

    def __init__(self, inputs: Sequence[Tensor], count: int, by_address: bool) -> None:
        self.device = inputs[0].device
        self.stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None
        self.buffers: list[Any] = [None] * count
        self.starts = [0] * count  # their addresses
        self.by_address = by_address

    def hold(self, buffer: int, x: Tensor) -> None:
        """Makes x's storage the buffer: all of it, wherever in it x begins."""
        self.buffers[buffer] = x
        self.starts[buffer] = x.data_ptr() - int(x.storage_offset()) * x.element_size()

    def tensor(self, place: Any) -> Any:
        """The tensor in a place; anything else as it is."""
        if type(place) is not Place:
            return place
        whole: Tensor = self.buffers[place.buffer]
        if place.type != whole.dtype:
            fresh = torch.empty(0, dtype=place.type, device=self.device)
            return fresh.set_(whole.untyped_storage(), place.start, place.size, place.stride)
        if place.size == whole.shape and place.stride == whole.stride() and place.start == whole.storage_offset():
            return whole
        return whole.as_strided(place.size, place.stride, place.start)

    def given(self, place: Any) -> Any:
        """A kernel's argument for a place, an address or a tensor; anything else as it is."""
        if type(place) is not Place or not self.by_address:
            return self.tensor(place)
        return self.starts[place.buffer] + place.start * place.type.itemsize


def _has_places(x: Any) -> bool:
    return any(map(_has_places, x)) if isinstance(x, tuple | list) else type(x) is Place


def _mapped(x: Any, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to all items of nested tuples, lists and dictionaries."""
    if isinstance(x, tuple | list):
        items = [_mapped(item, change) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if isinstance(x, dict):
        return {name: _mapped(item, change) for name, item in x.items()}
    return change(x)


class Tape(NamedTuple):
    """All that a call does, in order; after each step, buffers that are not used again."""

    steps: list[tuple[Callable[[_Call], None], tuple[int, ...]]]
    inputs: list[tuple[int, int]]  # which of the tensors that come in, which buffer
    buffers: int
    results: Any
    by_address: bool

    def play(self, tensors: Sequence[Tensor]) -> Any:
        """Replays the call with other tensors."""
        call = _Call(tensors, self.buffers, self.by_address)
        for which, buffer in self.inputs:
            call.hold(buffer, tensors[which])
        held = call.buffers
        for play, unused in self.steps:
            play(call)
            for buffer in unused:
                held[buffer] = None
        return _mapped(self.results, call.tensor)


class Recorder(TorchDispatchMode):
    """Records what this thread does with tensors while it is entered.

    Memory is identified by its storage. Weak references to freed storages are kept, so that no other one is mistaken
    for them, such as that of the number in ``x[0] = 1``, whose creation is not dispatched.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps = list[Any]()
        self.known = dict[int, int]()  # storages and their buffers
        self.weak = list[StorageWeakRef]()  # of all of them
        self.used = list[int]()  # of each buffer: the last step that does
        self.by_address = True
        self.inputs = list[tuple[int, int]]()
        for which, x in enumerate(tensors):
            if _storage(x) not in self.known:
                self.inputs.append((which, self._new(x)))

    def __enter__(self) -> Recorder:
        _recorders.current = self
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        _recorders.current = None
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = list[int]()  # storages of what it takes
        arguments, options = _mapped((args, kwargs), partial(self._place, seen=before))
        results = func(*args, **kwargs)
        if isinstance(results, bool | int | float):
            raise AssertionError(f"what is on tape may not depend on what is in a tensor, as {func} does")
        if func in _ALLOCATIONS:
            self.steps.append(_Room(self._new(results), tuple(results.shape), results.stride(), results.dtype).play)
            return results
        many = results if isinstance(results, tuple | list) else (results,)
        fresh = [(i, x) for i, x in enumerate(many) if isinstance(x, Tensor) and _storage(x) not in before]
        if fresh or func._schema.is_mutable:
            _mapped(arguments, self._use)
            if any(map(_has_places, options.values())):
                raise AssertionError(f"{func}: expected tensors in order, not by name")
            others = [at for at, x in enumerate(arguments) if _has_places(x)]
            results_here = [(i, self._new(x)) for i, x in fresh]
            self.steps.append(_Operation(func, list(arguments), others, options, results_here).play)
        return results  # a view is no step: what uses it says where it is

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A region that is not recorded: for the interpreter's own operations, for one."""
        _recorders.current = None
        try:
            with _disable_current_modes():
                yield
        finally:
            _recorders.current = self

    def launch(self, run: Callable[..., Any], arguments: Sequence[Any], by_address: bool) -> None:
        """Records a kernel launch."""
        self.by_address = by_address
        places = [_mapped(x, self._place) for x in arguments]
        _mapped(places, self._use)
        tensors, others = list[tuple[int, int, int]](), list[int]()
        for at, x in enumerate(places):
            if type(x) is Place and by_address:
                tensors.append((at, x.buffer, x.start * x.type.itemsize))
            elif _has_places(x):
                others.append(at)
        self.steps.append(_Launch(run, places, tensors, others).play)

    def _place(self, x: Any, seen: list[int] | None = None) -> Any:
        """The place of a tensor; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        storage = _storage(x)
        if seen is not None:
            seen.append(storage)
        if storage not in self.known:
            raise AssertionError("a tensor that is used on tape is neither given nor made there")
        return Place(self.known[storage], tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)

    def _new(self, x: Tensor) -> int:
        """A new buffer, for a tensor that the next step creates."""
        self.weak.append(StorageWeakRef(x.untyped_storage()))
        self.known[self.weak[-1].cdata] = len(self.used)
        self.used.append(len(self.steps))
        return len(self.used) - 1

    def _use(self, place: Any) -> None:
        """Marks a place as used by the next step."""
        if type(place) is Place:
            self.used[place.buffer] = len(self.steps)

    def tape(self, results: Any) -> Tape:
        """The tape of the recorded call, which returned these results."""
        places = _mapped(results, self._place)
        kept = {buffer for _, buffer in self.inputs}
        _mapped(places, lambda x: kept.add(x.buffer) if type(x) is Place else None)
        unused: list[list[int]] = [[] for _ in self.steps]
        for buffer, step in enumerate(self.used):
            if buffer not in kept:
                unused[step].append(buffer)
        steps = [(step, tuple(buffers)) for step, buffers in zip(self.steps, unused, strict=True)]
        return Tape(steps, self.inputs, len(self.used), places, self.by_address)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class Taped:
    """A decorator that tapes a function of tensors, numbers, None and tuples of them: see above.

    Attributes:
        on: whether to tape; None: on a GPU, unless the environment disables it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.tapes: dict[Any, Tape | None] = {}  # by kind of call; None: seen once
        self.compiled = set[Any]()  # sorts of calls whose kernels are there
        self.next: tuple[Taped, Callable[[tuple[Any, ...], Any], tuple[Any, ...] | None]] | None = None
        self.on: bool | None = None

    def followed_by(self, other: Taped, arguments: Callable[[tuple[Any, ...], Any], tuple[Any, ...] | None]) -> None:
        """Declares what will be called next, such as the backward pass: its kernels are compiled along with these.

        arguments: from this call's arguments and results, approximate ones of the next; None if there will be none.
        """
        self.next = other, arguments

    def __call__(self, *arguments: Any) -> Any:
        on = arguments[0].is_cuda and os.environ.get(SWITCH, "1") != "0" if self.on is None else self.on
        if not on or recorder() is not None:
            return self.function(*arguments)
        tensors = list[Tensor]()
        key = _mapped(arguments, partial(_kind, tensors)), *_surroundings(tensors)
        tape = self.tapes.get(key)
        if tape is not None:
            return tape.play(tensors)
        if key not in self.tapes:
            if len(self.tapes) >= MOST:
                self.tapes.clear()
            self.tapes[key] = None
            self._compile(arguments)
            return self.function(*arguments)
        with Recorder(tensors) as written:
            results = self.function(*arguments)
        self.tapes[key] = written.tape(results)
        return results

    def _compile(self, arguments: tuple[Any, ...]) -> None:
        """Compiles all kernels of a first call in parallel, if enabled and possible: see `ahead.py`."""
        if not wanted() or (arguments[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if _mapped(arguments, _sort) not in self.compiled:
            with compiled_ahead():
                self._go_through(arguments)

    def _go_through(self, arguments: tuple[Any, ...] | None) -> None:
        """Calls the function, and what is called next, while launches only compile."""
        sort = _mapped(arguments, _sort)
        if arguments is not None and sort not in self.compiled:
            self.compiled.add(sort)
            results = self.function(*arguments)
            if self.next is not None:
                other, arguments_of = self.next
                other._go_through(arguments_of(arguments, results))


def _sort(x: Any) -> Any:
    """Roughly what kernels are specialised on: dtypes, head widths, and levels, as many as a length has digits."""
    if isinstance(x, Tensor):
        return x.dtype, x.device, x.shape[-1:], x.shape[1].bit_length() if x.dim() > 1 else 0
    return x if isinstance(x, bool) else type(x)


def _kind(tensors: list[Tensor], x: Any) -> Any:
    """All of a tensor but its data, appending it to `tensors`; anything else is its own kind."""
    if not isinstance(x, Tensor):
        return x
    tensors.append(x)
    return x.dtype, x.device, x.shape, x.stride(), x.storage_offset(), x.data_ptr() & 15


def _surroundings(tensors: list[Tensor]) -> tuple[Any, ...]:
    """Which tensors share memory, and the PyTorch settings that affect the choice of kernels."""
    storages, kind = [_storage(x) for x in tensors], tensors[0].device.type
    return (
        tuple([storages.index(x) for x in storages]),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
    )

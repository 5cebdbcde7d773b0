"""Tapes: a recorded call replayed on other tensors of the same kind gives the same numbers as running it."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import DEVICE, Case, run
from torch import Tensor
from triton.compiler import CompiledKernel

from deadreckon.ops.triton import tape
from deadreckon.ops.triton.gated import operator as gated
from deadreckon.ops.triton.householder import operator as householder
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tape import Taped


@pytest.fixture(autouse=True)
def nothing_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_ahead.py` has that; here functions would be called once more."""
    monkeypatch.setenv("DEADRECKON_AHEAD", "0")


def taped(function: Callable[..., Any]) -> Taped:
    """On any device."""
    wrapped = Taped(function)
    wrapped.on = True
    return wrapped


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def operations(x: Tensor, pair: Pair, times: int, nothing: None = None) -> tuple[Any, ...]:
    """Views, things in place, lists, several results, memory of which all is used again."""
    room = x.new_empty(4, x.shape[1] + 1)[:, 1:]
    room.copy_(x * times)
    room[1:3].add_(pair.left.flip(0)[:2])
    parts = torch.stack([room, pair.right.expand_as(room)])
    del room
    most, where = parts.max(2)
    ordered = torch.cat([parts[0, :2], parts[1, 2:]]).T.contiguous()
    ordered[:, 1].zero_()
    return Pair(most + 1, where.to(torch.int32)), [ordered.view(-1)[3:9], torch.zeros_like(x)], nothing, times


def arguments(seed: int) -> tuple[Any, ...]:
    numbers = torch.Generator().manual_seed(seed)
    both = torch.randn(4, 12, generator=numbers)
    return torch.randn(4, 6, generator=numbers), Pair(both[:, :6], both[:1, 6:]), 3


def flat(results: Any) -> list[Any]:
    return [y for x in results for y in flat(x)] if isinstance(results, tuple | list) else [results]


def same(ours: Any, expected: Any) -> bool:
    return all(
        torch.equal(x, y) and x.stride() == y.stride() if isinstance(x, Tensor) else x is y
        for x, y in zip(flat(ours), flat(expected), strict=True)
    )


def test_operations_views_and_results() -> None:
    function = taped(operations)
    for seed in range(4):
        ours = function(*arguments(seed))
        assert same(ours, operations(*arguments(seed)))
        assert isinstance(ours[0], Pair)
    [written] = function.tapes.values()
    assert written is not None
    assert written.steps


def test_nothing_is_kept_from_the_call_that_was_written_down() -> None:
    kept = list[weakref.ref[Tensor]]()

    def function(x: Tensor) -> Tensor:
        middle = x * 2
        kept.append(weakref.ref(middle))
        return middle + 1

    double = taped(function)
    x = torch.ones(3)
    results = [double(x) for _ in range(3)]
    gc.collect()
    assert len(kept) == 2  # the third was read off
    assert all(ref() is None for ref in kept)
    assert len({result.data_ptr() for result in results}) == 3


def test_what_was_read_off_keeps_nothing() -> None:
    """Nor is it left to the garbage collector, which comes when it likes: a step would take more memory."""
    increment = taped(lambda x: x + 1)
    gc.disable()
    try:
        for number in range(4):
            x = torch.ones(3)
            watched = weakref.ref(x)
            increment(x)
            del x
            assert watched() is None or number == 1  # which is written down
    finally:
        gc.enable()


def test_buffers_are_dropped_after_their_last_use() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(5):
            x = x + 1
        return x

    add = taped(function)
    for _ in range(2):
        add(torch.ones(3))
    [written] = add.tapes.values()
    assert written is not None
    assert [len(unused) for _, unused in written.steps] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "change", ["type", "shape", "stride", "start", "number", "none", "shared", "deterministic", "autocast"]
)
def test_another_kind_of_call_has_another_tape(change: str) -> None:
    calls = list[int]()

    def function(x: Tensor, y: Tensor | None, number: int) -> Tensor:
        calls.append(number)
        return x * number if y is None else x * number + y

    def one() -> Tensor:
        return torch.zeros(8, 4)[:4]

    apart = taped(function)
    for _ in range(3):
        apart(one(), one(), 2)
    assert len(calls) == 2
    x: Tensor = one()
    y: Tensor | None = one()
    number = 2
    if change == "type":
        x = x.double()
    elif change == "shape":
        x = x[:1]
    elif change == "stride":
        x = x.T
    elif change == "start":
        x = torch.zeros(8, 4)[4:]
    elif change == "number":
        number = 3
    elif change == "none":
        y = None
    elif change == "shared":
        y = x
    with torch.random.fork_rng():
        try:
            torch.use_deterministic_algorithms(change == "deterministic")
            with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
                apart(x, y, number)
        finally:
            torch.use_deterministic_algorithms(False)
    assert len(calls) == 3


def test_tensors_that_share_memory() -> None:
    """What is written through one is seen through the other, and in the next call they are where they are then."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        room = torch.empty_like(x)
        room.copy_(x)
        return room - y

    less = taped(function)
    for seed in range(4):
        whole = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(less(whole[0], whole[1]), whole[0] - whole[1])
    for seed in range(4):
        x, y = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(seed)).clone().unbind()
        assert torch.equal(less(x.clone()[0], y.clone()[0]), (x - y)[0])


@pytest.mark.parametrize("ask", [lambda x: int(x.sum()), lambda x: 2 * torch.equal(x, x)])
def test_what_is_in_a_tensor_may_not_be_asked(ask: Callable[[Tensor], int]) -> None:
    function = taped(lambda x: x * ask(x))
    x = torch.ones(2)
    assert function(x).tolist() == [2, 2]
    with pytest.raises(AssertionError, match="may not depend on what is in a tensor"):
        function(x)


def test_tensors_from_elsewhere_are_refused() -> None:
    constant = torch.ones(2)
    function = taped(lambda x: x + constant)
    function(torch.ones(2))
    with pytest.raises(AssertionError, match="neither given nor made there"):
        function(torch.ones(2))


def test_nothing_takes_the_place_of_what_is_gone() -> None:
    """What is written is a tensor that nobody has seen, perhaps where one was that is gone."""

    def function(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x + 1
        return x.copy_(torch.from_numpy(np.zeros(2, np.float32)))

    gone = taped(function)
    gone(torch.ones(2))
    with pytest.raises(AssertionError, match="neither given nor made there"):
        gone(torch.ones(2))


def test_an_error_leaves_no_tape() -> None:
    broken = True

    def function(x: Tensor) -> Tensor:
        y = x + 1
        if broken:
            raise MemoryError
        return y

    risky = taped(function)
    for _ in range(3):
        with pytest.raises(MemoryError):
            risky(torch.zeros(2))
    assert tape.recorder() is None
    broken = False
    assert [risky(torch.zeros(2)).tolist() for _ in range(3)] == 3 * [[1, 1]]


def test_threads_write_for_themselves() -> None:
    first, second = threading.Event(), threading.Event()

    def function(x: Tensor, waits: bool) -> Tensor:
        y = x + 1
        if waits:
            first.set()
            second.wait(10)
        return y * 2

    calls = taped(function)
    x = torch.zeros(2)
    second.set()
    calls(x, True)
    other = threading.Thread(target=calls, args=(x, True))
    first.clear()
    second.clear()
    other.start()
    first.wait(10)
    for _ in range(3):
        assert calls(x, False).tolist() == [2, 2]
    second.set()
    other.join()
    assert [len(written.steps) for written in calls.tapes.values() if written] == [2, 2]


def test_kinds_are_forgotten_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MOST", 3)
    function = taped(lambda x: x + 1)
    for length in range(1, 10):
        function(torch.zeros(length))
        assert 0 < len(function.tapes) <= 3


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGPU(Tensor):
        is_cuda = True

    function = Taped(lambda x: x + 1)
    function(torch.zeros(2))
    assert not function.tapes  # on a CPU
    monkeypatch.setenv("DEADRECKON_TAPES", "0")
    function(torch.zeros(2).as_subclass(OnGPU))
    assert not function.tapes
    monkeypatch.delenv("DEADRECKON_TAPES")
    function(torch.zeros(2).as_subclass(OnGPU))
    assert function.tapes


class Copies(CompiledKernel):
    """As a compiled kernel does, takes tensors or addresses: four numbers from one, and from one in a tuple."""

    def __init__(self) -> None:
        self.streams = list[Any]()

    def __getitem__(self, grid: Any) -> Any:
        def launch(x: Any, to: tuple[Any, int], count: int, SIZE: int, stream: Any = "own") -> None:
            self.streams.append(stream)
            source, target = (y if isinstance(y, int) else y.data_ptr() for y in (x, to[0]))
            ctypes.memmove(target, source, count * SIZE)

        return launch


@pytest.mark.skipif(DEVICE == "cuda", reason="copies on a CPU")
def test_kernels_are_given_addresses() -> None:
    class Function:
        arg_names = ("p_x", "to", "count", "SIZE")

        def __getitem__(self, grid: Any) -> Any:
            def launch(*values: Any, **constants: Any) -> Any:
                copies[grid](*values, **constants)
                return copies

            return launch

    copies = Copies()
    kernel = Kernel(Function())

    def function(x: Tensor) -> Tensor:
        middle, out = x.new_zeros(8), torch.empty_like(x)
        kernel[(1,)](x[2:], (middle[4:], 7), 4, SIZE=4)
        kernel[(1,)](middle[4:], (out, 7), 4, SIZE=4)
        return out[:4]

    copy = taped(function)
    for seed in range(4):
        x = torch.randn(9, generator=torch.Generator().manual_seed(seed))[3:]
        assert torch.equal(copy(x), x[2:])
    assert copies.streams == 4 * ["own"] + 4 * [None]


@pytest.fixture
def on_tape(monkeypatch: pytest.MonkeyPatch) -> list[Taped]:
    """Operators are, also where they are interpreted."""
    passes = [getattr(where, name) for where in (gated, householder) for name in ("_forward_pass", "_backward_pass")]
    for one in [*passes, householder._ascend]:
        monkeypatch.setattr(one, "on", True)
        monkeypatch.setattr(one, "tapes", {})
        monkeypatch.setattr(one, "compiled", set())
    return passes


@pytest.mark.parametrize(
    "case",
    [
        Case("householder", "learned", length=150, heads=1, group=2, width=8, value_width=16),
        Case("householder", None, length=300, heads=2, group=1, width=8, value_width=8, batch=1),  # three blocks
        Case(None, "learned", length=150, heads=1, group=2, width=8, value_width=16),
    ],
    ids=["path-fox", "path", "fox"],
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("short_walks", "deterministic")
def test_attention(case: Case, packed: bool, on_tape: list[Taped], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what it is without a tape, other numbers and documents of other lengths included.

    Dense blocks without gates by PyTorch's kernel, as on a GPU. Before the first call operators are gone through.
    """
    monkeypatch.setenv("DEADRECKON_AHEAD", "1")
    if DEVICE == "cpu":
        monkeypatch.setattr("deadreckon.ops.triton.householder.levels.stock_for", lambda q, v: "cpu")
    for seed in range(3):
        now = Case(**{**vars(case), "seed": seed, **({"batch": 1} if packed else {})})
        bounds = torch.tensor([0, 40 + seed, 90, now.length], dtype=torch.int32, device=DEVICE) if packed else None
        ours = run(now, torch.float32, DEVICE, impl="triton", cu_seqlens=bounds)
        for one in on_tape:
            one.on = False
        expected = run(now, torch.float32, DEVICE, impl="triton", cu_seqlens=bounds)
        for one in on_tape:
            one.on = True
        assert all(torch.equal(ours[name], expected[name]) for name in expected)
    written = [one for passes in on_tape for one in passes.tapes.values()]
    assert len(written) == 2
    assert all(one is not None for one in written)
    assert sum(len(one.compiled) for one in on_tape) == 2


@pytest.mark.usefixtures("short_walks")
def test_prompts(on_tape: list[Taped]) -> None:
    """What a piece of a sequence leaves behind."""
    numbers = torch.Generator().manual_seed(0)
    for _ in range(3):
        q, k, v, w = (
            torch.randn(1, 150, heads, 8, generator=numbers, device="cpu").to(DEVICE) for heads in (2, 1, 1, 1)
        )
        w = torch.nn.functional.normalize(w, dim=-1)
        beta, gate = (torch.rand(1, 150, 1, generator=numbers).to(DEVICE) for _ in range(2))
        inputs = q, k, v, w, beta, -gate, 0.3, 128, True
        ours, expected = householder.ascend(*inputs), householder._ascend.function(*inputs)
        assert type(ours) is type(expected)
        assert same(ours, expected)


@pytest.mark.usefixtures("short_walks", "on_tape")
def test_prompts_with_and_without_autocast() -> None:
    """Two blocks are closed: their products are multiplied, in single precision."""
    numbers = torch.Generator().manual_seed(0)
    q, k, v, w = (torch.randn(1, 320, 1, 8, generator=numbers).to(DEVICE) for _ in range(4))
    w, beta = torch.nn.functional.normalize(w, dim=-1), torch.ones(1, 320, 1, device=DEVICE)
    inputs = q, k, v, w, beta, None, 0.3, 256
    expected = householder.ascend(*inputs)
    for autocast in (True, False, True):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            assert same(householder.ascend(*inputs), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")  # cuDNN adds up dq in any order
@pytest.mark.parametrize("gate", [None, "learned"])
def test_on_a_gpu(gate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several levels, in a captured graph too, and no more memory."""
    monkeypatch.delenv("DEADRECKON_TAPES", raising=False)
    case = Case("householder", gate, length=3000, batch=1, heads=2, group=2, width=64, value_width=64)
    exact = ("w", "beta", "log_gate")
    leaves = {
        name: x.to("cuda", torch.float32 if name in exact else torch.bfloat16).requires_grad_()
        for name, x in case.inputs().items()
    }

    def step() -> list[Tensor]:
        out = case.attend(leaves, impl="triton")
        return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))]

    passes = householder._forward_pass, householder._backward_pass
    for one in passes:
        one.tapes.clear()
    found, peaks = list[list[Tensor]](), list[int]()
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found.append([x.clone() for x in step()])
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert all(written is not None for one in passes for written in one.tapes.values())
    for later in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], later, strict=True))
    assert max(peaks[2:]) <= peaks[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in leaves.values():
            x.mul_(0.5)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(captured, step(), strict=True))

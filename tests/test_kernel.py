"""Launches that skip Triton's argument binding: the same kernel for the same kinds of arguments, else another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bounds import Checked
from triton.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources
from tune_kernels import Changed, parse

from deadreckon.ops.triton import kernel
from deadreckon.ops.triton.kernel import Kernel


class Compiled(CompiledKernel):
    """Records its launches."""

    def __init__(self) -> None:
        self.launched = list[Any]()

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.launched.append((grid, arguments))


class Function:
    """A fake for a function that Triton compiles: one kernel for each launch that is not cached."""

    arg_names = ("p_x", "sizes", "T", "scale", "BLOCK", "GATED")

    def __init__(self) -> None:
        self.kernels = list[Compiled]()

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Compiled:
            self.kernels.append(Compiled())
            return self.kernels[-1]

        return launch


X = torch.zeros(64)


def test_the_second_launch_goes_straight_to_the_kernel() -> None:
    function = Function()
    launch = Kernel(function)
    for x in (X, X[4:], torch.zeros(7)):  # all aligned to 16 bytes
        launch[(3, 2)](x, (x, 8), 16, 0.5, num_warps=4, GATED=True, BLOCK=64)
    [compiled] = function.kernels
    assert [grid for grid, _ in compiled.launched] == [(3, 2, 1)] * 2
    *_, last = compiled.launched
    assert last[1][2:] == (16, 0.5, 64, True)  # constants in the order of the signature, no options
    assert last[1][0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("arguments", "constants"),
    [
        ((X[1:], (X, 8), 16, 0.5), {}),  # alignment
        ((X.double(), (X, 8), 16, 0.5), {}),
        ((X, (X[1:], 8), 16, 0.5), {}),
        ((X, (X, 1), 16, 0.5), {}),
        ((X, (X, 8), 17, 0.5), {}),
        ((X, (X, 8), 16, None), {}),
        ((X, (X, 8), 16, 0.5), {"GATED": False}),
        ((X, (X, 8), 16, 0.5), {"num_warps": 8}),
    ],
)
def test_other_arguments_are_another_kernels(arguments: Any, constants: Any) -> None:
    function = Function()
    launch = Kernel(function)
    known = {"BLOCK": 64, "GATED": True, "num_warps": 4}
    launch[(1,)](X, (X, 8), 16, 0.5, **known)
    launch[(1,)](*arguments, **known | constants)
    assert len(function.kernels) == 2
    assert not any(one.launched for one in function.kernels)


def test_small_gpus_take_fewer_stages() -> None:
    tried = list[int]()

    class Large(Function):
        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **constants: Any) -> Compiled:
                tried.append(constants["num_stages"])
                if tried[-1] > 1:
                    raise OutOfResources(200_000, 101_376, "shared memory")
                return super(Large, self).__getitem__(grid)(*arguments, **constants)

            return launch

    launch = Kernel(function := Large())
    for _ in range(2):
        launch[(1,)](X, (X, 8), 16, 0.5, BLOCK=64, GATED=True, num_stages=3)
    assert tried == [3, 2, 1]
    assert len(function.kernels[0].launched) == 1


def test_kinds_are_forgotten_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MOST", 3)
    launch = Kernel(Function())
    for length in range(10):
        launch[(1,)](X, (X, 8), length, 0.5, BLOCK=64, GATED=True)
    assert 0 < len(launch.compiled) <= 3


def test_what_lies_outside_is_found_out() -> None:
    """With two stretches of memory: whole numbers in them may be read and written, and others if they are masked."""
    checked = Checked(SimpleNamespace(load=lambda *_: "read", store=lambda *_: "written"))
    checked.kernel, checked.memory = "_look", np.array([[100, 132], [140, 148]], dtype=np.uint64)
    inside, outside = np.array([100, 128, 144], dtype=np.uint64), np.array([128, 130, 132, 148], dtype=np.uint64)
    value = np.zeros(4, np.float32)
    assert checked.load(inside, np.ones(3, bool), value, np.float32) == "read"
    assert checked.store(outside, value, np.array([True, False, False, False])) == "written"
    with pytest.raises(IndexError, match="_look: 3 numbers are read outside of all arguments"):
        checked.load(outside, np.ones(4, bool), value, np.float32)
    with pytest.raises(IndexError, match="_look: 1 numbers are written outside of all arguments"):
        checked.store(outside, value, np.array([True, True, False, False]))


def test_other_options_for_one_kernel() -> None:
    """What `tune_kernels.py` times: the kernel that is named, and only as long as it is asked for."""
    seen = list[Any]()

    def named(name: str) -> Kernel:
        function = Function()
        function.__name__ = name  # type: ignore[attr-defined]
        one = Kernel(function)
        one._launch = lambda grid, arguments, constants: seen.append((name, constants))  # type: ignore[assignment]
        return one

    leaf, other = named("_leaf"), named("_other")
    with Changed(*parse("_leaf:maxnreg=168,num_stages=2")) as changed:
        leaf[(1,)](torch.zeros(1), num_stages=1)
        other[(1,)](torch.zeros(1), num_stages=1)
    leaf[(1,)](torch.zeros(1), num_stages=1)
    assert seen == [
        ("_leaf", {"num_stages": 2, "maxnreg": 168}), ("_other", {"num_stages": 1}), ("_leaf", {"num_stages": 1})
    ]  # fmt: skip
    assert changed.met == 1
    with pytest.raises(SystemExit, match="changes: expected KERNEL:OPTION=NUMBER,…, got '_leaf:maxnreg'"):
        parse("_leaf:maxnreg")

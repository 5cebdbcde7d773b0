"""Ahead-of-time compilation: all kernels of an operator are compiled before its first call."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DEVICE, Case
from test_tape import taped
from torch import Tensor

import deadreckon as dr
from deadreckon.ops.triton import tape
from deadreckon.ops.triton.ahead import compiled_ahead, compiling
from deadreckon.ops.triton.householder import operator
from deadreckon.ops.triton.kernel import Kernel


@pytest.mark.skipif(torch.cuda.is_available(), reason="functions on a CPU")
def test_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them before the first is launched, once for each sort of call, and of no other thread."""
    events, seen_elsewhere = list[str](), list[bool]()

    class Function:
        def __init__(self, name: str) -> None:
            self.name = name

        def warmup(self, x: Tensor, *, grid: tuple[int, ...]) -> None:
            assert compiling()
            thread = threading.Thread(target=lambda: seen_elsewhere.append(compiling()))
            thread.start()
            thread.join()
            events.append(f"compile {self.name}")

        def __getitem__(self, grid: Any) -> Any:
            return lambda x: events.append(f"launch {self.name}")

    kernels = {name: Kernel(Function(name)) for name in "abc"}

    def function(x: Tensor, number: int) -> Tensor:
        for name in "ab":
            kernels[name][(1,)](x)
        return x + number

    monkeypatch.delenv("DEADRECKON_AHEAD", raising=False)
    function_taped, ahead, plain = taped(function), ["compile a", "compile b"], ["launch a", "launch b"]
    for x, expected in (
        (torch.zeros(2, 5, 3), ahead + plain),
        (torch.zeros(4, 6, 3), plain),  # as many levels
        (torch.zeros(2, 9, 3), ahead + plain),
        (torch.zeros(2, 5, 4), ahead + plain),
        (torch.zeros(2, 5, 4).double(), ahead + plain),
    ):
        assert torch.equal(function_taped(x, 1), x + 1)
        assert events == expected
        events.clear()
    assert not any(seen_elsewhere)
    assert not compiling()
    # What follows is compiled beside it, where it will follow, and not once more when it does.
    for follows, expected in (
        (True, [*ahead, "compile c", *plain, "launch c"]),
        (False, [*ahead, *plain, "compile c", "launch c"]),
    ):
        before, after = taped(function), taped(lambda x, y: kernels["c"][(1,)](x))
        before.followed_by(after, lambda given, found, on=follows: (given[0], found) if on else None)
        x = torch.zeros(2, 5, 3)
        after(x, before(x, 1))
        assert events == expected
        events.clear()
    with pytest.raises(ZeroDivisionError), compiled_ahead():
        _ = 1 // 0
    assert not compiling()
    monkeypatch.setenv("DEADRECKON_AHEAD", "0")
    taped(function)(torch.zeros(2, 5, 3), 1)
    assert events == plain


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("gate", [None, "learned"])
def test_backward_passes_are_gone_through_once(
    gate: str | None, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the forward pass, if that keeps what they need, by arguments of the sort that they will have."""
    case = Case("householder", gate, length=130, batch=1, heads=1, width=64)
    leaves = {name: x.to(DEVICE, torch.float32) for name, x in case.inputs().items()}
    monkeypatch.setattr(tape, "compiled_ahead", contextlib.nullcontext)
    monkeypatch.setattr(operator, "_forward_pass", forward := taped(operator._forward_pass.function))
    monkeypatch.setattr(operator, "_backward_pass", backward := taped(operator._backward_pass.function))
    forward.followed_by(backward, operator._arguments_of_backward_pass)
    q = leaves.pop("q").requires_grad_()
    steps = dr.Householder(leaves["w"], leaves["beta"], recompute=recompute)
    out = dr.attend(q, leaves["k"], leaves["v"], transport=steps, log_gate=leaves.get("log_gate"), impl="triton")
    assert (len(forward.compiled), len(backward.compiled)) == (1, 0 if recompute else 1)
    out.sum().backward()
    assert (len(forward.compiled), len(backward.compiled)) == (1, 1)


FIRST_CALL = """
import sys, time, torch
import deadreckon as dr
torch.use_deterministic_algorithms(True)
draw = lambda *shape: torch.randn(1, 3000, *shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
q, k, v, w = (draw(2, 64).bfloat16().requires_grad_() for _ in range(4))
steps, gate = dr.Householder(torch.nn.functional.normalize(w.float(), dim=-1), draw(2).sigmoid()), -draw(2).exp()
began = time.perf_counter()
out = dr.attend(q, k, v, transport=steps, log_gate=gate)
out.float().sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - began)
torch.save([x.detach().cpu() for x in (out, q.grad, k.grad, v.grad, w.grad)], sys.argv[1])
"""


@pytest.mark.gpu
def test_first_calls_on_a_gpu(tmp_path: Path) -> None:
    """With nothing compiled yet: sooner, and what comes out is the same."""
    seconds, found = list[float](), list[list[Tensor]]()
    for ahead in "01":
        variables = {"DEADRECKON_AHEAD": ahead, "TRITON_CACHE_DIR": str(tmp_path / f"cache-{ahead}")}
        command = [sys.executable, "-c", FIRST_CALL, str(tmp_path / ahead)]
        said = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
        seconds.append(float(said.stdout.split()[-1]))
        found.append(torch.load(tmp_path / ahead, weights_only=True))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    print(f"first call {seconds[0]:.1f} s, compiled ahead {seconds[1]:.1f} s")
    assert seconds[1] < seconds[0]

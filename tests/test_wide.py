"""Keys of more channels than flash kernels keep gradients of: their weights go through memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import DEVICE, Case, relative_errors, remainder, run
from torch import Tensor

import deadreckon as dr
from deadreckon.ops.triton.gated import operator, wide

HALF = torch.float16  # the interpreter has no products of bfloat16


def check(case: Case) -> None:
    """At most twice the error that the definition makes in the same precision."""
    exact = run(case, impl="reference")
    plain = relative_errors(run(case, HALF, DEVICE, exact=("log_gate",), impl="reference"), exact)
    found = relative_errors(run(case, HALF, DEVICE, exact=("log_gate",), impl="triton"), exact)
    assert all(found[name] <= 2 * plain[name] + remainder(case) for name in plain), (found, plain)


@pytest.mark.parametrize(
    "case",
    [
        Case(length=1, batch=1, heads=1, group=2, width=264, value_width=16),
        Case(length=63, batch=1, heads=1, group=3, width=264, value_width=16),
        Case(length=130, batch=1, heads=2, group=1, width=376, value_width=24),
        Case(length=100, batch=2, heads=1, group=2, width=512, value_width=128, scale=-0.05),
    ],
    ids=str,
)
def test_definition(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def counted(*arguments: Any) -> None:
        asked.append(len(arguments))
        backward(*arguments)

    backward = wide.wide_backward
    monkeypatch.setattr(operator, "wide_backward", counted)
    check(case)
    assert asked  # twice where kernels are compiled ahead


def test_as_many_heads_at_a_time_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(length=70, batch=2, heads=3, group=2, width=264, value_width=8)
    whole = run(case, HALF, DEVICE, impl="triton")
    monkeypatch.setattr(wide, "HELD", 2 * 2 * 2 * 128**2 * 4)  # four key heads of six
    for name, x in run(case, HALF, DEVICE, impl="triton").items():
        assert torch.equal(x, whole[name]), name


@pytest.mark.parametrize(
    "case",
    [
        Case(None, "learned", length=100, batch=1, heads=1, width=264, value_width=16),
        Case(length=70, batch=1, heads=1, width=264, value_width=16),
    ],
    ids=["gates", "long rows"],
)
def test_what_stays_with_the_flash_kernel(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "LONGEST", 64)
    monkeypatch.setattr(operator, "wide_backward", None)
    check(case)


def test_packed() -> None:
    """Documents of a row, as they are on their own."""
    case = Case(length=90, batch=1, heads=1, group=2, width=264, value_width=16)
    leaves = {name: x.to(DEVICE, HALF).requires_grad_() for name, x in case.inputs().items()}
    bounds = torch.tensor([0, 30, 90], dtype=torch.int32, device=DEVICE)
    packed = dr.attend(**leaves, cu_seqlens=bounds, impl="triton")
    alone = [dr.attend(*(x[:, a:b] for x in leaves.values()), impl="triton") for a, b in ((0, 30), (30, 90))]
    grad = torch.randn(packed.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(packed)

    def gradients(output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, list(leaves.values()), grad)

    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=2**-9, atol=2**-9)
    for x, y in zip(gradients(packed), gradients(torch.cat(alone, dim=1)), strict=True):
        torch.testing.assert_close(x, y, rtol=2**-7, atol=2**-7)

"""Short rows whose keys are wider than their values: one program a head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import DEVICE, Case, relative_errors, remainder, run
from torch import Tensor

import deadreckon as dr
from deadreckon.ops.triton.gated import operator, short

HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # the interpreter has no products of bfloat16


@pytest.mark.parametrize(
    "case",
    [
        Case(length=1, heads=1, group=1, width=40, value_width=16),
        Case(length=17, heads=2, group=1, width=184, value_width=24),
        Case(length=84, batch=1, heads=2, group=1, width=200, value_width=24),
        Case(length=100, batch=1, heads=1, group=1, width=376, value_width=8, scale=-0.05),
        Case(length=128, batch=1, heads=1, group=1, width=136, value_width=64),
    ],
    ids=str,
)
def test_definition(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most twice the error that the definition makes in the same precision."""
    asked, backward = list[int](), operator.short_backward
    monkeypatch.setattr(operator, "short_backward", lambda *given: asked.append(len(given)) or backward(*given))
    exact = run(case, impl="reference")
    plain = relative_errors(run(case, HALF, DEVICE, impl="reference"), exact)
    found = relative_errors(run(case, HALF, DEVICE, impl="triton"), exact)
    assert all(found[name] <= 2 * plain[name] + remainder(case) for name in plain), (found, plain)
    assert asked  # twice where kernels are compiled ahead


def both_ways(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output = dr.attend(*leaves, impl="triton")
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return output.detach(), *torch.autograd.grad(output, leaves, grad)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, HALF)


def parts(offset: int) -> list[Tensor]:
    """Of one tensor, from some channel on."""
    whole = drawn(2, 30, 3, 2, 48 + offset)[..., offset:]
    return [whole[:, :, 0], whole[:, :, 1], whole[:, :, 2, :, :24]]


VIEWS = {
    "parts of one tensor": parts(0),
    "the same, from channel 1": parts(1),
    "the same, from channel 8": parts(8),
    "by token": [drawn(30, 2, 2, width).transpose(0, 1) for width in (48, 48, 24)],
    "by head": [drawn(2, 2, 30, width).transpose(1, 2) for width in (48, 48, 24)],
    "one row, repeated": [drawn(1, 30, 1, width).expand(2, -1, 2, -1) for width in (48, 48, 24)],
}


@pytest.mark.parametrize("views", VIEWS)
def test_views_of_any_strides(views: str) -> None:
    """As q, k and v of their own: whatever the compiler may assume of where their rows begin."""
    given = VIEWS[views]
    for one, other in zip(both_ways(*given), both_ways(*(x.contiguous() for x in given)), strict=True):
        assert torch.equal(one, other)


def test_gradients_of_any_strides() -> None:
    """Of a sum all gradients are the same number, and of a transposed output their heads lie apart."""
    found = []
    for change in (Tensor.clone, lambda x: x.expand_as(x), lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        leaves = [x.clone().requires_grad_() for x in parts(0)]
        change(dr.attend(*leaves, impl="triton")).sum().backward()
        found.append([x.grad for x in leaves])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_packed() -> None:
    """Documents do not see each other."""
    q, k, v = parts(0)
    bounds = torch.tensor([0, 11, 30], dtype=torch.int32, device=DEVICE)
    apart = [dr.attend(*(x[:1, a:b] for x in (q, k, v)), impl="triton") for a, b in ((0, 11), (11, 30))]
    packed = dr.attend(q[:1], k[:1], v[:1], cu_seqlens=bounds, impl="triton")
    torch.testing.assert_close(packed, torch.cat(apart, dim=1), rtol=2**-8, atol=2**-8)


def test_lengths_may_be_symbolic() -> None:
    """What is exported for any length does not branch by it."""

    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dr.attend(q, k, v, impl="triton")

    given = [drawn(1, 150, 2, width) for width in (48, 48, 24)]
    length, few = torch.export.Dim("length", min=2, max=4000), tuple(x[:, :24] for x in given)
    program = torch.export.export(Attention(), few, dynamic_shapes={name: {1: length} for name in "qkv"}).module()
    for count in (24, 150):
        some = [x[:, :count] for x in given]
        torch.testing.assert_close(program(*some), dr.attend(*some, impl="triton"), rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_earlier_tokens_do_not_see_it(number: float) -> None:
    q, k, v = drawn(1, 40, 2, 48), drawn(1, 40, 2, 48), drawn(1, 40, 2, 24)
    expected = dr.attend(q, k, v, impl="triton")
    q[:, 25, 0], k[:, 25, 1] = number, number
    found = dr.attend(q, k, v, impl="triton")
    assert torch.equal(found[:, :25], expected[:, :25])
    assert torch.equal(found[:, 26:, 0], expected[:, 26:, 0])


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(length=20, batch=1, heads=1, group=1, width=40, value_width=24), HALF),
        (Case(length=20, batch=1, heads=1, group=2, width=48, value_width=16), HALF),
        (Case(length=129, batch=1, heads=1, group=1, width=48, value_width=16), HALF),
        (Case(length=20, batch=1, heads=1, group=1, width=144, value_width=72), HALF),
        (Case(length=20, batch=1, heads=1, group=1, width=48, value_width=16), torch.float32),
        (Case(None, "learned", length=20, batch=1, heads=1, group=1, width=48, value_width=16), HALF),
    ],
    ids=["hardly wider", "groups", "long", "wide values", "single precision", "gates"],
)
def test_what_others_do(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(operator, "short_forward", never)
    run(case, dtype, DEVICE, exact=("log_gate",), impl="triton")


def test_gpus_with_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    q, v = drawn(1, 20, 1, 48), drawn(1, 20, 1, 24)
    assert short.is_short(q, q, v)
    monkeypatch.setattr(short, "cramped", lambda _: True)
    assert not short.is_short(q, q, v)

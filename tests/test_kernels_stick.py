"""Stick-breaking kernels against the definition in float64. Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.ops.triton.stick import backward, launch
from deadreckon.ops.triton.stick.operator import stick_breaking, stick_breaking_forward
from deadreckon.ops.triton.tiles import Tiling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")  # that they compile has tests of its own


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Memory that nobody has written to is NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all() and torch.ones(1).new_empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def draw(
    batch: int, length: int, heads: int, group: int, width: int, value_width: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k, v and a gradient of o."""
    generator = torch.Generator().manual_seed(length)
    shapes = ((heads * group, width), (heads, width), (heads, value_width), (heads * group, value_width))
    return [torch.randn(batch, length, *s, generator=generator, dtype=dtype).to(DEVICE) for s in shapes]


def shifted(q: Tensor, k: Tensor, by: float) -> None:
    """Adds about `by` to every logit."""
    q[..., 0], k[..., 0] = 1, by * q.shape[-1] ** 0.5


def gradients(attend, tensors: list[Tensor]) -> list[Tensor]:
    """o, dq, dk, dv."""
    *leaves, grad = tensors
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def by_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return stick_breaking(q, k, v, q.shape[-1] ** -0.5)


def by_definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dr.attend(q, k, v, score="stick-breaking", impl="reference")


def errors(tensors: list[Tensor]) -> list[float]:
    expected = gradients(by_definition, [x.double() for x in tensors])
    return distances(gradients(by_kernel, tensors), expected)


def distances(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape and x.is_contiguous()
    return [float((x - y).norm() / y.norm().clamp_min(1e-30)) for x, y in zip(found, expected, strict=True)]


def check(tensors: list[Tensor], forward: float = 1e-5, backward: float = 1e-4) -> None:
    out, *grads = errors(tensors)
    assert out <= forward
    assert max(grads) <= backward, grads


@pytest.mark.parametrize(
    "sizes",
    [
        (2, 1, 1, 2, 8, 16),
        (1, 63, 1, 2, 24, 16),
        (1, 64, 2, 1, 16, 40),
        (2, 100, 1, 1, 16, 24),
        (1, 100, 1, 1, 72, 136),
    ],
)
def test_definition(sizes: tuple[int, ...]) -> None:
    check(draw(*sizes))


@pytest.mark.parametrize(("logit", "length"), [(-4.0, 257), (-9.0, 100)])
def test_long_sticks(logit: float, length: int) -> None:
    q, k, v, grad = draw(1, length, 1, 1, 32, 32)
    shifted(q, k, logit)
    check([q, k, v, grad])


def test_float16() -> None:
    q, k, v, grad = draw(1, 200, 1, 1, 32, 32, torch.float16)
    shifted(q, k, -3.0)
    check([q, k, v + 1, grad], 1e-3, 1e-3)


def test_a_large_common_value_is_no_trouble() -> None:
    """do·o is then much larger than what is left of it at far keys."""
    q, k, v, grad = draw(1, 100, 1, 1, 16, 16, torch.float16)
    shifted(q, k, -1.0)
    check([q, k, v + 30, grad], 1e-3, 4e-3)


def test_big_logits() -> None:
    q, k, v, grad = draw(1, 100, 2, 1, 16, 16)
    logits = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    q *= 60 / logits.abs().max()
    check([q, k, v, grad])


def test_saturated_logits() -> None:
    """If every logit is 60 each token takes the one before it, and hardly any gradient reaches the logits."""
    _, _, v, grad = draw(1, 70, 1, 1, 16, 16)
    q = torch.full_like(v, 15**0.5)  # q·k / 4 = 60
    out, grad_q, grad_k, grad_v = gradients(by_kernel, [q, q, v, grad])
    torch.testing.assert_close(out[:, 1:], v[:, :-1])
    torch.testing.assert_close(grad_v[:, :-1], grad[:, 1:])
    assert max(grad_q.abs().max(), grad_k.abs().max()) <= 1e-4


@pytest.mark.parametrize(
    ("queries", "keys", "tokens", "group"),
    [
        (Tiling(64, 64, 4, 1), Tiling(64, 64, 4, 1), 64, 1),
        (Tiling(64, 32, 4, 1), Tiling(64, 128, 4, 1), 64, 2),
        (Tiling(128, 32, 4, 1), Tiling(32, 64, 4, 1), 128, 1),
    ],
)
def test_strips(monkeypatch: pytest.MonkeyPatch, queries: Tiling, keys: Tiling, tokens: int, group: int) -> None:
    """Three strips; tiles of all shapes; in half of the rows nothing is left soon."""
    monkeypatch.setattr(backward, "strip_for", lambda heads: 128)
    monkeypatch.setattr(launch, "CHECK", tokens)
    monkeypatch.setitem(launch.SINGLE, "queries", {64: queries})
    monkeypatch.setitem(launch.SINGLE, "keys", {64: keys})
    q, k, v, grad = draw(1, 270, 1, group, 16, 16)
    shifted(q, k, -5.0)
    q[:, 150:250, 0, 0] = -1
    check([q, k, v, grad])


def test_what_nothing_is_left_for_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "CHECK", 32)
    for which in ("forward", "queries"):
        monkeypatch.setitem(launch.SINGLE, which, {64: Tiling(64, 32, 4, 1)})
    q, k, v, grad = draw(1, 192, 1, 1, 16, 16)
    shifted(q, k, 6.0)
    k[:, :64], v[:, :64] = torch.nan, torch.nan
    out, grad_q, _, _ = gradients(by_kernel, [q, k, v, grad])
    assert out[:, 128:].isfinite().all() and grad_q[:, 128:].isfinite().all()
    assert out[:, 1:65].isnan().all()


def test_strides() -> None:
    q, k, v, grad = draw(2, 33, 2, 1, 16, 16)
    dense = gradients(by_kernel, [q, k, v, grad])
    both = torch.cat([k, v], dim=-1)  # keys and values that lie beside each other
    strided = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        both[..., :16],
        torch.stack([v, v], dim=-1)[..., 0],
        grad.transpose(0, 1).contiguous().transpose(0, 1),
    ]
    assert all(torch.equal(x, y) for x, y in zip(gradients(by_kernel, strided), dense, strict=True))
    flat = torch.ones((), device=DEVICE).expand_as(grad)
    found, expected = (gradients(by_kernel, [q, k, v, x]) for x in (flat, flat.contiguous()))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_twice_the_same_bits() -> None:
    tensors = draw(1, 70, 1, 2, 16, 16)
    assert all(torch.equal(x, y) for x, y in zip(*(gradients(by_kernel, tensors) for _ in range(2)), strict=True))


def test_operators() -> None:
    q, k, v, grad = draw(1, 20, 1, 2, 16, 8, torch.float16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.deadreckon.stick_breaking_forward, (*leaves, 0.25), test_utils=CHECKS)
    out, rest = stick_breaking_forward(q, k, v, 0.25)
    assert out.shape == rest.shape and not rest.requires_grad
    assert stick_breaking_forward(q.float(), k.float(), v.float(), 0.25)[1].shape == (0,)
    detached = [x.detach() for x in (grad, q, k, v, out, rest)]
    torch.library.opcheck(torch.ops.deadreckon.stick_breaking_backward, (*detached, 0.25), test_utils=CHECKS)


def test_compiles() -> None:
    tensors = draw(1, 40, 1, 2, 16, 16)
    compiled = torch.compile(by_kernel, fullgraph=True, backend="aot_eager")
    found, expected = gradients(compiled, tensors), gradients(by_kernel, tensors)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_packed_documents() -> None:
    """The kernel in graphs too, which know neither how many there are nor where they end."""
    q, k, v, grad = draw(1, 90, 1, 2, 16, 8)
    bounds = torch.tensor([0, 1, 30, 30, 75, 90], dtype=torch.int32, device=DEVICE)

    def attend(q: Tensor, k: Tensor, v: Tensor, impl: Any = "triton") -> Tensor:
        return dr.attend(q, k, v, score="stick-breaking", cu_seqlens=bounds, impl=impl)

    expected = gradients(lambda *x: attend(*x, impl="reference"), [x.double() for x in (q, k, v, grad)])
    found = gradients(attend, [q, k, v, grad])
    assert max(distances(found, expected)) <= 1e-5
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(x, y) for x, y in zip(gradients(compiled, [q, k, v, grad]), found, strict=True))
    half = [x.half() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.deadreckon.stick_breaking_packed, (*half, bounds, 0.25), test_utils=CHECKS)
    out, rest = torch.ops.deadreckon.stick_breaking_packed(*half, bounds, 0.25)
    inputs = (grad.half(), *half, bounds, out, rest, 0.25)
    torch.library.opcheck(torch.ops.deadreckon.stick_breaking_packed_backward, inputs, test_utils=CHECKS)


def test_second_derivatives_are_refused() -> None:
    q, k, v, _ = draw(1, 8, 1, 1, 16, 16)
    (grad,) = torch.autograd.grad(by_kernel(q.requires_grad_(), k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="stick_breaking_backward"):
        grad.sum().backward()


def test_nan_comes_out() -> None:
    q, k, v, _ = draw(1, 40, 1, 1, 16, 16)
    q[:, 20] = torch.nan
    out = by_kernel(q, k, v)
    assert out[:, 20].isnan().all() and out[:, :20].isfinite().all() and out[:, 21:].isfinite().all()


def test_what_it_cannot_do() -> None:
    q, k, v, _ = draw(1, 4, 1, 1, 264, 8)
    with pytest.raises(ValueError, match="256"):
        by_kernel(q, k, v)
    with pytest.raises(ValueError, match="float64"):
        by_kernel(q.double(), k.double(), v.double())


def densely(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition for long inputs, one head to each key."""
    z = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    visible = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril(-1)
    left = torch.nn.functional.logsigmoid(-z).masked_fill(~visible, 0)
    nearer = left.flip(-1).cumsum(-1).flip(-1) - left
    weights = (torch.nn.functional.logsigmoid(z) + nearer).exp().masked_fill(~visible, 0)
    return torch.einsum("bhij,bjhe->bihe", weights, v)


@pytest.mark.gpu
@pytest.mark.parametrize("logit", [0.0, -4.0, -7.0])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_bfloat16_on_a_gpu(width: int, logit: float) -> None:
    q, k, v, grad = (x.bfloat16() for x in draw(1, 2500, 8, 1, width, width))
    shifted(q, k, logit)
    expected = gradients(densely, [x.double() for x in (q, k, v, grad)])
    assert max(distances(gradients(by_kernel, [q, k, v, grad]), expected)) <= 6e-3

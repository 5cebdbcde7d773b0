"""Pointwise kernels (gates, strengths, SwiGLU) against plain float64, interpreted without a GPU; what a layer saves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.ops import pointwise
from deadreckon.ops.triton import pointwise as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = 2.0**-23


def logits(*shape: int) -> Tensor:
    """Some of them extreme."""
    x = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x.view(-1)[:9] = torch.tensor([0.0, 1e-6, -1e-6, 20.0, -20.0, 80.0, -80.0, 1e4, -1e4])
    return x.to(DEVICE)


def allowed(x: Tensor) -> Tensor:
    """Of e^−|x|, relatively: x is rounded to a power of 2, whose own error is a few units; one more for each step."""
    return (x.abs() + 8) * ROUNDING


def test_strength() -> None:
    x = logits(7, 333)
    exact = 2 * x.double().sigmoid()
    assert bool(((kernels.strength(x).double() - exact).abs() <= allowed(x) * exact + 1e-38).all())
    half = x.bfloat16()
    assert kernels.strength(half).dtype == torch.float32
    torch.testing.assert_close(kernels.strength(half), pointwise.strength(half), rtol=1e-5, atol=1e-38)


@pytest.mark.parametrize("scale", [1.0, 0.0625])
def test_log_gate(scale: float) -> None:
    x = logits(1025)
    exact = scale * torch.nn.functional.logsigmoid(x.double())
    assert bool(((kernels.log_gate(x, scale).double() - exact).abs() <= allowed(x) * exact.abs() + 1e-38).all())
    half = x.half()
    torch.testing.assert_close(kernels.log_gate(half, scale), pointwise.log_gate(half, scale), rtol=1e-5, atol=1e-38)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu(dtype: torch.dtype) -> None:
    """Forward and both gradients; an unusual number of elements, strides, and no elements at all."""
    gate = logits(2, 5, 310)[..., :301].to(dtype).requires_grad_()
    up = torch.randn(5, 2, 301, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype).transpose(0, 1)
    up.requires_grad_()
    weight = torch.linspace(-1, 1, 301, device=DEVICE)
    y = kernels.swiglu(gate, up)
    got = torch.autograd.grad((y.float() * weight).sum(), (gate, up))
    exact = [x.detach().double().requires_grad_() for x in (gate, up)]
    expected = torch.nn.functional.silu(exact[0]) * exact[1]
    gradients = torch.autograd.grad((expected * weight.to(dtype).double()).sum(), exact)
    bound = torch.finfo(dtype).eps + allowed(exact[0])
    for one, other in zip((y, *got), (expected, *gradients), strict=True):
        size = exact[1].abs() * (1 + exact[0].abs()) + exact[0].abs()
        assert one.dtype == dtype
        assert bool(((one.double() - other).abs() <= bound * torch.minimum(size, other.abs() + 1)).all())
    assert kernels.swiglu(gate[:0], up[:0]).shape == (0, 5, 301)


@pytest.mark.parametrize("encoding", ["rope", "path-fox"])
def test_a_layer_casts_its_input_once(encoding: str) -> None:
    """Under autocast every linear map would keep a copy of its own for the backward pass."""
    layer, x = (
        dr.AttentionLayer(64, 4, encoding),
        1 * torch.randn(2, 24, 64, requires_grad=True),
    )  # autocast keeps leaves
    kept = set[int]()

    def pack(y: Tensor) -> Tensor:
        if y.dtype == torch.bfloat16 and y.numel() == x.numel() and torch.equal(y.reshape(x.shape), x.bfloat16()):
            kept.add(y.untyped_storage().data_ptr())
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y), torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert len(kept) == 1
    y.float().sum().backward()

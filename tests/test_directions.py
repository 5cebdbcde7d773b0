"""Short convolutions and directions of Householder steps: kernels against the definition in float64, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deadreckon.ops.directions import convolve, directions
from deadreckon.ops.triton.directions import directions_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def definition(
    x: Tensor, filters: Tensor, places: Tensor, heads: int, activation: str, epsilon: float, unit: bool = True
) -> Tensor:
    """Token by token."""
    before, rows = x.shape[1] - places.shape[1], []
    for b in range(x.shape[0]):
        for t in range(places.shape[1]):
            place = int(places[b if places.shape[0] > 1 else 0, t])
            y = sum(filters[i] * x[b, before + t - i] for i in range(len(filters)) if i <= place and before + t >= i)
            y = y * y.sigmoid() if activation == "silu" else y
            a = y.unflatten(0, (heads, -1))
            rows.append(a / (a.square().sum(-1, keepdim=True) + epsilon).sqrt() if unit else a)
    return torch.stack(rows).unflatten(0, (x.shape[0], -1))


def draw(
    recent: int, length: int, heads: int, width: int, packed: bool, taps: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(2, recent + length, heads * width, generator=generator, dtype=torch.float64)
    filters = torch.randn(taps, heads * width, generator=generator, dtype=torch.float64)
    places = torch.arange(recent, recent + length).unsqueeze(0)
    if packed:
        places = torch.stack([torch.arange(length) % 5, torch.arange(length) % 7])
    return x, filters, places


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize(
    ("recent", "length", "heads", "width", "packed", "activation", "epsilon"),
    [(0, 1, 1, 8, False, "none", 0.0), (2, 33, 2, 16, False, "silu", 1e-6), (0, 67, 2, 24, True, "none", 0.0)],
)
@pytest.mark.parametrize(("taps", "unit"), [(3, True), (4, False), (1, True), (2, False), (5, True)])
def test_directions(
    recent: int,
    length: int,
    heads: int,
    width: int,
    packed: bool,
    activation: str,
    epsilon: float,
    taps: int,
    unit: bool,
    kernel: bool,
) -> None:
    x, filters, places = draw(recent, length, heads, width, packed, taps)
    exact = [y.clone().requires_grad_() for y in (x, filters)]
    expected = definition(*exact, places, heads, activation, epsilon, unit)
    grad = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, exact, grad)
    expected = expected.detach()
    dtype, device = (torch.float32, DEVICE) if kernel else (torch.float64, "cpu")
    inputs = [y.to(device, dtype).requires_grad_() for y in (x, filters)]
    if kernel:
        w = directions_forward(*inputs, places.to(device), heads, activation == "silu", epsilon, unit)
    else:
        w = directions(*inputs, places, heads, activation, epsilon, unit)
    gradients = torch.autograd.grad(w, inputs, grad.to(device, dtype))
    # Short vectors lose digits as they are divided by their length, two in these at worst.
    limit = 100 * torch.finfo(dtype).eps
    for ours, theirs in zip((w.detach(), *gradients), (expected, *expected_gradients), strict=True):
        torch.testing.assert_close(ours.double().cpu(), theirs, rtol=limit, atol=limit * float(theirs.abs().max()))


def test_directions_of_nothing_are_nothing() -> None:
    x = torch.zeros(1, 4, 16, device=DEVICE, requires_grad=True)
    w = directions_forward(x, torch.ones(3, 16, device=DEVICE), torch.arange(4, device=DEVICE)[None], 2, False, 0.0)
    assert not w.any()
    assert torch.isfinite(torch.autograd.grad(w.sum(), x)[0]).all()


def test_operators() -> None:
    x, filters, places = draw(2, 20, 2, 8, False)
    x, filters = (y.to(DEVICE, torch.float32).requires_grad_() for y in (x, filters))
    inputs = (x, filters, places.to(DEVICE), 2, True, 0.0)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.deadreckon.directions.default, inputs, test_utils=checks)


@pytest.mark.parametrize("recent", [0, 2, 7])
def test_convolution_of_one_token(recent: int) -> None:
    """As the last of several; what comes before a row's document does not matter, NaN or not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, recent + 1, 5, generator=generator, dtype=torch.float64)
    filters = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    places = torch.tensor([0, 2, 9])
    x[0, :-1] = torch.nan
    found = convolve(x, filters, places.unsqueeze(1))
    for row, place, y in zip(x, places.tolist(), found, strict=True):
        expected = sum(filters[i] * row[-1 - i] for i in range(1 + min(3, place, recent)))
        torch.testing.assert_close(y[0], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("unit", [False, True])
def test_half_precision_is_widened_first(unit: bool) -> None:
    """Angles and directions add up over long routes: sums of products are not rounded to half precision."""
    x, filters, places = draw(2, 9, 2, 8, False)
    x, filters = x.bfloat16(), filters.bfloat16()
    found = directions(x, filters, places, 2, unit=unit)
    assert torch.equal(found, directions(x.float(), filters.float(), places, 2, unit=unit))

"""The symmetric tensor power: φ with ⟨φ(q), φ(k)⟩ = (qᵀk)^p, in as few dimensions as there are monomials of degree p.

    φ(x)_α = √(p! / (α_1! ⋯ α_D!)) · x_1^{α_1} ⋯ x_D^{α_D},   α_1 + … + α_D = p,   C(D + p − 1, p) of them

A monomial is a product x_i x_j ⋯ with i ≤ j ≤ …, and they are sorted by these indices. Those without the first i
channels are then the last ones of their degree, and the next degree is x_i times these, for each i: nothing is ever of
size D^p, and every product is one of slices. Tensors are (..., D, T), tokens last, so that the slices are long.

Chunks need no roots: where φ(k) goes into a state, the state is multiplied once by the integer multiplicities.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import comb
from typing import Any

import torch
from torch import Tensor

from deadreckon.ops.tracing import operator, room_like

FEW = 16  # tokens for which the slices are short


def dimension(width: int, p: int) -> int:
    """The number of monomials of degree p in `width` variables."""
    return comb(width + p - 1, p)


def _symmetric_power(x: Tensor, p: int) -> Tensor:
    """φ(x): (..., D) -> (..., C(D + p − 1, p)). Differentiable, once."""
    powers = monomials(x.reshape(-1, x.shape[-1]).mT.contiguous(), p).mT
    return powers.reshape(*x.shape[:-1], -1) * _roots(x, p)


def _roots(x: Tensor, p: int) -> Tensor:
    return multiplicities(x.shape[-1], p).sqrt().to(x)


@cache
def multiplicities(width: int, p: int) -> Tensor:
    """p! / (α_1! ⋯ α_D!) of each monomial: in how many orders its factors can be written. float64, exact."""
    ways = repeats = torch.ones(width, dtype=torch.float64)  # and how often the first index occurs
    for degree in range(1, p):
        more = []
        for i, _, rest in _products(width, degree):
            again = repeats[rest].clone()
            with_i = dimension(width - i, degree) - dimension(width - i - 1, degree)
            again[:with_i] += 1
            again[with_i:] = 1
            more.append((ways[rest] * (degree + 1) / again, again))
        ways, repeats = (torch.cat(parts) for parts in zip(*more, strict=True))
    return ways


def _products(width: int, degree: int) -> Iterator[tuple[int, slice, slice]]:
    """Each channel i, the slice of its products in the next degree, and that of the monomials it multiplies."""
    start = 0
    for i in range(width):
        count = dimension(width - i, degree)
        yield i, slice(start, start + count), slice(-count, None)
        start += count


@cache
def _factors(width: int, degree: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each monomial of the next degree, its first channel and the monomial of this degree that is the rest."""
    channels, rests, all_of = [], [], torch.arange(dimension(width, degree))
    for i, _, rest in _products(width, degree):
        rests.append(all_of[rest])
        channels.append(torch.full_like(rests[-1], i))
    return torch.cat(channels).to(device), torch.cat(rests).to(device)


@cache
def channels_of(width: int, p: int, device: torch.device) -> Tensor:
    """The channels that each monomial of degree p is the product of, up to 256 of them: (p, F) uint8."""
    found = torch.arange(width, dtype=torch.uint8, device=device).unsqueeze(0)
    for degree in range(1, p):
        channels, rests = _factors(width, degree, device)
        found = torch.cat([channels.to(torch.uint8).unsqueeze(0), found[:, rests]])
    return found


def _degrees(x: Tensor, p: int) -> list[Tensor]:
    """Monomials of x (..., D, T) of degree 1, 2, ..., p."""
    width, degrees = x.shape[-2], [x]
    for degree in range(1, p):
        if x.shape[-1] <= FEW or x.is_cuda:  # one product of gathered rows instead of many of slices
            channels, rests = _factors(width, degree, x.device)
            degrees.append(x.index_select(-2, channels) * degrees[-1].index_select(-2, rests))
            continue
        more = x.new_empty(*x.shape[:-2], dimension(width, degree + 1), x.shape[-1])
        for i, here, rest in _products(width, degree):
            torch.mul(x[..., i : i + 1, :], degrees[-1][..., rest, :], out=more[..., here, :])
        degrees.append(more)
    return degrees


def monomials(x: Tensor, p: int) -> Tensor:
    """(..., D, T) -> (..., C(D + p − 1, p), T), without the roots of multiplicities."""
    return _degrees(x, p)[-1]


def monomial_gradients(x: Tensor, p: int, grad: Tensor) -> Tensor:
    """The gradient of x (..., D, T), from that of its monomials."""
    width = x.shape[-2]
    grad_x = torch.zeros_like(x)
    for degree, lower in reversed(list(enumerate(_degrees(x, p - 1), start=1))):
        grad_lower = torch.zeros_like(lower)
        for i, here, rest in _products(width, degree):
            grad_x[..., i, :] += (grad[..., here, :] * lower[..., rest, :]).sum(-2)
            grad_lower[..., rest, :].addcmul_(x[..., i : i + 1, :], grad[..., here, :])
        grad = grad_lower
    return grad_x.add_(grad)


def _backward(x: Tensor, p: int, grad: Tensor) -> Tensor:
    """The gradient of x, from that of φ(x)."""
    columns = x.reshape(-1, x.shape[-1]).mT.contiguous()
    grad = (grad * _roots(x, p)).reshape(-1, grad.shape[-1]).mT
    return monomial_gradients(columns, p, grad).mT.reshape(x.shape)


def _save(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    x, ctx.p = inputs
    ctx.save_for_backward(x)


symmetric_power_backward = operator(
    "deadreckon::symmetric_power_backward", _backward, lambda x, p, grad: room_like(x)[0]
)
symmetric_power = operator(
    "deadreckon::symmetric_power",
    _symmetric_power,
    lambda x, p: x.new_empty(*x.shape[:-1], dimension(x.shape[-1], p)),
    gradients=lambda ctx, grad: (symmetric_power_backward(*ctx.saved_tensors, ctx.p, grad), None),
    save=_save,
)

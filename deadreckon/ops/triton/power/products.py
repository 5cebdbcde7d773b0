"""Fourth powers are squares of squares: states of p = 4 take the products of two channels in place of channels."""

from __future__ import annotations

import torch
from torch import Tensor


def state_width(width: int, p: int) -> int:
    """U: a state holds sums of products of two of U channels."""
    return width if p == 2 else -(-width * (width + 1) // 2 // 8) * 8


def _products(x: Tensor) -> Tensor:
    """(…, D) -> (…, U): x_a x_b for a ≤ b, so that products of these are squares of products of x; zeros at the end."""
    width = x.shape[-1]
    parts = [x[..., a : a + 1] * torch.cat([x[..., a : a + 1], x[..., a + 1 :] * 2**0.5], -1) for a in range(width)]
    products = torch.cat(parts, -1)
    return torch.nn.functional.pad(products, (0, state_width(width, 4) - products.shape[-1]))


def _products_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, given that of its products, in float32."""
    x, width, at = x.float(), x.shape[-1], 0
    out = torch.zeros_like(x)
    for a in range(width):
        part = grad[..., at : at + width - a]
        at += width - a
        scaled = torch.cat([x[..., a : a + 1], x[..., a + 1 :] * 2**0.5], -1)
        out[..., a] += (part * scaled).sum(-1)
        out[..., a] += part[..., 0] * x[..., a]
        out[..., a + 1 :] += part[..., 1:] * (2**0.5 * x[..., a : a + 1])
    return out


def state_channels(x: Tensor, p: int) -> Tensor:
    """(…, D) -> (…, U): x as states take it, so that squares of its products are powers p of those of x."""
    return x if p == 2 else _products(x)


def state_channels_gradient(grad: Tensor, x: Tensor, p: int) -> Tensor:
    """The gradient of x, (…, D), from that of its state channels, (…, U)."""
    return grad if p == 2 else _products_gradient(grad, x)

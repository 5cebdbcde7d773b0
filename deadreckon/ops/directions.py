"""Short causal convolutions, and directions of Householder steps: convolution, activation, normalisation per head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad, silu

from deadreckon.ops.pointwise import at_least_single
from deadreckon.ops.triton import HAS_TRITON

ACTIVATIONS = ("none", "silu")
WIDEST = 8  # of the convolutions that kernels unroll


def convolve(x: Tensor, filters: Tensor, places: Tensor) -> Tensor:
    """y_t = Σ_i filters_i · x_{t−i} within its document, (B, T, C).

    Args:
        x: (B, R + T, C), R tokens of the preceding piece and T to be convolved.
        filters: (width, C), one per channel.
        places: (B or 1, T), the number of tokens before each in its document.
    """
    reach, length = filters.shape[0] - 1, places.shape[1]
    rows = x[:, -reach - length :]
    if missing := reach + length - rows.shape[1]:
        rows = pad(rows, (0, 0, missing, 0))
    if length == 1:  # fewer operations, each of which a decoding step waits for
        lags = torch.arange(reach, -1, -1, device=x.device)
        return (rows.masked_fill((places < lags).unsqueeze(-1), 0) * filters.flip(0)).sum(1, keepdim=True)
    y = rows[:, reach:] * filters[0]
    for lag in range(1, reach + 1):
        earlier = rows[:, reach - lag : reach - lag + length].masked_fill((places < lag).unsqueeze(-1), 0)
        y = y + earlier * filters[lag]  # not times 0 or 1: a NaN of another document would come through
    return y


def directions(
    x: Tensor,
    filters: Tensor,
    places: Tensor,
    heads: int,
    activation: str = "none",
    epsilon: float = 0.0,
    unit: bool = True,
) -> Tensor:
    """Unit vectors (B, T, H, D) from x (B, R + T, H·D), in float32 (float64 if x is): see :func:`convolve`.

    Args:
        activation: after the convolution, ``"none"`` or ``"silu"``.
        epsilon: added to the squared norm before normalising.
        unit: whether to normalise; if not, the activated convolution is returned.
    """
    if x.is_cuda and HAS_TRITON and filters.shape[0] <= WIDEST and x.dtype != torch.float64:
        from deadreckon.ops.triton.directions import directions_forward

        return directions_forward(x, filters, places, heads, activation == "silu", epsilon, unit)
    w = convolve(at_least_single(x), filters, places).unflatten(-1, (heads, -1))
    w = silu(w) if activation == "silu" else w
    if not unit:
        return w
    return w * (w.square().sum(-1, keepdim=True) + epsilon).rsqrt() if epsilon else normalize(w, dim=-1)

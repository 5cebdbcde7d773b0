"""Working dtypes, and norms and scales that keep numbers in range."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deadreckon.ops.factors import Power, Score


def exact(device: torch.device) -> torch.dtype:
    """The dtype of long sums whose differences matter: float64 where the device supports it."""
    return torch.float32 if device.type == "mps" else torch.float64


def work(dtype: torch.dtype) -> torch.dtype:
    """The dtype of frames, logits and outputs: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lengths(x: Tensor) -> Tensor:
    """Norms of x (..., D) as (..., 1), safe from over- and underflow; never zero.

    A row with NaN or infinity gets the smallest norm, so that the maximum over tokens, the unit of keys, stays finite.
    """
    limits = torch.finfo(x.dtype)
    largest = x.abs().amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, limits.tiny)
    return (largest * (x / largest).norm(dim=-1, keepdim=True).clamp(min=0.5)).nan_to_num(limits.tiny, limits.max)


def power_of_two(x: Tensor) -> Tensor:
    """The largest power of two no larger than x > 0."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1)


def faded(log_gate: Tensor, dtype: torch.dtype) -> Tensor:
    """exp of a sum of log gates, flushed to zero well above the denormal range, where arithmetic is slow."""
    nothing = 0.8 * math.log(torch.finfo(dtype).tiny)
    return log_gate.exp().masked_fill(log_gate < nothing, 0).to(dtype)


def in_range(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q (N, T, G, D) and k (N, T, D), rescaled to keep powers in range: norms of 1 to 2 for queries, below 2 for keys.

    Weights are divided by their sum, which cancels a factor of a query or of all keys of a head. The factors are powers
    of two, so that nothing is rounded: an error of a logit would count p times.
    """
    return q / power_of_two(lengths(q.detach())), k / power_of_two(lengths(k.detach()).amax(1, keepdim=True))


def usual_scale(q: Tensor, scale: float, score: Score = "softmax") -> tuple[Tensor, float]:
    """q and a scale that is positive and not extreme, with the same product.

    Stock kernels mask before they scale, and gates are carried in units of the scale. Powers are divided by their sum,
    which cancels any scale but 0; q times a small scale might underflow in half precision.
    """
    if isinstance(score, Power):
        return (q if scale else q * 0), 1.0
    if -1e4 < scale < -1e-4:
        return -q, -scale
    return (q, scale) if 1e-4 < scale < 1e4 else (q * scale, 1.0)

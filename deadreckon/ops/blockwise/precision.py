"""Which dtype to compute in."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deadreckon.ops.factors import Power, Score


def exact(device: torch.device) -> torch.dtype:
    """For long sums, whose differences matter: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def work(dtype: torch.dtype) -> torch.dtype:
    """For frames, logits and outputs: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lengths(x: Tensor) -> Tensor:
    """Norms of x (..., D) as (..., 1), safe from over- and underflow; never zero.

    A row that is not finite has next to none: the longest of all tokens, which keys are measured by, stays a number.
    """
    limits = torch.finfo(x.dtype)
    largest = x.abs().amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, limits.tiny)
    return (largest * (x / largest).norm(dim=-1, keepdim=True).clamp(min=0.5)).nan_to_num(limits.tiny, limits.max)


def power_of_two(x: Tensor) -> Tensor:
    """The largest that is no larger than x > 0."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1)


def faded(log_gate: Tensor, dtype: torch.dtype) -> Tensor:
    """exp of a sum of log gates. What is next to nothing is nothing: arithmetic of denormal numbers is slow."""
    nothing = 0.8 * math.log(torch.finfo(dtype).tiny)
    return log_gate.exp().masked_fill(log_gate < nothing, 0).to(dtype)


def in_range(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q (N, T, G, D) and k (N, T, D), of lengths that keep powers in range: queries of 1 to 2, keys of less than 2.

    Weights are divided by their sum, so that any length of a query and any unit for a head's keys will do. Powers of
    two round nothing: what is lost of a logit is lost p times.
    """
    return q / power_of_two(lengths(q.detach())), k / power_of_two(lengths(k.detach()).amax(1, keepdim=True))


def usual_scale(q: Tensor, scale: float, score: Score = "softmax") -> tuple[Tensor, float]:
    """q and a scale that is positive and not extreme, with the same product.

    Stock kernels mask before they scale, and gates are carried in units of the scale. Powers are divided by their sum,
    which any scale but 0 leaves as it is; half precision might lose q times a small one.
    """
    if isinstance(score, Power):
        return (q if scale else q * 0), 1.0
    if -1e4 < scale < -1e-4:
        return -q, -scale
    return (q, scale) if 1e-4 < scale < 1e4 else (q * scale, 1.0)

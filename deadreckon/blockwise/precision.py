"""Which dtype to compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def exact(device: torch.device) -> torch.dtype:
    """For long sums, whose differences matter: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def work(dtype: torch.dtype) -> torch.dtype:
    """For frames, logits and outputs: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lengths(x: Tensor) -> Tensor:
    """Norms of x (..., D) as (..., 1), safe from over- and underflow; never zero."""
    largest = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return largest * (x / largest).norm(dim=-1, keepdim=True).clamp(min=0.5)


def usual_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """q and a scale that is positive and not extreme, with the same product.

    Stock kernels mask before they scale, and gates are carried in units of the scale.
    """
    if -1e4 < scale < -1e-4:
        return -q, -scale
    return (q, scale) if 1e-4 < scale < 1e4 else (q * scale, 1.0)

"""Sinusoidal encodings of positions, f(p) = [sin(p · ω), cos(p · ω)], in as few channels as their inner products need.

f(0) … f(P − 1) have the same inner products in r ≤ d dimensions: most wavelengths are so much longer than P that their
channels hardly differ. For d = 340, r is 32 for 64 positions, 80 for 256, 104 for 512.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from deadreckon.ops.tracing import operator


@cache
@torch.inference_mode(False)  # an inference tensor in the cache could not be used in training
def waves(positions: int, width: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """f of all positions (P, r): rotated so that only r ≤ d channels are not zero to rounding, all of similar size.

    Channels that differ in size would lose more when they are rounded to half precision.
    """
    steps = torch.arange(0, width, 2, dtype=torch.float64)
    phase = torch.arange(positions, dtype=torch.float64)[:, None] * base ** (-steps / width)
    u, s, _ = torch.linalg.svd(torch.cat([phase.sin(), phase.cos()], dim=-1), full_matrices=False)
    rank = min(8 * math.ceil(int((s > s[0] * torch.finfo(dtype).eps).sum()) / 8), len(s))
    order = torch.arange(rank, dtype=torch.float64)
    cosines = (torch.pi * (order[:, None] + 0.5) * order / rank).cos() * (2 / rank) ** 0.5  # orthogonal: a DCT
    cosines[:, 0] *= 0.5**0.5
    return (u[:, :rank] * s[:rank] @ cosines.T).to(device, dtype)


@cache
@torch.inference_mode(False)
def waves_in(positions: int, width: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`waves` computed for float32 and cast to another dtype, for kernels."""
    return waves(positions, width, base, device, torch.float32).to(dtype)


def _table(like: Tensor, positions: int, width: int, base: float) -> Tensor:
    """`waves` as an operator, on the device and in the dtype of a tensor."""
    return waves(positions, width, base, like.device, like.dtype).clone()


def _table_room(like: Tensor, positions: int, width: int, base: float) -> Tensor:
    with _disable_current_modes():  # r has to be computed, even under a tracer
        channels = waves(positions, width, base, torch.device("cpu"), like.dtype).shape[1]
    return like.new_empty(positions, channels)


table_of_waves = operator("deadreckon::waves", _table, _table_room)

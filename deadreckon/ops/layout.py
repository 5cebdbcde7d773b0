"""Where and how tensors lie: layouts that kernels require, host numbers that go to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def dense(x: Tensor) -> Tensor:
    """x with stride 1 along its last dimension: x itself, or a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def sent(numbers: Sequence[Any] | Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copies a few host numbers to a device; on CUDA without synchronising, for they are read before this returns."""
    return torch.as_tensor(numbers, dtype=dtype).to(device, non_blocking=torch.device(device).type == "cuda")

"""What public functions say of arguments that are no tensors for them."""

from __future__ import annotations

import torch
from torch import Tensor


def shape_of(x: Tensor) -> str:
    """For messages."""
    return str(tuple(x.shape))


def check_tensor(name: str, x: object, like: Tensor | None = None, of: str = "") -> Tensor:
    """x, if it is a dense floating-point tensor on the device of `like`, which messages call `of`."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name}: expected a floating-point tensor of 16, 32 or 64 bits, got dtype {x.dtype}")
    if x.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {x.layout}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name}: expected it on {of}'s device {like.device}, got {x.device}")
    return x

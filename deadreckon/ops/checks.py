"""What public functions say of arguments that are no tensors for them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad


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


def check_transforms(impl: object, tensors: Iterable[object]) -> None:
    """No tensor may be inside a transform of torch.func or have a tangent: operators know of gradients alone."""
    if torch.compiler.is_compiling():  # which does not look into this, and has no such tensors
        return
    for x in tensors:
        if isinstance(x, Tensor) and (torch._C._functorch.is_functorch_wrapped_tensor(x) or _has_tangent(x)):
            raise ValueError(
                f"impl: torch.func's transforms and forward-mode derivatives need 'reference', got {impl!r}"
            )


def _has_tangent(x: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None

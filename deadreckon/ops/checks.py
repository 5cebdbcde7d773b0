"""Validation of tensor arguments."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad


def shape_of(x: Tensor) -> str:
    """x's shape, for error messages."""
    return str(tuple(x.shape))


def check_tensor(name: str, x: object, like: Tensor | None = None, of: str = "") -> Tensor:
    """Returns x if it is a dense floating-point tensor on the device of `like`, named `of` in messages, else raises."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name}: expected a floating-point tensor of 16, 32 or 64 bits, got dtype {x.dtype}")
    if x.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {x.layout}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name}: expected it on {of}'s device {like.device}, got {x.device}")
    return x


def check_derivatives(impl: object, tensors: Iterable[object]) -> None:
    """Rejects forward-mode and torch.func derivatives, which the custom ops, with reverse mode alone, would lose."""
    if any(isinstance(x, Tensor) and is_differentiated(x) for x in tensors):
        raise ValueError(f"impl: derivatives of torch.func and forward-mode ones need 'reference', got {impl!r}")


def is_differentiated(x: Tensor) -> bool:
    """Whether x has a forward-mode tangent or is inside torch.func's grad, jvp or the like (vmap does not count)."""
    if torch.compiler.is_compiling():  # tensors cannot be inspected: counts any inside a forward-mode region
        return forward_ad._current_level >= 0
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return True
    functorch = torch._C._functorch
    while functorch.is_batchedtensor(x) or functorch.is_gradtrackingtensor(x):
        if functorch.is_gradtrackingtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False

"""Fused residual add and RMSNorm: one kernel on a GPU, where PyTorch takes several passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deadreckon.ops.modules import is_plain
from deadreckon.ops.pointwise import has_kernels
from deadreckon.ops.tracing import autocast_dtype

WIDEST = 1 << 14  # channels of a row that a program can hold


def residual_norm(norm: nn.Module, x: Tensor, y: Tensor | None = None, cast: bool = True) -> tuple[Tensor, Tensor]:
    """(x + y, norm(x + y)); x itself where there is no y.

    Args:
        norm: over the last dimension.
        x: the residual, (…, C).
        y: what is added to it.
        cast: whether only linear maps read the norm, which autocast would cast it for.
    """
    if (
        isinstance(norm, nn.RMSNorm)
        and type(norm).forward is nn.RMSNorm.forward
        and norm.elementwise_affine
        and norm.eps is not None
        and has_kernels(x)
        and x.shape[-1:] == norm.normalized_shape
        and x.shape[-1] <= WIDEST
        and x.numel()
        and (y is None or (y.shape == x.shape and torch.promote_types(x.dtype, y.dtype) == x.dtype))
        and norm.weight.device == x.device
        and is_plain(norm)
    ):
        from deadreckon.ops.triton.norm import ResidualNorm

        dtype = autocast_dtype(x) if cast else x.dtype
        total, normed = ResidualNorm.apply(
            x.contiguous(), None if y is None else y.contiguous(), norm.weight, norm.eps, dtype
        )
        return total, normed
    x = x if y is None else x + y
    return x, norm(x)

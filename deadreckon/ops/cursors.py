"""What PRISM computes by kernels where there are no gradients: see `deadreckon/ops/triton/cursors.py`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from deadreckon.ops.pointwise import at_least_single, has_kernels

LARGEST = 128  # hidden units of a network that is one kernel: its matrices stay in registers


def by_kernels(x: Tensor) -> bool:
    """Whether what is computed from x is left to kernels, which have no gradients."""
    return has_kernels(x) and not torch.is_grad_enabled()


def mapped(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map of x (B, T, inputs), at least in single precision: halves are multiplied as they are, but added up
    and left in single precision.
    """
    if x.is_cuda and x.dtype == weight.dtype != torch.float32 and by_kernels(x):
        y = torch.mm(x.flatten(0, 1), weight.mT, out_dtype=torch.float32).unflatten(0, x.shape[:2])
        return y if bias is None else y + bias
    x = at_least_single(x)
    return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


@cache
@torch.inference_mode(False)
def order_of(layers: int, heads: int, kv_heads: int, cursors: int, copy: int, device: torch.device) -> Tensor:
    """Which filter each cursor of a layer's heads is, query heads first: (layers, Hq + H, C), −1 for fixed ones."""
    key = torch.arange(layers * kv_heads * cursors)
    fixed = key % copy == 0 if copy else key < 0
    jumping = fixed.view(-1, 1, cursors).expand(-1, heads // kv_heads, -1).flatten()  # the query cursors that meet them
    walking = int((~jumping).sum())
    queries = torch.where(jumping, walking + int((~fixed).sum()) + jumping.cumsum(0), (~jumping).cumsum(0)) - 1
    keys = torch.where(fixed, -1, walking + (~fixed).cumsum(0) - 1)
    parts = (queries.view(layers, heads, cursors), keys.view(layers, kv_heads, cursors))
    return torch.cat(parts, dim=1).to(device, torch.int32)


def gru(
    x: Tensor, b: Tensor, u: Tensor, c: Tensor, first: Tensor | None, places: Tensor, state: Tensor, by_place: bool
) -> Tensor:
    """Hidden states (B, T, H) of a GRU from what comes from its input, (B, T, 3 H)."""
    from deadreckon.ops.triton import cursors

    return cursors.gru(x, b, u, c, first, places, state, by_place)


def jumps(q: Tensor, keys: Tensor, none: Tensor, places: Tensor, positions: int, dtype: torch.dtype) -> Tensor:
    """Where cursors jump to, (B, T, F, P + 1): softmax over keys by place, and no jump."""
    from deadreckon.ops.triton import cursors

    return cursors.jumps(q, keys, none, places, positions, dtype)


def jump(q: Tensor, keys: Tensor, new: Tensor, none: Tensor, places: Tensor, positions: int) -> Tensor:
    """The same of one token, whose keys `new` are written among the others."""
    from deadreckon.ops.triton import cursors

    return cursors.jump(q, keys, new, none, places, positions)


def widen(
    q: Tensor, k: Tensor, e: Tensor, table: Tensor, places: Tensor, order: Tensor, mix: Tensor, alpha: Tensor,
    gain: float, norm: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries and keys with the superpositions of their heads' cursors behind them."""
    from deadreckon.ops.triton import cursors

    return cursors.widen(q, k, e, table, places, order, mix, alpha, gain, norm)

"""Entry points of PRISM's kernels, some of them without gradients: see `ops/triton/cursors.py` and `widen.py`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deadreckon.ops.pointwise import at_least_single, has_kernels
from deadreckon.ops.tracing import without_autocast


def by_kernels(x: Tensor) -> bool:
    """Whether to use kernels without gradients for x: it has kernels, and grad mode is off."""
    return has_kernels(x) and not torch.is_grad_enabled()


def mapped(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map of x (B, T, inputs) with at least float32 output: 16-bit inputs are upcast or, without gradients on
    a GPU, multiplied as they are with float32 accumulation.
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


def jumps_by_kernels(x: Tensor, keys: Tensor, positions: int) -> bool:
    """Whether `jumps` can be used for x: with gradients, each key must have a position of its own."""
    return has_kernels(x) and (not torch.is_grad_enabled() or keys.shape[2] <= positions)


def jumps(q: Tensor, keys: Tensor, none: Tensor, places: Tensor, positions: int, dtype: torch.dtype) -> Tensor:
    """Probabilities of where cursors jump to, (B, T, F, P + 1): softmax over the keys, by place, and no jump."""
    found: Tensor = _Jumps.apply(q, keys, none, places, positions, dtype)
    return found


class _Jumps(torch.autograd.Function):
    """With p the probabilities and g their gradient, that of logits is ds = p (g − Σ p g). The kernel leaves p of a key
    in the column of its place, for no two keys are at the last position."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, none: Tensor, places: Tensor, positions: int, dtype: torch.dtype
    ) -> Tensor:
        from deadreckon.ops.triton import cursors

        chances = cursors.jumps(q, keys, none, places, positions, dtype)
        ctx.save_for_backward(q, keys, chances)
        return chances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, keys, chances), (grad,) = ctx.saved_tensors, grads
        seen, scale = keys.shape[2], q.shape[3] ** -0.5
        along = (chances * grad).sum(-1, keepdim=True)
        none = chances[..., -1] * (grad[..., -1] - along.squeeze(-1))
        slopes = chances.new_empty(*keys.shape[:2], q.shape[1], seen)  # (B, F, T, S), as products take it
        torch.sub(*(x.transpose(1, 2) for x in (grad[..., :seen], along)), out=slopes)
        slopes *= chances[..., :seen].transpose(1, 2)
        slopes *= scale
        with without_autocast(slopes):
            of_q = (slopes @ keys.to(slopes.dtype)).transpose(1, 2)
            of_keys = slopes.mT @ q.transpose(1, 2).to(slopes.dtype)
        return of_q.to(q.dtype), of_keys.to(keys.dtype), none, None, None, None


def jump(q: Tensor, keys: Tensor, new: Tensor, none: Tensor, places: Tensor, positions: int) -> Tensor:
    """The same for one token, whose keys `new` are written into `keys`."""
    from deadreckon.ops.triton import cursors

    return cursors.jump(q, keys, new, none, places, positions)


def gathered(
    q: Tensor, k: Tensor, e: Tensor, table: Tensor, places: Tensor, order: Tensor, mix: Tensor, alpha: Tensor,
    gain: float, norm: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries and keys with the superpositions of their heads' cursors appended as channels."""
    from deadreckon.ops.triton import widen

    return widen.gathered(q, k, e, table, places, order, mix, alpha, gain, norm)


def widened(x: Tensor, e: Tensor, mix: Tensor | None, gain: Tensor | None, norm: float) -> Tensor:
    """Queries or keys times μ, with superpositions, scaled to a norm and times a gain, appended: (B, T, H, D + C r).

    Args:
        x: (B, T, H, D).
        e: (B, T, H, C, r), the superpositions of a head's cursors; all C together are scaled to the norm.
        mix: (H,) and gain: (H, C), at least in single precision; None for 1.
    """
    if has_kernels(x) and e.dtype == x.dtype:
        from deadreckon.ops.triton.widen import Widened

        wide: Tensor = Widened.apply(x, e, mix, gain, norm)
        return wide
    scale = norm / torch.linalg.vector_norm(
        e, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(e.dtype, torch.float32)
    )
    e = e * (scale if gain is None else scale * gain.unsqueeze(-1))
    x = x if mix is None else x * mix.to(x.dtype).unsqueeze(-1)
    return torch.cat([x, e.to(x.dtype).flatten(-2)], -1)


def permuted(x: Tensor, order: Tensor) -> Tensor:
    """x (B, T, F, ·) permuted along its third dimension by order (F,); on a GPU the backward pass is a gather, too."""
    return _Permuted.apply(x, order) if has_kernels(x) else x[:, :, order]


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(2, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(2, ctx.saved_tensors[0].argsort()), None

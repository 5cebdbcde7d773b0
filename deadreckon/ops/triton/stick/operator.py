"""Causal stick-breaking attention, as one operator and one for its backward pass.

    A_ij = σ(z_ij) Π_{j<s<i} (1 − σ(z_is)),  z_ij = scale · q_i·k_j,  j < i;      o_i = Σ_j A_ij v_j

Forward (`forward.py`): with e = exp z the steps are 1 − σ = 1/(1 + e), and what is left of a row's stick is their
product, kept as such: no logarithm. Keys come from near to far. In a tile (`sticks.py`), a key needs the product of the
steps of all nearer keys. What is left only decreases. Below 2^-29, a thirtieth of float32's precision, a row is done
(`left` becomes 0), and tiles with nothing left are skipped; e is clamped to 2^30, which breaks the stick all the same.

Backward (`backward.py`): with g_ij = do_i·v_j and m_ij = A_ij g_ij,  dz_ij = m_ij − σ(z_ij) Σ_{s≤j} m_is.  The sum over
farther keys is do_i·o_i less that over nearer ones, so this too runs from near to far, and nothing is restored by
division. But the two must be sums of the same numbers: the weights are rounded in m as they were in o, and o is kept to
twice the working precision, with its rounding residual in a second tensor, its *rest*. What error remains is multiplied
with Σ_j σ_ij, which is about 20 when a row is done, whatever T.

dq runs along keys; dk and dv along queries, for each tile of keys from what is left of the rows, and what they still
owe, at the tile's near edge. dq's kernel writes these two numbers. To keep memory linear in T it does so for one strip
of keys, whose dk and dv follow at once, then for the next strip down, continuing from the rows' state. No atomics.

Packed documents are batched by length (`blockwise/documents.py`), inside custom ops of their own, so that a graph does
not depend on their number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deadreckon.ops.blockwise.documents import batches, boundaries
from deadreckon.ops.triton.operators import gradients_for, save
from deadreckon.ops.triton.stick.backward import attend_backward
from deadreckon.ops.triton.stick.forward import attend_forward
from deadreckon.ops.triton.stick.launch import WIDEST, rest_scale


def _dense(x: Tensor) -> Tensor:
    """x, or a contiguous copy if its channels are strided, or if offsets within a tile would overflow 32 bits."""
    return x if x.stride(-1) == 1 and x.stride(1) < 2**23 else x.contiguous()


@torch.library.custom_op("deadreckon::stick_breaking_forward", mutates_args=())
def stick_breaking_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output (B, T, Hq, E) and, for the backward pass, its rounding residual (empty in float32)."""
    q, k, v = _dense(q), _dense(k), _dense(v)
    out, rest = _forward_outputs(q, v)
    with torch.cuda.device_of(q):
        attend_forward(q, k, v, scale, out, rest)
    return out, rest


def _forward_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, torch.empty_like(out) if rest_scale(q.dtype) else q.new_empty(0)


@stick_breaking_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _forward_outputs(q, v)


@torch.library.custom_op("deadreckon::stick_breaking_backward", mutates_args=())
def stick_breaking_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv: strip by strip from the last keys to the first."""
    grad, q, k, v = _dense(grad), _dense(q), _dense(k), _dense(v)
    grad_q, grad_k, grad_v = gradients_for(q, k, v)
    with torch.cuda.device_of(q):
        attend_backward(grad, q, k, v, out.contiguous(), rest, scale, grad_q, grad_k, grad_v)
    return grad_q, grad_k, grad_v


@stick_breaking_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = gradients_for(q, k, v)
    return grad_q, grad_k, grad_v


def _gradients(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    return *stick_breaking_backward(grad, *ctx.saved_tensors, ctx.scale), None


stick_breaking_forward.register_autograd(_gradients, setup_context=save)


@torch.library.custom_op("deadreckon::stick_breaking_packed", mutates_args=())
def packed_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `stick_breaking_forward`, for the documents of one row; validates boundaries (N + 1,) when it runs."""
    results = _forward_outputs(q, v)
    for batch in batches(boundaries(cu_seqlens, q.shape[1]), q.device):
        outputs = stick_breaking_forward(batch.rows(q), batch.rows(k), batch.rows(v), scale)
        for result, x in zip(results, outputs, strict=True):
            if x.numel():
                result[0, batch.place[batch.real]] = x[batch.real]
    return results


@packed_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _forward_outputs(q, v)


@torch.library.custom_op("deadreckon::stick_breaking_packed_backward", mutates_args=())
def packed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, out: Tensor, rest: Tensor, scale: float
) -> list[Tensor]:
    """dq, dk, dv."""
    gradients = gradients_for(q, k, v)
    for batch in batches(boundaries(cu_seqlens, q.shape[1]), q.device):
        inputs = [batch.rows(x) if x.numel() else x for x in (grad, q, k, v, out, rest)]
        for gradient, x in zip(gradients, stick_breaking_backward(*inputs, scale), strict=True):
            gradient[0, batch.place[batch.real]] = x[batch.real]
    return gradients


@packed_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, out: Tensor, rest: Tensor, scale: float
) -> list[Tensor]:
    return gradients_for(q, k, v)


def _packed_gradients(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    return *packed_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


packed_forward.register_autograd(_packed_gradients, setup_context=save)


def stick_breaking(q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor | None = None) -> Tensor:
    """q (B, T, Hq, D), k (B, T, H, D), v (B, T, H, E) -> o (B, T, Hq, E), Hq a multiple of H; differentiable once."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v: expected one of float16, bfloat16, float32, got {q.dtype}, {k.dtype}, {v.dtype}")
    if max(q.shape[3], v.shape[3]) > WIDEST:
        raise ValueError(f"q, k, v: expected at most {WIDEST} channels, got {q.shape[3]} and {v.shape[3]}")
    if cu_seqlens is not None:
        return packed_forward(q, k, v, cu_seqlens, scale)[0]
    return stick_breaking_forward(q, k, v, scale)[0]

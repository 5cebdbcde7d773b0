"""Softmax attention with forget gates, as one operator and one for its backward pass.

    o_i = Σ_j softmax_j(scale · q_i·k_j + c_i − c_j) v_j,   j ≤ i,   c the running sum of log gates

Forward: (1) sums of log gates, in parts that keep the digits of near pairs; (2) from these and the longest q and k,
the keys that gates leave in reach, exactly to the output's precision (`gates.py`); (3) flash attention over the keys in
reach (`forward.py`). Packed documents are masks: tiles that lie in one document take none.

Without gates and documents, short rows of wide keys have kernels of their own (`short.py`), and so have the gradients
of keys that are wider still (`wide.py`).

Backward: (1) sums again; (2) δ = o · do and each row's shift, −lse with its gates (`delta.py`); (3) dq by rows, dk and
dv by columns, and the gradients of log-weights summed by query and by key (`backward.py`); (4) from these sums the
gates' gradient. Nothing uses atomics.

The kernels take views (B, H, G, n, rows, channels) of any strides, so that token-major and head-major tensors both do;
n is 1 here. With n > 1, pairs of blocks of the route tree are dense (`householder/levels.py`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deadreckon.ops.layout import dense
from deadreckon.ops.triton.gated.backward import flash_backward
from deadreckon.ops.triton.gated.delta import prepare
from deadreckon.ops.triton.gated.forward import flash_forward
from deadreckon.ops.triton.gated.gates import (
    MARGINS,
    gate_gradient,
    gate_sums,
    pruned,
    reach_in,
    reach_of,
    room_for_reach,
)
from deadreckon.ops.triton.gated.launch import EDGE, WIDEST, Documents, documents_of
from deadreckon.ops.triton.gated.short import is_short, short_backward, short_forward
from deadreckon.ops.triton.gated.wide import LONGEST, wide_backward
from deadreckon.ops.triton.operators import gradients_for, results, save
from deadreckon.ops.triton.tape import Taped
from deadreckon.ops.triton.tiles import LOG2E


@Taped
def _forward_pass(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, documents: Documents | None, prune: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`gated_forward` returns."""
    heads = k.shape[2]
    out, lse = results(q, k, v)
    if log_gate is None and documents is None and is_short(q, k, v):
        short_forward(q, k, v, scale, out, lse)
        return out, lse, room_for_reach(k, None, prune)
    sums = reach = None
    if log_gate is not None:
        sums, most = gate_sums(log_gate, heads)  # 1
        reach = reach_of(q, k, sums.edge, most, scale) if prune else None  # 2
    flash_forward(  # 3
        _by_group(q, heads), _by_head(k), _by_head(v), sums, scale, _by_group(out, heads), _statistic(lse, k),
        reach=reach, documents=documents,
    )  # fmt: skip
    return out, lse, room_for_reach(k, None, prune) if reach is None else reach.both.view(-1)


@torch.library.custom_op("deadreckon::gated", mutates_args=())
def gated_forward(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, cu_seqlens: Tensor | None, prune: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention with forget gates, or packed, or both; `prune`: skips keys out of the gates' reach.

    Returns output (B, T, Hq, E), log-sum-exp (B·H, T padded, G), and the reach, flattened.
    """
    with torch.cuda.device_of(q):
        return _forward_pass(q, k, v, log_gate, documents_of(cu_seqlens, q.shape[1]), prune, scale)


def _by_head(x: Tensor) -> Tensor:
    """(B, T, H, C) -> (B, H, 1, T, C), a view."""
    return x.transpose(1, 2).unsqueeze(2)


def _by_group(x: Tensor, heads: int) -> Tensor:
    """(B, T, Hq, C) -> (B, H, G, 1, T, C), a view."""
    return x.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4).unsqueeze(3)


def _statistic(x: Tensor, k: Tensor) -> Tensor:
    """(B·H, T padded, G) -> (B, H, G, 1, T), a view."""
    return x.unflatten(0, (k.shape[0], k.shape[2])).transpose(2, 3)[..., : k.shape[1]].unsqueeze(3)


@gated_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, cu_seqlens: Tensor | None, prune: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return *results(q, k, v), room_for_reach(k, log_gate, prune)


@Taped
def _backward_pass(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, documents: Documents | None, out: Tensor,
    lse: Tensor, reach: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    """What :func:`gated_backward` returns."""
    heads = k.shape[2]
    grad = dense(grad)
    grad_q, grad_k, grad_v = gradients_for(q, k, v)
    if log_gate is None and documents is None and is_short(q, k, v):
        short_backward(q, k, v, scale, out, grad, lse, grad_q, grad_k, grad_v)
        return [grad_q, grad_k, grad_v]
    room = torch.empty_like if log_gate is None else torch.zeros_like
    by_query, by_key = room(lse), room(lse)
    sums = None if log_gate is None else gate_sums(log_gate, heads)[0]  # 1
    delta, row_shift = prepare(out, grad, lse, sums, heads, 0, None)  # 2
    if q.shape[3] > WIDEST and log_gate is None and documents is None and q.shape[1] <= LONGEST:
        wide_backward(q, k, v, scale, grad, delta, row_shift, grad_q, grad_k, grad_v)  # 3
        return [grad_q, grad_k, grad_v]
    flash_backward(  # 3
        _by_group(q, heads), _by_head(k), _by_head(v), sums, scale, _by_group(grad, heads), _statistic(delta, k),
        _statistic(lse, k), _statistic(row_shift, k), _by_group(grad_q, heads), _by_head(grad_k), _by_head(grad_v),
        _statistic(by_query, k), by_key, reach=reach_in(reach, k, log_gate), documents=documents,
    )  # fmt: skip
    if log_gate is None:
        return [grad_q, grad_k, grad_v]
    return [grad_q, grad_k, grad_v, gate_gradient(by_query, by_key, log_gate, heads)]  # 4


@torch.library.custom_op("deadreckon::gated_backward", mutates_args=())
def gated_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, cu_seqlens: Tensor | None, out: Tensor,
    lse: Tensor, reach: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v and, if there is one, log_gate."""
    with torch.cuda.device_of(q):
        documents = documents_of(cu_seqlens, q.shape[1])
        return _backward_pass(grad, q, k, v, log_gate, documents, out, lse, reach, scale)


@gated_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, cu_seqlens: Tensor | None, out: Tensor,
    lse: Tensor, reach: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    return gradients_for(q, k, v, *([] if log_gate is None else [log_gate]))


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    gradients = gated_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*gradients, *(None,) * (7 - len(gradients)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, scale = inputs
    save(ctx, (*tensors, scale), output)


gated_forward.register_autograd(_gradients, setup_context=_save)


def attend_gated(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> Tensor:
    """q (B, T, Hq, D), k (B, T, H, D), v (B, T, H, E), log_gate (B, T, H or Hq) -> (B, T, Hq, E)."""
    return gated_forward(q, k, v, log_gate, cu_seqlens, pruned(k, log_gate), scale)[0]


def share_in_reach(q: Tensor, k: Tensor, log_gate: Tensor, scale: float) -> float:
    """The share of the causal triangle, in blocks of 64 tokens, that the kernel does not skip; on any device."""
    length, heads = k.shape[1:3]
    ends = torch.arange(EDGE - 1, length + EDGE - 1, EDGE, device=q.device).clamp(max=length - 1)
    edge = log_gate.double().clamp(min=-1e4).cumsum(1)[:, ends] * LOG2E  # (B, blocks, Hc)
    edge = edge.transpose(1, 2).unflatten(1, (heads, -1))  # (B, H, 1 | G, blocks)
    longest_q, longest_k = (torch.linalg.vector_norm(x.float(), dim=-1).amax(1) for x in (q, k))
    longest_q = longest_q.unflatten(1, (heads, edge.shape[2], -1)).amax(3)
    margin = math.log(length) + MARGINS[q.dtype]
    bound = (2 * abs(scale) * longest_q * longest_k.unsqueeze(2) + margin).unsqueeze(3) * LOG2E  # see `reach_of`
    positive = log_gate.amax(1).unflatten(1, (heads, -1)).unsqueeze(3) > 0  # with which nothing is known of the rest
    bound = bound.masked_fill(positive, torch.inf)
    before = torch.nn.functional.pad(edge[..., :-1], (1, 0))  # before the first query of a block
    first = torch.searchsorted((-edge).contiguous(), -(before + bound).contiguous())
    blocks = torch.arange(1, len(ends) + 1, device=q.device)
    return float((blocks - first).double().mean() / blocks.double().mean())

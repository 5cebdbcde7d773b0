"""Softmax attention with forget gates, as one operator and one for its backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deadreckon.ops.layout import dense
from deadreckon.ops.triton.gated.delta import prepare
from deadreckon.ops.triton.gated.flash import EDGE, Documents, Reach, documents_of, flash_backward, flash_forward
from deadreckon.ops.triton.gated.gates import gate_gradient, gate_sums, pruned, reach_of, reach_within, room_for_reach
from deadreckon.ops.triton.operators import gradients_for, results, save
from deadreckon.ops.triton.tiles import LOG2E


@torch.library.custom_op("deadreckon::gated", mutates_args=())
def gated_forward(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Softmax attention with forget gates, or packed, or both.

    Output (B, T, Hq, E), log-sum-exp (B·H, T padded, G), what is in reach.
    """
    heads = k.shape[2]
    out, lse = results(q, k, v)
    with torch.cuda.device_of(q):
        sums = reach = None
        if log_gate is not None:
            sums = gate_sums(log_gate, heads)
            reach = reach_of(q, k, log_gate, sums.edge, scale) if pruned(k) else None
        flash_forward(
            _by_group(q, heads), _by_head(k), _by_head(v), sums, scale, _by_group(out, heads), _statistic(lse, k),
            reach=reach, documents=_documents(cu_seqlens, q),
        )  # fmt: skip
    return out, lse, *(reach or room_for_reach(k, None if reach is None else log_gate))


def _documents(cu_seqlens: Tensor | None, q: Tensor) -> Documents | None:
    return None if cu_seqlens is None else documents_of(cu_seqlens, q.shape[1])


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
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *results(q, k, v), *room_for_reach(k, log_gate if pruned(k) else None)


@torch.library.custom_op("deadreckon::gated_backward", mutates_args=())
def gated_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, cu_seqlens: Tensor | None, out: Tensor,
    lse: Tensor, first: Tensor, last: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v and, if there is one, log_gate."""
    heads = k.shape[2]
    grad = dense(grad)
    grad_q, grad_k, grad_v = gradients_for(q, k, v)
    room = torch.empty_like if log_gate is None else torch.zeros_like
    by_query, by_key = room(lse), room(lse)
    with torch.cuda.device_of(q):
        sums = None if log_gate is None else gate_sums(log_gate, heads)
        delta, own = prepare(out, grad, lse, sums, heads, 0, None)
        flash_backward(
            _by_group(q, heads), _by_head(k), _by_head(v), sums, scale, _by_group(grad, heads), _statistic(delta, k),
            _statistic(own, k), _by_group(grad_q, heads), _by_head(grad_k), _by_head(grad_v), _statistic(by_query, k),
            by_key, reach=Reach(first, last) if first.numel() else None, documents=_documents(cu_seqlens, q),
        )  # fmt: skip
    if log_gate is None:
        return [grad_q, grad_k, grad_v]
    return [grad_q, grad_k, grad_v, gate_gradient(by_query, by_key, log_gate, heads)]


@gated_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, cu_seqlens: Tensor | None, out: Tensor,
    lse: Tensor, first: Tensor, last: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    return gradients_for(q, k, v, *([] if log_gate is None else [log_gate]))


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    found = gated_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*found, *(None,) * (6 - len(found)))


gated_forward.register_autograd(_gradients, setup_context=save)


def attend_gated(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> Tensor:
    """q (B, T, Hq, D), k (B, T, H, D), v (B, T, H, E), log_gate (B, T, H or Hq) -> (B, T, Hq, E)."""
    return gated_forward(q, k, v, log_gate, cu_seqlens, scale)[0]


def share_in_reach(q: Tensor, k: Tensor, log_gate: Tensor, scale: float) -> float:
    """The share of the causal triangle, in blocks of 64 tokens, that the kernel does not skip."""
    batch, length, heads, _ = k.shape
    ends = torch.arange(EDGE - 1, length + EDGE - 1, EDGE, device=q.device).clamp(max=length - 1)
    edge = log_gate.double().clamp(min=-1e4).cumsum(1)[:, ends] * LOG2E  # (B, blocks, Hc)
    edge = edge.transpose(1, 2).reshape(batch * heads, -1, len(ends))
    longest_q, longest_k = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax(1) for x in (q, k))
    first, _ = reach_within(scale * longest_q, longest_k, log_gate, edge, q.dtype)
    blocks = torch.arange(1, len(ends) + 1, device=q.device)
    return float((blocks - first // EDGE).double().mean() / blocks.double().mean())

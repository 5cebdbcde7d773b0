"""What the operators share: room for their results, what they save, what gates leave out, and their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deadreckon.kernels.flash import EDGE, Reach
from deadreckon.kernels.leaf import LEAF

PRUNED = 2048  # tokens from which on it pays to ask what gates leave in reach


def results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Room for an output (B, T, Hq, E) and a log-sum-exp (B·H, T padded to leaves, G)."""
    batch, length, heads, _ = k.shape
    out = q.new_empty(batch, length, q.shape[2], v.shape[3])
    return out, q.new_empty(batch * heads, -(-length // LEAF) * LEAF, q.shape[2] // heads, dtype=torch.float32)


def pruned(k: Tensor) -> bool:
    """Whether gates are asked what they leave in reach."""
    return k.shape[1] >= PRUNED


def room_for_reach(k: Tensor, log_gate: Tensor | None) -> Reach:
    """As `reach_of` has it, or empty where nothing is pruned."""
    batch, length, heads, _ = k.shape
    gates, blocks = (heads, 0) if log_gate is None else (log_gate.shape[2], -(-length // EDGE) if pruned(k) else 0)
    return Reach(*(k.new_empty(batch * heads, gates // heads, blocks, dtype=torch.int32) for _ in range(2)))


def gradients_for(*inputs: Tensor) -> list[Tensor]:
    """Room for a gradient of each, contiguous."""
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]


def dense(x: Tensor) -> Tensor:
    """x with its channels side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Inputs and all outputs, of which the first has a gradient, and the others not even one of zeros."""
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def gate_gradient(by_query: Tensor, by_key: Tensor, log_gate: Tensor, heads: int) -> Tensor:
    """A gate at s is on the routes that end at s or later, less those that also begin there: from (B·H, T, G)."""
    ends = by_query - by_key
    if ends.shape[2] * heads != log_gate.shape[2]:
        ends = ends.sum(2, keepdim=True)
    ends = ends.flip(1).cumsum(1, dtype=torch.float64).flip(1)  # long sums, of which little is left
    ends = ends.unflatten(0, (log_gate.shape[0], heads)).transpose(1, 2).flatten(2, 3)
    return ends[:, : log_gate.shape[1]].to(log_gate.dtype).contiguous()

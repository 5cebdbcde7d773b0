"""What the operators share: room for their results, what they save, what gates leave out, and their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deadreckon.ops.blockwise.runs import LEAF


def results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Room for an output (B, T, Hq, E) and a log-sum-exp (B·H, T padded to leaves, G)."""
    batch, length, heads, _ = k.shape
    out = q.new_empty(batch, length, q.shape[2], v.shape[3])
    return out, q.new_empty(batch * heads, -(-length // LEAF) * LEAF, q.shape[2] // heads, dtype=torch.float32)


def gradients_for(*inputs: Tensor) -> list[Tensor]:
    """Room for a gradient of each, contiguous."""
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Inputs and all outputs, of which the first has a gradient, and the others not even one of zeros."""
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)

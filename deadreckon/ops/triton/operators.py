"""Helpers that the custom ops share: empty tensors for results and gradients, saving for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deadreckon.ops.blockwise.runs import LEAF


def results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Empty tensors for an output (B, T, Hq, E) and a log-sum-exp (B·H, T padded to leaves, G)."""
    batch, length, heads, _ = k.shape
    out = q.new_empty(batch, length, q.shape[2], v.shape[3])
    return out, q.new_empty(batch * heads, -(-length // LEAF) * LEAF, q.shape[2] // heads, dtype=torch.float32)


def gradients_for(*inputs: Tensor) -> list[Tensor]:
    """An empty contiguous tensor for the gradient of each input."""
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Saves inputs and outputs. Only output 0 is differentiable; missing gradients are not materialised."""
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)

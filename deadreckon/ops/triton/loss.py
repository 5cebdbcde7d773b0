"""Fused cross-entropy that overwrites logits with their gradients.

    loss = log Σ_v exp l_v − l_target      ∂loss/∂l_v = softmax(l)_v − [v = target]

Logits are read twice, the second time mostly from the cache, and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.kernel import Kernel

BLOCK = 4096  # logits at a time


@Kernel
@triton.jit
def _cross_entropy(p_logit, p_target, p_loss, s_row, V, BLOCK: tl.constexpr, LEARN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    p_logit += row * s_row
    target = tl.load(p_target + row)
    # Read before other threads overwrite it with the gradient. A target out of range makes the loss NaN.
    logit = tl.load(p_logit + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
    b_most = tl.full([BLOCK], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        b_logit = tl.load(p_logit + at, mask=at < V, other=float("-inf")).to(tl.float32)
        b_new = tl.maximum(b_most, b_logit)
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_sum = b_sum * tl.exp(b_most - b_shift) + tl.exp(b_logit - b_shift)
        b_most = b_new
    most = tl.max(b_most, 0)
    lse = most + tl.log(tl.sum(b_sum * tl.exp(b_most - most), 0))
    tl.store(p_loss + row, lse - logit)
    if LEARN:
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            b_logit = tl.load(p_logit + at, mask=at < V, other=float("-inf")).to(tl.float32)
            b_grad = tl.exp(b_logit - lse) - tl.where(at == target, 1.0, 0.0)
            tl.store(p_logit + at, b_grad.to(p_logit.dtype.element_ty), mask=at < V)


def cross_entropy_(logits: Tensor, targets: Tensor, learn: bool) -> Tensor:
    """The float32 losses (N,) of logits (N, V), whose rows are contiguous; `learn`: logits become gradients."""
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    with torch.cuda.device_of(logits):
        _cross_entropy[(len(logits),)](
            logits, targets, losses, logits.stride(0), logits.shape[1], BLOCK=BLOCK, LEARN=learn, num_warps=8
        )
    return losses

"""Stick-breaking in decode: the weight of each key, and what all nearer keys leave of the stick.

Logarithms are of base 2. Sums over keys are taken in float64: a key's own term is subtracted from a sum that has it,
and it may be hundreds of times what the nearer keys add up to.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearer(b_left, AXIS: tl.constexpr, FROM_END: tl.constexpr):
    """The logarithm of what all nearer keys (parts) leave, from that of each alone; the nearest is first, or last."""
    b_exact = b_left.to(tl.float64)
    return (tl.cumsum(b_exact, AXIS, reverse=FROM_END) - b_exact).to(tl.float32)


@triton.jit
def broken(b_s, b_bias, b_shorter, m_key):
    """Weights of keys, the nearest last, and the logarithm of what they leave of sticks, b_shorter before them.

    Logits b_s (queries, keys), sums of log gates that broadcast to them, b_shorter (queries,).
    """
    b_z = b_s * 1.4426950408889634
    b_e = tl.exp2(-tl.abs(b_z))
    b_one = 1.0 + b_e
    b_more = tl.log2(b_one) + (b_e - (b_one - 1.0)) * 1.4426950408889634  # with what a small e has lost in the sum
    b_left = tl.where(m_key[None, :], -(tl.maximum(b_z, 0.0) + b_more), 0.0)
    b_log = tl.minimum(b_z, 0.0) - b_more + nearer(b_left, 1, True) + b_shorter[:, None]
    b_weight = tl.where(m_key[None, :], tl.exp2(b_log + b_bias * 1.4426950408889634), 0.0)
    return b_weight, b_shorter + tl.sum(b_left, 1)

"""Softmax attention in one program a head, where rows are short and keys wider than values, such as PRISM's.

Stock kernels want values as wide as keys, so that up to half of their work would be on zeros. Here all logits of a
row of up to `LONGEST` tokens stay in registers, and any number of channels goes by in chunks; backward, two products
for each chunk write its share of the gradients, and nothing else is written:

    s = q kᵀ · scale         p = exp(s − lse)       ds = p (do vᵀ − do · o)
    dv = pᵀ do               dq = ds k · scale      dk = dsᵀ q · scale
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import LOG2E, cramped, load_columns, load_rows, power_of_two, store_rows

LONGEST = 128  # tokens: more logits than 128 × 128 do not stay in registers
WIDEST = 512  # channels of keys
CHUNK = 64  # channels at a time, and all that values may have


def is_short(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether these kernels serve rows of q, k (B, T, H, D) and v (B, T, H, E); never if the length is symbolic."""
    if q.element_size() != 2 or q.shape[2] != k.shape[2] or cramped(q) or isinstance(q.shape[1], torch.SymInt):
        return False
    return v.shape[3] <= CHUNK and 2 * v.shape[3] <= q.shape[3] <= WIDEST and q.shape[1] <= LONGEST


@triton.jit
def _of_head(p_x, s_x, UNIT: tl.constexpr, HEADS):
    """Where the rows of this program's head begin, and from one to the next."""
    i_n = tl.program_id(0).to(tl.int64)
    return p_x + (i_n // HEADS * s_x[0] + i_n % HEADS * s_x[2]) * UNIT, tl.cast(s_x[1], tl.int64) * UNIT


@triton.jit
def _logits(p_q, p_k, s_q, s_k, token, T, scale2, D: tl.constexpr, CHUNK: tl.constexpr):
    """q kᵀ · scale, base 2, of tokens and those before them; minus infinity elsewhere."""
    inside = token < T
    b_s = tl.zeros([token.shape[0], token.shape[0]], tl.float32)
    for first in range(0, D, CHUNK):
        channel = first + tl.arange(0, CHUNK)
        b_q = load_rows(p_q, token, s_q, channel, inside, D, 0)
        b_s = tl.dot(b_q, load_columns(p_k, token, s_k, channel, inside, D, 0), b_s)
    return tl.where(token[None, :] <= token[:, None], b_s * scale2, float("-inf"))


@Kernel
@triton.jit(do_not_specialize=["T", "HEADS"])
def _forward(
    p_q, p_k, p_v, p_out, p_lse, scale2, s_q, s_k, s_v, s_o, s_l, T, HEADS,
    D: tl.constexpr, E: tl.constexpr, BT: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Strides are in multiples of UNIT, so that the compiler knows how many numbers it may load at once."""
    token, channel = tl.arange(0, BT), tl.arange(0, CHUNK)
    inside = token < T
    p_q, s_q = _of_head(p_q, s_q, UNIT, HEADS)
    p_k, s_k = _of_head(p_k, s_k, UNIT, HEADS)
    p_v, s_v = _of_head(p_v, s_v, UNIT, HEADS)
    p_out, s_o = _of_head(p_out, s_o, UNIT, HEADS)
    b_s = _logits(p_q, p_k, s_q, s_k, token, T, scale2, D, CHUNK)
    b_max = tl.max(b_s, 1)
    b_p = tl.exp2(b_s - b_max[:, None])
    b_sum = tl.sum(b_p, 1)
    b_v = load_rows(p_v, token, s_v, channel, inside, E, CHUNK)
    store_rows(p_out, token, s_o, channel, inside, tl.dot(b_p.to(b_v.dtype), b_v) / b_sum[:, None], E)
    p_lse += tl.program_id(0).to(tl.int64) * s_l
    tl.store(p_lse + token, (b_max + tl.log2(b_sum)) * 0.6931471805599453, mask=inside)


@Kernel
@triton.jit(do_not_specialize=["T", "HEADS"])
def _backward(
    p_q, p_k, p_v, p_out, p_grad, p_lse, p_dq, p_dk, p_dv, scale, s_q, s_k, s_v, s_o, s_g, s_l, s_dq, s_dk, s_dv,
    T, HEADS, D: tl.constexpr, E: tl.constexpr, BT: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    token, channel = tl.arange(0, BT), tl.arange(0, CHUNK)
    inside = token < T
    p_q, s_q = _of_head(p_q, s_q, UNIT, HEADS)
    p_k, s_k = _of_head(p_k, s_k, UNIT, HEADS)
    p_v, s_v = _of_head(p_v, s_v, UNIT, HEADS)
    p_out, s_o = _of_head(p_out, s_o, UNIT, HEADS)
    p_grad, s_g = _of_head(p_grad, s_g, UNIT, HEADS)
    p_dq, s_dq = _of_head(p_dq, s_dq, UNIT, HEADS)
    p_dk, s_dk = _of_head(p_dk, s_dk, UNIT, HEADS)
    p_dv, s_dv = _of_head(p_dv, s_dv, UNIT, HEADS)
    p_lse += tl.program_id(0).to(tl.int64) * s_l
    b_s = _logits(p_q, p_k, s_q, s_k, token, T, scale * 1.4426950408889634, D, CHUNK)
    b_lse = tl.load(p_lse + token, mask=inside, other=float("inf"))
    b_p = tl.exp2(b_s - b_lse[:, None] * 1.4426950408889634)
    b_do = load_rows(p_grad, token, s_g, channel, inside, E, CHUNK)
    b_o = load_rows(p_out, token, s_o, channel, inside, E, CHUNK)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    b_dp = tl.dot(b_do, load_columns(p_v, token, s_v, channel, inside, E, CHUNK))
    b_ds = tl.where(token[None, :] <= token[:, None], b_p * (b_dp - b_delta[:, None]), 0.0).to(b_do.dtype)
    store_rows(p_dv, token, s_dv, channel, inside, tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do), E)
    for first in range(0, D, CHUNK):
        some = first + tl.arange(0, CHUNK)
        b_dq = tl.dot(b_ds, load_rows(p_k, token, s_k, some, inside, D, 0)) * scale
        store_rows(p_dq, token, s_dq, some, inside, b_dq, D)
        b_dk = tl.dot(tl.trans(b_ds), load_rows(p_q, token, s_q, some, inside, D, 0)) * scale
        store_rows(p_dk, token, s_dk, some, inside, b_dk, D)


def _units(*tensors: Tensor) -> tuple[int, Iterator[tuple[int, ...]]]:
    """A number of channels that all strides are multiples of, and how many of it they are."""
    unit = gcd(16, *(stride for x in tensors for stride in x.stride()[:-1]))
    return unit, (tuple(stride // unit for stride in x.stride()[:-1]) for x in tensors)


def _tile(q: Tensor, v: Tensor) -> dict[str, int]:
    tokens = max(64, power_of_two(q.shape[1]))
    sizes = {"D": q.shape[3], "E": v.shape[3], "BT": tokens, "CHUNK": CHUNK}
    return {**sizes, "num_warps": 8 if tokens == LONGEST else 4, "num_stages": 3}


def short_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
    """Writes the output (B, T, H, E) and its log-sum-exp (B·H, T padded, 1)."""
    batch, length, heads, _ = q.shape
    unit, given = _units(q, k, v, out)
    _forward[(batch * heads,)](
        q, k, v, out, lse, scale * LOG2E, *given, lse.stride(0), length, heads, UNIT=unit, **_tile(q, v)
    )


def short_backward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, grad: Tensor, lse: Tensor,
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor,
) -> None:  # fmt: skip
    """Writes the gradients of q, k and v."""
    batch, length, heads, _ = q.shape
    unit, (*given, s_dq, s_dk, s_dv) = _units(q, k, v, out, grad, grad_q, grad_k, grad_v)
    _backward[(batch * heads,)](
        q, k, v, out, grad, lse, grad_q, grad_k, grad_v, scale, *given, lse.stride(0), s_dq, s_dk, s_dv,
        length, heads, UNIT=unit, **_tile(q, v),
    )  # fmt: skip

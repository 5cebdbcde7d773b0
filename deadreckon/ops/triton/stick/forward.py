"""Stick-breaking attention: the forward kernel.

A program has a tile of queries and takes keys from near to far; every CHECK tiles it checks whether anything is left.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.stick.launch import constants, rest_scale, steps_per_check, tiling_for
from deadreckon.ops.triton.stick.sticks import break_stick, key_order, load_tokens
from deadreckon.ops.triton.tiles import LOG2E, ceil_div, strides


@triton.jit
def _forward_along(
    b_acc, b_left, b_q, p_k, p_v, scale2, s_kt, s_vt, end, count, row, T,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """`count` tiles of keys, down from tile `end`."""
    order = key_order(BN)
    for i in range(0, count):
        base = (end - 1 - i) * BN
        key = base + order
        m_key = (key < T) | (not MASKED)
        b_k = load_tokens(p_k, base, order, s_kt, m_key, D, BD)
        b_z = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale2
        b_v = load_tokens(p_v, base, order, s_vt, m_key, E, BE)
        b_w, _, _, _, _, b_left = break_stick(b_z, b_left, key[None, :] < row[:, None], MASKED, BM, BN, FAST)
        b_acc = tl.dot(b_w.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_left


@Kernel
@triton.jit(do_not_specialize=["T", "HEADS", "GROUP"])
def _forward(
    p_q, p_k, p_v, p_o, p_rest, scale2, s_q, s_k, s_v, T, HEADS, GROUP,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CHECK: tl.constexpr, REST: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    s_qb, s_qt, s_qh = s_q
    s_kb, s_kt, s_kh = s_k
    s_vb, s_vt, s_vh = s_v
    tiles = tl.cdiv(T, BM)
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    base = (tiles - 1 - tl.program_id(0) % tiles) * BM  # long rows first
    row = base + tl.arange(0, BM)
    m_row = row < T
    p_k += i_b * s_kb + i_h // GROUP * s_kh
    p_v += i_b * s_vb + i_h // GROUP * s_vh
    b_q = load_tokens(p_q + i_b * s_qb + i_h * s_qh, base, tl.arange(0, BM), s_qt, m_row, D, BD)
    b_acc = tl.zeros((BM, BE), tl.float32)
    b_left = tl.where(m_row, 1.0, 0.0)
    whole = base // BN  # tiles that every row sees
    end = tl.cdiv(tl.minimum(base + BM, T) - 1, BN)
    b_acc, b_left = _forward_along(
        b_acc, b_left, b_q, p_k, p_v, scale2, s_kt, s_vt, end, end - whole, row, T,
        D, E, BD, BE, BM, BN, True, PRECISION, FAST,
    )  # fmt: skip
    for i in range(0, tl.cdiv(whole, CHECK)):
        end = whole - i * CHECK
        count = tl.where(tl.max(b_left, 0) > 0, tl.minimum(end, CHECK), 0)
        b_acc, b_left = _forward_along(
            b_acc, b_left, b_q, p_k, p_v, scale2, s_kt, s_vt, end, count, row, T,
            D, E, BD, BE, BM, BN, False, PRECISION, FAST,
        )  # fmt: skip
    channel = tl.arange(0, BE)
    offsets = ((i_b * T + row) * HEADS + i_h)[:, None] * E + channel[None, :]
    m_out = m_row[:, None] & (channel < E)[None, :]
    b_o = b_acc.to(p_o.dtype.element_ty)
    tl.store(p_o + offsets, b_o, mask=m_out)
    if REST:
        tl.store(p_rest + offsets, ((b_acc - b_o.to(tl.float32)) * REST).to(p_rest.dtype.element_ty), mask=m_out)


def attend_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, rest: Tensor) -> None:
    """Writes out (B, T, Hq, E) and, in half precision, its rounding residual to rest, of the same shape."""
    batch, length, heads, _ = q.shape
    tiling = tiling_for("forward", k, v)
    _forward[(ceil_div(length, tiling.tile) * batch * heads,)](
        q, k, v, out, rest, scale * LOG2E, *strides(q, k, v),
        length, heads, heads // k.shape[2], **constants(k, v), BM=tiling.tile, BN=tiling.step,
        CHECK=steps_per_check(tiling), REST=rest_scale(q.dtype), **tiling.options,
    )  # fmt: skip

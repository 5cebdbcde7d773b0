"""Stick-breaking attention: the backward kernels, dq along keys, dk and dv along queries, one strip of keys at a time.

A *state* is what is left of a row (`left`), and minus the sum of m over the keys that are still to come (`debt`), at
the near edge of a tile of keys. dq's kernel writes the states of a strip; the one of dk and dv starts each tile there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.stick.launch import constants, rest_scale, steps_per_check, strip_for, tiling_for
from deadreckon.ops.triton.stick.sticks import break_stick, key_order, load_tokens, logit_gradients, rounded
from deadreckon.ops.triton.tiles import LOG2E, ceil_div, strides


@triton.jit
def _query_gradients_along(
    b_dq, b_left, b_debt, b_q, b_do, p_k, p_v, p_lefts, p_debts, scale2, s_kt, s_vt, end, count, first, row, T,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RATIO: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """`count` tiles of keys, down from tile `end`; RATIO of them share a state, `first` is the strip's first state."""
    order = key_order(BN)
    for i in range(0, count):
        tile = end - 1 - i
        key = tile * BN + order
        m_key = (key < T) | (not MASKED)
        b_k = load_tokens(p_k, tile * BN, order, s_kt, m_key, D, BD)
        b_v = load_tokens(p_v, tile * BN, order, s_vt, m_key, E, BE)
        m_state = (row < T) & (tile % RATIO == RATIO - 1)
        state = (tile // RATIO - first).to(tl.int64) * T + row
        tl.store(p_lefts + state, b_left, mask=m_state)
        tl.store(p_debts + state, b_debt, mask=m_state)
        b_z = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale2
        b_g = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        visible = key[None, :] < row[:, None]
        b_w, b_s0, b_s1, b_s2, b_s3, b_left = break_stick(b_z, b_left, visible, MASKED, BM, BN, FAST)
        b_w = rounded(b_w, b_v.dtype, FAST)
        b_dz, b_debt = logit_gradients(b_w, b_g, b_s0, b_s1, b_s2, b_s3, b_debt, b_left, BM, BN)
        b_dq = tl.dot(b_dz.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    return b_dq, b_left, b_debt


@Kernel
@triton.jit(do_not_specialize=["begin", "stop", "T", "STATES", "HEADS", "GROUP"])
def _query_gradients(
    p_q, p_k, p_v, p_o, p_rest, p_do, p_dq, p_sum, p_left, p_debt, p_lefts, p_debts, scale, scale2,
    s_q, s_k, s_v, s_o, begin, stop, T, STATES, HEADS, GROUP,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RATIO: tl.constexpr, CHECK: tl.constexpr, REST: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """dq from the keys of one strip, begin to stop, for rows at and after it; states of its tiles."""
    s_qb, s_qt, s_qh = s_q
    s_kb, s_kt, s_kh = s_k
    s_vb, s_vt, s_vh = s_v
    s_ob, s_ot, s_oh = s_o
    tiles = tl.cdiv(T - begin, BM)
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    base = begin + (tiles - 1 - tl.program_id(0) % tiles) * BM
    row = base + tl.arange(0, BM)
    m_row = row < T
    channel, value_channel = tl.arange(0, BD), tl.arange(0, BE)
    outputs = (i_b * T + row) * HEADS + i_h
    sums = outputs[:, None] * D + channel[None, :]
    m_sum = m_row[:, None] & (channel < D)[None, :]
    p_k += i_b * s_kb + i_h // GROUP * s_kh
    p_v += i_b * s_vb + i_h // GROUP * s_vh
    p_left += i_bh * T + row
    p_debt += i_bh * T + row
    p_lefts += i_bh * STATES * T
    p_debts += i_bh * STATES * T
    b_q = load_tokens(p_q + i_b * s_qb + i_h * s_qh, base, tl.arange(0, BM), s_qt, m_row, D, BD)
    b_do = load_tokens(p_do + i_b * s_ob + i_h * s_oh, base, tl.arange(0, BM), s_ot, m_row, E, BE)
    if base < stop:  # rows that begin in this strip
        m_out = m_row[:, None] & (value_channel < E)[None, :]
        b_o = tl.load(p_o + outputs[:, None] * E + value_channel[None, :], mask=m_out, other=0.0).to(tl.float32)
        if REST:
            b_rest = tl.load(p_rest + outputs[:, None] * E + value_channel[None, :], mask=m_out, other=0.0)
            b_o += b_rest.to(tl.float32) * (1.0 / REST)
        b_debt = -tl.sum(b_do.to(tl.float32) * b_o, 1)
        b_left = tl.where(m_row, 1.0, 0.0)
        b_dq = tl.zeros((BM, BD), tl.float32)
    else:
        b_debt = tl.load(p_debt, mask=m_row, other=0.0)
        b_left = tl.load(p_left, mask=m_row, other=0.0)
        b_dq = tl.load(p_sum + sums, mask=m_sum, other=0.0)
    first = begin // (BN * RATIO)
    whole = tl.minimum(base, stop) // BN
    end = tl.cdiv(tl.minimum(tl.minimum(base + BM, T) - 1, stop), BN * RATIO) * RATIO
    b_dq, b_left, b_debt = _query_gradients_along(
        b_dq, b_left, b_debt, b_q, b_do, p_k, p_v, p_lefts, p_debts, scale2, s_kt, s_vt,
        end, end - whole, first, row, T, D, E, BD, BE, BM, BN, RATIO, True, PRECISION, FAST,
    )  # fmt: skip
    for i in range(0, tl.cdiv(whole - first * RATIO, CHECK)):
        end = whole - i * CHECK
        count = tl.minimum(end - first * RATIO, CHECK)
        alive = tl.where(tl.max(b_left, 0) > 0, count, 0)
        b_dq, b_left, b_debt = _query_gradients_along(
            b_dq, b_left, b_debt, b_q, b_do, p_k, p_v, p_lefts, p_debts, scale2, s_kt, s_vt,
            end, alive, first, row, T, D, E, BD, BE, BM, BN, RATIO, False, PRECISION, FAST,
        )  # fmt: skip
        for j in range(alive, count):  # dk and dv read only `lefts` to see that nothing is left
            tile = end - 1 - j
            m_state = m_row & (tile % RATIO == RATIO - 1)
            tl.store(p_lefts + (tile // RATIO - first).to(tl.int64) * T + row, b_left, mask=m_state)
    if begin > 0:
        tl.store(p_debt, b_debt, mask=m_row)
        tl.store(p_left, b_left, mask=m_row)
        tl.store(p_sum + sums, b_dq, mask=m_sum)
    else:
        tl.store(p_dq + sums, (b_dq * scale).to(p_dq.dtype.element_ty), mask=m_sum)


@triton.jit
def _key_gradients_along(
    b_dk, b_dv, b_k, b_v, p_q, p_do, p_lefts, p_debts, scale2, s_qt, s_ot, begin, end, first, key, T,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Tiles of queries, begin to end, for keys from `first` on."""
    step = tl.arange(0, BM)
    for i in range(begin, end):
        row = i * BM + step
        m_row = row < T
        b_q = load_tokens(p_q, i * BM, step, s_qt, m_row, D, BD)
        b_do = load_tokens(p_do, i * BM, step, s_ot, m_row, E, BE)
        m_state = m_row & ((row > first) | (not MASKED))  # rows that see none of these keys have stored no state
        b_left = tl.load(p_lefts + row, mask=m_state, other=0.0)
        b_debt = tl.load(p_debts + row, mask=m_state, other=0.0)
        b_debt = tl.where(b_left > 0, b_debt, 0.0)  # nor have all rows with nothing left
        b_z = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale2
        b_g = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        visible = key[None, :] < row[:, None]
        b_w, b_s0, b_s1, b_s2, b_s3, _ = break_stick(b_z, b_left, visible, MASKED, BM, BN, FAST)
        b_w = rounded(b_w, b_v.dtype, FAST)
        b_dv = tl.dot(tl.trans(b_w.to(b_v.dtype)), b_do, b_dv, input_precision=PRECISION)
        b_dz, _ = logit_gradients(b_w, b_g, b_s0, b_s1, b_s2, b_s3, b_debt, b_left, BM, BN)
        b_dk = tl.dot(tl.trans(b_dz.to(b_k.dtype)), b_q, b_dk, input_precision=PRECISION)
    return b_dk, b_dv


@Kernel
@triton.jit(do_not_specialize=["begin", "stop", "T", "STATES", "HEADS", "GROUP"])
def _key_gradients(
    p_q, p_k, p_v, p_do, p_dk, p_dv, p_lefts, p_debts, scale, scale2,
    s_q, s_k, s_v, s_o, begin, stop, T, STATES, HEADS, GROUP,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CHECK: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of a strip, from all queries of all heads that share them."""
    s_qb, s_qt, s_qh = s_q
    s_kb, s_kt, s_kh = s_k
    s_vb, s_vt, s_vh = s_v
    s_ob, s_ot, s_oh = s_o
    tiles = tl.cdiv(stop - begin, BN)
    i_n = tl.program_id(0) % tiles
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    key_heads = HEADS // GROUP
    i_b, i_h = i_bh // key_heads, i_bh % key_heads
    tile = begin // BN + i_n
    key = tile * BN + key_order(BN)
    m_key = key < T
    b_k = load_tokens(p_k + i_b * s_kb + i_h * s_kh, tile * BN, key_order(BN), s_kt, m_key, D, BD)
    b_v = load_tokens(p_v + i_b * s_vb + i_h * s_vh, tile * BN, key_order(BN), s_vt, m_key, E, BE)
    b_dk = tl.zeros((BN, BD), tl.float32)
    b_dv = tl.zeros((BN, BE), tl.float32)
    end = tl.cdiv(T, BM)
    whole = tl.minimum(tl.cdiv((tile + 1) * BN, BM), end)  # tiles of queries that see all of these keys
    for i_g in range(0, GROUP):
        i_hq = i_h * GROUP + i_g
        states = ((i_b * HEADS + i_hq) * STATES + i_n) * T
        p_qg, p_dog = p_q + i_b * s_qb + i_hq * s_qh, p_do + i_b * s_ob + i_hq * s_oh
        b_dk, b_dv = _key_gradients_along(
            b_dk, b_dv, b_k, b_v, p_qg, p_dog, p_lefts + states, p_debts + states, scale2, s_qt, s_ot,
            tile * BN // BM, whole, tile * BN, key, T, D, E, BD, BE, BM, BN, True, PRECISION, FAST,
        )  # fmt: skip
        for i in range(0, tl.cdiv(end - whole, CHECK)):
            start = whole + i * CHECK
            row = start * BM + tl.arange(0, CHECK * BM)
            alive = tl.max(tl.load(p_lefts + states + row, mask=row < T, other=0.0), 0) > 0
            b_dk, b_dv = _key_gradients_along(
                b_dk, b_dv, b_k, b_v, p_qg, p_dog, p_lefts + states, p_debts + states, scale2, s_qt, s_ot,
                start, tl.where(alive, tl.minimum(start + CHECK, end), start), tile * BN, key, T,
                D, E, BD, BE, BM, BN, False, PRECISION, FAST,
            )  # fmt: skip
    channel, value_channel = tl.arange(0, BD), tl.arange(0, BE)
    outputs = ((i_b * T + key) * key_heads + i_h)[:, None]
    m_k, m_v = m_key[:, None] & (channel < D)[None, :], m_key[:, None] & (value_channel < E)[None, :]
    tl.store(p_dk + outputs * D + channel[None, :], (b_dk * scale).to(p_dk.dtype.element_ty), mask=m_k)
    tl.store(p_dv + outputs * E + value_channel[None, :], b_dv.to(p_dv.dtype.element_ty), mask=m_v)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest: Tensor, scale: float,
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor,
) -> None:  # fmt: skip
    """Writes dq, dk and dv, strip by strip from the last keys to the first; out, rest and gradients are contiguous."""
    batch, length, heads, _ = q.shape
    queries, keys = tiling_for("queries", k, v), tiling_for("keys", k, v)
    strip = strip_for(batch * k.shape[2])
    assert strip % queries.tile == strip % keys.tile == keys.tile % queries.step == 0
    states = ceil_div(min(length, strip), keys.tile)
    left, debt = q.new_empty(2, batch, heads, length, dtype=torch.float32)
    lefts, debts = q.new_empty(2, batch, heads, states, length, dtype=torch.float32)
    total = q.new_empty(q.shape if length > strip else (0,), dtype=torch.float32)
    flags = constants(k, v)
    for begin in reversed(range(0, length, strip)):
        stop = min(begin + strip, length)
        sizes = (*strides(q, k, v, grad), begin, stop, length, states, heads, heads // k.shape[2])
        _query_gradients[(ceil_div(length - begin, queries.tile) * batch * heads,)](
            q, k, v, out, rest, grad, grad_q, total, left, debt, lefts, debts, scale, scale * LOG2E, *sizes,
            **flags, BM=queries.tile, BN=queries.step, RATIO=keys.tile // queries.step,
            CHECK=steps_per_check(queries), REST=rest_scale(q.dtype), **queries.options,
        )  # fmt: skip
        _key_gradients[(ceil_div(stop - begin, keys.tile) * batch * k.shape[2],)](
            q, k, v, grad, grad_k, grad_v, lefts, debts, scale, scale * LOG2E, *sizes,
            **flags, BM=keys.step, BN=keys.tile, CHECK=steps_per_check(keys), **keys.options,
        )  # fmt: skip

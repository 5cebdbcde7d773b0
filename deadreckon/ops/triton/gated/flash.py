"""Softmax attention with forget gates: causal, or dense blocks of the route tree, forward and backward.

A gate adds c_i − c_j to the logit of query i and key j, c the running sum of log gates. Kept as one number, c would
lose the digits of near pairs to far ones; so it is kept as its value at the end of each 64 tokens (float64) and what is
left from each token to there (float32). A tile needs one scalar and one vector of these.

Tensors are (B, H, G, n, rows, channels), those of keys without G: n blocks of queries that see n blocks of keys; one
block that sees itself, if causal. They may have any strides but a last one of 1, so that token-major and head-major
ones both do. The backward pass takes the log-sum-exp of *whole* rows, of which a block may be a part, as in ring
attention. It computes logits twice, by rows for dq and by columns for dk and dv, and so needs no atomics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.tiles import (
    LOG2E,
    ceil_div,
    load_columns,
    load_rows,
    padded,
    poison_of,
    power_of_two,
    store_rows,
    zeroed,
)

EDGE = 64  # tokens that share one float64 sum of gates; tiles in a loop are no larger


class Sums(NamedTuple):
    """Running sums of log gates, divided by log 2, in two parts: c_j = edge[block of j] − left[j]."""

    left: Tensor  # (B·H, 1 | G, T padded) float32
    edge: Tensor  # (B·H, 1 | G, blocks) float64


class Reach(NamedTuple):
    """What gates leave of the triangle, in tokens; both rise with the block of 64 tokens that they belong to."""

    first: Tensor  # (B·H, 1 | G, blocks) int32: the first key that queries of this block or a later one may need
    last: (
        Tensor  # (B·H, 1 | G, blocks) int32: the end of the queries that may need keys of this block or an earlier one
    )


class Documents(NamedTuple):
    """Packed sequences: where the document of each token begins and ends; padding is one more document."""

    start: Tensor  # (T padded,) int32
    end: Tensor  # (T padded,) int32


class Pairs(NamedTuple):
    """Where blocks lie in the sequence: `pairs` times `left` keys, then `right` queries that see them, from `start`."""

    start: int
    pairs: int
    left: int
    right: int


@triton.jit
def _document_of(p_start, origin_q, origin_k, first_row, row, rows, begin, whole, BN: tl.constexpr):
    """Where the documents of a tile's rows begin, and from where on its first keys matter and need no mask."""
    last_row = tl.minimum(first_row + row.shape[0], rows) - 1
    b_start = tl.load(p_start + origin_q + tl.minimum(row, last_row)) - origin_k
    oldest = tl.load(p_start + origin_q + first_row) - origin_k
    youngest = tl.load(p_start + origin_q + last_row) - origin_k
    begin = tl.minimum(tl.maximum(begin, oldest // BN * BN), whole)
    return b_start, begin, tl.minimum(tl.maximum(begin, (youngest + BN - 1) // BN * BN), whole)


@triton.jit
def _forward_along(
    b_acc, b_max, b_sum, b_q, p_k, p_v, p_left, p_edge, reference, scale2, s_kr, s_vr, begin, end, origin, row,
    b_start, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    channel, value_channel = tl.arange(0, BD), tl.arange(0, BE)
    for j in range(begin, end, BN):
        key = j + tl.arange(0, BN)
        m_key = (key < end) | (not MASKED)
        b_k = load_columns(p_k, key, s_kr, channel, m_key, D, BD)
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION) * scale2
        if GATED:
            shift = (reference - tl.load(p_edge + (origin + j) // 64)).to(tl.float32)
            b_s += (tl.load(p_left + origin + key, mask=m_key, other=0.0) + shift)[None, :]
        if MASKED:
            visible = m_key[None, :]
            if CAUSAL:
                visible = visible & (key[None, :] <= row[:, None])
            if PACKED:
                visible = visible & (key[None, :] >= b_start[:, None])
            if PACKED:  # (on every diagonal this would cost more than 2 %)
                b_v = load_rows(p_v, key, s_vr, value_channel, m_key, E, BE)
                b_poison = poison_of(b_v)  # for the rows that see it, and no others
                b_v, b_s = zeroed(b_v, b_poison), b_s + b_poison[None, :]
            b_s = tl.where(visible, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_from = b_new
        if MASKED and PACKED:  # a row may have seen nothing yet, and -inf less itself is no number
            b_from = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_from[:, None])
        decay = tl.exp2(b_max - b_from)
        b_sum = b_sum * decay + tl.sum(b_p, 1)
        if not (MASKED and PACKED):
            b_v = load_rows(p_v, key, s_vr, value_channel, m_key, E, BE)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * decay[:, None], input_precision=PRECISION)
        b_max = b_new
    return b_acc, b_max, b_sum


@triton.jit(do_not_specialize=["ROWS", "KEYS", "TILES", "HEADS", "GATES", "BLOCKS", "start", "left", "right"])
def _forward(
    p_q, p_k, p_v, p_o, p_lse, p_left, p_edge, p_first, p_start, scale2,
    s_qb, s_qh, s_qg, s_qp, s_qr, s_kb, s_kh, s_kp, s_kr, s_vb, s_vh, s_vp, s_vr,
    s_ob, s_oh, s_og, s_op, s_or, s_lb, s_lh, s_lg, s_lp, s_lr,
    ROWS, KEYS, TILES, HEADS, GROUP, GATES, BLOCKS, start, left, right,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, GATED: tl.constexpr, PRUNED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_tile, i_head, i_pair = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(1)
    i_n, i_g = i_head // GROUP, i_head % GROUP
    i_b, i_h, i_c = i_n // HEADS, i_n % HEADS, i_n * GATES + i_g % GATES
    origin_k = start + i_pair * (left + right)  # in the sequence
    origin_q = origin_k + left
    if CAUSAL:
        first_row = (TILES - 1 - i_tile) * BM  # the longest rows first
        whole, keys = first_row, tl.minimum(first_row + BM, ROWS)
    else:
        first_row = i_tile * BM
        whole, keys = KEYS // BN * BN, KEYS
    row = first_row + tl.arange(0, BM)
    m_row = row < ROWS
    p_q += i_b * s_qb + i_h * s_qh + i_g * s_qg + i_pair.to(tl.int64) * s_qp
    p_k += i_b * s_kb + i_h * s_kh + i_pair.to(tl.int64) * s_kp
    p_v += i_b * s_vb + i_h * s_vh + i_pair.to(tl.int64) * s_vp
    b_q = load_rows(p_q, row, s_qr, tl.arange(0, BD), m_row, D, BD)
    p_left += i_c * BLOCKS * 64
    p_edge += i_c * BLOCKS
    reference = tl.load(p_edge + (origin_q + first_row) // 64) if GATED else 0.0
    begin = 0
    if PRUNED:
        reached = tl.load(p_first + i_c * BLOCKS + (origin_q + first_row) // 64)
        begin = tl.minimum(tl.maximum(reached - origin_k, 0), whole)
    b_start, inner = row, begin  # keys from `inner` on are of the same document as all rows
    if PACKED:
        b_start, begin, inner = _document_of(p_start, origin_q, origin_k, first_row, row, ROWS, begin, whole, BN)
        if not CAUSAL:
            if begin >= keys:  # no row looks here, and nobody asks
                return
    b_acc = tl.zeros([BM, BE], tl.float32)
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    if PACKED:
        b_acc, b_max, b_sum = _forward_along(
            b_acc, b_max, b_sum, b_q, p_k, p_v, p_left, p_edge, reference, scale2, s_kr, s_vr, begin, inner, origin_k,
            row, b_start, D, E, BD, BE, BN, False, GATED, True, True, PRECISION,
        )  # fmt: skip
    b_acc, b_max, b_sum = _forward_along(
        b_acc, b_max, b_sum, b_q, p_k, p_v, p_left, p_edge, reference, scale2, s_kr, s_vr, inner, whole, origin_k, row,
        b_start, D, E, BD, BE, BN, CAUSAL, GATED, PACKED, False, PRECISION,
    )  # fmt: skip
    b_acc, b_max, b_sum = _forward_along(
        b_acc, b_max, b_sum, b_q, p_k, p_v, p_left, p_edge, reference, scale2, s_kr, s_vr, whole, keys, origin_k, row,
        b_start, D, E, BD, BE, BN, CAUSAL, GATED, PACKED, True, PRECISION,
    )  # fmt: skip
    some = b_sum > 0  # gates may have left no key at all
    b_sum = tl.where(some, b_sum, 1.0)
    b_lse = tl.where(some, b_max + tl.log2(b_sum), float("-inf"))
    if GATED:
        token = origin_q + row
        edge = tl.load(p_edge + token // 64, mask=m_row, other=0.0)
        b_lse += (edge - reference).to(tl.float32) - tl.load(p_left + token, mask=m_row, other=0.0)
    p_o += i_b * s_ob + i_h * s_oh + i_g * s_og + i_pair.to(tl.int64) * s_op
    store_rows(p_o, row, s_or, tl.arange(0, BE), m_row, b_acc / b_sum[:, None], E)
    p_lse += i_b * s_lb + i_h * s_lh + i_g * s_lg + i_pair.to(tl.int64) * s_lp
    tl.store(p_lse + row.to(tl.int64) * s_lr, b_lse * 0.6931471805599453, mask=m_row)


@triton.jit
def _query_gradients_along(
    b_dq, b_rows, b_q, b_do, b_own, b_delta, p_k, p_v, p_left, p_edge, reference, scale2, s_kr, s_vr, begin, end,
    origin, row, b_start,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    channel, value_channel = tl.arange(0, BD), tl.arange(0, BE)
    for j in range(begin, end, BN):
        key = j + tl.arange(0, BN)
        m_key = (key < end) | (not MASKED)
        b_k = load_columns(p_k, key, s_kr, channel, m_key, D, BD)
        b_v = load_columns(p_v, key, s_vr, value_channel, m_key, E, BE)
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION) * scale2
        if GATED:
            shift = (reference - tl.load(p_edge + (origin + j) // 64)).to(tl.float32)
            b_s += (tl.load(p_left + origin + key, mask=m_key, other=0.0) + shift)[None, :]
        b_p = tl.exp2(b_s + b_own[:, None])
        if MASKED:
            visible = m_key[None, :]
            if CAUSAL:
                visible = visible & (key[None, :] <= row[:, None])
            if PACKED:
                visible = visible & (key[None, :] >= b_start[:, None])
            b_p = tl.where(visible, b_p, 0.0)
        b_ds = b_p * (tl.dot(b_do, b_v, input_precision=PRECISION) - b_delta[:, None])
        if GATED:
            b_rows += tl.sum(b_ds, 1)
        b_dq = tl.dot(b_ds.to(b_k.dtype), tl.trans(b_k), b_dq, input_precision=PRECISION)
    return b_dq, b_rows


@triton.jit(do_not_specialize=["ROWS", "KEYS", "TILES", "HEADS", "GATES", "BLOCKS", "start", "left", "right"])
def _query_gradients(
    p_q, p_k, p_v, p_do, p_dq, p_sums, p_delta, p_own, p_left, p_edge, p_first, p_start, scale, scale2,
    s_qb, s_qh, s_qg, s_qp, s_qr, s_kb, s_kh, s_kp, s_kr, s_vb, s_vh, s_vp, s_vr,
    s_ob, s_oh, s_og, s_op, s_or, s_lb, s_lh, s_lg, s_lp, s_lr, s_xb, s_xh, s_xg, s_xp, s_xr,
    ROWS, KEYS, TILES, HEADS, GROUP, GATES, BLOCKS, start, left, right,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, GATED: tl.constexpr, PRUNED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_tile, i_head, i_pair = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(1)
    i_n, i_g = i_head // GROUP, i_head % GROUP
    i_b, i_h, i_c = i_n // HEADS, i_n % HEADS, i_n * GATES + i_g % GATES
    origin_k = start + i_pair * (left + right)
    origin_q = origin_k + left
    if CAUSAL:
        first_row = (TILES - 1 - i_tile) * BM
        whole, keys = first_row, tl.minimum(first_row + BM, ROWS)
    else:
        first_row = i_tile * BM
        whole, keys = KEYS // BN * BN, KEYS
    row = first_row + tl.arange(0, BM)
    m_row = row < ROWS
    i_pair = i_pair.to(tl.int64)
    p_q += i_b * s_qb + i_h * s_qh + i_g * s_qg + i_pair * s_qp
    p_k += i_b * s_kb + i_h * s_kh + i_pair * s_kp
    p_v += i_b * s_vb + i_h * s_vh + i_pair * s_vp
    p_do += i_b * s_ob + i_h * s_oh + i_g * s_og + i_pair * s_op
    b_q = load_rows(p_q, row, s_qr, tl.arange(0, BD), m_row, D, BD)
    b_do = load_rows(p_do, row, s_or, tl.arange(0, BE), m_row, E, BE)
    at = i_b * s_lb + i_h * s_lh + i_g * s_lg + i_pair * s_lp + row.to(tl.int64) * s_lr
    b_delta = tl.load(p_delta + at, mask=m_row, other=0.0)
    b_own = tl.load(p_own + at, mask=m_row, other=float("-inf"))
    p_left += i_c * BLOCKS * 64
    p_edge += i_c * BLOCKS
    reference = 0.0
    if GATED:
        reference = tl.load(p_edge + (origin_q + first_row) // 64)
        b_own += (tl.load(p_edge + (origin_q + row) // 64, mask=m_row, other=0.0) - reference).to(tl.float32)
    begin = 0
    if PRUNED:
        reached = tl.load(p_first + i_c * BLOCKS + (origin_q + first_row) // 64)
        begin = tl.minimum(tl.maximum(reached - origin_k, 0), whole)
    b_start, inner = row, begin  # keys from `inner` on are of the same document as all rows
    if PACKED:
        b_start, begin, inner = _document_of(p_start, origin_q, origin_k, first_row, row, ROWS, begin, whole, BN)
        if not CAUSAL:
            if begin >= keys:  # no row looks here, and nobody asks
                return
    b_dq = tl.zeros([BM, BD], tl.float32)
    b_rows = tl.zeros([BM], tl.float32)
    if PACKED:
        b_dq, b_rows = _query_gradients_along(
            b_dq, b_rows, b_q, b_do, b_own, b_delta, p_k, p_v, p_left, p_edge, reference, scale2, s_kr, s_vr, begin,
            inner, origin_k, row, b_start, D, E, BD, BE, BN, False, GATED, True, True, PRECISION,
        )  # fmt: skip
    b_dq, b_rows = _query_gradients_along(
        b_dq, b_rows, b_q, b_do, b_own, b_delta, p_k, p_v, p_left, p_edge, reference, scale2, s_kr, s_vr, inner, whole,
        origin_k, row, b_start, D, E, BD, BE, BN, CAUSAL, GATED, PACKED, False, PRECISION,
    )  # fmt: skip
    b_dq, b_rows = _query_gradients_along(
        b_dq, b_rows, b_q, b_do, b_own, b_delta, p_k, p_v, p_left, p_edge, reference, scale2, s_kr, s_vr, whole, keys,
        origin_k, row, b_start, D, E, BD, BE, BN, CAUSAL, GATED, PACKED, True, PRECISION,
    )  # fmt: skip
    p_dq += i_b * s_xb + i_h * s_xh + i_g * s_xg + i_pair * s_xp
    store_rows(p_dq, row, s_xr, tl.arange(0, BD), m_row, b_dq * scale, D)
    if GATED:
        if not CAUSAL:  # a row's sum goes over the blocks of all levels
            b_rows += tl.load(p_sums + at, mask=m_row, other=0.0)
        tl.store(p_sums + at, b_rows, mask=m_row)


@triton.jit
def _key_gradients_along(
    b_dk, b_dv, b_sums, b_k, b_v, b_bias, p_q, p_do, p_delta, p_own, p_edge, reference, scale2, s_qr, s_or, s_lr,
    begin, end, origin, key, b_end,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    GATED: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    channel, value_channel = tl.arange(0, BD), tl.arange(0, BE)
    for i in range(begin, end, BM):
        row = i + tl.arange(0, BM)
        m_row = row < end
        b_q = load_columns(p_q, row, s_qr, channel, m_row, D, BD)
        b_do = load_rows(p_do, row, s_or, value_channel, m_row, E, BE)
        b_own = tl.load(p_own + row.to(tl.int64) * s_lr, mask=m_row, other=float("-inf"))
        b_delta = tl.load(p_delta + row.to(tl.int64) * s_lr, mask=m_row, other=0.0)
        b_s = tl.dot(b_k, b_q, input_precision=PRECISION) * scale2
        if GATED:
            b_own += (tl.load(p_edge + (origin + i) // 64) - reference).to(tl.float32)
            b_s += b_bias[:, None]
        b_p = tl.exp2(b_s + b_own[None, :])
        if CAUSAL:
            b_p = tl.where(key[:, None] <= row[None, :], b_p, 0.0)
        if PACKED:
            b_p = tl.where(row[None, :] < b_end[:, None], b_p, 0.0)
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        b_ds = b_p * (tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION) - b_delta[None, :])
        if GATED:
            b_sums += tl.sum(b_ds, 1)
        b_dk = tl.dot(b_ds.to(b_q.dtype), tl.trans(b_q), b_dk, input_precision=PRECISION)
    return b_dk, b_dv, b_sums


@triton.jit(do_not_specialize=["ROWS", "KEYS", "TILES", "HEADS", "GATES", "BLOCKS", "start", "left", "right"])
def _key_gradients(
    p_q, p_k, p_v, p_do, p_dk, p_dv, p_sums, p_delta, p_own, p_left, p_edge, p_last, p_end, scale, scale2,
    s_qb, s_qh, s_qg, s_qp, s_qr, s_kb, s_kh, s_kp, s_kr, s_vb, s_vh, s_vp, s_vr,
    s_ob, s_oh, s_og, s_op, s_or, s_lb, s_lh, s_lg, s_lp, s_lr, s_xb, s_xh, s_xp, s_xr, s_yb, s_yh, s_yp, s_yr,
    ROWS, KEYS, TILES, HEADS, GROUP, GATES, BLOCKS, start, left, right,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, GATED: tl.constexpr, PRUNED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_tile, i_n, i_pair = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(1)
    i_b, i_h = i_n // HEADS, i_n % HEADS
    origin_k = start + i_pair * (left + right)
    origin_q = origin_k + left
    first_key = i_tile * BN
    key = first_key + tl.arange(0, BN)
    m_key = key < KEYS
    i_pair = i_pair.to(tl.int64)
    p_k += i_b * s_kb + i_h * s_kh + i_pair * s_kp
    p_v += i_b * s_vb + i_h * s_vh + i_pair * s_vp
    b_k = load_rows(p_k, key, s_kr, tl.arange(0, BD), m_key, D, BD)
    b_v = load_rows(p_v, key, s_vr, tl.arange(0, BE), m_key, E, BE)
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BE], tl.float32)
    whole = tl.minimum(first_key + BN, ROWS) if CAUSAL else 0
    b_end, oldest, newest = key, 0, 0  # where the documents of these keys end, first and last of these ends
    if PACKED:
        last_key = tl.minimum(first_key + BN, KEYS) - 1
        b_end = tl.load(p_end + origin_k + tl.minimum(key, last_key)) - origin_q
        oldest = tl.load(p_end + origin_k + first_key) - origin_q
        newest = tl.load(p_end + origin_k + last_key) - origin_q
        if not CAUSAL:
            if newest <= 0:
                return
    for g in range(GROUP):
        i_g = tl.cast(g, tl.int64)
        i_stat = i_b * s_lb + i_h * s_lh + i_g * s_lg + i_pair * s_lp
        i_c = i_n * GATES + i_g % GATES
        b_bias = tl.zeros([BN], tl.float32)
        reference = 0.0
        end = ROWS
        if GATED:
            reference = tl.load(p_edge + i_c * BLOCKS + (origin_k + first_key) // 64)
            edge = tl.load(p_edge + i_c * BLOCKS + (origin_k + key) // 64, mask=m_key, other=0.0)
            b_bias = tl.load(p_left + i_c * BLOCKS * 64 + origin_k + key, mask=m_key, other=0.0)
            b_bias += (reference - edge).to(tl.float32)
        if PRUNED:
            i_block = (origin_k + tl.minimum(first_key + BN, KEYS) - 1) // 64
            end = tl.maximum(tl.minimum(tl.load(p_last + i_c * BLOCKS + i_block) - origin_q, ROWS), whole)
        inner = end  # rows before `inner` are of the same document as all keys
        if PACKED:
            end = tl.maximum(tl.minimum(newest, end), whole)
            inner = tl.maximum(tl.minimum(oldest // BM * BM, end), whole)
        b_sums = tl.zeros([BN], tl.float32)
        p_qg = p_q + i_b * s_qb + i_h * s_qh + i_g * s_qg + i_pair * s_qp
        p_og = p_do + i_b * s_ob + i_h * s_oh + i_g * s_og + i_pair * s_op
        if CAUSAL:
            b_dk, b_dv, b_sums = _key_gradients_along(
                b_dk, b_dv, b_sums, b_k, b_v, b_bias, p_qg, p_og, p_delta + i_stat, p_own + i_stat,
                p_edge + i_c * BLOCKS, reference, scale2, s_qr, s_or, s_lr, first_key, whole, origin_q, key,
                b_end, D, E, BD, BE, BM, GATED, True, PACKED, PRECISION,
            )  # fmt: skip
        b_dk, b_dv, b_sums = _key_gradients_along(
            b_dk, b_dv, b_sums, b_k, b_v, b_bias, p_qg, p_og, p_delta + i_stat, p_own + i_stat,
            p_edge + i_c * BLOCKS, reference, scale2, s_qr, s_or, s_lr, whole, inner, origin_q, key,
            b_end, D, E, BD, BE, BM, GATED, False, False, PRECISION,
        )  # fmt: skip
        if PACKED:
            b_dk, b_dv, b_sums = _key_gradients_along(
                b_dk, b_dv, b_sums, b_k, b_v, b_bias, p_qg, p_og, p_delta + i_stat, p_own + i_stat,
                p_edge + i_c * BLOCKS, reference, scale2, s_qr, s_or, s_lr, inner, end, origin_q, key,
                b_end, D, E, BD, BE, BM, GATED, False, True, PRECISION,
            )  # fmt: skip
        if GATED:
            # Keys have their sums where they stand in the sequence, which is not where their queries do.
            p_to = p_sums + i_b * s_lb + i_h * s_lh + i_g * s_lg + (origin_k + key).to(tl.int64) * s_lr
            if not CAUSAL:
                b_sums += tl.load(p_to, mask=m_key, other=0.0)
            tl.store(p_to, b_sums, mask=m_key)
    p_dk += i_b * s_xb + i_h * s_xh + i_pair * s_xp
    store_rows(p_dk, key, s_xr, tl.arange(0, BD), m_key, b_dk * scale, D)
    p_dv += i_b * s_yb + i_h * s_yh + i_pair * s_yp
    store_rows(p_dv, key, s_yr, tl.arange(0, BE), m_key, b_dv, E)


class Tiles(NamedTuple):
    """Tokens of a program's own tile and of the tiles in its loop, and how the compiler shall run it."""

    own: int
    loop: int
    warps: int
    stages: int


def _tiles(which: str, q: Tensor, v: Tensor) -> Tiles:
    """Tile sizes by what was measured on Hopper; wide heads and single precision take smaller ones."""
    widest = max(padded(q.shape[-1]), padded(v.shape[-1])) * q.element_size() // 2
    return TILES[which][64 if widest <= 64 else 128 if widest <= 128 else 256 if widest <= 256 else 512]


TILES = {
    "forward": {
        64: Tiles(128, 64, 4, 3),
        128: Tiles(128, 64, 8, 3),
        256: Tiles(64, 32, 4, 2),
        512: Tiles(64, 32, 4, 1),
    },
    "queries": {
        64: Tiles(128, 64, 4, 3),
        128: Tiles(128, 32, 8, 2),
        256: Tiles(64, 32, 4, 2),
        512: Tiles(64, 16, 4, 1),
    },
    "keys": {64: Tiles(128, 32, 4, 3), 128: Tiles(128, 32, 8, 2), 256: Tiles(64, 32, 4, 1), 512: Tiles(64, 16, 4, 1)},
}


class Launch:
    """What the three kernels share: sizes, gates and flags."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, sums: Sums | None, pairs: Pairs | None, reach: Reach | None,
        documents: Documents | None,
    ) -> None:  # fmt: skip
        self.batch, self.heads, self.group, self.count, self.rows, _ = q.shape
        self.keys = k.shape[3]
        self.q, self.v = q, v
        self.gates = (q, q) if sums is None else (sums.left, sums.edge)
        gate_heads, blocks = (1, 1) if sums is None else (sums.left.shape[1], sums.edge.shape[2])
        start, _, left, right = pairs or (0, 1, 0, 0)
        self.sizes = (self.heads, self.group, gate_heads, blocks, start, left, right)
        self.flags = {
            "D": q.shape[-1], "E": v.shape[-1], "BD": padded(q.shape[-1]), "BE": padded(v.shape[-1]),
            "CAUSAL": pairs is None, "GATED": sums is not None, "PRUNED": reach is not None,
            "PACKED": documents is not None,
            "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        }  # fmt: skip

    def __call__(self, kernel: Any, which: str, *arguments: Any) -> None:
        """Runs a kernel whose programs own a tile of queries, or of keys."""
        own, loop, warps, stages = _tiles(which, self.q, self.v)
        by_key = which == "keys"
        own = min(own, max(64, power_of_two(self.keys if by_key else self.rows)))
        tiles = ceil_div(self.keys if by_key else self.rows, own)
        rows, columns = (loop, own) if by_key else (own, loop)
        programs = tiles * self.batch * self.heads * (1 if by_key else self.group)
        kernel[(programs, self.count)](
            *arguments, self.rows, self.keys, tiles, *self.sizes,
            **self.flags, BM=rows, BN=columns, num_warps=warps, num_stages=stages,
        )  # fmt: skip


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of all dimensions but the last, which is dense."""
    return tuple(step for x in tensors for step in x.stride()[:-1])


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, sums: Sums | None, scale: float, out: Tensor, lse: Tensor,
    pairs: Pairs | None = None, reach: Reach | None = None, documents: Documents | None = None,
) -> None:  # fmt: skip
    """Writes softmax attention to out (B, H, G, n, rows, E) and its log-sum-exp to lse (B, H, G, n, rows)."""
    launch = Launch(q, k, v, sums, pairs, reach, documents)
    launch(
        _forward, "forward", q, k, v, out, lse, *launch.gates, lse if reach is None else reach.first,
        lse if documents is None else documents.start, scale * LOG2E, *_strides(q, k, v, out), *lse.stride(),
    )  # fmt: skip


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, sums: Sums | None, scale: float, grad: Tensor, delta: Tensor, own: Tensor,
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, by_query: Tensor, by_key: Tensor,
    pairs: Pairs | None = None, reach: Reach | None = None, documents: Documents | None = None,
) -> None:  # fmt: skip
    """Writes gradients and, with gates, what the log-weights' gradients sum up to by query and by key.

    delta, own and by_query are (B, H, G, n, rows), of one layout, by_key (B, H, G, T) of the same; pairs of blocks
    *add* to by_query and by_key.
    """
    launch = Launch(q, k, v, sums, pairs, reach, documents)
    inputs = (*_strides(q, k, v, grad), *delta.stride())
    first, last = (delta, delta) if reach is None else reach
    start, end = (delta, delta) if documents is None else documents
    launch(
        _query_gradients, "queries", q, k, v, grad, grad_q, by_query, delta, own, *launch.gates, first, start,
        scale, scale * LOG2E, *inputs, *_strides(grad_q),
    )  # fmt: skip
    launch(
        _key_gradients, "keys", q, k, v, grad, grad_k, grad_v, by_key, delta, own, *launch.gates, last, end,
        scale, scale * LOG2E, *inputs, *_strides(grad_k, grad_v),
    )  # fmt: skip


def documents_of(cu_seqlens: Tensor, length: int) -> Documents:
    """The document of each of `length` tokens, padded to whole leaves, from boundaries (N + 1,); on their device."""
    tokens = torch.arange(-(-length // EDGE) * EDGE, dtype=torch.int32, device=cu_seqlens.device)
    bounds = torch.nn.functional.pad(cu_seqlens.to(torch.int32), (0, 1), value=tokens.shape[0])
    document = torch.searchsorted(bounds, tokens, right=True, out_int32=True).clamp_(max=bounds.shape[0] - 1)
    return Documents(bounds[document - 1], bounds[document])

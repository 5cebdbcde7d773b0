"""Softmax attention with forget gates: the backward kernels.

Logits are computed twice, by rows for dq and by columns for dk and dv, so that nothing needs atomics. With a row's
shift (−lse with its gates: see `delta.py`) the exponential of a logit is its weight. In the tile of a key, where gates
are differences, it is −lse alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.gated.forward import first_keys, query_tile
from deadreckon.ops.triton.gated.launch import (
    Documents,
    Launch,
    Pairs,
    Reach,
    Sums,
    difference,
    edge_above,
    edge_before,
    gates_since,
)
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import LOG2E, load_columns, load_rows, store_rows, strides


@triton.jit
def _query_gradients_along(
    b_dq, b_by_query, b_q, b_do, b_row_shift, b_delta, p_k, p_v, p_left, p_rest, p_edge, b_gate, reference, scale2,
    s_kr, s_vr, begin, end, origin, row, b_start,
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
            if CAUSAL and MASKED:
                b_s += difference(b_gate, gates_since(p_left, p_rest, p_edge, origin + key, m_key, reference))
            else:
                shift = (reference - tl.load(p_edge + (origin + j) // 64)).to(tl.float32)
                b_s += (tl.load(p_left + origin + key, mask=m_key, other=0.0) + shift)[None, :]
        b_p = tl.exp2(b_s + b_row_shift[:, None])
        if MASKED:
            visible = m_key[None, :]
            if CAUSAL:
                visible = visible & (key[None, :] <= row[:, None])
            if PACKED:
                visible = visible & (key[None, :] >= b_start[:, None])
            b_p = tl.where(visible, b_p, 0.0)
        b_ds = b_p * (tl.dot(b_do, b_v, input_precision=PRECISION) - b_delta[:, None])
        if GATED:
            b_by_query += tl.sum(b_ds, 1)
        b_dq = tl.dot(b_ds.to(b_k.dtype), tl.trans(b_k), b_dq, input_precision=PRECISION)
    return b_dq, b_by_query


@Kernel
@triton.jit(do_not_specialize=["ROWS", "KEYS", "TILES", "HEADS", "GATES", "BLOCKS", "start", "left", "right"])
def _query_gradients(
    p_q, p_k, p_v, p_do, p_dq, p_by_query, p_delta, p_lse, p_row_shift, p_left, p_rest, p_edge, p_first, p_start,
    scale, scale2,
    s_q, s_k, s_v, s_o, s_l, s_dq, ROWS, KEYS, TILES, HEADS, GROUP, GATES, BLOCKS, start, left, right,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, GATED: tl.constexpr, PRUNED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    s_qb, s_qh, s_qg, s_qp, s_qr = s_q  # batch, head, query of a group, block, row
    s_kb, s_kh, s_kp, s_kr = s_k
    s_vb, s_vh, s_vp, s_vr = s_v
    s_ob, s_oh, s_og, s_op, s_or = s_o
    s_lb, s_lh, s_lg, s_lp, s_lr = s_l
    s_xb, s_xh, s_xg, s_xp, s_xr = s_dq
    i_b, i_h, i_g, i_c, i_pair, origin_k, origin_q, first_row, whole, keys = query_tile(
        ROWS, KEYS, TILES, HEADS, GROUP, GATES, start, left, right, BM, BN, CAUSAL
    )
    row = first_row + tl.arange(0, BM)
    m_row = row < ROWS
    b_start, oldest, begin, inner = first_keys(
        p_first + i_c * BLOCKS, p_start, origin_q, origin_k, first_row, row, ROWS, whole, BN, PRUNED, PACKED
    )
    if PACKED:
        if not CAUSAL:
            if oldest >= keys:  # no row sees any of these keys, and nothing reads this gradient
                return
    p_q += i_b * s_qb + i_h * s_qh + i_g * s_qg + i_pair * s_qp
    p_k += i_b * s_kb + i_h * s_kh + i_pair * s_kp
    p_v += i_b * s_vb + i_h * s_vh + i_pair * s_vp
    p_do += i_b * s_ob + i_h * s_oh + i_g * s_og + i_pair * s_op
    b_q = load_rows(p_q, row, s_qr, tl.arange(0, BD), m_row, D, BD)
    b_do = load_rows(p_do, row, s_or, tl.arange(0, BE), m_row, E, BE)
    at = i_b * s_lb + i_h * s_lh + i_g * s_lg + i_pair * s_lp + row.to(tl.int64) * s_lr
    b_delta = tl.load(p_delta + at, mask=m_row, other=0.0)
    b_row_shift = tl.load(p_row_shift + at, mask=m_row, other=float("-inf"))
    p_left += i_c * BLOCKS * 64
    p_rest += i_c * BLOCKS * 64
    p_edge += i_c * BLOCKS
    reference = 0.0
    if GATED:
        reference = edge_before(p_edge, origin_q + first_row)
        b_row_shift += (edge_before(p_edge, tl.where(m_row, origin_q + row, 0)) - reference).to(tl.float32)
    b_dq = tl.zeros([BM, BD], tl.float32)
    b_by_query = tl.zeros([BM], tl.float32)
    if PACKED:
        b_dq, b_by_query = _query_gradients_along(
            b_dq, b_by_query, b_q, b_do, b_row_shift, b_delta, p_k, p_v, p_left, p_rest, p_edge, row, reference, scale2,
            s_kr, s_vr, begin, inner, origin_k, row, b_start, D, E, BD, BE, BN, False, GATED, True, True, PRECISION,
        )  # fmt: skip
    b_dq, b_by_query = _query_gradients_along(
        b_dq, b_by_query, b_q, b_do, b_row_shift, b_delta, p_k, p_v, p_left, p_rest, p_edge, row, reference, scale2,
        s_kr, s_vr, inner, whole, origin_k, row, b_start, D, E, BD, BE, BN, CAUSAL, GATED, PACKED, False, PRECISION,
    )  # fmt: skip
    b_gate = row
    if GATED and CAUSAL:
        b_gate = gates_since(p_left, p_rest, p_edge, origin_q + row, m_row, reference)
        b_row_shift = tl.load(p_lse + at, mask=m_row, other=float("inf")) * -1.4426950408889634
    b_dq, b_by_query = _query_gradients_along(
        b_dq, b_by_query, b_q, b_do, b_row_shift, b_delta, p_k, p_v, p_left, p_rest, p_edge, b_gate, reference, scale2,
        s_kr, s_vr, whole, keys, origin_k, row, b_start, D, E, BD, BE, BN, CAUSAL, GATED, PACKED, True, PRECISION,
    )  # fmt: skip
    p_dq += i_b * s_xb + i_h * s_xh + i_g * s_xg + i_pair * s_xp
    store_rows(p_dq, row, s_xr, tl.arange(0, BD), m_row, b_dq * scale, D)
    if GATED:
        if not CAUSAL:  # a row's sum goes over the blocks of all levels
            b_by_query += tl.load(p_by_query + at, mask=m_row, other=0.0)
        tl.store(p_by_query + at, b_by_query, mask=m_row)


@triton.jit
def _key_gradients_along(
    b_dk, b_dv, b_by_key, b_k, b_v, b_bias, p_q, p_do, p_delta, p_lse, p_row_shift, p_left, p_rest, p_edge, b_gate,
    reference, scale2, s_qr, s_or, s_lr, begin, end, origin, key, b_end,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    GATED: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    channel, value_channel = tl.arange(0, BD), tl.arange(0, BE)
    for i in range(begin, end, BM):
        row = i + tl.arange(0, BM)
        m_row = row < end
        b_q = load_columns(p_q, row, s_qr, channel, m_row, D, BD)
        b_do = load_rows(p_do, row, s_or, value_channel, m_row, E, BE)
        if GATED and CAUSAL:
            b_row_shift = tl.load(p_lse + row.to(tl.int64) * s_lr, mask=m_row, other=float("inf")) * -1.4426950408889634
        else:
            b_row_shift = tl.load(p_row_shift + row.to(tl.int64) * s_lr, mask=m_row, other=float("-inf"))
        b_delta = tl.load(p_delta + row.to(tl.int64) * s_lr, mask=m_row, other=0.0)
        b_s = tl.dot(b_k, b_q, input_precision=PRECISION) * scale2
        if GATED:
            if CAUSAL:
                b_s -= difference(b_gate, gates_since(p_left, p_rest, p_edge, origin + row, m_row, reference))
            else:
                b_row_shift += (edge_before(p_edge, origin + i) - reference).to(tl.float32)
                b_s += b_bias[:, None]
        b_p = tl.exp2(b_s + b_row_shift[None, :])
        if CAUSAL:
            b_p = tl.where(key[:, None] <= row[None, :], b_p, 0.0)
        if PACKED:
            b_p = tl.where(row[None, :] < b_end[:, None], b_p, 0.0)
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        b_ds = b_p * (tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION) - b_delta[None, :])
        if GATED:
            b_by_key += tl.sum(b_ds, 1)
        b_dk = tl.dot(b_ds.to(b_q.dtype), tl.trans(b_q), b_dk, input_precision=PRECISION)
    return b_dk, b_dv, b_by_key


@Kernel
@triton.jit(do_not_specialize=["ROWS", "KEYS", "TILES", "HEADS", "GATES", "BLOCKS", "start", "left", "right"])
def _key_gradients(
    p_q, p_k, p_v, p_do, p_dk, p_dv, p_by_key, p_delta, p_lse, p_row_shift, p_left, p_rest, p_edge, p_last, p_end,
    scale, scale2,
    s_q, s_k, s_v, s_o, s_l, s_dk, s_dv, ROWS, KEYS, TILES, HEADS, GROUP, GATES, BLOCKS, start, left, right,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, GATED: tl.constexpr, PRUNED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    s_qb, s_qh, s_qg, s_qp, s_qr = s_q  # batch, head, query of a group, block, row
    s_kb, s_kh, s_kp, s_kr = s_k
    s_vb, s_vh, s_vp, s_vr = s_v
    s_ob, s_oh, s_og, s_op, s_or = s_o
    s_lb, s_lh, s_lg, s_lp, s_lr = s_l
    s_xb, s_xh, s_xp, s_xr = s_dk
    s_yb, s_yh, s_yp, s_yr = s_dv
    i_tile, i_n, i_pair = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(1)
    i_b, i_h = i_n // HEADS, i_n % HEADS
    origin_k = start + i_pair * (left + right)
    origin_q = origin_k + left
    first_key = i_tile * BN
    key = first_key + tl.arange(0, BN)
    m_key = key < KEYS
    i_pair = i_pair.to(tl.int64)
    whole = tl.minimum(edge_above(first_key + BN, BN), ROWS) if CAUSAL else 0
    b_end, oldest, newest = key, 0, 0  # where the documents of these keys end, first and last of these ends
    if PACKED:
        last_key = tl.minimum(first_key + BN, KEYS) - 1
        b_end = tl.load(p_end + origin_k + tl.minimum(key, last_key)) - origin_q
        oldest = tl.load(p_end + origin_k + first_key) - origin_q
        newest = tl.load(p_end + origin_k + last_key) - origin_q
        if not CAUSAL:
            if newest <= 0:
                return
    p_k += i_b * s_kb + i_h * s_kh + i_pair * s_kp
    p_v += i_b * s_vb + i_h * s_vh + i_pair * s_vp
    b_k = load_rows(p_k, key, s_kr, tl.arange(0, BD), m_key, D, BD)
    b_v = load_rows(p_v, key, s_vr, tl.arange(0, BE), m_key, E, BE)
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BE], tl.float32)
    for g in range(GROUP):
        i_g = tl.cast(g, tl.int64)
        i_stat = i_b * s_lb + i_h * s_lh + i_g * s_lg + i_pair * s_lp
        i_c = i_n * GATES + i_g % GATES
        p_left_g, p_rest_g, p_edge_g = p_left + i_c * BLOCKS * 64, p_rest + i_c * BLOCKS * 64, p_edge + i_c * BLOCKS
        b_bias, b_gate = tl.zeros([BN], tl.float32), key
        reference = 0.0
        end = ROWS
        i_block = (origin_k + tl.minimum(first_key + BN, KEYS) - 1) // 64  # that of the last key
        if GATED:
            reference = tl.load(p_edge_g + i_block)
            b_gate = gates_since(p_left_g, p_rest_g, p_edge_g, origin_k + key, m_key, reference)
            b_bias = -b_gate.to(tl.float32)
        if PRUNED:
            end = tl.maximum(tl.minimum(tl.load(p_last + i_c * BLOCKS + i_block) - origin_q, ROWS), whole)
        inner = end  # rows before `inner` are of the same document as all keys
        if PACKED:
            end = tl.maximum(tl.minimum(newest, end), whole)
            inner = tl.maximum(tl.minimum(oldest // BM * BM, end), whole)
        b_by_key = tl.zeros([BN], tl.float32)
        p_qg = p_q + i_b * s_qb + i_h * s_qh + i_g * s_qg + i_pair * s_qp
        p_og = p_do + i_b * s_ob + i_h * s_oh + i_g * s_og + i_pair * s_op
        if CAUSAL:
            b_dk, b_dv, b_by_key = _key_gradients_along(
                b_dk, b_dv, b_by_key, b_k, b_v, b_bias, p_qg, p_og, p_delta + i_stat, p_lse + i_stat,
                p_row_shift + i_stat, p_left_g, p_rest_g, p_edge_g, b_gate, reference, scale2, s_qr, s_or, s_lr,
                first_key, whole, origin_q, key, b_end, D, E, BD, BE, BM, GATED, True, PACKED, PRECISION,
            )  # fmt: skip
        b_dk, b_dv, b_by_key = _key_gradients_along(
            b_dk, b_dv, b_by_key, b_k, b_v, b_bias, p_qg, p_og, p_delta + i_stat, p_lse + i_stat,
            p_row_shift + i_stat, p_left_g, p_rest_g, p_edge_g, b_gate, reference, scale2, s_qr, s_or, s_lr,
            whole, inner, origin_q, key, b_end, D, E, BD, BE, BM, GATED, False, False, PRECISION,
        )  # fmt: skip
        if PACKED:
            b_dk, b_dv, b_by_key = _key_gradients_along(
                b_dk, b_dv, b_by_key, b_k, b_v, b_bias, p_qg, p_og, p_delta + i_stat, p_lse + i_stat,
                p_row_shift + i_stat, p_left_g, p_rest_g, p_edge_g, b_gate, reference, scale2, s_qr, s_or, s_lr,
                inner, end, origin_q, key, b_end, D, E, BD, BE, BM, GATED, False, True, PRECISION,
            )  # fmt: skip
        if GATED:
            # Sums by key are stored at the key's own position in the sequence, unlike those by query.
            p_to = p_by_key + i_b * s_lb + i_h * s_lh + i_g * s_lg + (origin_k + key).to(tl.int64) * s_lr
            if not CAUSAL:
                b_by_key += tl.load(p_to, mask=m_key, other=0.0)
            tl.store(p_to, b_by_key, mask=m_key)
    p_dk += i_b * s_xb + i_h * s_xh + i_pair * s_xp
    store_rows(p_dk, key, s_xr, tl.arange(0, BD), m_key, b_dk * scale, D)
    p_dv += i_b * s_yb + i_h * s_yh + i_pair * s_yp
    store_rows(p_dv, key, s_yr, tl.arange(0, BE), m_key, b_dv, E)


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, sums: Sums | None, scale: float, grad: Tensor, delta: Tensor, lse: Tensor,
    row_shift: Tensor, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, by_query: Tensor, by_key: Tensor,
    pairs: Pairs | None = None, reach: Reach | None = None, documents: Documents | None = None,
) -> None:  # fmt: skip
    """Writes gradients and, with gates, the gradients of log-weights summed by query and by key.

    delta, lse, row_shift and by_query are (B, H, G, n, rows) with the same strides, by_key is (B, H, G, T) with those
    of B, H, G and rows. Pairs of blocks *add* to by_query and by_key. The lse is that of *whole* rows, of which a block
    may be a part: so each part has its exact gradient, as in ring attention.
    """
    launch = Launch(q, k, v, sums, pairs, reach, documents)
    inputs = (*strides(q, k, v, grad), delta.stride())
    first, last = (delta, delta) if reach is None else (reach.first, reach.last)
    start, end = (delta, delta) if documents is None else documents
    launch(
        _query_gradients, "queries", q, k, v, grad, grad_q, by_query, delta, lse, row_shift, *launch.gates, first,
        start, scale, scale * LOG2E, *inputs, *strides(grad_q),
    )  # fmt: skip
    launch(
        _key_gradients, "keys", q, k, v, grad, grad_k, grad_v, by_key, delta, lse, row_shift, *launch.gates, last,
        end, scale, scale * LOG2E, *inputs, *strides(grad_k, grad_v),
    )  # fmt: skip

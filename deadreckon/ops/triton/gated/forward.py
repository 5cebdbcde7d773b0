"""Softmax attention with forget gates: the flash-style forward kernel.

A program has a tile of queries and loops over the keys they see with a running maximum and sum, as FlashAttention does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.gated.launch import (
    Documents,
    Launch,
    Pairs,
    Reach,
    Sums,
    difference,
    edge_before,
    edge_below,
    gates_since,
)
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import LOG2E, load_columns, load_rows, poison_of, store_rows, strides, zeroed


@triton.jit
def query_tile(
    ROWS, KEYS, TILES, HEADS, GROUP, GATES, start, left, right,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """This program's tile of queries: its row of the batch, key head, query of a group, gates and pair of blocks; where
    the blocks of keys and queries begin in the sequence; its first row, the keys that all rows see, and all keys."""
    i_tile, i_head, i_pair = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(1)
    i_n, i_g = i_head // GROUP, i_head % GROUP
    origin_k = start + i_pair * (left + right)
    if CAUSAL:
        first_row = (TILES - 1 - i_tile) * BM  # the longest rows first
        whole, keys = edge_below(first_row, BM), tl.minimum(first_row + BM, ROWS)
    else:
        first_row = i_tile * BM
        whole, keys = KEYS // BN * BN, KEYS
    i_c = i_n * GATES + i_g % GATES
    origin_q = origin_k + left
    return i_n // HEADS, i_n % HEADS, i_g, i_c, i_pair.to(tl.int64), origin_k, origin_q, first_row, whole, keys


@triton.jit
def first_keys(
    p_first, p_start, origin_q, origin_k, first_row, row, rows, whole,
    BN: tl.constexpr, PRUNED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Where the documents of a tile's rows start, and the first of them; the first key that any row sees within reach
    of its gates, and the first from which on keys are of the same document as all rows."""
    begin = 0
    if PRUNED:
        reached = tl.load(p_first + (origin_q + first_row) // 64)
        begin = tl.minimum(tl.maximum(reached - origin_k, 0), whole)
    b_start, oldest, inner = row, 0, begin
    if PACKED:
        last_row = tl.minimum(first_row + row.shape[0], rows) - 1
        b_start = tl.load(p_start + origin_q + tl.minimum(row, last_row)) - origin_k
        oldest = tl.load(p_start + origin_q + first_row) - origin_k
        youngest = tl.load(p_start + origin_q + last_row) - origin_k
        begin = tl.minimum(tl.maximum(begin, oldest // BN * BN), whole)
        inner = tl.minimum(tl.maximum(begin, (youngest + BN - 1) // BN * BN), whole)
    return b_start, oldest, begin, inner


@triton.jit
def _forward_along(
    b_acc, b_max, b_sum, b_q, p_k, p_v, p_left, p_rest, p_edge, b_gate, reference, scale2, s_kr, s_vr, begin, end,
    origin, row, b_start, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    channel, value_channel = tl.arange(0, BD), tl.arange(0, BE)
    for j in range(begin, end, BN):
        key = j + tl.arange(0, BN)
        m_key = (key < end) | (not MASKED)
        b_k = load_columns(p_k, key, s_kr, channel, m_key, D, BD)
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION) * scale2
        if GATED:
            if CAUSAL and MASKED:
                b_s += difference(b_gate, gates_since(p_left, p_rest, p_edge, origin + key, m_key, reference))
            else:
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
        if MASKED and PACKED:  # a row may have seen nothing yet, and -inf - (-inf) is NaN
            b_from = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_from[:, None])
        decay = tl.exp2(b_max - b_from)
        b_sum = b_sum * decay + tl.sum(b_p, 1)
        if not (MASKED and PACKED):
            b_v = load_rows(p_v, key, s_vr, value_channel, m_key, E, BE)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * decay[:, None], input_precision=PRECISION)
        b_max = b_new
    return b_acc, b_max, b_sum


@Kernel
@triton.jit(do_not_specialize=["ROWS", "KEYS", "TILES", "HEADS", "GATES", "BLOCKS", "start", "left", "right"])
def _forward(
    p_q, p_k, p_v, p_o, p_lse, p_left, p_rest, p_edge, p_first, p_start, scale2,
    s_q, s_k, s_v, s_o, s_l, ROWS, KEYS, TILES, HEADS, GROUP, GATES, BLOCKS, start, left, right,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, GATED: tl.constexpr, PRUNED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    s_qb, s_qh, s_qg, s_qp, s_qr = s_q  # batch, head, query of a group, block, row
    s_kb, s_kh, s_kp, s_kr = s_k
    s_vb, s_vh, s_vp, s_vr = s_v
    s_ob, s_oh, s_og, s_op, s_or = s_o
    s_lb, s_lh, s_lg, s_lp, s_lr = s_l
    i_b, i_h, i_g, i_c, i_pair, origin_k, origin_q, first_row, whole, keys = query_tile(
        ROWS, KEYS, TILES, HEADS, GROUP, GATES, start, left, right, BM, BN, CAUSAL
    )
    row = first_row + tl.arange(0, BM)
    m_row = row < ROWS
    p_q += i_b * s_qb + i_h * s_qh + i_g * s_qg + i_pair * s_qp
    p_k += i_b * s_kb + i_h * s_kh + i_pair * s_kp
    p_v += i_b * s_vb + i_h * s_vh + i_pair * s_vp
    b_q = load_rows(p_q, row, s_qr, tl.arange(0, BD), m_row, D, BD)
    p_left += i_c * BLOCKS * 64
    p_rest += i_c * BLOCKS * 64
    p_edge += i_c * BLOCKS
    reference = edge_before(p_edge, origin_q + first_row) if GATED else 0.0
    b_start, oldest, begin, inner = first_keys(
        p_first + i_c * BLOCKS, p_start, origin_q, origin_k, first_row, row, ROWS, whole, BN, PRUNED, PACKED
    )
    if PACKED:
        if not CAUSAL:
            if oldest >= keys:  # no row sees any of these keys, and nothing reads this output
                return
    b_acc = tl.zeros([BM, BE], tl.float32)
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    if PACKED:
        b_acc, b_max, b_sum = _forward_along(
            b_acc, b_max, b_sum, b_q, p_k, p_v, p_left, p_rest, p_edge, row, reference, scale2, s_kr, s_vr, begin,
            inner, origin_k, row, b_start, D, E, BD, BE, BN, False, GATED, True, True, PRECISION,
        )  # fmt: skip
    b_acc, b_max, b_sum = _forward_along(
        b_acc, b_max, b_sum, b_q, p_k, p_v, p_left, p_rest, p_edge, row, reference, scale2, s_kr, s_vr, inner, whole,
        origin_k, row, b_start, D, E, BD, BE, BN, CAUSAL, GATED, PACKED, False, PRECISION,
    )  # fmt: skip
    b_gate = row
    if GATED:
        b_gate = gates_since(p_left, p_rest, p_edge, origin_q + row, m_row, reference)
        if CAUSAL:
            b_max += b_gate.to(tl.float32)  # from here on logits have all their gates
    b_acc, b_max, b_sum = _forward_along(
        b_acc, b_max, b_sum, b_q, p_k, p_v, p_left, p_rest, p_edge, b_gate, reference, scale2, s_kr, s_vr, whole, keys,
        origin_k, row, b_start, D, E, BD, BE, BN, CAUSAL, GATED, PACKED, True, PRECISION,
    )  # fmt: skip
    seen = b_sum > 0  # gates may have left a row no key at all
    b_sum = tl.where(seen, b_sum, 1.0)
    b_lse = tl.where(seen, b_max + tl.log2(b_sum), float("-inf"))
    if GATED and not CAUSAL:
        b_lse += b_gate.to(tl.float32)
    p_o += i_b * s_ob + i_h * s_oh + i_g * s_og + i_pair * s_op
    store_rows(p_o, row, s_or, tl.arange(0, BE), m_row, b_acc / b_sum[:, None], E)
    p_lse += i_b * s_lb + i_h * s_lh + i_g * s_lg + i_pair * s_lp
    tl.store(p_lse + row.to(tl.int64) * s_lr, b_lse * 0.6931471805599453, mask=m_row)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, sums: Sums | None, scale: float, out: Tensor, lse: Tensor,
    pairs: Pairs | None = None, reach: Reach | None = None, documents: Documents | None = None,
) -> None:  # fmt: skip
    """Writes softmax attention to out (B, H, G, n, rows, E) and its log-sum-exp to lse (B, H, G, n, rows).

    q is (B, H, G, n, rows, D), k and v are (B, H, n, keys, D | E): n blocks of queries that see n blocks of keys if
    `pairs` says where these lie, else one block that sees itself causally. The last stride is 1, all others are free.
    """
    launch = Launch(q, k, v, sums, pairs, reach, documents)
    launch(
        _forward, "forward", q, k, v, out, lse, *launch.gates, lse if reach is None else reach.first,
        lse if documents is None else documents.start, scale * LOG2E, *strides(q, k, v, out), lse.stride(),
    )  # fmt: skip

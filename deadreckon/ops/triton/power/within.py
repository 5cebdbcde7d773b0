"""Attention within chunks, forward and backward.

Weights are powers of q · k times the gates between them; there is no softmax, so tiles just add up. A tile takes first
the keys before it, which need no mask, then its own; a tile of fewer than 64 has those of its block of 64 among its
own, since sums of gates refer to the edges of blocks. What was read from states is added at the end, before rows are
divided by the sums of their weights. The backward pass computes weights twice, by rows for dq and by columns for dk and
dv, and so needs no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.gated.launch import Sums, difference, edge_above, edge_before, edge_below, gates_since
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.power.chunks import Chunks, plus, tiling_for
from deadreckon.ops.triton.tiles import DTYPES, load_columns, load_rows, mul, padded, store_rows, strides


@triton.jit
def _power(b_s, POWER: tl.constexpr):
    return b_s * b_s if POWER == 2 else (b_s * b_s) * (b_s * b_s)


@triton.jit
def _query_tile(TILES, HEADS, GROUP, BM: tl.constexpr):
    """This program's query head and key head of the whole batch, row of the batch, query head, and rows of a tile."""
    i_head = (tl.program_id(0) // TILES).to(tl.int64)
    i_tile = TILES - 1 - tl.program_id(0) % TILES  # those that take longest come first
    i_n = i_head // GROUP
    first_row = i_tile * BM
    i_h = i_n % HEADS * GROUP + i_head % GROUP
    return i_head, i_n, i_n // HEADS, i_h, first_row, first_row + tl.arange(0, BM)


@triton.jit
def _query_gates(p_left, p_rest, p_edge, first_row, row, m_row, BM: tl.constexpr, GATED: tl.constexpr):
    """Before a tile of queries, the sum of gates that is a reference to all; and from there to each row."""
    b_tile_gate = tl.zeros([BM], tl.float64)
    reference = 0.0
    if GATED:
        reference = edge_before(p_edge, first_row)
        b_tile_gate = gates_since(p_left, p_rest, p_edge, row, m_row, reference)
    return reference, b_tile_gate


@triton.jit
def _faded(b_tile_gate, b_step_gate, SIGN: tl.constexpr, MASKED: tl.constexpr):
    """Products of gates from keys to queries; without a mask, to a reference between them.

    From sums of log gates (base 2) since the reference: of the program's tile, which is of queries if SIGN is 1, of
    keys if it is -1, and of a step of its loop.
    """
    if MASKED:
        # Where the mask is off, sums of gates run the other way and would overflow.
        b_sum = SIGN * difference(b_tile_gate, b_step_gate)
        return tl.exp2(tl.minimum(b_sum, 64.0, propagate_nan=tl.PropagateNan.ALL))
    else:
        return tl.exp2(-SIGN * b_step_gate.to(tl.float32))[None, :]


@Kernel
@triton.jit
def _forward(
    p_q, p_k, p_v, p_left, p_rest, p_edge, p_read, p_read_sum, p_o, p_inverse, s_v, s_o, T, CHUNK, TILES, HEADS,
    GROUP, BLOCKS,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    POWER: tl.constexpr, GATED: tl.constexpr, STATE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    s_vb, s_vt, s_vh = s_v
    s_ob, s_ot, s_oh = s_o
    i_head, i_n, i_b, i_h, first_row, row = _query_tile(TILES, HEADS, GROUP, BM)
    channel, value = tl.arange(0, BD), tl.arange(0, BE)
    m_row = row < T
    b_q = load_rows(p_q + i_head * T * D, row, D, channel, m_row, D, BD)
    p_k += i_n * T * D
    p_v += i_b * s_vb + (i_n % HEADS) * s_vh
    p_left += i_n * BLOCKS * 64
    p_rest += i_n * BLOCKS * 64
    p_edge += i_n * BLOCKS
    reference, b_tile_gate = _query_gates(p_left, p_rest, p_edge, first_row, row, m_row, BM, GATED)
    b_acc = tl.zeros([BM, BE], tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    for MASKED in tl.static_range(2):  # keys before the tile, then those in it
        begin = edge_below(first_row, BM) if MASKED else first_row // CHUNK * CHUNK
        end = tl.minimum(first_row + BM, T) if MASKED else edge_below(first_row, BM)
        for j in range(begin, end, BN):
            key = j + tl.arange(0, BN)
            m_key = (key < end) | (not MASKED)
            b_k = load_columns(p_k, key, D, channel, m_key, D, BD)
            b_w = _power(mul(b_q, b_k, DTYPE), POWER)
            b_v = load_rows(p_v, key, s_vt, value, m_key, E, BE)
            if GATED:
                b_step_gate = gates_since(p_left, p_rest, p_edge, key, m_key, reference)
                b_w *= _faded(b_tile_gate, b_step_gate, 1, MASKED)
            if MASKED:
                b_w = tl.where(m_key[None, :] & (key[None, :] <= row[:, None]), b_w, 0.0)
            b_w = b_w.to(DTYPE)  # the sum is of what values are multiplied by: a key that is alone has all the weight
            b_sum += tl.sum(b_w.to(tl.float32), 1)
            b_acc = plus(b_acc, b_w, b_v, DTYPE)
        if GATED and not MASKED:
            b_fade = tl.exp2(b_tile_gate.to(tl.float32))
            b_acc *= b_fade[:, None]
            b_sum *= b_fade
    if STATE:
        b_acc += load_rows(p_read + i_head * T * E, row, E, value, m_row, E, BE)
        b_sum += tl.load(p_read_sum + i_head * T + row, mask=m_row, other=0.0)
    b_none = b_sum < 1e-36  # what is divided by less may be infinite
    b_inverse = tl.where(b_none, 0.0, 1 / tl.where(b_none, 1.0, b_sum))
    store_rows(p_o + i_b * s_ob + i_h * s_oh, row, s_ot, value, m_row, b_acc * b_inverse[:, None], E)
    tl.store(p_inverse + i_head * T + row, b_inverse, mask=m_row)


@Kernel
@triton.jit
def _query_gradients(
    p_q, p_k, p_v, p_do, p_left, p_rest, p_edge, p_delta, p_inverse, p_unit, p_state_dq, p_dq, p_by_query,
    s_v, s_o, s_dq, T, CHUNK, TILES, HEADS, GROUP, BLOCKS,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    POWER: tl.constexpr, GATED: tl.constexpr, STATE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    s_vb, s_vt, s_vh = s_v
    s_ob, s_ot, s_oh = s_o
    s_xb, s_xt, s_xh = s_dq
    i_head, i_n, i_b, i_h, first_row, row = _query_tile(TILES, HEADS, GROUP, BM)
    channel, value = tl.arange(0, BD), tl.arange(0, BE)
    m_row = row < T
    b_q = load_rows(p_q + i_head * T * D, row, D, channel, m_row, D, BD)
    b_do = load_rows(p_do + i_b * s_ob + i_h * s_oh, row, s_ot, value, m_row, E, BE).to(DTYPE)
    b_delta = tl.load(p_delta + i_head * T + row, mask=m_row, other=0.0)
    b_inverse = tl.load(p_inverse + i_head * T + row, mask=m_row, other=0.0)
    p_k += i_n * T * D
    p_v += i_b * s_vb + (i_n % HEADS) * s_vh
    p_left += i_n * BLOCKS * 64
    p_rest += i_n * BLOCKS * 64
    p_edge += i_n * BLOCKS
    reference, b_tile_gate = _query_gates(p_left, p_rest, p_edge, first_row, row, m_row, BM, GATED)
    b_dq = tl.zeros([BM, BD], tl.float32)
    b_by_query = tl.zeros([BM], tl.float32)
    for MASKED in tl.static_range(2):
        begin = edge_below(first_row, BM) if MASKED else first_row // CHUNK * CHUNK
        end = tl.minimum(first_row + BM, T) if MASKED else edge_below(first_row, BM)
        for j in range(begin, end, BN):
            key = j + tl.arange(0, BN)
            m_key = (key < end) | (not MASKED)
            b_k = load_columns(p_k, key, D, channel, m_key, D, BD)
            b_v = load_columns(p_v, key, s_vt, value, m_key, E, BE)
            b_s = mul(b_q, b_k, DTYPE)
            b_ds = (mul(b_do, b_v, DTYPE) + b_delta[:, None]) * (b_s if POWER == 2 else b_s * b_s * b_s)
            if GATED:
                b_step_gate = gates_since(p_left, p_rest, p_edge, key, m_key, reference)
                b_ds *= _faded(b_tile_gate, b_step_gate, 1, MASKED)
            if MASKED:
                b_ds = tl.where(m_key[None, :] & (key[None, :] <= row[:, None]), b_ds, 0.0)
            if GATED:
                b_by_query += tl.sum(b_ds * b_s, 1)
            b_dq = plus(b_dq, b_ds, tl.trans(b_k), DTYPE)
        if GATED and not MASKED:
            b_fade = tl.exp2(b_tile_gate.to(tl.float32))
            b_dq *= b_fade[:, None]
            b_by_query *= b_fade
    b_dq *= POWER * b_inverse[:, None]
    if STATE:
        b_dq += load_rows(p_state_dq + i_head * T * D, row, D, channel, m_row, D, BD)
    b_unit = tl.load(p_unit + i_head * T + row, mask=m_row, other=0.0)
    store_rows(p_dq + i_b * s_xb + i_h * s_xh, row, s_xt, channel, m_row, b_dq * b_unit[:, None], D)
    if GATED:
        tl.store(p_by_query + i_head * T + row, b_by_query * b_inverse, mask=m_row)


@Kernel
@triton.jit
def _key_gradients(
    p_q, p_k, p_v, p_do, p_left, p_rest, p_edge, p_delta, p_inverse, p_unit, p_state_dk, p_state_dv, p_dk, p_dv,
    p_by_key,
    s_v, s_o, s_dk, s_dv, T, CHUNK, TILES, HEADS, GROUP, BLOCKS,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    POWER: tl.constexpr, GATED: tl.constexpr, STATE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    s_vb, s_vt, s_vh = s_v
    s_ob, s_ot, s_oh = s_o
    s_xb, s_xt, s_xh = s_dk
    s_yb, s_yt, s_yh = s_dv
    i_tile, i_n = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    i_b, i_h = i_n // HEADS, i_n % HEADS
    first_key = i_tile * BN
    key, channel, value = first_key + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BE)
    m_key = key < T
    b_k = load_rows(p_k + i_n * T * D, key, D, channel, m_key, D, BD)
    b_v = load_rows(p_v + i_b * s_vb + i_h * s_vh, key, s_vt, value, m_key, E, BE).to(DTYPE)
    p_left += i_n * BLOCKS * 64
    p_rest += i_n * BLOCKS * 64
    p_edge += i_n * BLOCKS
    b_tile_gate = tl.zeros([BN], tl.float64)
    reference = 0.0
    whole = tl.minimum(edge_above(first_key + BN, BN), T)
    if GATED:
        reference = tl.load(p_edge + (whole - 1) // 64)  # at the last key
        b_tile_gate = gates_since(p_left, p_rest, p_edge, key, m_key, reference)
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BE], tl.float32)
    b_by_key = tl.zeros([BN], tl.float32)
    for MASKED in tl.static_range(2):  # queries after the tile, then those in it
        begin = first_key if MASKED else whole
        end = whole if MASKED else tl.minimum(first_key // CHUNK * CHUNK + CHUNK, T)
        for g in range(GROUP):
            i_head = i_n * GROUP + g
            p_qg, p_og = p_q + i_head * T * D, p_do + i_b * s_ob + (i_h * GROUP + g) * s_oh
            for i in range(begin, end, BM):
                row = i + tl.arange(0, BM)
                m_row = row < end
                b_q = load_columns(p_qg, row, D, channel, m_row, D, BD)
                b_do = load_rows(p_og, row, s_ot, value, m_row, E, BE).to(DTYPE)
                b_delta = tl.load(p_delta + i_head * T + row, mask=m_row, other=0.0)
                b_factor = tl.load(p_inverse + i_head * T + row, mask=m_row, other=0.0)[None, :]
                b_s = mul(b_k, b_q, DTYPE)  # (keys, queries)
                b_x = b_s if POWER == 2 else b_s * b_s * b_s
                if GATED:
                    b_step_gate = gates_since(p_left, p_rest, p_edge, row, m_row, reference)
                    b_factor *= _faded(b_tile_gate, b_step_gate, -1, MASKED)
                b_x *= b_factor
                if MASKED:
                    b_x = tl.where(key[:, None] <= row[None, :], b_x, 0.0)
                b_dv = plus(b_dv, b_x * b_s, b_do, DTYPE)
                b_x *= mul(b_v, tl.trans(b_do), DTYPE) + b_delta[None, :]
                if GATED:
                    b_by_key += tl.sum(b_x * b_s, 1)
                b_dk = plus(b_dk, b_x, tl.trans(b_q), DTYPE)
        if GATED and not MASKED:
            b_fade = tl.exp2(-b_tile_gate.to(tl.float32))
            b_dk *= b_fade[:, None]
            b_dv *= b_fade[:, None]
            b_by_key *= b_fade
    b_dk *= POWER
    if STATE:
        b_dk += load_rows(p_state_dk + i_n * T * D, key, D, channel, m_key, D, BD)
        b_dv += load_rows(p_state_dv + i_n * T * E, key, E, value, m_key, E, BE)
    b_dk *= tl.load(p_unit + i_n)
    store_rows(p_dk + i_b * s_xb + i_h * s_xh, key, s_xt, channel, m_key, b_dk, D)
    store_rows(p_dv + i_b * s_yb + i_h * s_yh, key, s_yt, value, m_key, b_dv, E)
    if GATED:
        tl.store(p_by_key + i_n * T + key, b_by_key, mask=m_key)


def _launch(
    kernel: Any, which: str, chunks: Chunks, q: Tensor, v: Tensor, p: int, sums: Sums | None, state: bool,
    *arguments: Any,
) -> None:  # fmt: skip
    """Launches a kernel with one program per tile of keys (`which` = "keys") or of queries."""
    tiling = tiling_for(which, max(q.shape[2], v.shape[3]), q)
    tile, tiles = chunks.tiles(tiling)
    of_keys = which == "keys"
    kernel[(tiles * (chunks.key_heads if of_keys else chunks.query_heads),)](
        *arguments, chunks.length, chunks.size, tiles, chunks.heads, chunks.group,
        1 if sums is None else sums.edge.shape[-1],
        D=q.shape[2], E=v.shape[3], BD=padded(q.shape[2]), BE=padded(v.shape[3]),
        BM=tiling.step if of_keys else tile, BN=tile if of_keys else tiling.step, POWER=p, GATED=sums is not None,
        STATE=state, DTYPE=DTYPES[q.dtype], **tiling.options,
    )  # fmt: skip


def _gates(sums: Sums | None, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (q, q, q) if sums is None else sums


def attend_within(
    chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, sums: Sums | None, p: int, before: tuple[Tensor, Tensor] | None,
    out: Tensor,
) -> Tensor:  # fmt: skip
    """Writes out (B, T, H G, E), with what was read from `before` the chunk; returns 1 / sum of weights, (N G, T).

    q (N G, T, D) and k (N, T, D) are normalised; v is (B, T, H, E).
    """
    inverse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    _launch(
        _forward, "forward", chunks, q, v, p, sums, before is not None,
        q, k, v, *_gates(sums, q), *(before or (inverse, inverse)), out, inverse,
        *strides(v, out),
    )  # fmt: skip
    return inverse


def query_gradients_within(
    chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sums: Sums | None, p: int, delta: Tensor,
    inverse: Tensor, unit: Tensor, before: Tensor | None, grad_q: Tensor,
) -> Tensor:  # fmt: skip
    """Writes dq, with its part from `before` the chunk; returns gradients of log-weights summed by query, (N G, T)."""
    by_query = torch.empty_like(inverse)
    _launch(
        _query_gradients, "queries", chunks, q, v, p, sums, before is not None,
        q, k, v, grad, *_gates(sums, q), delta, inverse, unit, inverse if before is None else before, grad_q, by_query,
        *strides(v, grad, grad_q),
    )  # fmt: skip
    return by_query


def key_gradients_within(
    chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sums: Sums | None, p: int, delta: Tensor,
    inverse: Tensor, unit: Tensor, after: tuple[Tensor, Tensor] | None, grad_k: Tensor, grad_v: Tensor,
) -> Tensor:  # fmt: skip
    """Writes dk, dv, with their part from `after` the chunk; returns gradients of log-weights summed by key, (N, T)."""
    by_key = torch.empty(k.shape[:2], dtype=torch.float32, device=k.device)
    _launch(
        _key_gradients, "keys", chunks, q, v, p, sums, after is not None,
        q, k, v, grad, *_gates(sums, q), delta, inverse, unit, *(after or (inverse, inverse)), grad_k, grad_v, by_key,
        *strides(v, grad, grad_k, grad_v),
    )  # fmt: skip
    return by_key

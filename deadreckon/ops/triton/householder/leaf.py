"""The leaves of the route tree: 64 tokens, all Householder routes inside them at once, forward and backward.

With W the leaf's directions, B = diag(β), rows for tokens, M = I + strictLower(B W Wᵀ) and J = M⁻¹ B,

    A = lower(Q Wᵀ)      C = strictLower(W Kᵀ)      logits = Q Kᵀ − A J C
    Q̃ = Q − A J W        queries, carried back to the leaf's start
    K̃ = K − Cᵀ Jᵀ W      keys, carried on to the leaf's end
    P = I − Wᵀ Jᵀ W      the whole leaf, first step leftmost

M is inverted by substitution in blocks of 16 and then block by block, never through its powers, which would grow. What
goes into P is computed in (nearly) float32 precision even for 16-bit inputs, by splitting factors into a high and a low
part: routes cross many leaves. All else is as precise as the inputs.

Backward, with dZ the gradient of the logits and U = dQ̃ Wᵀ + dZ Cᵀ,

    dA = −lower(U Jᵀ)    dJ = −(Aᵀ U + W dK̃ᵀ Cᵀ + W dPᵀ Wᵀ)    dC = −strictLower((A J)ᵀ dZ + Jᵀ W dK̃ᵀ)
    dM = −strictLower(M⁻ᵀ dJ Jᵀ)    dβ = rows of (dM ∘ W Wᵀ) + columns of (M⁻¹ ∘ dJ)
    dQ = dQ̃ + dA W + dZ K    dK = dK̃ + dZᵀ Q + dCᵀ W
    dW = dAᵀ Q + dC K − (A J)ᵀ dQ̃ − J C dK̃ − J W dP − Jᵀ W dPᵀ + (B dM + (B dM)ᵀ) W

Sums over the queries of a group are taken inside a program: there is one program per leaf and key head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.triton.gated.launch import Documents, Sums
from deadreckon.ops.triton.householder.frames import Back, Frames, Place
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import (
    DTYPES,
    LOG2E,
    ceil_div,
    load_rows,
    mul,
    mul_exact,
    padded,
    poison_of,
    roomy,
    store_rows,
    store_tile,
    strides,
    zeroed,
)


@triton.jit
def unit_lower_inverse(b_l, DTYPE: tl.constexpr):
    """(I + L)⁻¹ of a strictly lower L (64, 64), float32."""
    i_block, i_row = tl.arange(0, 4), tl.arange(0, 16)
    on_diagonal = (i_block[:, None] == i_block[None, :])[:, None, :, None]
    b_diagonal = tl.sum(tl.where(on_diagonal, tl.reshape(b_l, (4, 16, 4, 16)), 0.0), 2)  # (4, 16, 16)
    b_x = tl.where(i_row[:, None] == i_row[None, :], 1.0, 0.0)[None, :, :] + tl.zeros([4, 16, 16], tl.float32)
    for j in range(15):
        b_column = tl.sum(tl.where((i_row == j)[None, None, :], b_diagonal, 0.0), 2)
        b_done = tl.sum(tl.where((i_row == j)[None, :, None], b_x, 0.0), 1)
        b_x -= b_column[:, :, None] * b_done[:, None, :]
    b_inverse = tl.reshape(tl.where(on_diagonal, b_x[:, :, None, :], 0.0), (64, 64))
    token = tl.arange(0, 64)
    for size in tl.static_range(16, 33, 16):
        i_half = token // size
        below = (i_half[:, None] == i_half[None, :] + 1) & (i_half % 2 == 1)[:, None]
        b_below = tl.where(below, b_l, 0.0)
        b_inverse -= mul_exact(mul_exact(b_inverse, b_below, DTYPE), b_inverse, DTYPE)
    return b_inverse


@triton.jit
def _between(b_left, b_rest):
    """Sums of log gates from each token of a leaf (columns) to each (rows)."""
    return (b_left[None, :] - b_left[:, None]) + (b_rest[None, :] - b_rest[:, None])


@triton.jit
def _leaf(p_start, first, LEAVES, HEADS, PACKED: tl.constexpr):
    """This program's leaf, head (of those taken; row of the batch, key head), rows and tokens; three (64, 64) masks.

    Heads go first: those of a token lie side by side in memory.
    """
    taken = tl.num_programs(0) // LEAVES
    i_leaf, i_n = tl.program_id(0) // taken, (tl.program_id(0) % taken).to(tl.int64)
    i_row = tl.arange(0, 64)
    token = i_leaf.to(tl.int64) * 64 + i_row
    lower = i_row[:, None] >= i_row[None, :]
    strict = i_row[:, None] > i_row[None, :]
    visible = lower
    if PACKED:  # routes into another document are computed with the others, but never used
        visible = lower & (tl.load(p_start + token)[:, None] <= token[None, :])
    return i_leaf, i_n, (i_n + first) // HEADS, (i_n + first) % HEADS, i_row, token, lower, strict, visible


@Kernel
@triton.jit(do_not_specialize=["s_bb", "s_bt", "first", "T", "LEAVES", "HEADS", "GATES"])
def _leaf_forward(
    p_q, p_k, p_v, p_w, p_beta, p_left, p_rest, p_start, p_end, p_frame_q, p_frame_k, p_values, p_products,
    p_products_rest, p_inverse, p_out, p_lse, scale2, s_q, s_k, s_v, s_w, s_bb, s_bt, s_bh, s_fq, s_fk, s_fv, s_fo,
    s_fl, first, T, LEAVES, HEADS, GROUP, GATES,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, DTYPE: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, FRAMES: tl.constexpr, KEEP: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    s_qb, s_qt, s_qh = s_q
    s_kb, s_kt, s_kh = s_k
    s_vb, s_vt, s_vh = s_v
    s_wb, s_wt, s_wh = s_w
    i_leaf, i_n, i_b, i_h, i_row, token, lower, strict, visible = _leaf(p_start, first, LEAVES, HEADS, PACKED)
    m_token = token < T
    channel, value_channel = tl.arange(0, BD), tl.arange(0, BE)
    b_w = load_rows(p_w + i_b * s_wb + i_h * s_wh, token, s_wt, channel, m_token, D, BD)
    b_k = load_rows(p_k + i_b * s_kb + i_h * s_kh, token, s_kt, channel, m_token, D, BD)
    b_beta = tl.load(p_beta + i_b * s_bb + i_h * s_bh + token * s_bt, mask=m_token, other=0.0).to(tl.float32)
    b_v = load_rows(p_v + i_b * s_vb + i_h * s_vh, token, s_vt, value_channel, m_token, E, BE)
    # A token that is not finite counts as zeros, but its key is NaN to all that see it: later queries of its document.
    b_poison = poison_of(b_k) + poison_of(b_v) + tl.sum(b_w.to(tl.float32) * b_w.to(tl.float32), 1) * b_beta * 0
    b_w, b_k, b_v = zeroed(b_w, b_poison), zeroed(b_k, b_poison), zeroed(b_v, b_poison)
    b_beta = tl.where(b_poison == 0, b_beta, 0.0)
    b_ww = mul_exact(b_w, tl.trans(b_w), DTYPE)
    b_inverse = unit_lower_inverse(tl.where(strict, b_beta[:, None] * b_ww, 0.0), DTYPE)
    if KEEP:
        p_inverse += (i_n * LEAVES + i_leaf) * 4096
        if ACROSS:  # Triton 3.7 fails to compile the other way before Hopper, where heads have 128 channels
            tl.store(p_inverse + i_row[:, None] + i_row[None, :] * 64, tl.trans(b_inverse.to(DTYPE)))
        else:
            tl.store(p_inverse + i_row[:, None] * 64 + i_row[None, :], b_inverse.to(DTYPE))
    b_j = b_inverse * b_beta[None, :]
    if FRAMES:
        i_product = (i_n * LEAVES + i_leaf) * D * D
        for part in tl.static_range(BD // 64):  # 64 rows of P at a time: more would not fit in registers
            i_p = part * 64 + i_row
            b_part = zeroed(load_rows(p_w + i_b * s_wb + i_h * s_wh, token, s_wt, i_p, m_token, D, BD), b_poison)
            b_x = mul_exact(b_j, b_part, DTYPE)  # J W
            b_p = tl.where(i_p[:, None] == channel[None, :], 1.0, 0.0) - mul_exact(tl.trans(b_x), b_w, DTYPE)
            store_rows(p_products + i_product, i_p, D, channel, i_p < D, b_p, D)
            if tl.float32 != DTYPE:
                store_rows(p_products_rest + i_product, i_p, D, channel, i_p < D, b_p - b_p.to(DTYPE).to(tl.float32), D)
        if BD > 64:
            b_x = mul_exact(b_j, b_w, DTYPE)
        b_x = b_x.to(DTYPE)
    b_w = b_w.to(DTYPE)
    b_j = b_j.to(DTYPE)
    b_y = mul(b_j, tl.where(strict, mul(b_w, tl.trans(b_k), DTYPE), 0.0), DTYPE).to(DTYPE)
    if FRAMES:
        store_tile(p_values + i_n * s_fv, token, E, b_v, E, BE)
        b_frame = b_k.to(tl.float32) - mul(tl.trans(b_y), b_w, DTYPE) + b_poison[:, None]
        store_tile(p_frame_k + i_n * s_fk, token, D, b_frame, D, BD)
    for g in range(GROUP):
        i_hq = i_h * GROUP + g
        b_q = load_rows(p_q + i_b * s_qb + i_hq * s_qh, token, s_qt, channel, m_token, D, BD)
        b_a = tl.where(lower, mul(b_q, tl.trans(b_w), DTYPE), 0.0).to(DTYPE)
        if FRAMES:
            b_frame = b_q.to(tl.float32) - mul(b_a, b_x, DTYPE)
            store_tile(p_frame_q + i_n * s_fq + g * D, token, GROUP * D, b_frame, D, BD)
        b_s = (mul(b_q, tl.trans(b_k), DTYPE) - mul(b_a, b_y, DTYPE)) * scale2 + b_poison[None, :]
        if GATED:
            at = (i_b * GATES + i_hq // (HEADS * GROUP // GATES)) * LEAVES * 64 + token
            b_s += tl.where(lower, _between(tl.load(p_left + at), tl.load(p_rest + at)), 0.0)
        at = i_n * s_fl + token * GROUP + g
        b_s = tl.where(visible, b_s, float("-inf"))
        b_max = tl.max(b_s, 1)
        b_e = tl.exp2(b_s - b_max[:, None])
        b_sum = tl.sum(b_e, 1)
        b_o = mul(b_e, b_v, DTYPE) / b_sum[:, None]
        store_tile(p_out + i_n * s_fo + g * E, token, GROUP * E, b_o, E, BE)
        tl.store(p_lse + at, (b_max + tl.log2(b_sum)) * 0.6931471805599453)


@triton.jit
def sum_runs(
    b_total, runs, places, p_end, i_n, i_tile, row, channel, W: tl.constexpr, BW: tl.constexpr, RUNS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Adds what each run has for this tile of 64 tokens, where it lies in the run's left blocks."""
    if PACKED:
        b_end = tl.load(p_end + i_tile * 64 + row)
    for r in tl.static_range(RUNS):
        p_x = runs[r]
        start, count, left, right = places[r]
        start, count, left, right = start // 16, count // 16, left // 16, right // 16
        at = i_tile * 64 - start
        i_pair, at = at // (left + right), at % (left + right)
        inside = (i_tile * 64 >= start) & (i_pair < count) & (at < left) & (row >= 0)
        offset = ((i_n * count + i_pair) * left + at) * W
        if PACKED:  # keys that are seen from the run's right blocks, of which the last run has none
            inside = inside & ((b_end > start + i_pair * (left + right) + left) | (right == 0))
            if tl.max(inside.to(tl.int32), 0) > 0:  # few runs have any
                b_total += load_rows(p_x + offset, row, W, channel, inside, W, BW).to(tl.float32)
        else:  # a mask rather than a branch: the loads of all runs are under way at once
            b_total += load_rows(p_x + offset, row, W, channel, inside, W, BW).to(tl.float32)
    return b_total


@Kernel
@triton.jit(do_not_specialize=["s_bb", "s_bt", "first", "T", "LEAVES", "HEADS", "GATES"])
def _leaf_backward(
    p_q, p_k, p_v, p_w, p_beta, p_left, p_rest, p_start, p_end, p_inverse, p_do, p_delta, p_lse, p_row_shift,
    p_by_query, p_by_key, p_frame_dq, p_frame_dk, p_dp, runs, places, p_dq, p_dk, p_dv, p_dw, p_dbeta, scale, scale2,
    s_q, s_k, s_v, s_w, s_bb, s_bt, s_bh, s_fq, s_fk, s_fo, s_fl, first, T, LEAVES, HEADS, GROUP, GATES,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, DTYPE: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, FRAMES: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    s_qb, s_qt, s_qh = s_q
    s_kb, s_kt, s_kh = s_k
    s_vb, s_vt, s_vh = s_v
    s_wb, s_wt, s_wh = s_w
    i_leaf, i_n, i_b, i_h, i_row, token, lower, strict, visible = _leaf(p_start, first, LEAVES, HEADS, PACKED)
    m_token = token < T
    channel, value_channel = tl.arange(0, BD), tl.arange(0, BE)
    m_to = m_token[:, None] & (channel < D)[None, :]
    square = i_row[:, None] * 64 + i_row[None, :]
    b_dv = sum_runs(
        tl.zeros([64, BE], tl.float32), runs, places, p_end, i_n, i_leaf, i_row, value_channel, E, BE, RUNS, PACKED
    )
    b_w = load_rows(p_w + i_b * s_wb + i_h * s_wh, token, s_wt, channel, m_token, D, BD).to(DTYPE)
    b_k = load_rows(p_k + i_b * s_kb + i_h * s_kh, token, s_kt, channel, m_token, D, BD)
    b_beta = tl.load(p_beta + i_b * s_bb + i_h * s_bh + token * s_bt, mask=m_token, other=0.0).to(tl.float32)
    p_inverse += (i_n * LEAVES + i_leaf) * 4096
    b_j = (tl.load(p_inverse + square).to(tl.float32) * b_beta[None, :]).to(DTYPE)
    b_c = tl.where(strict, mul(b_w, tl.trans(b_k), DTYPE), 0.0).to(DTYPE)
    b_dj = tl.zeros([64, 64], tl.float32)  # −dJ and −dC
    b_dc = tl.zeros([64, 64], tl.float32)
    b_dk = tl.zeros([64, BD], tl.float32)
    b_dw = tl.zeros([64, BD], tl.float32)
    for g in range(GROUP):
        b_q = load_rows(p_q + i_b * s_qb + (i_h * GROUP + g) * s_qh, token, s_qt, channel, m_token, D, BD)
        b_a = tl.where(lower, mul(b_q, tl.trans(b_w), DTYPE), 0.0).to(DTYPE)
        b_aj = mul(b_a, b_j, DTYPE).to(DTYPE)
        if tl.float32 == DTYPE:  # reloaded, or its parts would stay in shared memory, of which there is too little
            b_k = load_rows(p_k + i_b * s_kb + i_h * s_kh, token, s_kt, channel, m_token, D, BD)
        b_s = (mul(b_q, tl.trans(b_k), DTYPE) - mul(b_aj, b_c, DTYPE)) * scale2
        at = i_n * s_fl + token * GROUP + g
        if GATED:
            at_gate = (i_b * GATES + (i_h * GROUP + g) // (HEADS * GROUP // GATES)) * LEAVES * 64 + token
            b_s += _between(tl.load(p_left + at_gate), tl.load(p_rest + at_gate))
        b_lse = tl.load(p_lse + at) * 1.4426950408889634
        b_e = tl.where(visible, tl.exp2(b_s - b_lse[:, None]), 0.0)
        b_do = load_rows(p_do + i_n * s_fo + g * E, token, GROUP * E, value_channel, m_token, E, BE)
        b_dv += mul(tl.trans(b_e.to(DTYPE)), b_do, DTYPE)
        b_v = load_rows(p_v + i_b * s_vb + i_h * s_vh, token, s_vt, value_channel, m_token, E, BE)
        b_dz = b_e * (mul(b_do, tl.trans(b_v), DTYPE) - tl.load(p_delta + at)[:, None])
        if GATED:
            tl.store(p_by_query + at, tl.load(p_by_query + at) + tl.sum(b_dz, 1))
            tl.store(p_by_key + at, tl.load(p_by_key + at) + tl.sum(b_dz, 0))
        b_dz = (b_dz * scale).to(DTYPE)
        b_dk += mul(tl.trans(b_dz), b_q, DTYPE)
        b_dc += mul(tl.trans(b_aj), b_dz, DTYPE)
        b_u = mul(b_dz, tl.trans(b_c), DTYPE)
        b_dq = mul(b_dz, b_k, DTYPE)
        if FRAMES:
            b_frame = load_rows(p_frame_dq + i_n * s_fq + g * D, token, GROUP * D, channel, m_token, D, BD)
            b_u += mul(b_frame, tl.trans(b_w), DTYPE)
            b_dq += b_frame.to(tl.float32)
            b_dw -= mul(tl.trans(b_aj), b_frame, DTYPE)
        b_u = b_u.to(DTYPE)
        b_da = tl.where(lower, -mul(b_u, tl.trans(b_j), DTYPE), 0.0).to(DTYPE)
        b_dq += mul(b_da, b_w, DTYPE)
        p_row = p_dq + ((i_b * T * HEADS + i_h) * GROUP + g) * D + token[:, None] * (HEADS * GROUP * D)
        tl.store(p_row + channel[None, :], b_dq.to(p_dq.dtype.element_ty), mask=m_to)
        b_dw += mul(tl.trans(b_da), b_q, DTYPE)
        b_dj += mul(tl.trans(b_a), b_u, DTYPE)
    p_dv += (i_b * T * HEADS + i_h) * E
    m_dv = m_token[:, None] & (value_channel < E)[None, :]
    tl.store(p_dv + token[:, None] * (HEADS * E) + value_channel[None, :], b_dv.to(p_dv.dtype.element_ty), mask=m_dv)
    if FRAMES:
        b_frame = load_rows(p_frame_dk + i_n * s_fk, token, D, channel, m_token, D, BD)
        b_dk += b_frame.to(tl.float32)
        b_h = mul(b_frame, tl.trans(b_w), DTYPE).to(DTYPE)  # dK̃ Wᵀ
        b_dj += mul(tl.trans(b_h), tl.trans(b_c), DTYPE)
        b_dc += mul(tl.trans(b_j), tl.trans(b_h), DTYPE)
    b_dc = tl.where(strict, -b_dc, 0.0).to(DTYPE)
    b_dk += mul(tl.trans(b_dc), b_w, DTYPE)
    p_dk += (i_b * T * HEADS + i_h) * D
    tl.store(p_dk + token[:, None] * (HEADS * D) + channel[None, :], b_dk.to(p_dk.dtype.element_ty), mask=m_to)
    b_dw += mul(b_dc, b_k, DTYPE)
    if FRAMES:
        m_p = (channel < D)[:, None] & (channel < D)[None, :]
        p_dp += (i_n * LEAVES + i_leaf) * D * D + channel[:, None] * D + channel[None, :]
        b_dp = tl.load(p_dp, mask=m_p, other=0.0).to(DTYPE)
        b_through = mul(b_c, b_frame, DTYPE) + mul(b_w, b_dp, DTYPE)
        b_dw -= mul(b_j, b_through, DTYPE)
        b_through = mul(b_w, tl.trans(b_dp), DTYPE).to(DTYPE)
        b_dw -= mul(tl.trans(b_j), b_through, DTYPE)
        b_dj += mul(b_through, tl.trans(b_w), DTYPE)
    # M receives −M⁻ᵀ dJ Jᵀ.
    b_inverse = tl.load(p_inverse + square)
    b_dm = tl.where(strict, mul(mul(tl.trans(b_inverse), b_dj, DTYPE), tl.trans(b_j), DTYPE), 0.0)
    b_dbeta = tl.sum(b_dm * mul(b_w, tl.trans(b_w), DTYPE), 1) - tl.sum(b_inverse.to(tl.float32) * b_dj, 0)
    p_dbeta += i_b * T * HEADS + i_h + token * HEADS
    tl.store(p_dbeta, b_dbeta.to(p_dbeta.dtype.element_ty), mask=m_token)
    b_dm = (b_dm * b_beta[:, None]).to(DTYPE)
    b_dw += mul(b_dm, b_w, DTYPE) + mul(tl.trans(b_dm), b_w, DTYPE)
    p_dw += (i_b * T * HEADS + i_h) * D
    tl.store(p_dw + token[:, None] * (HEADS * D) + channel[None, :], b_dw.to(p_dw.dtype.element_ty), mask=m_to)


def in_fours(parts: list[tuple[Any, Place]]) -> tuple[tuple[Any, ...], tuple[Place, ...]]:
    """Tensors of runs and their places, padded with empty runs to a multiple of four; numbers n of places as 16 n + 8.

    So few kernels are compiled: Triton specialises on each number in a tuple that is 1 or a multiple of 16.
    """
    parts = parts + [(x, (0, 0, 1, 1)) for x, _ in parts[:1] * (-len(parts) % 4)]
    return tuple(x for x, _ in parts), tuple(tuple(16 * n + 8 for n in place) for _, place in parts)  # type: ignore[misc]


class Leaves(NamedTuple):
    """The inputs of all leaves of `taken` key heads, from `first` on of all B·H."""

    q: Tensor  # (B, T, Hq, D)
    k: Tensor  # (B, T, H, D)
    v: Tensor  # (B, T, H, E)
    w: Tensor  # (B, T, H, D)
    beta: Tensor  # (B, T, H)
    sums: Sums | None
    documents: Documents | None
    scale: float
    first: int
    taken: int

    @property
    def leaves(self) -> int:
        return ceil_div(self.q.shape[1], LEAF)

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    def _inputs(self) -> tuple[Any, ...]:
        unused = self.beta, self.beta
        sums = unused if self.sums is None else self.sums[:2]
        return self.q, self.k, self.v, self.w, self.beta, *sums, *(self.documents or unused)

    def _strides(self) -> tuple[Any, ...]:
        """Strides of the inputs; those of β as numbers, not a tuple, or kernels would be recompiled for each length."""
        return *strides(self.q, self.k, self.v, self.w), *self.beta.stride()

    def _sizes(self) -> tuple[int, ...]:
        heads = self.k.shape[2]
        gates = 1 if self.sums is None else self.sums.left.shape[1] * heads
        return self.first, self.q.shape[1], self.leaves, heads, self.group, gates

    def _flags(self) -> dict[str, Any]:
        width, value_width = self.q.shape[3], self.v.shape[3]
        return {
            "D": width, "E": value_width, "BD": padded(width), "BE": padded(value_width),
            "DTYPE": DTYPES[self.q.dtype], "GATED": self.sums is not None,
            "PACKED": self.documents is not None,
        }  # fmt: skip

    def forward(self, frames: Frames | None, inverse: Tensor | None, out: Tensor, lse: Tensor) -> None:
        """Writes frames, outputs (n, T, G, E) and their log-sum-exp (n, T, G), and inverses if they are kept."""
        unused = self.q
        into = (unused,) * 5 if frames is None else (*frames[:4], unused if frames.rest is None else frames.rest)
        steps = (0, 0, 0) if frames is None else tuple(x.stride(0) for x in frames[:3])
        _leaf_forward[(self.taken * self.leaves,)](
            *self._inputs(), *into, unused if inverse is None else inverse, out, lse, self.scale * LOG2E,
            *self._strides(), *steps, out.stride(0), lse.stride(0), *self._sizes(), **self._flags(),
            FRAMES=frames is not None, KEEP=inverse is not None, ACROSS=not roomy(self.q), num_warps=4, num_stages=1,
            **_registers(self.q),
        )  # fmt: skip

    def backward(
        self, inverse: Tensor, back: Back, grad_q: Tensor | None, grad_k: Tensor | None, grad_products: Tensor | None,
        parts: list[tuple[Tensor, Place]], gradients: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """Writes dq, dk, dv, dw, dbeta (`gradients`) from the gradients of outputs, frames and products.

        parts: dv of runs, which add up to dv with that of the leaves.
        """
        runs, places = in_fours(parts)
        _leaf_backward[(self.taken * self.leaves,)](
            *self._inputs(), inverse, *back, grad_q, grad_k, grad_products, runs, places, *gradients,
            self.scale, self.scale * LOG2E, *self._strides(), 0 if grad_q is None else grad_q.stride(0),
            0 if grad_k is None else grad_k.stride(0), back.grad.stride(0), back.delta.stride(0), *self._sizes(),
            **self._flags(), FRAMES=grad_q is not None, RUNS=len(runs), num_warps=4, num_stages=1,
        )  # fmt: skip


def _registers(q: Tensor) -> dict[str, int]:
    """A limit on registers, where a third program on a multiprocessor is worth more than the registers."""
    return {"maxnreg": 168} if q.is_cuda and q.element_size() == 2 and q.shape[3] <= 64 else {}

"""Causal stick-breaking attention, forward and backward.

    A_ij = σ(z_ij) Π_{j<s<i} (1 − σ(z_is)),  z_ij = scale · q_i·k_j,  j < i;      o_i = Σ_j A_ij v_j

With e = exp z the steps are 1 − σ = 1/(1 + e), and what is left of a row's stick is their product, kept as such: no
logarithm. Keys come from near to far. In a tile, a key needs the product of the steps of all nearer keys. A thread
holds a quarter of the columns of each of its rows, and *which* keys stand in them is ours to choose: sixteen neighbours
(of 64), so that most products are of registers, and one division serves four keys. What is left only falls. Below
2^-29, a thirtieth of float32's precision, a row is done (`left` becomes 0), and groups of tiles with nothing left are
skipped; an e above 2^30 is taken for 2^30, which breaks the stick all the same.

Backward, with g_ij = do_i·v_j and m_ij = A_ij g_ij,  dz_ij = m_ij − σ(z_ij) Σ_{s≤j} m_is.  The sum over farther keys
is do_i·o_i less that over nearer ones, so this too runs from near to far, and nothing is restored by division. But the
two must be sums of the same numbers: the weights are rounded in m as they were in o, and o is kept to twice the working
precision, by a second tensor with what rounding took. What error remains is multiplied with Σ_j σ_ij, which is about 20
when a row is done, whatever T.

dq runs along keys; dk and dv along queries, for each tile of keys from what is left of the rows, and what they still
owe, at the tile's near edge. dq's kernel writes these two numbers. To keep memory linear in T it does so for one strip
of keys, whose dk and dv follow at once, then for the next strip down, going on from where the rows were. No atomics.
"""

# Signatures of kernels have names of tiles in capitals and no types.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.tiles import ceil_div, power_of_two

LOG2E = 1.4426950408889634
STRIP = 2048  # keys, if there are eight heads or more; a query and head keeps 8 bytes for each tile of a strip
WIDEST = 256
INTERPRETED = bool(triton.knobs.runtime.interpret)


class Tiles(NamedTuple):
    """The shape of a program."""

    own: int  # tokens of its own
    loop: int  # tokens at a time in its loop
    group: int  # tiles between two looks at whether anything is left
    warps: int
    stages: int
    registers: int | None = None  # at most, for each thread

    @property
    def options(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


# By the wider of keys and values, for half and for single precision. A warp holds 16 whole rows of logits; with fewer
# rows than that, warps repeat each other's work. Tiles of "keys" are whole tiles of the loop of "queries". Made for
# Hopper's registers and shared memory.
HALF = {
    "forward": {64: Tiles(128, 64, 8, 8, 3, 128), 128: Tiles(128, 64, 8, 8, 3), 256: Tiles(128, 64, 8, 8, 2)},
    "queries": {64: Tiles(64, 64, 8, 4, 2, 168), 128: Tiles(128, 64, 8, 8, 2), 256: Tiles(128, 32, 16, 8, 2)},
    "keys": {64: Tiles(64, 64, 8, 4, 2), 128: Tiles(64, 128, 4, 8, 2), 256: Tiles(32, 32, 16, 4, 1)},
}
SINGLE = {
    "forward": {64: Tiles(128, 64, 8, 8, 2), 128: Tiles(128, 32, 16, 8, 2), 256: Tiles(64, 32, 16, 4, 1)},
    "queries": {64: Tiles(128, 32, 16, 8, 2), 128: Tiles(64, 32, 16, 4, 2), 256: Tiles(16, 32, 16, 4, 1, 255)},
    "keys": {64: Tiles(32, 32, 16, 4, 1), 128: Tiles(32, 32, 16, 8, 1), 256: Tiles(32, 16, 32, 8, 1, 255)},
}


@triton.jit
def _rows(p_x, base, token, s_t, m_token, W: tl.constexpr, BW: tl.constexpr):
    """(tokens, channels) of x, tokens counted from base; within a tile 32 bits are enough (see `_dense`)."""
    channel = tl.arange(0, BW)
    mask = m_token[:, None]
    if W != BW:
        mask = mask & (channel < W)[None, :]
    return tl.load(
        p_x + tl.cast(base, tl.int64) * s_t + (token[:, None] * s_t + channel[None, :]), mask=mask, other=0.0
    )


@triton.jit
def _order(BN: tl.constexpr):
    """The keys of a tile, column by column: a thread holds two of every eight columns, and its keys are neighbours."""
    column = tl.arange(0, BN)
    return BN - 1 - (column // 2 % 4 * (BN // 4) + column // 8 * 2 + column % 2)


@triton.jit
def _apart(b_x, BM: tl.constexpr, BN: tl.constexpr):
    """The nearest of each four neighbouring keys, the second, …: (BM, BN) -> four of (4·BM, BN/16). No data moves."""
    b_x = tl.permute(tl.reshape(b_x, (BM, BN // 8, 4, 2)), (0, 2, 1, 3))
    b_even, b_odd = tl.split(tl.reshape(b_x, (BM * 4, BN // 16, 2, 2)))
    b_0, b_2 = tl.split(b_even)
    b_1, b_3 = tl.split(b_odd)
    return b_0, b_1, b_2, b_3


@triton.jit
def _together(b_0, b_1, b_2, b_3, BM: tl.constexpr, BN: tl.constexpr):
    """What `_apart` took apart."""
    b_x = tl.reshape(tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3)), (BM, 4, BN // 8, 2))
    return tl.reshape(tl.permute(b_x, (0, 2, 1, 3)), (BM, BN))


@triton.jit
def _join(b_x, b_y, PRODUCT: tl.constexpr):
    return b_x * b_y if PRODUCT else b_x + b_y


@triton.jit
def _before(b_x, R: tl.constexpr, N: tl.constexpr, PRODUCT: tl.constexpr):
    """Products (sums) of all earlier entries of each row of (R, N), and of all, by halving."""
    if N == 2:
        b_0, b_1 = tl.split(b_x)
        return tl.join(tl.full((R,), 1.0 if PRODUCT else 0.0, tl.float32), b_0), _join(b_0, b_1, PRODUCT)
    else:
        b_0, b_1 = tl.split(tl.reshape(b_x, (R, N // 2, 2)))
        b_y, b_all = _before(_join(b_0, b_1, PRODUCT), R, N // 2, PRODUCT)
        return tl.reshape(tl.join(b_y, _join(b_y, b_0, PRODUCT)), (R, N)), b_all


@triton.jit
def _nearer(b_x, b_start, BM: tl.constexpr, N: tl.constexpr, PRODUCT: tl.constexpr):
    """Products (sums) of b_start (BM,) and all nearer entries of (4·BM, N), and of all; four threads share a row."""
    b_y, b_all = _before(b_x, BM * 4, N, PRODUCT)
    b_all = tl.reshape(b_all, (BM, 2, 2))
    second = tl.arange(0, 2) == 1
    b_first = tl.sum(tl.where(second[None, None, :], 0.0, b_all), 2)  # (BM, 2): a choice, not a sum
    b_pair = _join(b_first, tl.sum(tl.where(second[None, None, :], b_all, 0.0), 2), PRODUCT)
    b_half = _join(b_start, tl.sum(tl.where(second[None, :], 0.0, b_pair), 1), PRODUCT)  # (BM,)
    b_end = _join(b_half, tl.sum(tl.where(second[None, :], b_pair, 0.0), 1), PRODUCT)
    b_from = tl.where(second[None, :], b_half[:, None], b_start[:, None])
    b_from = tl.where(second[None, None, :], _join(b_from, b_first, PRODUCT)[:, :, None], b_from[:, :, None])
    b_y = _join(tl.reshape(b_y, (BM, 2, 2, N)), b_from[:, :, :, None], PRODUCT)
    return tl.reshape(b_y, (BM * 4, N)), b_end


@triton.jit
def _inverse(b_x, FAST: tl.constexpr):
    if FAST:  # a quotient costs four instructions more, for numbers above 2^126
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [b_x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / b_x


@triton.jit
def _rounded(b_x, TYPE: tl.constexpr, FAST: tl.constexpr):
    """b_x as it would be after storing it in TYPE."""
    if FAST and tl.bfloat16 == TYPE:  # in pairs, or conversions take as long as exponentials
        return tl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }",
            "=r,=r,r,r", [b_x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    elif FAST and tl.float16 == TYPE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.f32 pair, $3, $2; mov.b32 {low, high}, pair;"
            " cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=r,=r,r,r", [b_x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return b_x.to(TYPE).to(tl.float32)


@triton.jit
def _break(b_z, b_left, visible, MASKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FAST: tl.constexpr):
    """Weights (BM, BN), σ in four parts, and what is left, from logits / log 2 and what was left before."""
    b_e = tl.exp2(tl.minimum(b_z, 30.0, propagate_nan=tl.PropagateNan.ALL))
    if MASKED:
        b_e = tl.where(visible, b_e, 0.0)
    b_e0, b_e1, b_e2, b_e3 = _apart(b_e, BM, BN)
    b_near, b_far = (1.0 + b_e0) * (1.0 + b_e1), (1.0 + b_e2) * (1.0 + b_e3)
    b_step = _inverse(b_near * b_far, FAST)  # at least 2^-120
    b_stick, b_left = _nearer(b_step, b_left, BM, BN // 16, True)
    b_left = tl.where(b_left > 1.862645149230957e-09, b_left, 0.0)  # 2^-29
    b_in_near, b_in_far = b_step * b_far, b_step * b_near
    b_0, b_1 = b_e0 * (1.0 + b_e1), b_e1
    b_2, b_3 = b_e2 * (1.0 + b_e3), b_e3
    b_to_near, b_to_far = b_in_near * b_stick, b_step * b_stick
    b_w = _together(b_0 * b_to_near, b_1 * b_to_near, b_2 * b_to_far, b_3 * b_to_far, BM, BN)
    b_s1, b_s3 = b_e1 * (1.0 + b_e0), b_e3 * (1.0 + b_e2)
    return b_w, b_0 * b_in_near, b_s1 * b_in_near, b_2 * b_in_far, b_s3 * b_in_far, b_left


@triton.jit
def _grad_logits(b_w, b_g, b_s0, b_s1, b_s2, b_s3, b_debt, b_left, BM: tl.constexpr, BN: tl.constexpr):
    """dz (BM, BN) from weights, their gradients and σ, and the new debt: minus the sum of m over keys still to come."""
    b_m0, b_m1, b_m2, b_m3 = _apart(b_w * b_g, BM, BN)
    b_near = b_m0 + b_m1
    b_debt0, b_debt = _nearer(b_near + (b_m2 + b_m3), b_debt, BM, BN // 16, False)
    b_debt2 = b_debt0 + b_near
    b_dz0, b_dz1 = b_m0 + b_s0 * b_debt0, b_m1 + b_s1 * (b_debt0 + b_m0)
    b_dz2, b_dz3 = b_m2 + b_s2 * b_debt2, b_m3 + b_s3 * (b_debt2 + b_m2)
    return _together(b_dz0, b_dz1, b_dz2, b_dz3, BM, BN), tl.where(b_left > 0, b_debt, 0.0)


@triton.jit
def _forward_along(
    b_acc, b_left, b_q, p_k, p_v, scale2, s_kt, s_vt, end, count, row, T,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """`count` tiles of keys, down from tile `end`."""
    order = _order(BN)
    for i in range(0, count):
        base = (end - 1 - i) * BN
        key = base + order
        m_key = (key < T) | (not MASKED)
        b_k = _rows(p_k, base, order, s_kt, m_key, D, BD)
        b_z = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale2
        b_v = _rows(p_v, base, order, s_vt, m_key, E, BE)
        b_w, _, _, _, _, b_left = _break(b_z, b_left, key[None, :] < row[:, None], MASKED, BM, BN, FAST)
        b_acc = tl.dot(b_w.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_left


@triton.jit(do_not_specialize=["T", "HEADS", "SHARE"])
def _forward(
    p_q, p_k, p_v, p_o, p_rest, scale2, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, T, HEADS, SHARE,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, REST: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T, BM)
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    base = (tiles - 1 - tl.program_id(0) % tiles) * BM  # long rows first
    row = base + tl.arange(0, BM)
    m_row = row < T
    p_k += i_b * s_kb + i_h // SHARE * s_kh
    p_v += i_b * s_vb + i_h // SHARE * s_vh
    b_q = _rows(p_q + i_b * s_qb + i_h * s_qh, base, tl.arange(0, BM), s_qt, m_row, D, BD)
    b_acc = tl.zeros((BM, BE), tl.float32)
    b_left = tl.where(m_row, 1.0, 0.0)
    whole = base // BN  # tiles that every row sees
    end = tl.cdiv(tl.minimum(base + BM, T) - 1, BN)
    b_acc, b_left = _forward_along(
        b_acc, b_left, b_q, p_k, p_v, scale2, s_kt, s_vt, end, end - whole, row, T,
        D, E, BD, BE, BM, BN, True, PRECISION, FAST,
    )  # fmt: skip
    for i in range(0, tl.cdiv(whole, GROUP)):
        end = whole - i * GROUP
        count = tl.where(tl.max(b_left, 0) > 0, tl.minimum(end, GROUP), 0)
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


@triton.jit
def _query_gradients_along(
    b_dq, b_left, b_debt, b_q, b_do, p_k, p_v, p_lefts, p_debts, scale2, s_kt, s_vt, end, count, first, row, T,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RATIO: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """`count` tiles of keys, down from tile `end`; RATIO of them share a state, `first` is the strip's first state."""
    order = _order(BN)
    for i in range(0, count):
        tile = end - 1 - i
        key = tile * BN + order
        m_key = (key < T) | (not MASKED)
        b_k = _rows(p_k, tile * BN, order, s_kt, m_key, D, BD)
        b_v = _rows(p_v, tile * BN, order, s_vt, m_key, E, BE)
        m_state = (row < T) & (tile % RATIO == RATIO - 1)
        state = (tile // RATIO - first).to(tl.int64) * T + row
        tl.store(p_lefts + state, b_left, mask=m_state)
        tl.store(p_debts + state, b_debt, mask=m_state)
        b_z = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale2
        b_g = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        visible = key[None, :] < row[:, None]
        b_w, b_s0, b_s1, b_s2, b_s3, b_left = _break(b_z, b_left, visible, MASKED, BM, BN, FAST)
        b_w = _rounded(b_w, b_v.dtype, FAST)
        b_dz, b_debt = _grad_logits(b_w, b_g, b_s0, b_s1, b_s2, b_s3, b_debt, b_left, BM, BN)
        b_dq = tl.dot(b_dz.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    return b_dq, b_left, b_debt


@triton.jit(do_not_specialize=["begin", "stop", "T", "STATES", "HEADS", "SHARE"])
def _query_gradients(
    p_q, p_k, p_v, p_o, p_rest, p_do, p_dq, p_sum, p_left, p_debt, p_lefts, p_debts, scale, scale2,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, begin, stop, T, STATES, HEADS, SHARE,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RATIO: tl.constexpr, GROUP: tl.constexpr, REST: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """dq from the keys of one strip, begin to stop, for rows at and after it; states of its tiles."""
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
    p_k += i_b * s_kb + i_h // SHARE * s_kh
    p_v += i_b * s_vb + i_h // SHARE * s_vh
    p_left += i_bh * T + row
    p_debt += i_bh * T + row
    p_lefts += i_bh * STATES * T
    p_debts += i_bh * STATES * T
    b_q = _rows(p_q + i_b * s_qb + i_h * s_qh, base, tl.arange(0, BM), s_qt, m_row, D, BD)
    b_do = _rows(p_do + i_b * s_ob + i_h * s_oh, base, tl.arange(0, BM), s_ot, m_row, E, BE)
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
    for i in range(0, tl.cdiv(whole - first * RATIO, GROUP)):
        end = whole - i * GROUP
        count = tl.minimum(end - first * RATIO, GROUP)
        alive = tl.where(tl.max(b_left, 0) > 0, count, 0)
        b_dq, b_left, b_debt = _query_gradients_along(
            b_dq, b_left, b_debt, b_q, b_do, p_k, p_v, p_lefts, p_debts, scale2, s_kt, s_vt,
            end, alive, first, row, T, D, E, BD, BE, BM, BN, RATIO, False, PRECISION, FAST,
        )  # fmt: skip
        for j in range(alive, count):  # dk and dv look at `lefts` alone to see that nothing is left
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
        b_q = _rows(p_q, i * BM, step, s_qt, m_row, D, BD)
        b_do = _rows(p_do, i * BM, step, s_ot, m_row, E, BE)
        m_state = m_row & ((row > first) | (not MASKED))  # rows that see none of these keys have stored no state
        b_left = tl.load(p_lefts + row, mask=m_state, other=0.0)
        b_debt = tl.load(p_debts + row, mask=m_state, other=0.0)
        b_debt = tl.where(b_left > 0, b_debt, 0.0)  # nor have all rows with nothing left
        b_z = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale2
        b_g = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        visible = key[None, :] < row[:, None]
        b_w, b_s0, b_s1, b_s2, b_s3, _ = _break(b_z, b_left, visible, MASKED, BM, BN, FAST)
        b_w = _rounded(b_w, b_v.dtype, FAST)
        b_dv = tl.dot(tl.trans(b_w.to(b_v.dtype)), b_do, b_dv, input_precision=PRECISION)
        b_dz, _ = _grad_logits(b_w, b_g, b_s0, b_s1, b_s2, b_s3, b_debt, b_left, BM, BN)
        b_dk = tl.dot(tl.trans(b_dz.to(b_k.dtype)), b_q, b_dk, input_precision=PRECISION)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["begin", "stop", "T", "STATES", "HEADS", "SHARE"])
def _key_gradients(
    p_q, p_k, p_v, p_do, p_dk, p_dv, p_lefts, p_debts, scale, scale2,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, begin, stop, T, STATES, HEADS, SHARE,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of a strip, from all queries of all heads that share them."""
    tiles = tl.cdiv(stop - begin, BN)
    i_n = tl.program_id(0) % tiles
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    key_heads = HEADS // SHARE
    i_b, i_h = i_bh // key_heads, i_bh % key_heads
    tile = begin // BN + i_n
    key = tile * BN + _order(BN)
    m_key = key < T
    b_k = _rows(p_k + i_b * s_kb + i_h * s_kh, tile * BN, _order(BN), s_kt, m_key, D, BD)
    b_v = _rows(p_v + i_b * s_vb + i_h * s_vh, tile * BN, _order(BN), s_vt, m_key, E, BE)
    b_dk = tl.zeros((BN, BD), tl.float32)
    b_dv = tl.zeros((BN, BE), tl.float32)
    end = tl.cdiv(T, BM)
    whole = tl.minimum(tl.cdiv((tile + 1) * BN, BM), end)  # tiles of queries that see all of these keys
    for i_g in range(0, SHARE):
        i_hq = i_h * SHARE + i_g
        states = ((i_b * HEADS + i_hq) * STATES + i_n) * T
        p_qg, p_dog = p_q + i_b * s_qb + i_hq * s_qh, p_do + i_b * s_ob + i_hq * s_oh
        b_dk, b_dv = _key_gradients_along(
            b_dk, b_dv, b_k, b_v, p_qg, p_dog, p_lefts + states, p_debts + states, scale2, s_qt, s_ot,
            tile * BN // BM, whole, tile * BN, key, T, D, E, BD, BE, BM, BN, True, PRECISION, FAST,
        )  # fmt: skip
        for i in range(0, tl.cdiv(end - whole, GROUP)):
            start = whole + i * GROUP
            row = start * BM + tl.arange(0, GROUP * BM)
            alive = tl.max(tl.load(p_lefts + states + row, mask=row < T, other=0.0), 0) > 0
            b_dk, b_dv = _key_gradients_along(
                b_dk, b_dv, b_k, b_v, p_qg, p_dog, p_lefts + states, p_debts + states, scale2, s_qt, s_ot,
                start, tl.where(alive, tl.minimum(start + GROUP, end), start), tile * BN, key, T,
                D, E, BD, BE, BM, BN, False, PRECISION, FAST,
            )  # fmt: skip
    channel, value_channel = tl.arange(0, BD), tl.arange(0, BE)
    outputs = ((i_b * T + key) * key_heads + i_h)[:, None]
    m_k, m_v = m_key[:, None] & (channel < D)[None, :], m_key[:, None] & (value_channel < E)[None, :]
    tl.store(p_dk + outputs * D + channel[None, :], (b_dk * scale).to(p_dk.dtype.element_ty), mask=m_k)
    tl.store(p_dv + outputs * E + value_channel[None, :], b_dv.to(p_dv.dtype.element_ty), mask=m_v)


def _tiles(which: str, k: Tensor, v: Tensor) -> Tiles:
    width = max(k.shape[3], v.shape[3])
    table = SINGLE if k.dtype == torch.float32 else HALF
    return table[which][64 if width <= 64 else 128 if width <= 128 else WIDEST]


def _strip(heads: int) -> int:
    """Longer strips where few heads would leave the device idle: `heads` of all sequences of a batch."""
    return STRIP * max(1, 8 // heads)


def _widths(k: Tensor, v: Tensor) -> dict[str, int]:
    width, value_width = k.shape[3], v.shape[3]
    return {
        "D": width,
        "E": value_width,
        "BD": max(16, power_of_two(width)),
        "BE": max(16, power_of_two(value_width)),
    }


def _options(k: Tensor, v: Tensor) -> dict[str, int | bool | str]:
    """Widths, and how to multiply and divide."""
    single = k.dtype == torch.float32
    return {
        **_widths(k, v),
        "PRECISION": "tf32x3" if single else "tf32",
        "FAST": not (INTERPRETED or torch.version.hip),
    }


def _rest(dtype: torch.dtype) -> int:
    """What the part of o that rounding took is multiplied with before it is rounded itself; 0: nothing was taken."""
    return {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2048}[dtype]  # float16 has no small numbers


def _dense(x: Tensor) -> Tensor:
    """x, or a copy if its channels lie apart or its tokens so far apart that a tile overruns 32 bits."""
    return x if x.stride(-1) == 1 and x.stride(1) < 2**23 else x.contiguous()


@torch.library.custom_op("deadreckon::stick_breaking_forward", mutates_args=())
def stick_breaking_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output (B, T, Hq, E), and for the backward pass what rounding took from it (nothing in float32)."""
    q, k, v = _dense(q), _dense(k), _dense(v)
    batch, length, heads, _ = q.shape
    out, rest = _forward_outputs(q, v)
    tiles = _tiles("forward", k, v)
    with torch.cuda.device_of(q):
        _forward[(ceil_div(length, tiles.own) * batch * heads,)](
            q, k, v, out, rest, scale * LOG2E, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            length, heads, heads // k.shape[2], **_options(k, v), BM=tiles.own, BN=tiles.loop, GROUP=tiles.group,
            REST=_rest(q.dtype), **tiles.options,
        )  # fmt: skip
    return out, rest


def _forward_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, torch.empty_like(out) if _rest(q.dtype) else q.new_empty(0)


@stick_breaking_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _forward_outputs(q, v)


@torch.library.custom_op("deadreckon::stick_breaking_backward", mutates_args=())
def stick_breaking_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv: strip by strip from the last keys to the first."""
    grad, q, k, v, out = _dense(grad), _dense(q), _dense(k), _dense(v), out.contiguous()
    batch, length, heads, _ = q.shape
    queries, keys = _tiles("queries", k, v), _tiles("keys", k, v)
    strip = _strip(batch * k.shape[2])
    assert strip % queries.own == strip % keys.own == keys.own % queries.loop == 0
    states = ceil_div(min(length, strip), keys.own)
    grads = _backward_outputs(q, k, v)
    left, debt = q.new_empty(2, batch, heads, length, dtype=torch.float32)
    lefts, debts = q.new_empty(2, batch, heads, states, length, dtype=torch.float32)
    total = q.new_empty(q.shape if length > strip else (0,), dtype=torch.float32)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3])
    options = _options(k, v)
    for begin in reversed(range(0, length, strip)):
        stop = min(begin + strip, length)
        sizes = (*strides, begin, stop, length, states, heads, heads // k.shape[2])
        with torch.cuda.device_of(q):
            _query_gradients[(ceil_div(length - begin, queries.own) * batch * heads,)](
                q, k, v, out, rest, grad, grads[0], total, left, debt, lefts, debts, scale, scale * LOG2E, *sizes,
                **options, BM=queries.own, BN=queries.loop, RATIO=keys.own // queries.loop, GROUP=queries.group,
                REST=_rest(q.dtype), **queries.options,
            )  # fmt: skip
            _key_gradients[(ceil_div(stop - begin, keys.own) * batch * k.shape[2],)](
                q, k, v, grad, grads[1], grads[2], lefts, debts, scale, scale * LOG2E, *sizes,
                **options, BM=keys.loop, BN=keys.own, GROUP=keys.group, **keys.options,
            )  # fmt: skip
    return grads


def _backward_outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@stick_breaking_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward_outputs(q, k, v)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.scale = scale


def _gradients(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    return *stick_breaking_backward(grad, *ctx.saved_tensors, ctx.scale), None


stick_breaking_forward.register_autograd(_gradients, setup_context=_save)


def stick_breaking(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q (B, T, Hq, D), k (B, T, H, D), v (B, T, H, E) -> o (B, T, Hq, E), Hq a multiple of H; differentiable once."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v: expected one of float16, bfloat16, float32, got {q.dtype}, {k.dtype}, {v.dtype}")
    if max(q.shape[3], v.shape[3]) > WIDEST:
        raise ValueError(f"q, k, v: expected at most {WIDEST} channels, got {q.shape[3]} and {v.shape[3]}")
    return stick_breaking_forward(q, k, v, scale)[0]

"""Stick-breaking in one tile: the order of keys in its columns, what is left of each row after them, its derivative.

A thread holds a quarter of the columns of each of its rows, and *which* keys these hold is ours to choose: sixteen
neighbours (of 64), so that most products are of registers, and one division serves four keys.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tokens(p_x, base, token, s_t, m_token, W: tl.constexpr, BW: tl.constexpr):
    """(tokens, channels) of x, tokens counted from base; within a tile 32 bits are enough (see `_dense`)."""
    channel = tl.arange(0, BW)
    mask = m_token[:, None]
    if W != BW:
        mask = mask & (channel < W)[None, :]
    return tl.load(
        p_x + tl.cast(base, tl.int64) * s_t + (token[:, None] * s_t + channel[None, :]), mask=mask, other=0.0
    )


@triton.jit
def key_order(BN: tl.constexpr):
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
    """The inverse of `_apart`."""
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
def rounded(b_x, TYPE: tl.constexpr, FAST: tl.constexpr):
    """b_x rounded to TYPE, as float32."""
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
def break_stick(b_z, b_left, visible, MASKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FAST: tl.constexpr):
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
def logit_gradients(b_w, b_g, b_s0, b_s1, b_s2, b_s3, b_debt, b_left, BM: tl.constexpr, BN: tl.constexpr):
    """dz (BM, BN) from weights, their gradients and σ, and the new debt: minus the sum of m over keys still to come."""
    b_m0, b_m1, b_m2, b_m3 = _apart(b_w * b_g, BM, BN)
    b_near = b_m0 + b_m1
    b_debt0, b_debt = _nearer(b_near + (b_m2 + b_m3), b_debt, BM, BN // 16, False)
    b_debt2 = b_debt0 + b_near
    b_dz0, b_dz1 = b_m0 + b_s0 * b_debt0, b_m1 + b_s1 * (b_debt0 + b_m0)
    b_dz2, b_dz3 = b_m2 + b_s2 * b_debt2, b_m3 + b_s3 * (b_debt2 + b_m2)
    return _together(b_dz0, b_dz1, b_dz2, b_dz3, BM, BN), tl.where(b_left > 0, b_debt, 0.0)

"""Symmetric power attention in chunks: within a chunk as attention, across chunks through a state of fixed size.

A chunk may be the whole sequence.

For p = 2 a state is S[a, b] = Σ_t γ_t k_a k_b v and the moments Z[a, b] = Σ_t γ_t k_a k_b, γ_t the gates from t to
where the state stands; a query reads Σ q_a q_b S[a, b] and Σ q_a q_b Z[a, b]. S is symmetric in a and b, and kept once
for each pair of 8 channels: with n = D/8 blocks, pair number δ n + i is blocks i and (i + δ) mod n, δ ≤ n/2, and row
8 a + b of its 64 rows is channel a of the first with channel b of the second. So D = 64 takes 2304 rows where 2080
would do. A pair of blocks is one tile of a tensor core, whose products q_a q_b are made in registers, never in memory.

Fourth powers are squares of squares: the state kernels then take the D(D+1)/2 products of two channels in place of
channels (D = 32: 528 of them, a state of 141 504 rows), those within chunks take channels.

Queries and keys come levelled (`level`): head-major, (heads, T, D), each query and the keys of each head multiplied by
a power of two, so that no power overflows. N counts the heads of keys, G the queries' heads of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.gated.flash import Sums
from deadreckon.ops.triton.tiles import (
    DTYPES,
    ceil_div,
    load_columns,
    load_rows,
    mul,
    mul_exact,
    mul_single,
    padded,
    store_rows,
)


class Tiles(NamedTuple):
    """Sizes of a program's own tile and of the tiles in its loop, and how the compiler shall run it."""

    own: int
    loop: int
    warps: int
    stages: int


# For halves and for single precision, with up to 64 channels and with up to 128. `accumulate` owns pairs of blocks.
HALF = {
    "accumulate": {64: Tiles(2, 64, 4, 3), 128: Tiles(2, 64, 8, 3)},
    "read": {64: Tiles(128, 64, 4, 4), 128: Tiles(128, 64, 8, 3)},
    "gradient": {64: Tiles(128, 64, 4, 4), 128: Tiles(128, 64, 8, 3)},
    "forward": {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 8, 3)},
    "queries": {64: Tiles(64, 64, 4, 3), 128: Tiles(128, 32, 8, 2)},
    "keys": {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 8, 2)},
}
SINGLE = {
    "accumulate": {64: Tiles(1, 64, 4, 1), 128: Tiles(1, 64, 8, 1)},
    "read": {64: Tiles(64, 64, 4, 1), 128: Tiles(64, 64, 8, 1)},
    "gradient": {64: Tiles(64, 64, 8, 1), 128: Tiles(64, 64, 8, 1)},
    "forward": {64: Tiles(64, 32, 4, 1), 128: Tiles(64, 32, 8, 1)},
    "queries": {64: Tiles(64, 32, 4, 1), 128: Tiles(64, 32, 8, 1)},
    "keys": {64: Tiles(64, 32, 8, 1), 128: Tiles(64, 32, 8, 1)},
}
CHUNK = {64: 1024, 128: 2048, 0: 4096}  # tokens, by the width that states are squares of; 0: wider than 128
PROGRAMS = 528  # that `accumulate` is split into, if a sequence has as many chunks: four for each multiprocessor
PADDING = 128  # tokens to whose multiple transposed sequences are padded


def tiles_for(which: str, width: int, dtype: torch.dtype) -> Tiles:
    return (SINGLE if dtype == torch.float32 else HALF)[which][64 if width <= 64 else 128]


def chunk_for(width: int) -> int:
    return CHUNK[64 if width <= 64 else 128 if width <= 128 else 0]


def pairs_of(width: int) -> int:
    """Pairs of blocks of 8 channels; a state has 64 rows for each."""
    blocks = width // 8
    return blocks * (blocks + 1) // 2


@triton.jit
def _plus(b_sum, b_x, b_y, DTYPE: tl.constexpr):
    """sum + x y."""
    if tl.float32 == DTYPE:
        return b_sum + mul_single(b_x.to(DTYPE), b_y.to(DTYPE))
    return tl.dot(b_x.to(DTYPE), b_y.to(DTYPE), b_sum)


@triton.jit
def _power(b_s, P: tl.constexpr):
    return b_s * b_s if P == 2 else (b_s * b_s) * (b_s * b_s)


@triton.jit
def _row_of(a, b, BLOCKS: tl.constexpr):
    """The row of a state that is channels a and b."""
    i, j = a // 8, b // 8
    apart = (j - i + BLOCKS) % BLOCKS
    forth = (2 * apart < BLOCKS) | ((2 * apart == BLOCKS) & (i < j))
    pair = tl.where(forth, apart * BLOCKS + i, (BLOCKS - apart) * BLOCKS + j)
    return pair * 64 + tl.where(forth, (a % 8) * 8 + b % 8, (b % 8) * 8 + a % 8)


@triton.jit
def _decays(p_left, p_edge, p_rise, p_fall, p_whole, T, CHUNK, CHUNKS, BLOCKS):
    i_block, i_n = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    i_chunk = i_block * 64 // CHUNK
    first = i_chunk * (CHUNK // 64)
    token = i_block * 64 + tl.arange(0, 64)
    p_edge += i_n * BLOCKS
    start = tl.load(p_edge + first - 1, mask=first > 0, other=0.0)
    end = tl.load(p_edge + tl.minimum(first + CHUNK // 64, BLOCKS) - 1)
    edge = tl.load(p_edge + i_block)
    b_left = tl.load(p_left + i_n * BLOCKS * 64 + token)
    tl.store(p_rise + i_n * T + token, tl.exp2((edge - start).to(tl.float32) - b_left), mask=token < T)
    tl.store(p_fall + i_n * T + token, tl.exp2((end - edge).to(tl.float32) + b_left), mask=token < T)
    if i_block == first:
        tl.store(p_whole + i_n * CHUNKS + i_chunk, tl.exp2((end - start).to(tl.float32)))


@triton.jit
def _level(
    p_x, p_unit, p_y, s_b, s_t, s_h, T, TILES, HEADS, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    BY_ROW: tl.constexpr,
):  # fmt: skip
    i_tile, i_head = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    row, channel = i_tile * BT + tl.arange(0, BT), tl.arange(0, BD)
    m_row = row < T
    p_x += (i_head // HEADS) * s_b + (i_head % HEADS) * s_h
    b_x = load_rows(p_x, row, s_t, channel, m_row, D, BD).to(tl.float32)
    if BY_ROW:
        bits = tl.max(tl.abs(b_x), 1).to(tl.int32, bitcast=True) >> 23  # the exponent
        b_unit = (tl.maximum(254 - bits, 1) << 23).to(tl.float32, bitcast=True)
        tl.store(p_unit + i_head * T + row, b_unit, mask=m_row)
        b_y = b_x * b_unit[:, None]
    else:
        b_y = b_x * tl.load(p_unit + i_head)
    store_rows(p_y + i_head * T * D, row, D, channel, m_row, b_y, D)


@triton.jit
def _largest(p_x, p_out, s_b, s_t, s_h, T, TILES, HEADS, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr):
    i_tile, i_head = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    row = i_tile * BT + tl.arange(0, BT)
    p_x += (i_head // HEADS) * s_b + (i_head % HEADS) * s_h
    b_x = tl.abs(load_rows(p_x, row, s_t, tl.arange(0, BD), row < T, D, BD).to(tl.float32))
    tl.store(p_out + tl.program_id(0), tl.max(tl.where(b_x < float("inf"), b_x, 0.0)))


@triton.jit
def _transpose(p_x, p_factor, p_y, T, TP, TILES, D: tl.constexpr, BT: tl.constexpr):
    i_tile, i_part = tl.program_id(0) % TILES, tl.program_id(1)
    i_head = (tl.program_id(0) // TILES).to(tl.int64)
    row, channel = i_tile * BT + tl.arange(0, BT), i_part * 64 + tl.arange(0, 64)
    m_row = row < T
    m_all = m_row[:, None] & (channel < D)[None, :]
    b_x = tl.load(p_x + (i_head * T + row)[:, None] * D + channel[None, :], mask=m_all, other=0.0).to(tl.float32)
    b_x *= tl.sqrt(tl.load(p_factor + i_head * T + row, mask=m_row, other=0.0))[:, None]
    p_y += (i_head * D + channel)[:, None] * TP + row[None, :]
    tl.store(p_y, tl.trans(b_x).to(p_y.dtype.element_ty), mask=(channel < D)[:, None])


@triton.jit
def _accumulate(
    p_x, p_y, p_first, p_decay, p_state, p_total, s_b, s_h, s_g, s_t,
    T, TP, C, CHUNKS, SEGMENT, SEGMENTS, TILES, HEADS, GROUP,
    D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, P: tl.constexpr, BT: tl.constexpr,
    REVERSE: tl.constexpr, FIRST: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    i_tile = tl.program_id(0) % TILES
    i_segment = tl.program_id(0) // TILES % SEGMENTS
    i_n = (tl.program_id(0) // TILES // SEGMENTS).to(tl.int64)
    BLOCKS: tl.constexpr = D // 8
    ROWS: tl.constexpr = BLOCKS * (BLOCKS + 1) // 2 * 64
    pair = tl.minimum(i_tile * P + tl.arange(0, P), ROWS // 64 - 1)
    lane = tl.arange(0, 8)
    first = tl.reshape((pair % BLOCKS)[:, None] * 8 + lane[None, :], [P * 8])
    second = tl.reshape(((pair % BLOCKS + pair // BLOCKS) % BLOCKS)[:, None] * 8 + lane[None, :], [P * 8])
    row, value = i_tile * P * 64 + tl.arange(0, P * 64), tl.arange(0, BE)
    m_state = (row < ROWS)[:, None] & (value < E)[None, :]
    at = row[:, None] * E + value[None, :]
    b_sum = tl.zeros([P * 64, BE], tl.float32)
    if FIRST:
        b_sum += tl.load(p_first + i_n * ROWS * E + at, mask=m_state & (i_segment == 0), other=0.0)
    for step in range(i_segment * SEGMENT, tl.minimum((i_segment + 1) * SEGMENT, CHUNKS)):
        i_chunk = CHUNKS - 1 - step if REVERSE else step
        i_state = i_n * CHUNKS + i_chunk
        tl.store(p_state + i_state * ROWS * E + at, b_sum.to(p_state.dtype.element_ty), mask=m_state)
        b_sum *= tl.load(p_decay + i_state)
        begin, end = i_chunk * C, tl.minimum(i_chunk * C + C, T)
        for g in range(GROUP):
            p_xg = p_x + (i_n * GROUP + g) * D * TP
            p_yg = p_y + (i_n // HEADS) * s_b + (i_n % HEADS) * s_h + g * s_g
            for t in range(begin, end, BT):
                token = t + tl.arange(0, BT)
                b_first = tl.reshape(tl.load(p_xg + first[:, None].to(tl.int64) * TP + token[None, :]), [P, 8, 1, BT])
                b_second = tl.reshape(tl.load(p_xg + second[:, None].to(tl.int64) * TP + token[None, :]), [P, 1, 8, BT])
                b_y = load_rows(p_yg, token, s_t, value, token < T, E, BE)
                b_sum = _plus(b_sum, tl.reshape(b_first * b_second, [P * 64, BT]), b_y, DTYPE)
    tl.store(p_total + (i_n * SEGMENTS + i_segment) * ROWS * E + at, b_sum, mask=m_state)


@triton.jit
def _moments(
    p_x, p_weight, p_out, T, TP, C, CHUNKS, GROUP,
    D: tl.constexpr, BT: tl.constexpr, WEIGHTED: tl.constexpr, REVERSE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (D + 63) // 64
    i_chunk, i_n = tl.program_id(0) % CHUNKS, (tl.program_id(0) // CHUNKS).to(tl.int64)
    first, second = tl.program_id(1) // PARTS * 64 + tl.arange(0, 64), tl.program_id(1) % PARTS * 64 + tl.arange(0, 64)
    b_sum = tl.zeros([64, 64], tl.float32)
    for g in range(GROUP):
        i_head = i_n * GROUP + g
        p_xg = p_x + i_head * D * TP
        for t in range(i_chunk * C, tl.minimum(i_chunk * C + C, T), BT):
            token = t + tl.arange(0, BT)
            b_first = tl.load(
                p_xg + first[:, None].to(tl.int64) * TP + token[None, :], mask=(first < D)[:, None], other=0.0
            )
            b_second = tl.load(
                p_xg + second[None, :].to(tl.int64) * TP + token[:, None], mask=(second < D)[None, :], other=0.0
            )
            if WEIGHTED:
                b_weight = tl.load(p_weight + i_head * T + token, mask=token < T, other=0.0)
                b_sum += mul_exact(b_first, b_second.to(tl.float32) * b_weight[:, None], DTYPE)
            else:
                b_sum += mul_exact(b_first, b_second, DTYPE)
    i_out = i_n * CHUNKS + (CHUNKS - 1 - i_chunk if REVERSE else i_chunk)
    p_out += i_out * D * D + first[:, None] * D + second[None, :]
    tl.store(p_out, b_sum, mask=(first < D)[:, None] & (second < D)[None, :])


@triton.jit
def _carry(
    p_first, p_total, p_decay, p_state, p_last, s_first, SIZE, CHUNKS, SEGMENT, SEGMENTS, FROM, TILES,
    BLOCK: tl.constexpr, ADD: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    i_tile, i_n = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    at = i_tile * BLOCK + tl.arange(0, BLOCK)
    m_at = at < SIZE
    b_run = tl.load(p_first + i_n * s_first + at, mask=m_at, other=0.0)
    for segment in range(FROM, SEGMENTS):
        for step in range(segment * SEGMENT, tl.minimum(segment * SEGMENT + SEGMENT, CHUNKS)):
            i_state = i_n * CHUNKS + (CHUNKS - 1 - step if REVERSE else step)
            p_at = p_state + i_state * SIZE + at
            b_here = b_run
            if ADD:
                b_here += tl.load(p_at, mask=m_at, other=0.0).to(tl.float32)
            tl.store(p_at, b_here.to(p_state.dtype.element_ty), mask=m_at)
            b_run *= tl.load(p_decay + i_state)
        b_run += tl.load(p_total + (i_n * SEGMENTS + segment) * SIZE + at, mask=m_at, other=0.0)
    tl.store(p_last + i_n * SIZE + at, b_run, mask=m_at)


@triton.jit
def _read(
    p_x, p_state, p_moments, p_factor, p_out, p_sum, T, C, CHUNKS, TILES, GROUP, empty,
    D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    SUM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    i_tile, i_head = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    BLOCKS: tl.constexpr = D // 8
    PAIRS: tl.constexpr = BLOCKS * (BLOCKS + 1) // 2
    row, value, lane, part = i_tile * BM + tl.arange(0, BM), tl.arange(0, BE), tl.arange(0, 8), tl.arange(0, 64)
    m_row = row < T
    i_chunk = i_tile * BM // C
    i_state = i_head // GROUP * CHUNKS + i_chunk
    p_x += i_head * T * D + row[:, None].to(tl.int64) * D
    p_state += i_state * PAIRS * 64 * E + part[:, None] * E + value[None, :]
    b_factor = tl.load(p_factor + i_head * T + row, mask=m_row, other=0.0)
    b_sum = tl.zeros([BM, BE], tl.float32)
    for i_pair in range(tl.where(i_chunk == empty, 0, PAIRS)):
        pair = tl.cast(i_pair, tl.int32)
        i_first = pair % BLOCKS
        i_second = (i_first + pair // BLOCKS) % BLOCKS
        b_first = tl.load(p_x + i_first * 8 + lane[None, :], mask=m_row[:, None], other=0.0)
        b_first *= tl.where(pair < BLOCKS, 1.0, 2.0).to(DTYPE)  # two blocks stand for both their orders
        b_second = tl.load(p_x + i_second * 8 + lane[None, :], mask=m_row[:, None], other=0.0)
        b_x = tl.reshape(b_first[:, :, None] * b_second[:, None, :], [BM, 64])
        if E == BE:
            b_state = tl.load(p_state + pair * 64 * E)
        else:
            b_state = tl.load(p_state + pair * 64 * E, mask=(value < E)[None, :], other=0.0)
        b_sum = _plus(b_sum, b_x, b_state, DTYPE)
    store_rows(p_out + i_head * T * E, row, E, value, m_row, b_sum * b_factor[:, None], E)
    if SUM:
        p_moments += i_state * D * D
        b_row = tl.zeros([BM], tl.float32)
        for j in tl.range(0, D, 64, num_stages=1):
            second = j + part
            b_moved = tl.zeros([BM, 64], tl.float32)
            for i in tl.range(0, D, 64, num_stages=1):
                first = i + part
                m_z = (first < D)[:, None] & (second < D)[None, :]
                b_z = tl.load(p_moments + first[:, None] * D + second[None, :], mask=m_z, other=0.0)
                b_x = tl.load(p_x + first[None, :], mask=m_row[:, None] & (first < D)[None, :], other=0.0)
                b_moved += mul_exact(b_x, b_z, DTYPE)
            b_x = tl.load(p_x + second[None, :], mask=m_row[:, None] & (second < D)[None, :], other=0.0)
            b_row += tl.sum(b_moved * b_x.to(tl.float32), 1)
        tl.store(p_sum + i_head * T + row, b_row * b_factor, mask=m_row)


@triton.jit
def _gradient(
    p_x, p_y, p_state, p_moments, p_factor, p_weight, p_out, p_dot, s_b, s_h, s_g, s_t,
    T, C, CHUNKS, TILES, HEADS, GROUP, empty,
    D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, WEIGHTED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    i_tile, i_part = tl.program_id(0) % TILES, tl.program_id(1)
    i_head = (tl.program_id(0) // TILES).to(tl.int64)
    i_n, i_g = i_head // GROUP, i_head % GROUP
    BLOCKS: tl.constexpr = D // 8
    ROWS: tl.constexpr = BLOCKS * (BLOCKS + 1) // 2 * 64
    row, value, part = i_tile * BM + tl.arange(0, BM), tl.arange(0, BE), tl.arange(0, 64)
    m_row = row < T
    second = i_part * 64 + part
    m_second = second < D
    i_chunk = i_tile * BM // C
    i_state = i_n * CHUNKS + i_chunk
    p_x += i_head * T * D + row.to(tl.int64) * D
    p_y += (i_n // HEADS) * s_b + (i_n % HEADS) * s_h + i_g * s_g
    p_state += i_state * ROWS * E
    b_y = load_rows(p_y, row, s_t, value, m_row, E, BE).to(DTYPE)
    b_sum = tl.zeros([BM, 64], tl.float32)
    half, both = tl.arange(0, 2 * BE) // BE, tl.arange(0, 2 * BE) % BE  # two channels at a time
    p_x = p_x[:, None]
    for i in range(0, tl.where(i_chunk == empty, 0, D), 2):
        channel = tl.cast(i, tl.int32)
        b_x = tl.load(p_x + channel + tl.arange(0, 2)[None, :], mask=m_row[:, None], other=0.0)
        at = _row_of(channel, second, BLOCKS)
        at = at[:, None] + half[None, :] * (_row_of(channel + 1, second, BLOCKS) - at)[:, None]
        if E == BE and D % 64 == 0:
            b_state = tl.load(p_state + at * E + both[None, :])
        else:
            b_state = tl.load(p_state + at * E + both[None, :], mask=m_second[:, None] & (both < E)[None, :], other=0.0)
        b_x = tl.reshape(b_x[:, :, None] * b_y[:, None, :], [BM, 2 * BE])
        b_sum = _plus(b_sum, b_x, tl.trans(b_state), DTYPE)
    b_moved = tl.zeros([BM, 64], tl.float32)
    p_moments += i_state * D * D
    for i in tl.range(0, D, 64, num_stages=1):
        first = i + part
        b_z = tl.load(
            p_moments + first[:, None] * D + second[None, :], mask=(first < D)[:, None] & m_second[None, :], other=0.0
        )
        b_x = tl.load(p_x + first[None, :], mask=m_row[:, None] & (first < D)[None, :], other=0.0)
        b_moved += mul_exact(b_x, b_z, DTYPE)
    if WEIGHTED:
        b_moved *= tl.load(p_weight + i_head * T + row, mask=m_row, other=0.0)[:, None]
    b_factor = tl.load(p_factor + i_head * T + row, mask=m_row, other=0.0)
    b_sum = (b_sum + b_moved) * b_factor[:, None]
    m_out = m_row[:, None] & m_second[None, :]
    b_x = tl.load(p_x + second[None, :], mask=m_out, other=0.0).to(tl.float32)
    tl.store(p_out + (i_head * T + row)[:, None] * D + second[None, :], 2 * b_sum, mask=m_out)
    tl.store(p_dot + (i_part * (tl.num_programs(0) // TILES) + i_head) * T + row, tl.sum(b_sum * b_x, 1), mask=m_row)


@triton.jit
def _overlap(
    p_state, p_other, p_out, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    BLOCKS: tl.constexpr = D // 8
    PAIRS: tl.constexpr = BLOCKS * (BLOCKS + 1) // 2
    i_state, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, value = tl.arange(0, 64), tl.arange(0, BE)
    at = i_state * PAIRS * 64 * E + row[:, None] * E + value[None, :]
    m_value = (value < E)[None, :]
    b_sum = tl.zeros([64], tl.float32)
    for i_pair in range(i_part, PAIRS, PARTS):
        pair = tl.cast(i_pair, tl.int32)
        b_x = tl.load(p_state + at + pair * 64 * E, mask=m_value, other=0.0).to(tl.float32)
        b_y = tl.load(p_other + at + pair * 64 * E, mask=m_value, other=0.0).to(tl.float32)
        b_sum += tl.sum(b_x * b_y, 1) * tl.where(pair < BLOCKS, 1.0, 2.0)
    tl.store(p_out + i_state * PARTS + i_part, tl.sum(b_sum, 0))


@triton.jit
def _delta(
    p_o, p_do, p_out, s_ob, s_ot, s_oh, s_gb, s_gt, s_gh, T, TILES, HEADS,
    E: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    i_tile, i_head = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    row, value = i_tile * BT + tl.arange(0, BT), tl.arange(0, BE)
    m_row = row < T
    i_b, i_h = i_head // HEADS, i_head % HEADS
    b_o = load_rows(p_o + i_b * s_ob + i_h * s_oh, row, s_ot, value, m_row, E, BE).to(tl.float32)
    b_do = load_rows(p_do + i_b * s_gb + i_h * s_gh, row, s_gt, value, m_row, E, BE).to(tl.float32)
    tl.store(p_out + i_head * T + row, -tl.sum(b_o * b_do, 1), mask=m_row)


@triton.jit
def _own_gates(p_left, p_edge, row, m_row, reference):
    """Sums of gates from a reference to each row, divided by log 2."""
    b_edge = tl.load(p_edge + row // 64, mask=m_row, other=reference)
    return (b_edge - reference).to(tl.float32) - tl.load(p_left + row, mask=m_row, other=0.0)


@triton.jit
def _gates_along(p_left, p_edge, first, row, m_row, reference):
    """The same for rows from `first` on in a block of 64, which share a sum."""
    return (tl.load(p_edge + first // 64) - reference).to(tl.float32) - tl.load(p_left + row, mask=m_row, other=0.0)


@triton.jit
def _faded(b_own, b_gate, MASKED: tl.constexpr):
    """What gates leave from keys to queries; without a mask, to a reference between them."""
    if MASKED:
        # Beyond the mask gates grow.
        return tl.exp2(tl.minimum(b_own[:, None] + b_gate[None, :], 64.0, propagate_nan=tl.PropagateNan.ALL))
    else:
        return tl.exp2(b_gate)[None, :]


@triton.jit
def _forward(
    p_q, p_k, p_v, p_left, p_edge, p_read, p_rows, p_o, p_inverse, s_vb, s_vh, s_vt, s_ob, s_oh, s_ot,
    T, C, TILES, HEADS, GROUP, BLOCKS,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    P: tl.constexpr, GATED: tl.constexpr, STATE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    i_head = (tl.program_id(0) // TILES).to(tl.int64)
    i_tile = TILES - 1 - tl.program_id(0) % TILES  # those that take longest come first
    i_n = i_head // GROUP
    first_row = i_tile * BM
    row, channel, value = first_row + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BE)
    m_row = row < T
    b_q = load_rows(p_q + i_head * T * D, row, D, channel, m_row, D, BD)
    p_k += i_n * T * D
    p_v += (i_n // HEADS) * s_vb + (i_n % HEADS) * s_vh
    p_left += i_n * BLOCKS * 64
    p_edge += i_n * BLOCKS
    b_own = tl.zeros([BM], tl.float32)
    reference = 0.0
    if GATED:
        reference = tl.load(p_edge + first_row // 64 - 1, mask=first_row > 0, other=0.0)  # before the first row
        b_own = _own_gates(p_left, p_edge, row, m_row, reference)
    b_acc = tl.zeros([BM, BE], tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    for MASKED in tl.static_range(2):  # keys before the tile, then those in it
        begin = first_row if MASKED else first_row // C * C
        end = tl.minimum(first_row + BM, T) if MASKED else first_row
        for j in range(begin, end, BN):
            key = j + tl.arange(0, BN)
            m_key = (key < end) | (not MASKED)
            b_k = load_columns(p_k, key, D, channel, m_key, D, BD)
            b_w = _power(mul(b_q, b_k, DTYPE), P)
            b_v = load_rows(p_v, key, s_vt, value, m_key, E, BE)
            if GATED:
                b_gate = _gates_along(p_left, p_edge, j, key, m_key, reference)
                b_w *= _faded(b_own, -b_gate, MASKED)
            if MASKED:
                b_w = tl.where(m_key[None, :] & (key[None, :] <= row[:, None]), b_w, 0.0)
            b_w = b_w.to(DTYPE)  # the sum is of what values are multiplied by: a key that is alone has all the weight
            b_sum += tl.sum(b_w.to(tl.float32), 1)
            b_acc = _plus(b_acc, b_w, b_v, DTYPE)
        if GATED and not MASKED:
            b_acc *= tl.exp2(b_own)[:, None]
            b_sum *= tl.exp2(b_own)
    if STATE:
        b_acc += load_rows(p_read + i_head * T * E, row, E, value, m_row, E, BE)
        b_sum += tl.load(p_rows + i_head * T + row, mask=m_row, other=0.0)
    b_none = b_sum < 1e-36  # what is divided by less may be infinite
    b_inverse = tl.where(b_none, 0.0, 1 / tl.where(b_none, 1.0, b_sum))
    i_b, i_h = i_n // HEADS, i_n % HEADS * GROUP + i_head % GROUP
    store_rows(p_o + i_b * s_ob + i_h * s_oh, row, s_ot, value, m_row, b_acc * b_inverse[:, None], E)
    tl.store(p_inverse + i_head * T + row, b_inverse, mask=m_row)


@triton.jit
def _query_gradients(
    p_q, p_k, p_v, p_do, p_left, p_edge, p_delta, p_inverse, p_unit, p_part, p_dq, p_rows,
    s_vb, s_vh, s_vt, s_ob, s_oh, s_ot, s_xb, s_xh, s_xt, T, C, TILES, HEADS, GROUP, BLOCKS,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    P: tl.constexpr, GATED: tl.constexpr, STATE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    i_head = (tl.program_id(0) // TILES).to(tl.int64)
    i_tile = TILES - 1 - tl.program_id(0) % TILES  # those that take longest come first
    i_n = i_head // GROUP
    i_b, i_h = i_n // HEADS, i_n % HEADS * GROUP + i_head % GROUP
    first_row = i_tile * BM
    row, channel, value = first_row + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BE)
    m_row = row < T
    b_q = load_rows(p_q + i_head * T * D, row, D, channel, m_row, D, BD)
    b_do = load_rows(p_do + i_b * s_ob + i_h * s_oh, row, s_ot, value, m_row, E, BE).to(DTYPE)
    b_delta = tl.load(p_delta + i_head * T + row, mask=m_row, other=0.0)
    b_inverse = tl.load(p_inverse + i_head * T + row, mask=m_row, other=0.0)
    p_k += i_n * T * D
    p_v += i_b * s_vb + (i_n % HEADS) * s_vh
    p_left += i_n * BLOCKS * 64
    p_edge += i_n * BLOCKS
    b_own = tl.zeros([BM], tl.float32)
    reference = 0.0
    if GATED:
        reference = tl.load(p_edge + first_row // 64 - 1, mask=first_row > 0, other=0.0)
        b_own = _own_gates(p_left, p_edge, row, m_row, reference)
    b_dq = tl.zeros([BM, BD], tl.float32)
    b_rows = tl.zeros([BM], tl.float32)
    for MASKED in tl.static_range(2):
        begin = first_row if MASKED else first_row // C * C
        end = tl.minimum(first_row + BM, T) if MASKED else first_row
        for j in range(begin, end, BN):
            key = j + tl.arange(0, BN)
            m_key = (key < end) | (not MASKED)
            b_k = load_columns(p_k, key, D, channel, m_key, D, BD)
            b_v = load_columns(p_v, key, s_vt, value, m_key, E, BE)
            b_s = mul(b_q, b_k, DTYPE)
            b_ds = (mul(b_do, b_v, DTYPE) + b_delta[:, None]) * (b_s if P == 2 else b_s * b_s * b_s)
            if GATED:
                b_gate = _gates_along(p_left, p_edge, j, key, m_key, reference)
                b_ds *= _faded(b_own, -b_gate, MASKED)
            if MASKED:
                b_ds = tl.where(m_key[None, :] & (key[None, :] <= row[:, None]), b_ds, 0.0)
            if GATED:
                b_rows += tl.sum(b_ds * b_s, 1)
            b_dq = _plus(b_dq, b_ds, tl.trans(b_k), DTYPE)
        if GATED and not MASKED:
            b_dq *= tl.exp2(b_own)[:, None]
            b_rows *= tl.exp2(b_own)
    b_dq *= P * b_inverse[:, None]
    if STATE:
        b_dq += load_rows(p_part + i_head * T * D, row, D, channel, m_row, D, BD)
    b_unit = tl.load(p_unit + i_head * T + row, mask=m_row, other=0.0)
    store_rows(p_dq + i_b * s_xb + i_h * s_xh, row, s_xt, channel, m_row, b_dq * b_unit[:, None], D)
    if GATED:
        tl.store(p_rows + i_head * T + row, b_rows * b_inverse, mask=m_row)


@triton.jit
def _key_gradients(
    p_q, p_k, p_v, p_do, p_left, p_edge, p_delta, p_inverse, p_unit, p_part_k, p_part_v, p_dk, p_dv, p_columns,
    s_vb, s_vh, s_vt, s_ob, s_oh, s_ot, s_xb, s_xh, s_xt, s_yb, s_yh, s_yt, T, C, TILES, HEADS, GROUP, BLOCKS,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    P: tl.constexpr, GATED: tl.constexpr, STATE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    i_tile, i_n = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    i_b, i_h = i_n // HEADS, i_n % HEADS
    first_key = i_tile * BN
    key, channel, value = first_key + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BE)
    m_key = key < T
    b_k = load_rows(p_k + i_n * T * D, key, D, channel, m_key, D, BD)
    b_v = load_rows(p_v + i_b * s_vb + i_h * s_vh, key, s_vt, value, m_key, E, BE).to(DTYPE)
    p_left += i_n * BLOCKS * 64
    p_edge += i_n * BLOCKS
    b_own = tl.zeros([BN], tl.float32)
    reference = 0.0
    whole = tl.minimum(first_key + BN, T)
    if GATED:
        reference = tl.load(p_edge + (whole - 1) // 64)  # at the last key
        b_own = -_own_gates(p_left, p_edge, key, m_key, reference)
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BE], tl.float32)
    b_columns = tl.zeros([BN], tl.float32)
    for MASKED in tl.static_range(2):  # queries after the tile, then those in it
        begin = first_key if MASKED else whole
        end = whole if MASKED else tl.minimum(first_key // C * C + C, T)
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
                b_x = b_s if P == 2 else b_s * b_s * b_s
                if GATED:
                    b_gate = _gates_along(p_left, p_edge, i, row, m_row, reference)
                    b_factor *= _faded(b_own, b_gate, MASKED)
                b_x *= b_factor
                if MASKED:
                    b_x = tl.where(key[:, None] <= row[None, :], b_x, 0.0)
                b_dv = _plus(b_dv, b_x * b_s, b_do, DTYPE)
                b_x *= mul(b_v, tl.trans(b_do), DTYPE) + b_delta[None, :]
                if GATED:
                    b_columns += tl.sum(b_x * b_s, 1)
                b_dk = _plus(b_dk, b_x, tl.trans(b_q), DTYPE)
        if GATED and not MASKED:
            b_dk *= tl.exp2(b_own)[:, None]
            b_dv *= tl.exp2(b_own)[:, None]
            b_columns *= tl.exp2(b_own)
    b_dk *= P
    if STATE:
        b_dk += load_rows(p_part_k + i_n * T * D, key, D, channel, m_key, D, BD)
        b_dv += load_rows(p_part_v + i_n * T * E, key, E, value, m_key, E, BE)
    b_dk *= tl.load(p_unit + i_n)
    store_rows(p_dk + i_b * s_xb + i_h * s_xh, key, s_xt, channel, m_key, b_dk, D)
    store_rows(p_dv + i_b * s_yb + i_h * s_yh, key, s_yt, value, m_key, b_dv, E)
    if GATED:
        tl.store(p_columns + i_n * T + key, b_columns, mask=m_key)


class Walk(NamedTuple):
    """A sequence in chunks."""

    batch: int
    heads: int  # of keys
    group: int  # queries' heads for each
    length: int
    chunk: int

    @property
    def keys(self) -> int:
        return self.batch * self.heads

    @property
    def queries(self) -> int:
        return self.keys * self.group

    @property
    def chunks(self) -> int:
        return ceil_div(self.length, self.chunk)


class Decays(NamedTuple):
    """What gates leave: from a chunk's start to each token, from each token to its end, from start to end."""

    rise: Tensor  # (N, T)
    fall: Tensor  # (N, T)
    whole: Tensor  # (N, chunks)


class States(NamedTuple):
    """What has been gathered before each chunk, or after each if time runs backwards, and in the end."""

    values: Tensor  # (N, chunks, rows, E)
    moments: Tensor  # (N, chunks, D, D) float32
    last_values: Tensor  # (N, rows, E) float32
    last_moments: Tensor  # (N, D, D) float32
    empty: int  # a chunk for which nothing has been gathered, or −1


def _by_head(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and token of x (B, T, H, channels)."""
    return x.stride(0), x.stride(2), x.stride(1)


def _by_group(x: Tensor, group: int) -> tuple[int, int, int, int]:
    """Strides of batch, key head, query head in it and token of x (B, T, H G, channels)."""
    return x.stride(0), x.stride(2) * group, x.stride(2), x.stride(1)


def _type(x: Tensor) -> Any:
    return DTYPES[x.dtype]


def decays_of(walk: Walk, sums: Sums | None, device: torch.device) -> Decays:
    if sums is None:
        ones = torch.ones(walk.keys, walk.length, device=device)
        return Decays(ones, ones, ones.new_ones(walk.keys, walk.chunks))
    rise = torch.empty(walk.keys, walk.length, device=device)
    decays = Decays(rise, torch.empty_like(rise), rise.new_empty(walk.keys, walk.chunks))
    blocks = sums.edge.shape[-1]
    _decays[(blocks * walk.keys,)](
        sums.left, sums.edge, *decays, walk.length, walk.chunk, walk.chunks, blocks, num_warps=2
    )
    return decays


def level(x: Tensor, unit: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (B, T, H, D) as (B H, T, D), times `unit` (B H), or each row times its own power of two (B H, T)."""
    batch, length, heads, width = x.shape
    by_row = unit is None
    unit = x.new_empty(batch * heads, length, dtype=torch.float32) if unit is None else unit
    out = x.new_empty(batch * heads, length, width, dtype=dtype)
    tiles = ceil_div(length, 64)
    _level[(tiles * batch * heads,)](
        x, unit, out, *x.stride()[:3], length, tiles, heads, D=width, BD=padded(width), BT=64, BY_ROW=by_row
    )
    return out, unit


def largest(x: Tensor) -> Tensor:
    """The largest number of x (B, T, H, D) in each head that is finite, in size: (B H,)."""
    batch, length, heads, width = x.shape
    tiles = triton.cdiv(length, 128)
    out = x.new_empty(batch * heads, tiles, dtype=torch.float32)
    _largest[(batch * heads * tiles,)](x, out, *x.stride()[:3], length, tiles, heads, D=width, BD=padded(width), BT=128)
    return out.amax(1)


def transposed(x: Tensor, factor: Tensor) -> Tensor:
    """x (heads, T, D), rows times the root of factor (heads, T), as (heads, D, T padded)."""
    heads, length, width = x.shape
    room = ceil_div(length, PADDING) * PADDING
    out = x.new_empty(heads, width, room)
    _transpose[(room // 64 * heads, ceil_div(width, 64))](x, factor, out, length, room, room // 64, D=width, BT=64)
    return out


def gather(
    walk: Walk, x: Tensor, y: Tensor, weight: Tensor | None, decay: Tensor, first: tuple[Tensor, Tensor] | None,
    reverse: bool,
) -> States:  # fmt: skip
    """The states of x (N G', D, T padded) and y (B, T, H G', E), begun with `first` (N, rows, E), (N, D, D).

    Moments are weighted by `weight` (N G', T); decay (N, chunks) is what each chunk leaves of what came before it.
    """
    values, last_values = _gather_values(walk, x, y, decay, None if first is None else first[0], reverse)
    moments, last_moments = _gather_moments(walk, x, weight, decay, None if first is None else first[1], reverse)
    empty = -1 if first is not None else walk.chunks - 1 if reverse else 0
    return States(values, moments, last_values, last_moments, empty)


def _gather_values(
    walk: Walk, x: Tensor, y: Tensor, decay: Tensor, first: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    width, room, value_width = x.shape[1], x.shape[2], y.shape[3]
    rows, chunks = pairs_of(width) * 64, walk.chunks
    own, loop, warps, stages = tiles_for("accumulate", value_width, x.dtype)
    tiles = ceil_div(rows // 64, own)
    segment = ceil_div(chunks, min(chunks, ceil_div(PROGRAMS, tiles * walk.keys)))
    segments = ceil_div(chunks, segment)
    states = x.new_empty(walk.keys, chunks, rows, value_width)
    totals = x.new_empty(walk.keys, segments, rows, value_width, dtype=torch.float32)
    group = x.shape[0] // walk.keys
    _accumulate[(tiles * segments * walk.keys,)](
        x, y, decay if first is None else first, decay, states, totals, *_by_group(y, group),
        walk.length, room, walk.chunk, chunks, segment, segments, tiles, walk.heads, group,
        D=width, E=value_width, BE=padded(value_width), P=own, BT=loop, REVERSE=reverse, FIRST=first is not None,
        DTYPE=_type(x), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if segments == 1:
        return states, totals[:, 0]
    last = torch.empty_like(totals[:, 0])
    _carried(totals, totals, decay, states, last, segment, begin=1, add=True, reverse=reverse)
    return states, last


def _gather_moments(
    walk: Walk, x: Tensor, weight: Tensor | None, decay: Tensor, first: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    width, parts = x.shape[1], ceil_div(x.shape[1], 64)
    totals = x.new_empty(walk.keys, walk.chunks, width, width, dtype=torch.float32)
    _moments[(walk.keys * walk.chunks, parts * parts)](
        x, x if weight is None else weight, totals, walk.length, x.shape[2], walk.chunk, walk.chunks,
        x.shape[0] // walk.keys, D=width, BT=64, WEIGHTED=weight is not None, REVERSE=reverse, DTYPE=_type(x),
        num_warps=4, num_stages=1 if x.dtype == torch.float32 else 2,
    )  # fmt: skip
    first = totals.new_zeros(walk.keys, width, width) if first is None else first
    states, last = torch.empty_like(totals), torch.empty_like(first)
    _carried(first, totals, decay, states, last, 1, begin=0, add=False, reverse=reverse)
    return states, last


def _carried(
    first: Tensor, totals: Tensor, decay: Tensor, states: Tensor, last: Tensor, segment: int, *,
    begin: int, add: bool, reverse: bool,
) -> None:  # fmt: skip
    """Adds what earlier segments of chunks have gathered to states, and the whole of it to last."""
    size, block = last[0].numel(), 1024
    tiles = ceil_div(size, block)
    _carry[(tiles * len(last),)](
        first, totals, decay, states, last, first.stride(0), size, states.shape[1], segment, totals.shape[1], begin,
        tiles, BLOCK=block, ADD=add, REVERSE=reverse, num_warps=4,
    )  # fmt: skip


def read(walk: Walk, x: Tensor, factor: Tensor, states: States, sums: bool) -> tuple[Tensor, Tensor]:
    """What x (heads, T, D) reads, times factor (heads, T): values (heads, T, E) and, if asked for, sums (heads, T)."""
    heads, length, width = x.shape
    value_width = states.values.shape[3]
    own, _, warps, stages = tiles_for("read", value_width, x.dtype)
    own, tiles = _tiles_of(own, walk)
    out = x.new_empty(heads, length, value_width, dtype=torch.float32)
    rows = x.new_empty(heads, length, dtype=torch.float32) if sums else out
    _read[(tiles * heads,)](
        x, states.values, states.moments, factor, out, rows, length, walk.chunk, walk.chunks, tiles,
        heads // walk.keys, states.empty, D=width, E=value_width, BE=padded(value_width), BM=own, SUM=sums,
        DTYPE=_type(x), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, rows


def _tiles_of(own: int, walk: Walk) -> tuple[int, int]:
    """The size of tiles that end where chunks do, and how many there are."""
    own = min(own, walk.chunk)
    return own, ceil_div(walk.length, own)


def read_gradient(
    walk: Walk, x: Tensor, y: Tensor, weight: Tensor | None, factor: Tensor, states: States
) -> tuple[Tensor, Tensor]:
    """The gradient of factor · (y · values + weight · sums) that x reads, (heads, T, D), and x · gradient / 2."""
    heads, length, width = x.shape
    value_width = states.values.shape[3]
    own, _, warps, stages = tiles_for("gradient", value_width, x.dtype)
    own, tiles = _tiles_of(own, walk)
    group, parts = heads // walk.keys, ceil_div(width, 64)
    out = x.new_empty(heads, length, width, dtype=torch.float32)
    dots = x.new_empty(parts, heads, length, dtype=torch.float32)
    _gradient[(tiles * heads, parts)](
        x, y, states.values, states.moments, factor, x if weight is None else weight, out, dots,
        *_by_group(y, group), length, walk.chunk, walk.chunks, tiles, walk.heads, group, states.empty,
        D=width, E=value_width, BE=padded(value_width), BM=own, WEIGHTED=weight is not None, DTYPE=_type(x),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, dots.sum(0)


def overlap(walk: Walk, width: int, one: States, other: States) -> Tensor:
    """The scalar product of two states at each chunk, (N, chunks): all of two channels, in both orders."""
    value_width, parts = one.values.shape[3], 4
    out = one.values.new_empty(walk.keys, walk.chunks, parts, dtype=torch.float32)
    _overlap[(walk.keys * walk.chunks, parts)](
        one.values, other.values, out, D=width, E=value_width, BE=padded(value_width), PARTS=parts, num_warps=4
    )
    return out.sum(2) + torch.einsum("ncab,ncab->nc", one.moments, other.moments)


def minus_delta(out: Tensor, grad: Tensor) -> Tensor:
    """−out · grad, (B, T, H, E) -> (B H, T)."""
    batch, length, heads, width = out.shape
    result = out.new_empty(batch * heads, length, dtype=torch.float32)
    tiles = ceil_div(length, 64)
    _delta[(tiles * batch * heads,)](
        out, grad, result, *out.stride()[:3], *grad.stride()[:3], length, tiles, heads,
        E=width, BE=padded(width), BT=64,
    )  # fmt: skip
    return result


def _within(
    kernel: Any, which: str, walk: Walk, q: Tensor, v: Tensor, p: int, sums: Sums | None, state: bool, *arguments: Any
) -> None:
    """Runs a kernel within chunks, whose programs own a tile of queries, or of keys."""
    own, loop, warps, stages = tiles_for(which, max(q.shape[2], v.shape[3]), q.dtype)
    own, tiles = _tiles_of(own, walk)
    by_key = which == "keys"
    kernel[(tiles * (walk.keys if by_key else walk.queries),)](
        *arguments, walk.length, walk.chunk, tiles, walk.heads, walk.group, 1 if sums is None else sums.edge.shape[-1],
        D=q.shape[2], E=v.shape[3], BD=padded(q.shape[2]), BE=padded(v.shape[3]),
        BM=loop if by_key else own, BN=own if by_key else loop, P=p, GATED=sums is not None, STATE=state,
        DTYPE=_type(q), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _gates(sums: Sums | None, q: Tensor) -> tuple[Tensor, Tensor]:
    return (q, q) if sums is None else (sums.left, sums.edge)


def chunk_forward(
    walk: Walk, q: Tensor, k: Tensor, v: Tensor, sums: Sums | None, p: int, before: tuple[Tensor, Tensor] | None,
    out: Tensor,
) -> Tensor:  # fmt: skip
    """Attention within chunks, with what was read `before` them; writes out (B, T, H G, E), returns 1 / sums (N G, T).

    q and k are levelled; v is (B, T, H, E).
    """
    inverse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    _within(
        _forward, "forward", walk, q, v, p, sums, before is not None,
        q, k, v, *_gates(sums, q), *(before or (inverse, inverse)), out, inverse, *_by_head(v), *_by_head(out),
    )  # fmt: skip
    return inverse


def chunk_queries(
    walk: Walk, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sums: Sums | None, p: int, delta: Tensor,
    inverse: Tensor, unit: Tensor, before: Tensor | None, grad_q: Tensor,
) -> Tensor:  # fmt: skip
    """Writes the queries' gradients, with what comes from `before` the chunk; returns d log-weights by query."""
    rows = torch.empty_like(inverse)
    _within(
        _query_gradients, "queries", walk, q, v, p, sums, before is not None,
        q, k, v, grad, *_gates(sums, q), delta, inverse, unit, inverse if before is None else before, grad_q, rows,
        *_by_head(v), *_by_head(grad), *_by_head(grad_q),
    )  # fmt: skip
    return rows


def chunk_keys(
    walk: Walk, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sums: Sums | None, p: int, delta: Tensor,
    inverse: Tensor, unit: Tensor, after: tuple[Tensor, Tensor] | None, grad_k: Tensor, grad_v: Tensor,
) -> Tensor:  # fmt: skip
    """Writes the keys' and values' gradients, with what comes from `after` the chunk; returns d log-weights by key."""
    columns = torch.empty(k.shape[:2], dtype=torch.float32, device=k.device)
    _within(
        _key_gradients, "keys", walk, q, v, p, sums, after is not None,
        q, k, v, grad, *_gates(sums, q), delta, inverse, unit, *(after or (inverse, inverse)), grad_k, grad_v, columns,
        *_by_head(v), *_by_head(grad), *_by_head(grad_k), *_by_head(grad_v),
    )  # fmt: skip
    return columns

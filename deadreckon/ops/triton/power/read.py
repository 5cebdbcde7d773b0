"""Kernels that read states: queries forward, and the gradients through it backward.

A query x reads Σ x_a x_b S[a, b], where S is the state before its chunk, and the sum of its weights from the moments.
Backward, keys read the states of later chunks in the same way. The products x_a x_b of a pair of blocks are made in
registers; two different blocks stand for both their orders, so their products count twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.power.chunks import Chunks, plus, strides_by_group, tiling_for
from deadreckon.ops.triton.power.write import States
from deadreckon.ops.triton.tiles import DTYPES, ceil_div, load_rows, mul_exact, padded, store_rows


@Kernel
@triton.jit
def _read(
    p_x, p_state, p_moments, p_factor, p_out, p_sum, T, CHUNK, CHUNKS, TILES, GROUP, empty,
    D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    SUM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    i_tile, i_head = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    BLOCKS: tl.constexpr = D // 8
    PAIRS: tl.constexpr = BLOCKS * (BLOCKS + 1) // 2
    row, value, lane, part = i_tile * BM + tl.arange(0, BM), tl.arange(0, BE), tl.arange(0, 8), tl.arange(0, 64)
    m_row = row < T
    i_chunk = i_tile * BM // CHUNK
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
        b_sum = plus(b_sum, b_x, b_state, DTYPE)
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


def read(chunks: Chunks, x: Tensor, factor: Tensor, states: States, sums: bool) -> tuple[Tensor, Tensor]:
    """What x (heads, T, D) reads from the state of its chunk, times factor (heads, T), all in float32.

    Values (heads, T, E) and, if `sums`, the sums of weights (heads, T). `heads` are those of queries or of keys.
    """
    heads, length, width = x.shape
    value_width = states.values.shape[3]
    tiling = tiling_for("read", value_width, x)
    tile, tiles = chunks.tiles(tiling)
    out = x.new_empty(heads, length, value_width, dtype=torch.float32)
    rows = x.new_empty(heads, length, dtype=torch.float32) if sums else out
    _read[(tiles * heads,)](
        x, states.values, states.moments, factor, out, rows, length, chunks.size, chunks.count, tiles,
        heads // chunks.key_heads, states.empty, D=width, E=value_width, BE=padded(value_width), BM=tile, SUM=sums,
        DTYPE=DTYPES[x.dtype], **tiling.options,
    )  # fmt: skip
    return out, rows


@triton.jit
def _row_of(a, b, BLOCKS: tl.constexpr):
    """The row of a state that is channels a and b."""
    i, j = a // 8, b // 8
    apart = (j - i + BLOCKS) % BLOCKS
    forth = (2 * apart < BLOCKS) | ((2 * apart == BLOCKS) & (i < j))
    pair = tl.where(forth, apart * BLOCKS + i, (BLOCKS - apart) * BLOCKS + j)
    return pair * 64 + tl.where(forth, (a % 8) * 8 + b % 8, (b % 8) * 8 + a % 8)


@Kernel
@triton.jit
def _read_gradient(
    p_x, p_y, p_state, p_moments, p_factor, p_weight, p_out, p_dot, s_y,
    T, CHUNK, CHUNKS, TILES, HEADS, GROUP, empty,
    D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, WEIGHTED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    s_b, s_h, s_g, s_t = s_y
    i_tile, i_part = tl.program_id(0) % TILES, tl.program_id(1)
    i_head = (tl.program_id(0) // TILES).to(tl.int64)
    i_n, i_g = i_head // GROUP, i_head % GROUP
    BLOCKS: tl.constexpr = D // 8
    ROWS: tl.constexpr = BLOCKS * (BLOCKS + 1) // 2 * 64
    row, value, part = i_tile * BM + tl.arange(0, BM), tl.arange(0, BE), tl.arange(0, 64)
    m_row = row < T
    second = i_part * 64 + part
    m_second = second < D
    i_chunk = i_tile * BM // CHUNK
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
        b_sum = plus(b_sum, b_x, tl.trans(b_state), DTYPE)
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


def read_gradient(
    chunks: Chunks, x: Tensor, y: Tensor, weight: Tensor | None, factor: Tensor, states: States
) -> tuple[Tensor, Tensor]:
    """Gradient of factor · (y · values + weight · sums), with values and sums as x (heads, T, D) reads them.

    y is (B, T, heads of a sequence, E), weight and factor are (heads, T). Returns the gradient of x, (heads, T, D)
    float32, and x · gradient / 2, (heads, T), which is what gates receive.
    """
    heads, length, width = x.shape
    value_width = states.values.shape[3]
    tiling = tiling_for("gradient", value_width, x)
    tile, tiles = chunks.tiles(tiling)
    group, parts = heads // chunks.key_heads, ceil_div(width, 64)
    out = x.new_empty(heads, length, width, dtype=torch.float32)
    dots = x.new_empty(parts, heads, length, dtype=torch.float32)
    _read_gradient[(tiles * heads, parts)](
        x, y, states.values, states.moments, factor, x if weight is None else weight, out, dots,
        strides_by_group(y, group), length, chunks.size, chunks.count, tiles, chunks.heads, group, states.empty,
        D=width, E=value_width, BE=padded(value_width), BM=tile, WEIGHTED=weight is not None, DTYPE=DTYPES[x.dtype],
        **tiling.options,
    )  # fmt: skip
    return out, dots.sum(0)


@Kernel
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


def overlap(chunks: Chunks, width: int, one: States, other: States) -> Tensor:
    """The scalar product of two states at each chunk, (N, chunks), over all channels a and b."""
    value_width, parts = one.values.shape[3], 4
    out = one.values.new_empty(chunks.key_heads, chunks.count, parts, dtype=torch.float32)
    _overlap[(chunks.key_heads * chunks.count, parts)](
        one.values, other.values, out, D=width, E=value_width, BE=padded(value_width), PARTS=parts, num_warps=4
    )
    return out.sum(2) + (one.moments * other.moments).sum((2, 3))  # no product of matrices, which autocast would round

"""Kernels that write states: what the keys of each chunk add, carried from chunk to chunk.

A program owns a few pairs of blocks of a state and goes over the chunks in order: it stores what it has summed so far,
the state *before* the chunk, then multiplies it with the chunk's decay and adds the chunk's keys. Where heads are few,
the chunks are cut into segments that run in parallel, and `_carry` adds to each what all segments before it had.
Backward runs over the chunks in reverse: queries write the gradients of states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.power.chunks import Chunks, plus, strides_by_group, tiling_for
from deadreckon.ops.triton.tiles import DTYPES, ceil_div, load_rows, mul_exact, padded

PROGRAMS = 528  # that `_write` is split into, if there are enough chunks: four for each multiprocessor of an H200


class States(NamedTuple):
    """The state before each chunk (in reverse: after it), and the final one after all chunks."""

    values: Tensor  # (N, chunks, rows, E)
    moments: Tensor  # (N, chunks, D, D) float32
    final_values: Tensor  # (N, rows, E) float32
    final_moments: Tensor  # (N, D, D) float32
    empty: int  # the chunk whose state is zero, or −1


def pairs_of(width: int) -> int:
    """Pairs of blocks of 8 channels; a state has 64 rows for each."""
    blocks = width // 8
    return blocks * (blocks + 1) // 2


@Kernel
@triton.jit
def _write(
    p_x, p_y, p_initial, p_decay, p_state, p_total, s_y,
    T, TP, CHUNK, CHUNKS, SEGMENT, SEGMENTS, TILES, HEADS, GROUP,
    D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, PAIRS: tl.constexpr, BT: tl.constexpr,
    REVERSE: tl.constexpr, INITIAL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    s_b, s_h, s_g, s_t = s_y
    i_tile = tl.program_id(0) % TILES
    i_segment = tl.program_id(0) // TILES % SEGMENTS
    i_n = (tl.program_id(0) // TILES // SEGMENTS).to(tl.int64)
    BLOCKS: tl.constexpr = D // 8
    ROWS: tl.constexpr = BLOCKS * (BLOCKS + 1) // 2 * 64
    pair = tl.minimum(i_tile * PAIRS + tl.arange(0, PAIRS), ROWS // 64 - 1)
    lane = tl.arange(0, 8)
    first = tl.reshape((pair % BLOCKS)[:, None] * 8 + lane[None, :], [PAIRS * 8])
    second = tl.reshape(((pair % BLOCKS + pair // BLOCKS) % BLOCKS)[:, None] * 8 + lane[None, :], [PAIRS * 8])
    row, value = i_tile * PAIRS * 64 + tl.arange(0, PAIRS * 64), tl.arange(0, BE)
    m_state = (row < ROWS)[:, None] & (value < E)[None, :]
    at = row[:, None] * E + value[None, :]
    b_sum = tl.zeros([PAIRS * 64, BE], tl.float32)
    if INITIAL:
        b_sum += tl.load(p_initial + i_n * ROWS * E + at, mask=m_state & (i_segment == 0), other=0.0)
    for step in range(i_segment * SEGMENT, tl.minimum((i_segment + 1) * SEGMENT, CHUNKS)):
        i_chunk = CHUNKS - 1 - step if REVERSE else step
        i_state = i_n * CHUNKS + i_chunk
        tl.store(p_state + i_state * ROWS * E + at, b_sum.to(p_state.dtype.element_ty), mask=m_state)
        b_sum *= tl.load(p_decay + i_state)
        begin, end = i_chunk * CHUNK, tl.minimum(i_chunk * CHUNK + CHUNK, T)
        for g in range(GROUP):
            p_xg = p_x + (i_n * GROUP + g) * D * TP
            p_yg = p_y + (i_n // HEADS) * s_b + (i_n % HEADS) * s_h + g * s_g
            for t in range(begin, end, BT):
                token = t + tl.arange(0, BT)
                b_first = tl.reshape(
                    tl.load(p_xg + first[:, None].to(tl.int64) * TP + token[None, :]), [PAIRS, 8, 1, BT]
                )
                b_second = tl.reshape(
                    tl.load(p_xg + second[:, None].to(tl.int64) * TP + token[None, :]), [PAIRS, 1, 8, BT]
                )
                b_y = load_rows(p_yg, token, s_t, value, token < T, E, BE)
                b_sum = plus(b_sum, tl.reshape(b_first * b_second, [PAIRS * 64, BT]), b_y, DTYPE)
    tl.store(p_total + (i_n * SEGMENTS + i_segment) * ROWS * E + at, b_sum, mask=m_state)


@Kernel
@triton.jit
def _moments(
    p_x, p_weight, p_out, T, TP, CHUNK, CHUNKS, GROUP,
    D: tl.constexpr, BT: tl.constexpr, WEIGHTED: tl.constexpr, REVERSE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (D + 63) // 64
    i_chunk, i_n = tl.program_id(0) % CHUNKS, (tl.program_id(0) // CHUNKS).to(tl.int64)
    first, second = tl.program_id(1) // PARTS * 64 + tl.arange(0, 64), tl.program_id(1) % PARTS * 64 + tl.arange(0, 64)
    b_sum = tl.zeros([64, 64], tl.float32)
    for g in range(GROUP):
        i_head = i_n * GROUP + g
        p_xg = p_x + i_head * D * TP
        for t in range(i_chunk * CHUNK, tl.minimum(i_chunk * CHUNK + CHUNK, T), BT):
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


@Kernel
@triton.jit
def _carry(
    p_initial, p_total, p_decay, p_state, p_final, s_initial, SIZE, CHUNKS, SEGMENT, SEGMENTS, FROM, TILES,
    BLOCK: tl.constexpr, ADD: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    i_tile, i_n = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    at = i_tile * BLOCK + tl.arange(0, BLOCK)
    m_at = at < SIZE
    b_run = tl.load(p_initial + i_n * s_initial + at, mask=m_at, other=0.0)
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
    tl.store(p_final + i_n * SIZE + at, b_run, mask=m_at)


def write_states(
    chunks: Chunks, x: Tensor, y: Tensor, weight: Tensor | None, decay: Tensor, initial: tuple[Tensor, Tensor] | None,
    reverse: bool,
) -> States:  # fmt: skip
    """The states that x (N G', D, T padded) and y (B, T, H G', E) write: Σ x_a x_b y, and moments Σ weight · x_a x_b.

    They start from `initial`, (N, rows, E) and (N, D, D), or from zero. weight is (N G', T) or None; decay (N, chunks)
    is what each chunk leaves of the state before it. G' is 1 for keys (forward), G for queries (backward).
    """
    values, final_values = _write_values(chunks, x, y, decay, None if initial is None else initial[0], reverse)
    moments, final_moments = _write_moments(chunks, x, weight, decay, None if initial is None else initial[1], reverse)
    empty = -1 if initial is not None else chunks.count - 1 if reverse else 0
    return States(values, moments, final_values, final_moments, empty)


def _write_values(
    chunks: Chunks, x: Tensor, y: Tensor, decay: Tensor, initial: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    width, room, value_width = x.shape[1], x.shape[2], y.shape[3]
    rows, count = pairs_of(width) * 64, chunks.count
    tiling = tiling_for("write", value_width, x)
    tiles = ceil_div(rows // 64, tiling.tile)
    segment = ceil_div(count, min(count, ceil_div(PROGRAMS, tiles * chunks.key_heads)))
    segments = ceil_div(count, segment)
    states = x.new_empty(chunks.key_heads, count, rows, value_width)
    totals = x.new_empty(chunks.key_heads, segments, rows, value_width, dtype=torch.float32)
    group = x.shape[0] // chunks.key_heads
    _write[(tiles * segments * chunks.key_heads,)](
        x, y, decay if initial is None else initial, decay, states, totals, strides_by_group(y, group),
        chunks.length, room, chunks.size, count, segment, segments, tiles, chunks.heads, group,
        D=width, E=value_width, BE=padded(value_width), PAIRS=tiling.tile, BT=tiling.step, REVERSE=reverse,
        INITIAL=initial is not None, DTYPE=DTYPES[x.dtype], **tiling.options,
    )  # fmt: skip
    if segments == 1:
        return states, totals[:, 0]
    final = torch.empty_like(totals[:, 0])
    _carry_on(totals, totals, decay, states, final, segment, begin=1, add=True, reverse=reverse)
    return states, final


def _write_moments(
    chunks: Chunks, x: Tensor, weight: Tensor | None, decay: Tensor, initial: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    width, parts = x.shape[1], ceil_div(x.shape[1], 64)
    totals = x.new_empty(chunks.key_heads, chunks.count, width, width, dtype=torch.float32)
    _moments[(chunks.key_heads * chunks.count, parts * parts)](
        x, x if weight is None else weight, totals, chunks.length, x.shape[2], chunks.size, chunks.count,
        x.shape[0] // chunks.key_heads, D=width, BT=64, WEIGHTED=weight is not None, REVERSE=reverse,
        DTYPE=DTYPES[x.dtype], num_warps=4, num_stages=1 if x.dtype == torch.float32 else 2,
    )  # fmt: skip
    initial = totals.new_zeros(chunks.key_heads, width, width) if initial is None else initial
    states, final = torch.empty_like(totals), torch.empty_like(initial)
    _carry_on(initial, totals, decay, states, final, 1, begin=0, add=False, reverse=reverse)
    return states, final


def _carry_on(
    initial: Tensor, totals: Tensor, decay: Tensor, states: Tensor, final: Tensor, segment: int, *,
    begin: int, add: bool, reverse: bool,
) -> None:  # fmt: skip
    """Runs over segments from `begin` on with their totals (N, segments, …): writes (or adds to) states, and final."""
    size, block = final[0].numel(), 1024
    tiles = ceil_div(size, block)
    _carry[(tiles * len(final),)](
        initial, totals, decay, states, final, initial.stride(0), size, states.shape[1], segment,
        totals.shape[1], begin, tiles, BLOCK=block, ADD=add, REVERSE=reverse, num_warps=4,
    )  # fmt: skip

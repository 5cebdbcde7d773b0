"""Preprocessing: inputs normalised by powers of two so that no power overflows, decays, transposes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.gated.launch import Sums, gates_since
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.power.chunks import PADDING, Chunks
from deadreckon.ops.triton.tiles import ceil_div, load_rows, padded, store_rows, strides


@Kernel
@triton.jit
def _normalise(
    p_x, p_unit, p_y, s_x, T, TILES, HEADS, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    BY_ROW: tl.constexpr,
):  # fmt: skip
    i_tile, i_head = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    row, channel = i_tile * BT + tl.arange(0, BT), tl.arange(0, BD)
    m_row = row < T
    s_b, s_t, s_h = s_x
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


def normalise(x: Tensor, unit: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (B, T, H, D) as (B H, T, D), times `unit` (B H,), or if None each row times its own power of two, (B H, T).

    Returns both. The units are exact, so nothing is rounded.
    """
    batch, length, heads, width = x.shape
    by_row = unit is None
    unit = x.new_empty(batch * heads, length, dtype=torch.float32) if unit is None else unit
    out = x.new_empty(batch * heads, length, width, dtype=dtype)
    tiles = ceil_div(length, 64)
    _normalise[(tiles * batch * heads,)](
        x, unit, out, *strides(x), length, tiles, heads, D=width, BD=padded(width), BT=64, BY_ROW=by_row
    )
    return out, unit


@Kernel
@triton.jit
def _largest(p_x, p_out, s_x, T, TILES, HEADS, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr):
    i_tile, i_head = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    row = i_tile * BT + tl.arange(0, BT)
    s_b, s_t, s_h = s_x
    p_x += (i_head // HEADS) * s_b + (i_head % HEADS) * s_h
    b_x = tl.abs(load_rows(p_x, row, s_t, tl.arange(0, BD), row < T, D, BD).to(tl.float32))
    tl.store(p_out + tl.program_id(0), tl.max(tl.where(b_x < float("inf"), b_x, 0.0)))


def largest(x: Tensor) -> Tensor:
    """max |x| over the finite numbers of each head of x (B, T, H, D): (B H,)."""
    batch, length, heads, width = x.shape
    tiles = ceil_div(length, 128)
    out = x.new_empty(batch * heads, tiles, dtype=torch.float32)
    _largest[(batch * heads * tiles,)](x, out, *strides(x), length, tiles, heads, D=width, BD=padded(width), BT=128)
    return out.amax(1)


def key_unit(k: Tensor, moments: Tensor | None, p: int, chunk: int) -> Tensor:
    """For each head a power of two, (N,), that scales its keys, and those that are already in a state, to at most 1."""
    limit = 120 // p if chunk else 120  # states are multiplied by its power p
    longest = largest(k)
    if moments is not None:
        past = moments.diagonal(dim1=-2, dim2=-1).amax(-1).flatten()
        longest = torch.maximum(longest, past ** (1 / p))
    exponent = torch.frexp(longest).exponent.clamp(-limit, limit)
    return torch.ldexp(torch.ones_like(longest), -exponent)


def rescaled(values: Tensor, moments: Tensor, unit: Tensor, p: int) -> tuple[Tensor, Tensor]:
    """A state, (B, H, …) or (N, …), as if its keys had been multiplied by `unit` (N,)."""
    half = (unit ** (p // 2)).view(*values.shape[:-2], 1, 1)
    return values * half * half, moments * half * half


@Kernel
@triton.jit
def _decays(p_left, p_rest, p_edge, p_rise, p_fall, p_whole, T, CHUNK, CHUNKS, BLOCKS):
    i_block, i_n = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    i_chunk = i_block * 64 // CHUNK
    first = i_chunk * (CHUNK // 64)
    token = i_block * 64 + tl.arange(0, 64)
    p_edge += i_n * BLOCKS
    start = tl.load(p_edge + first - 1, mask=first > 0, other=0.0)
    end = tl.load(p_edge + tl.minimum(first + CHUNK // 64, BLOCKS) - 1)
    b_gate = gates_since(p_left + i_n * BLOCKS * 64, p_rest + i_n * BLOCKS * 64, p_edge, token, token >= 0, start)
    tl.store(p_rise + i_n * T + token, tl.exp2(b_gate.to(tl.float32)), mask=token < T)
    tl.store(p_fall + i_n * T + token, tl.exp2(((end - start) - b_gate).to(tl.float32)), mask=token < T)
    if i_block == first:
        tl.store(p_whole + i_n * CHUNKS + i_chunk, tl.exp2((end - start).to(tl.float32)))


class Decays(NamedTuple):
    """Products of gates: from the chunk's start to each token, from each token to the chunk's end, and across it."""

    rise: Tensor  # (N, T)
    fall: Tensor  # (N, T)
    whole: Tensor  # (N, chunks)


def decays_of(chunks: Chunks, sums: Sums | None, device: torch.device) -> Decays:
    if sums is None:
        ones = torch.ones(chunks.key_heads, chunks.length, device=device)
        return Decays(ones, ones, ones.new_ones(chunks.key_heads, chunks.count))
    rise = torch.empty(chunks.key_heads, chunks.length, device=device)
    decays = Decays(rise, torch.empty_like(rise), rise.new_empty(chunks.key_heads, chunks.count))
    blocks = sums.edge.shape[-1]
    _decays[(blocks * chunks.key_heads,)](*sums, *decays, chunks.length, chunks.size, chunks.count, blocks, num_warps=2)
    return decays


@Kernel
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


def transposed(x: Tensor, factor: Tensor) -> Tensor:
    """x (heads, T, D), rows times the root of factor (heads, T), as (heads, D, T padded)."""
    heads, length, width = x.shape
    room = ceil_div(length, PADDING) * PADDING
    out = x.new_empty(heads, width, room)
    _transpose[(room // 64 * heads, ceil_div(width, 64))](x, factor, out, length, room, room // 64, D=width, BT=64)
    return out


@Kernel
@triton.jit
def _delta(
    p_o, p_do, p_out, s_o, s_g, T, TILES, HEADS, E: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    i_tile, i_head = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    row, value = i_tile * BT + tl.arange(0, BT), tl.arange(0, BE)
    m_row = row < T
    s_ob, s_ot, s_oh = s_o
    s_gb, s_gt, s_gh = s_g
    i_b, i_h = i_head // HEADS, i_head % HEADS
    b_o = load_rows(p_o + i_b * s_ob + i_h * s_oh, row, s_ot, value, m_row, E, BE).to(tl.float32)
    b_do = load_rows(p_do + i_b * s_gb + i_h * s_gh, row, s_gt, value, m_row, E, BE).to(tl.float32)
    tl.store(p_out + i_head * T + row, -tl.sum(b_o * b_do, 1), mask=m_row)


def minus_delta(out: Tensor, grad: Tensor) -> Tensor:
    """−out · grad, (B, T, H, E) -> (B H, T)."""
    batch, length, heads, width = out.shape
    result = out.new_empty(batch * heads, length, dtype=torch.float32)
    tiles = ceil_div(length, 64)
    _delta[(tiles * batch * heads,)](
        out, grad, result, *strides(out, grad), length, tiles, heads,
        E=width, BE=padded(width), BT=64,
    )  # fmt: skip
    return result

"""Decode kernels of PaTH and related encodings, for one token: two launches, since a step waits for each.

    maps         several linear maps of one x, each with bias and an ending: β = 2σ(a), log f = s · log σ(a)
    directions   the map up from a low rank, the convolution with recent inputs, unit length, and the updated inputs

A matrix-vector product takes as long as reading its weights. Each program has a few rows of them, for one sequence of
the batch; sums are in float32, and rounded where PyTorch's operations would round them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.directions import SMALLEST, silu
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.pointwise import log_sigmoid, sigmoid
from deadreckon.ops.triton.tiles import ceil_div, power_of_two

ENDINGS = ("none", "strength", "log gate")
MOST = 3  # maps of one launch
ROWS = 4  # of weights, of one program
WIDEST = 1024  # inputs that are read at a time


class Map(NamedTuple):
    """y = ending(x · weightᵀ + bias), of `rows` outputs."""

    weight: Tensor  # (rows, inputs)
    bias: Tensor | None  # (rows,)
    y: Tensor  # (B, rows)
    rows: int
    scale: float


@triton.jit
def _map(p_x, part, i_b, i_tile, K, ENDING: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    row, column = i_tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BK)
    m_row = row < part.rows
    b_sum = tl.zeros([ROWS], tl.float32)
    dtype = p_x.dtype.element_ty
    for first in range(0, K, BK):
        m_column = first + column < K
        b_x = tl.load(p_x + i_b * K + first + column, mask=m_column, other=0.0).to(tl.float32)
        p_weight = part.weight + row.to(tl.int64)[:, None] * K + first + column[None, :]
        b_weight = tl.load(p_weight, mask=m_row[:, None] & m_column[None, :], other=0.0)
        b_sum += tl.sum(b_weight.to(dtype).to(tl.float32) * b_x[None, :], 1)  # weights as autocast hands them on
    if part.bias is not None:
        b_sum += tl.load(part.bias + row, mask=m_row, other=0.0).to(dtype).to(tl.float32)
    b_y = b_sum.to(dtype).to(tl.float32)
    if ENDING == 1:
        b_y = 2 * sigmoid(b_y)
    if ENDING == 2:
        b_y = log_sigmoid(b_y) * part.scale
    tl.store(part.y + i_b * part.rows + row, b_y.to(part.y.dtype.element_ty), mask=m_row)


@Kernel
@triton.jit
def _maps(
    p_x, one, two, three, K, FIRST, SECOND,
    ENDING_1: tl.constexpr, ENDING_2: tl.constexpr, ENDING_3: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The first FIRST programs have rows of the first map, the next ones, up to SECOND, of the second."""
    i_tile, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if i_tile < FIRST:
        _map(p_x, one, i_b, i_tile, K, ENDING_1, ROWS, BK)
    elif i_tile < SECOND:
        if ENDING_2 >= 0:
            _map(p_x, two, i_b, i_tile - FIRST, K, ENDING_2, ROWS, BK)
    else:
        if ENDING_3 >= 0:
            _map(p_x, three, i_b, i_tile - SECOND, K, ENDING_3, ROWS, BK)


def maps(x: Tensor, parts: Sequence[tuple[Tensor, Tensor | None, str, float]]) -> list[Tensor]:
    """Up to three maps of x (B, 1, inputs): weight (rows, inputs), bias, ending and its scale, contiguous.

    Returns:
        (B, 1, rows) each, in x's dtype, or in float32 if there is an ending.
    """
    batch, _, inputs = x.shape
    x, given = x.contiguous(), list[Map | None]()
    for weight, bias, ending, scale in parts:
        y = torch.empty(batch, 1, len(weight), dtype=x.dtype if ending == "none" else torch.float32, device=x.device)
        given.append(Map(weight, bias, y, len(weight), float(scale)))
    tiles = [ceil_div(len(weight), ROWS) for weight, *_ in parts] + [0] * (MOST - len(parts))
    endings = [ENDINGS.index(ending) for _, _, ending, _ in parts] + [-1] * (MOST - len(parts))
    outputs = [part.y for part in given if part is not None]
    given += [None] * (MOST - len(parts))
    with torch.cuda.device_of(x):
        _maps[(sum(tiles), batch)](
            x, *given, inputs, tiles[0], tiles[0] + tiles[1],
            ENDING_1=endings[0], ENDING_2=endings[1], ENDING_3=endings[2], ROWS=ROWS,
            BK=min(WIDEST, power_of_two(inputs)), num_warps=4,
        )  # fmt: skip
    return outputs


@Kernel
@triton.jit(do_not_specialize=["s_place"])
def _directions(
    p_low, p_up, p_recent, p_filter, p_place, p_w, p_kept, s_place, R, S, C, D, epsilon,
    BR: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, UNIT: tl.constexpr, SILU: tl.constexpr,
    SMALLEST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane, rank, token = tl.arange(0, BD), tl.arange(0, BR), tl.arange(0, BS)
    channel, m_channel = i_h * D + lane, lane < D
    dtype = p_recent.dtype.element_ty
    b_low = tl.load(p_low + i_b * R + rank, mask=rank < R, other=0.0).to(tl.float32)
    m_up = m_channel[:, None] & (rank < R)[None, :]
    b_up = tl.load(p_up + channel[:, None] * R + rank[None, :], mask=m_up, other=0.0)
    b_new = tl.sum(b_up.to(dtype).to(tl.float32) * b_low[None, :], 1).to(dtype)
    p_recent += i_b * S * C
    p_kept += i_b * S * C
    m_earlier = (token < S - 1)[:, None] & m_channel[None, :]
    offsets = token[:, None] * C + channel[None, :]
    tl.store(p_kept + offsets, tl.load(p_recent + offsets + C, mask=m_earlier, other=0.0), mask=m_earlier)
    tl.store(p_kept + (S - 1) * C + channel, b_new, mask=m_channel)
    place = tl.load(p_place + i_b * s_place)
    b_a = b_new.to(tl.float32) * tl.load(p_filter + channel, mask=m_channel, other=0.0).to(tl.float32)
    for lag in tl.static_range(1, WIDTH):
        mask = m_channel & (place >= lag)
        b_x = tl.load(p_recent + (S - lag) * C + channel, mask=mask, other=0.0).to(tl.float32)
        b_a += b_x * tl.load(p_filter + lag * C + channel, mask=m_channel, other=0.0).to(tl.float32)
    if SILU:
        b_a = silu(b_a)
    if UNIT:
        b_a /= tl.sqrt(tl.maximum(tl.sum(b_a * b_a, 0) + epsilon, SMALLEST))
    tl.store(p_w + i_b * C + channel, b_a, mask=m_channel)


def directions(
    low: Tensor,
    up: Tensor,
    recent: Tensor,
    filters: Tensor,
    places: Tensor,
    heads: int,
    activation: str,
    epsilon: float,
    unit: bool = True,
) -> tuple[Tensor, Tensor]:
    """The direction w (B, 1, H, D) float32 of the next token, and recent inputs (B, S, C) that end with it.

    Without `unit` it is the activated convolution.

    Args:
        low: (B, 1, rank).
        up: (C, rank) weights of the map from it.
        recent: (B, S, C), the last S inputs of the convolution, at least as many as it reaches back.
        filters: (width, C).
        places: (B or 1, 1), the number of tokens before it in its document.
    """
    low, recent, filters = low.contiguous(), recent.contiguous(), filters.contiguous()
    (batch, size, channels), width = recent.shape, recent.shape[2] // heads
    w = torch.empty(batch, 1, heads, width, dtype=torch.float32, device=low.device)
    kept = torch.empty_like(recent)
    with torch.cuda.device_of(low):
        _directions[(heads, batch)](
            low, up, recent, filters, places, w, kept, places.stride(0) if places.shape[0] > 1 else 0,
            low.shape[2], size, channels, width, epsilon, BR=power_of_two(low.shape[2]), BS=power_of_two(size),
            BD=max(16, power_of_two(width)), UNIT=unit, SILU=activation == "silu",
            SMALLEST=SMALLEST, WIDTH=filters.shape[0], num_warps=4,
        )  # fmt: skip
    return w, kept

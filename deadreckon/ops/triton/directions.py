"""Directions of Householder steps from a low-rank map's output, in one pass over memory each way.

    y_t = Σ_i f_i ⊙ x_{t−i}, i < width, within the document    a = y, or silu(y)    w = a / √(‖a‖² + ε), head by head

or w = a without `unit`. In PyTorch these are a dozen passes forward and two dozen back. Backward, with dy that of y,

    da = (dw − w (w · dw)) / √(‖a‖² + ε)      dx_t = Σ_i f_i ⊙ dy_{t+i}      df_i = Σ_t dy_t ⊙ x_{t−i}

x (B, R + T, C) begins with R tokens of the preceding piece; places (B or 1, T) say how many tokens of its document come
before each. dy is written and read once more, since tokens need that of later ones; where w = y it is the incoming
gradient. Sums over tokens are taken tile by tile, then over tiles: bit-reproducible.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import ceil_div, power_of_two

TILE = 32  # tokens of a tile
TILES = 4  # of one program on its way back: so many rows of a filter's gradient it adds up
CHANNELS = 64  # of such a program
SMALLEST = 1e-24  # of ‖a‖²: a direction of nothing but zeros stays that


@triton.jit
def _convolved(p_x, p_filter, p_place, token, channel, m_channel, RECENT, T, C, WIDTH: tl.constexpr):
    """y of these tokens (tokens, channels), zeros where there is no such token."""
    inside = (token >= 0) & (token < T)
    b_place = tl.load(p_place + token, mask=inside, other=0)
    b_y = tl.zeros([token.shape[0], channel.shape[0]], tl.float32)
    for lag in tl.static_range(WIDTH):
        row = token - lag + RECENT
        mask = (inside & (row >= 0) & (b_place >= lag))[:, None] & m_channel[None, :]
        b_x = tl.load(p_x + row.to(tl.int64)[:, None] * C + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        b_y += b_x * tl.load(p_filter + lag * C + channel, mask=m_channel, other=0.0).to(tl.float32)[None, :]
    return b_y


@triton.jit
def silu(b_y):
    return b_y / (1 + tl.exp(-b_y))


@Kernel
@triton.jit(do_not_specialize=["RECENT", "T", "s_place"])
def _forward(
    p_x, p_filter, p_place, p_w, s_place, RECENT, T, C, D, epsilon,
    BD: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, SILU: tl.constexpr, SMALLEST: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    i_tile, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token, lane = i_tile * TILE + tl.arange(0, TILE), tl.arange(0, BD)
    channel, m_channel = i_h * D + lane, lane < D
    b_a = _convolved(
        p_x + i_b * (RECENT + T) * C, p_filter, p_place + i_b * s_place, token, channel, m_channel, RECENT, T, C, WIDTH
    )
    if SILU:
        b_a = silu(b_a)
    if UNIT:
        b_a /= tl.sqrt(tl.maximum(tl.sum(b_a * b_a, 1) + epsilon, SMALLEST))[:, None]
    offsets = token.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(p_w + i_b * T * C + offsets, b_a, mask=(token < T)[:, None] & m_channel[None, :])


@Kernel
@triton.jit(do_not_specialize=["RECENT", "T", "s_place"])
def _arrive(
    p_x, p_filter, p_place, p_grad, p_dy, s_place, RECENT, T, C, D, epsilon,
    BD: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, SILU: tl.constexpr, SMALLEST: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """dy of a tile of tokens."""
    i_tile, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token, lane = i_tile * TILE + tl.arange(0, TILE), tl.arange(0, BD)
    channel, m_channel = i_h * D + lane, lane < D
    b_y = _convolved(
        p_x + i_b * (RECENT + T) * C, p_filter, p_place + i_b * s_place, token, channel, m_channel, RECENT, T, C, WIDTH
    )
    b_a = b_y
    if SILU:
        b_a = silu(b_y)
    mask = (token < T)[:, None] & m_channel[None, :]
    offsets = i_b * T * C + token.to(tl.int64)[:, None] * C + channel[None, :]
    b_da = tl.load(p_grad + offsets, mask=mask, other=0.0).to(tl.float32)
    if UNIT:
        b_square = tl.sum(b_a * b_a, 1) + epsilon
        b_inverse = 1 / tl.sqrt(tl.maximum(b_square, SMALLEST))
        b_along = tl.sum(b_a * b_da, 1) * tl.where(b_square > SMALLEST, b_inverse * b_inverse, 0.0)
        b_da = (b_da - b_a * b_along[:, None]) * b_inverse[:, None]
    if SILU:
        b_gate = 1 / (1 + tl.exp(-b_y))
        b_da *= b_gate * (1 + b_y * (1 - b_gate))
    tl.store(p_dy + offsets, b_da, mask=mask)


@triton.jit
def _behind(p_dy, p_place, token, lag, channel, m_channel, T, C):
    """dy of the tokens that follow these by a lag, zeros where there is none or it is of another document."""
    later = token + lag
    there = (later >= 0) & (later < T)
    there = there & (tl.load(p_place + later, mask=there, other=-1) >= lag)
    mask = there[:, None] & m_channel[None, :]
    return tl.load(p_dy + later.to(tl.int64)[:, None] * C + channel[None, :], mask=mask, other=0.0)


@Kernel
@triton.jit(do_not_specialize=["RECENT", "T", "s_place"])
def _backward(
    p_x, p_filter, p_place, p_dy, p_dx, p_dfilter, s_place, RECENT, T, C,
    BC: tl.constexpr, BW: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dx of TILES tiles of rows of x, and this program's part of df (programs, width, C)."""
    i_part, i_b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    channel, tap = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BW)
    m_channel = channel < C
    p_x += i_b * (RECENT + T) * C
    p_dx += i_b * (RECENT + T) * C
    p_dy += i_b * T * C
    p_place += i_b * s_place
    b_df = tl.zeros([BW, BC], tl.float32)
    for tile in range(TILES):
        token = (i_part * TILES + tile) * TILE + tl.arange(0, TILE) - RECENT  # of the piece; before it below zero
        m_row = (token < T)[:, None] & m_channel[None, :]
        offsets = (token + RECENT).to(tl.int64)[:, None] * C + channel[None, :]
        b_x = tl.load(p_x + offsets, mask=m_row, other=0.0).to(tl.float32)
        b_dx = tl.zeros([TILE, BC], tl.float32)
        for lag in tl.static_range(WIDTH):  # what x does for its own token, the one after it, …
            b_dy = _behind(p_dy, p_place, token, lag, channel, m_channel, T, C)
            b_dx += b_dy * tl.load(p_filter + lag * C + channel, mask=m_channel, other=0.0).to(tl.float32)[None, :]
            b_df += tl.where((tap == lag)[:, None], tl.sum(b_dy * b_x, 0)[None, :], 0.0)
        tl.store(p_dx + offsets, b_dx.to(p_dx.dtype.element_ty), mask=m_row)
    p_dfilter += (i_b * tl.num_programs(0) + i_part) * WIDTH * C
    m_filter = (tap < WIDTH)[:, None] & m_channel[None, :]
    tl.store(p_dfilter + tap[:, None] * C + channel[None, :], b_df, mask=m_filter)


def _options(filters: Tensor, heads: int, silu: bool, unit: bool) -> dict[str, Any]:
    return {
        "BD": max(16, power_of_two(filters.shape[1] // heads)), "TILE": TILE, "UNIT": unit, "SILU": silu,
        "SMALLEST": SMALLEST, "WIDTH": filters.shape[0], "num_warps": 4,
    }  # fmt: skip


@torch.library.custom_op("deadreckon::directions", mutates_args=())
def directions_forward(
    x: Tensor, filters: Tensor, places: Tensor, heads: int, silu: bool, epsilon: float, unit: bool = True
) -> Tensor:
    """w (B, T, H, D) float32 of x (B, R + T, H·D), filters (width, H·D) and places (B or 1, T)."""
    x, filters, places = x.contiguous(), filters.contiguous(), places.contiguous()
    batch, length, channels = x.shape[0], places.shape[1], x.shape[2]
    w = x.new_empty(batch, length, heads, channels // heads, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _forward[(ceil_div(length, TILE), heads, batch)](
            x, filters, places, w, places.stride(0) if places.shape[0] > 1 else 0, x.shape[1] - length, length,
            channels, channels // heads, epsilon, **_options(filters, heads, silu, unit),
        )  # fmt: skip
    return w


@directions_forward.register_fake
def _(x: Tensor, filters: Tensor, places: Tensor, heads: int, silu: bool, epsilon: float, unit: bool = True) -> Tensor:
    return x.new_empty(x.shape[0], places.shape[1], heads, x.shape[2] // heads, dtype=torch.float32)


@torch.library.custom_op("deadreckon::directions_backward", mutates_args=())
def directions_backward(
    grad: Tensor, x: Tensor, filters: Tensor, places: Tensor, heads: int, silu: bool, epsilon: float, unit: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and filters."""
    x, filters, places, grad = (y.contiguous() for y in (x, filters, places, grad))
    batch, rows, channels = x.shape
    length = places.shape[1]
    width, parts, block = filters.shape[0], ceil_div(rows, TILE * TILES), min(CHANNELS, power_of_two(channels))
    dx, dy = torch.empty_like(x), grad
    partial = x.new_empty(batch * parts, width, channels, dtype=torch.float32)
    sizes = places.stride(0) if places.shape[0] > 1 else 0, rows - length, length, channels
    with torch.cuda.device_of(x):
        if unit or silu:
            dy = x.new_empty(batch, length, channels, dtype=torch.float32)
            _arrive[(ceil_div(length, TILE), heads, batch)](
                x, filters, places, grad, dy, *sizes, channels // heads, epsilon,
                **_options(filters, heads, silu, unit),
            )  # fmt: skip
        _backward[(parts, ceil_div(channels, block), batch)](
            x, filters, places, dy, dx, partial, *sizes, BC=block, BW=power_of_two(width), TILE=TILE, TILES=TILES,
            WIDTH=width, num_warps=4,
        )  # fmt: skip
    return dx, partial.sum(0).to(filters.dtype)


@directions_backward.register_fake
def _(
    grad: Tensor, x: Tensor, filters: Tensor, places: Tensor, heads: int, silu: bool, epsilon: float, unit: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(filters)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, filters, places, *ctx.options = inputs
    ctx.save_for_backward(x, filters, places)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx, dfilters = directions_backward(grad, *ctx.saved_tensors, *ctx.options)
    return dx, dfilters, None, None, None, None, None


directions_forward.register_autograd(_gradients, setup_context=_save)

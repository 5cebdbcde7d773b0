"""Gradients of softmax attention whose keys are wide and whose rows are short, such as PRISM's.

A flash kernel accumulates the gradient of a tile of 64 keys in registers, and 512 channels of it are all that a
multiprocessor has. Here weights p and their slopes ds are written to memory, T × T of them in 16 bits, for as many
heads at a time as `HELD` has room for; products with them go over any number of channels:

    s = q kᵀ · scale         p = exp(s − lse)       ds = p (do vᵀ − δ)       (1) `_weights`, a tile each
    dq = ds k · scale                                                        (2) `_query_products`
    dk = dsᵀ q · scale       dv = pᵀ do                                      (3) `_key_products`

Tiles above the diagonal are neither written nor read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import LOG2E, ceil_div, padded, strides

LONGEST = 2048  # tokens: T × T weights and slopes of a head take 16 MiB
HELD = 1 << 29  # bytes of weights and slopes at a time
TILE = 64  # tokens
CHANNELS = 128  # of a program's products


@triton.jit
def _rows_of(p_x, row, T, s_t, channel, W: tl.constexpr):
    """Some channels of some rows of x."""
    mask = (row < T)[:, None] & (channel < W)[None, :]
    return tl.load(p_x + row.to(tl.int64)[:, None] * s_t + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _tile_of(p_x, i_head, row, column, TP):
    """A tile of the T × T numbers of a head, in rows of TP."""
    return p_x + i_head * TP * TP + row.to(tl.int64)[:, None] * TP + column[None, :]


@Kernel
@triton.jit(do_not_specialize=["first", "T", "TILES", "HEADS"])
def _weights(
    p_q, p_k, p_v, p_do, p_delta, p_row_shift, p_weight, p_slope, scale2, s_q, s_k, s_v, s_o, s_l, first, T,
    TILES, HEADS, GROUP, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of p and ds."""
    i_tile, i_head = tl.program_id(0) % (TILES * TILES), (tl.program_id(0) // (TILES * TILES)).to(tl.int64)
    i_row, i_column = i_tile // TILES, i_tile % TILES
    if i_column > i_row:
        return
    i_n, i_g = first + i_head // GROUP, i_head % GROUP
    i_b, i_h = i_n // HEADS, i_n % HEADS
    i_hq = i_h * GROUP + i_g
    row, column, channel = i_row * TILE + tl.arange(0, TILE), i_column * TILE + tl.arange(0, TILE), tl.arange(0, TILE)
    p_q += i_b * s_q[0] + i_hq * s_q[2]
    p_k += i_b * s_k[0] + i_h * s_k[2]
    b_s = tl.zeros([TILE, TILE], tl.float32)
    for d in range(0, D, TILE):
        b_q = _rows_of(p_q, row, T, s_q[1], d + channel, D)
        b_s = tl.dot(b_q, tl.trans(_rows_of(p_k, column, T, s_k[1], d + channel, D)), b_s)
    value_channel = tl.arange(0, BE)
    b_v = _rows_of(p_v + i_b * s_v[0] + i_h * s_v[2], column, T, s_v[1], value_channel, E)
    b_do = _rows_of(p_do + i_b * s_o[0] + i_hq * s_o[2], row, T, s_o[1], value_channel, E)
    at = i_n * s_l[0] + row.to(tl.int64) * s_l[1] + i_g
    b_delta, b_shift = tl.load(p_delta + at), tl.load(p_row_shift + at)  # padded to whole tiles
    seen = (column[None, :] <= row[:, None]) & (row < T)[:, None]
    b_p = tl.exp2(tl.where(seen, b_s * scale2 + b_shift[:, None], float("-inf")))
    b_ds = tl.where(seen, b_p * (tl.dot(b_do, tl.trans(b_v)) - b_delta[:, None]), 0.0)
    TP = TILES * TILE
    tl.store(_tile_of(p_weight, i_head, row, column, TP), b_p.to(p_weight.dtype.element_ty))
    tl.store(_tile_of(p_slope, i_head, row, column, TP), b_ds.to(p_slope.dtype.element_ty))


@Kernel
@triton.jit(do_not_specialize=["first", "T", "TILES", "HEADS"])
def _query_products(
    p_slope, p_k, p_dq, scale, s_k, s_dq, first, T, TILES, HEADS, GROUP,
    D: tl.constexpr, BD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """ds k · scale: some channels of the rows of a tile."""
    i_row, i_head = TILES - 1 - tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)  # longest rows first
    i_n, i_g = first + i_head // GROUP, i_head % GROUP
    i_b, i_h = i_n // HEADS, i_n % HEADS
    row, channel = i_row * TILE + tl.arange(0, TILE), tl.program_id(1) * BD + tl.arange(0, BD)
    p_k += i_b * s_k[0] + i_h * s_k[2]
    p_dq += i_b * s_dq[0] + (i_h * GROUP + i_g) * s_dq[2]
    b_dq = tl.zeros([TILE, BD], tl.float32)
    for j in range(0, i_row + 1):
        column = j * TILE + tl.arange(0, TILE)
        b_ds = tl.load(_tile_of(p_slope, i_head, row, column, TILES * TILE))
        b_dq = tl.dot(b_ds, _rows_of(p_k, column, T, s_k[1], channel, D), b_dq)
    mask = (row < T)[:, None] & (channel < D)[None, :]
    p_dq += row.to(tl.int64)[:, None] * s_dq[1] + channel[None, :]
    tl.store(p_dq, (b_dq * scale).to(p_dq.dtype.element_ty), mask=mask)


@Kernel
@triton.jit(do_not_specialize=["first", "T", "TILES", "HEADS"])
def _key_products(
    p_x, p_q, p_dk, scale, s_q, s_dk, first, T, TILES, HEADS, GROUP,
    D: tl.constexpr, BD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """xᵀ q · scale, for x either p or ds: some channels of the rows of a tile, summed over the queries of a group."""
    i_column, i_head = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    i_n = first + i_head
    i_b, i_h = i_n // HEADS, i_n % HEADS
    column, channel = i_column * TILE + tl.arange(0, TILE), tl.program_id(1) * BD + tl.arange(0, BD)
    b_dk = tl.zeros([TILE, BD], tl.float32)
    for g in range(GROUP):
        p_rows = p_q + i_b * s_q[0] + (i_h * GROUP + g) * s_q[2]
        for i in range(i_column, TILES):
            row = i * TILE + tl.arange(0, TILE)
            b_x = tl.load(_tile_of(p_x, i_head * GROUP + g, row, column, TILES * TILE))
            b_dk = tl.dot(tl.trans(b_x), _rows_of(p_rows, row, T, s_q[1], channel, D), b_dk)
    mask = (column < T)[:, None] & (channel < D)[None, :]
    p_dk += i_b * s_dk[0] + i_h * s_dk[2] + column.to(tl.int64)[:, None] * s_dk[1] + channel[None, :]
    tl.store(p_dk, (b_dk * scale).to(p_dk.dtype.element_ty), mask=mask)


def wide_backward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, grad: Tensor, delta: Tensor, row_shift: Tensor,
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor,
) -> None:  # fmt: skip
    """Writes the gradients of q (B, T, Hq, D), k (B, T, H, D) and v (B, T, H, E), all in 16 bits.

    delta and row_shift are (B·H, T padded to whole tiles, Hq / H), as `prepare` makes them.
    """
    (batch, length, heads, width), values = k.shape, v.shape[3]
    group, tiles = q.shape[2] // heads, ceil_div(length, TILE)
    area = group * (tiles * TILE) ** 2
    taken = max(1, HELD // (2 * area * q.element_size()))  # key heads at a time
    weight, slope = (q.new_empty(min(taken, batch * heads) * area) for _ in "ps")
    s_q, s_k, s_v, s_o, s_dq, s_dk, s_dv = strides(q, k, v, grad, grad_q, grad_k, grad_v)
    for first in range(0, batch * heads, taken):
        count, sizes = min(taken, batch * heads - first), (first, length, tiles, heads, group)
        _weights[(tiles * tiles * count * group,)](
            q, k, v, grad, delta, row_shift, weight, slope, scale * LOG2E, s_q, s_k, s_v, s_o,
            delta.stride()[:2], *sizes, D=width, E=values, BE=padded(values), TILE=TILE, num_warps=4, num_stages=3,
        )  # fmt: skip
        options = {"BD": CHANNELS, "TILE": TILE, "num_warps": 4, "num_stages": 3}
        parts = ceil_div(width, CHANNELS)
        _query_products[(tiles * count * group, parts)](slope, k, grad_q, scale, s_k, s_dq, *sizes, D=width, **options)
        _key_products[(tiles * count, parts)](slope, q, grad_k, scale, s_q, s_dk, *sizes, D=width, **options)
        options["BD"] = min(padded(values), CHANNELS)
        parts = ceil_div(values, options["BD"])
        _key_products[(tiles * count, parts)](weight, grad, grad_v, 1.0, s_o, s_dv, *sizes, D=values, **options)

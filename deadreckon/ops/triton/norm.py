"""Fused residual add and RMSNorm, in one pass over memory each way.

    s = x + y      n = s ⊙ g / √(mean s² + ε)

PyTorch takes four passes, with the cast of n to what linear maps read. Backward, with dn and ds the gradients of both,

    dx = dy = ds + (dn ⊙ g − ŝ mean(dn ⊙ g ⊙ ŝ)) / √(mean s² + ε)      dg = Σ dn ⊙ ŝ      ŝ = s / √(mean s² + ε)

Sums over tokens are taken program by program, then over programs: bit-reproducible.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import ceil_div, power_of_two

NUMBERS = 2048  # of a tile: so many rows of it as there is room for
PROGRAMS = 4096  # of a backward pass, each of which adds up a gradient of g


@triton.jit
def _place(tile, ROWS, C, BC: tl.constexpr, TILE: tl.constexpr):
    row, channel = tile * TILE + tl.arange(0, TILE), tl.arange(0, BC)
    return row, row.to(tl.int64)[:, None] * C + channel[None, :], (row < ROWS)[:, None] & (channel < C)[None, :]


@Kernel
@triton.jit(do_not_specialize=["ROWS"])
def _forward(
    p_x, p_y, p_gain, p_sum, p_n, p_inverse, ROWS, C, epsilon,
    BC: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row, offsets, mask = _place(tl.program_id(0), ROWS, C, BC, TILE)
    b_s = tl.load(p_x + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        b_sum = (b_s + tl.load(p_y + offsets, mask=mask, other=0.0).to(tl.float32)).to(p_sum.dtype.element_ty)
        tl.store(p_sum + offsets, b_sum, mask=mask)
        b_s = b_sum.to(tl.float32)
    b_inverse = 1 / tl.sqrt(tl.sum(b_s * b_s, 1) / C + epsilon)
    channel = tl.arange(0, BC)
    b_gain = tl.load(p_gain + channel, mask=channel < C, other=0.0).to(tl.float32)
    tl.store(p_n + offsets, (b_s * b_inverse[:, None] * b_gain[None, :]).to(p_n.dtype.element_ty), mask=mask)
    tl.store(p_inverse + row, b_inverse, mask=row < ROWS)


@Kernel
@triton.jit(do_not_specialize=["ROWS", "tiles"])
def _backward(
    p_s, p_gain, p_inverse, p_dn, p_ds, p_dx, p_dy, p_dgain, tiles, ROWS, C,
    BC: tl.constexpr, TILE: tl.constexpr, STAYS: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Gradients of `tiles` tiles; STAYS: whether there is a ds; CAST: whether dy has another dtype than dx."""
    channel, first = tl.arange(0, BC), tl.program_id(0) * tiles
    b_gain = tl.load(p_gain + channel, mask=channel < C, other=0.0).to(tl.float32)
    b_dgain = tl.zeros([BC], tl.float32)
    for tile in range(first, first + tiles):
        row, offsets, mask = _place(tile, ROWS, C, BC, TILE)
        b_inverse = tl.load(p_inverse + row, mask=row < ROWS, other=0.0)[:, None]
        b_unit = tl.load(p_s + offsets, mask=mask, other=0.0).to(tl.float32) * b_inverse
        b_dn = tl.load(p_dn + offsets, mask=mask, other=0.0).to(tl.float32)
        b_dgain += tl.sum(b_dn * b_unit, 0)
        b_dn *= b_gain[None, :]
        b_dx = (b_dn - b_unit * (tl.sum(b_dn * b_unit, 1) / C)[:, None]) * b_inverse
        if STAYS:
            b_dx += tl.load(p_ds + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(p_dx + offsets, b_dx.to(p_dx.dtype.element_ty), mask=mask)
        if CAST:
            tl.store(p_dy + offsets, b_dx.to(p_dy.dtype.element_ty), mask=mask)
    tl.store(p_dgain + tl.program_id(0).to(tl.int64) * C + channel, b_dgain, mask=channel < C)


def _tile(x: Tensor) -> dict[str, int]:
    width = power_of_two(x.shape[-1])
    return {"BC": width, "TILE": max(1, NUMBERS // width), "num_warps": min(16, max(4, width // 512))}


class ResidualNorm(torch.autograd.Function):
    """(x + y, its norm in `dtype`), or (x, its norm) without y; all contiguous, g float32 or as x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, gain: Tensor, epsilon: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total = x if y is None else torch.empty_like(x)
        normed = torch.empty_like(x, dtype=dtype)
        options, rows = _tile(x), x.shape[:-1].numel()
        inverse = x.new_empty(rows, dtype=torch.float32)
        with torch.cuda.device_of(x):
            _forward[(ceil_div(rows, options["TILE"]),)](
                x, x if y is None else y, gain, total, normed, inverse, rows, x.shape[-1], epsilon,
                ADD=y is not None, **options,
            )  # fmt: skip
        ctx.save_for_backward(total, gain, inverse)
        ctx.set_materialize_grads(False)
        ctx.added = None if y is None else y.dtype
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ds: Tensor | None, dn: Tensor | None) -> tuple[Tensor | None, ...]:
        total, gain, inverse = ctx.saved_tensors
        if dn is None:
            return ds, None if ctx.added is None else ds, None, None, None
        options, rows = _tile(total), len(inverse)
        cast = ctx.added not in (None, total.dtype)
        dx = torch.empty_like(total)
        dy = torch.empty_like(total, dtype=ctx.added) if cast else dx
        count = ceil_div(rows, options["TILE"])
        tiles = ceil_div(count, PROGRAMS)
        dgain = total.new_empty(ceil_div(count, tiles), total.shape[-1], dtype=torch.float32)
        dn, ds = dn.contiguous(), None if ds is None else ds.contiguous()
        with torch.cuda.device_of(total):
            _backward[(len(dgain),)](
                total, gain, inverse, dn, dn if ds is None else ds, dx, dy, dgain, tiles, rows, total.shape[-1],
                STAYS=ds is not None, CAST=cast, **options,
            )  # fmt: skip
        return dx, None if ctx.added is None else dy, dgain.sum(0).to(gain.dtype), None, None

"""Appends a head's scaled cursor superpositions to its queries or keys, for all tokens in one pass over memory.

    wide = [m x, g_c s e_c for c = 1 … C]      s = norm / ‖e‖, e all C superpositions of a head

PyTorch takes some ten passes, some of them in single precision. Backward, with dx̂ and dê the gradients of both parts,

    dx = m dx̂      dm = Σ ⟨x, dx̂⟩      de_c = s (g_c dê_c − e_c Σ_i g_i ⟨e_i, dê_i⟩ / ‖e‖²)      dg_c = Σ s ⟨e_c, dê_c⟩

Sums over tokens are taken program by program, then over programs: bit-reproducible. Without gradients, `gathered` picks
the superpositions of a layer from those of all layers.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from deadreckon.ops.triton.cursors import stride_of
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.pointwise import sigmoid
from deadreckon.ops.triton.tiles import ceil_div, power_of_two

NUMBERS = 4096  # of a tile: so many tokens of it as there is room for


@triton.jit
def _place(
    p_x, p_e, s_x, s_xh, s_e, s_eh, s_ec, N, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    BE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """For one head of a tile of tokens: tokens, pointers and masks, and the indices of channels and waves."""
    row, i_h = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1)
    channel, wave = tl.arange(0, BD), tl.arange(0, BE)
    m_x = (row < N)[:, None] & (channel < D)[None, :]
    m_e = (row < N)[:, None] & (wave < C * R)[None, :]
    row = row.to(tl.int64)[:, None]
    p_x += row * s_x + i_h * s_xh + channel[None, :]
    p_e += row * s_e + i_h * s_eh + (wave // R * s_ec + wave % R)[None, :]
    at = row * tl.num_programs(1) + i_h  # of what is contiguous
    return i_h, row, at, p_x, p_e, m_x, m_e, channel, wave


@Kernel
@triton.jit(do_not_specialize=["N"])
def _forward(
    p_x, p_e, p_mix, p_gain, p_wide, s_x, s_xh, s_e, s_eh, s_ec, N, norm, D: tl.constexpr,
    BD: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BE: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    i_h, _, at, p_x, p_e, m_x, m_e, channel, wave = _place(
        p_x, p_e, s_x, s_xh, s_e, s_eh, s_ec, N, D, BD, C, R, BE, TILE
    )
    dtype = p_wide.dtype.element_ty
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_e = tl.load(p_e, mask=m_e, other=0.0).to(tl.float32)
    b_e *= (norm / tl.sqrt(tl.sum(b_e * b_e, 1)))[:, None]
    if SCALED:
        b_x *= tl.load(p_mix + i_h).to(dtype).to(tl.float32)
        b_e *= tl.load(p_gain + i_h * C + wave // R, mask=wave < C * R, other=0.0)[None, :]
    p_wide += at * (D + C * R)
    tl.store(p_wide + channel[None, :], b_x.to(dtype), mask=m_x)
    tl.store(p_wide + D + wave[None, :], b_e.to(dtype), mask=m_e)


@Kernel
@triton.jit(do_not_specialize=["N", "T"])
def _backward(
    p_x, p_e, p_mix, p_gain, p_dwide, p_dx, p_de, p_dmix, p_dgain, s_gb, s_gt, s_gh, T, s_x, s_xh, s_e, s_eh, s_ec, N,
    norm, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BE: tl.constexpr, TILE: tl.constexpr,
    SCALED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Strides of p_dwide are in multiples of UNIT, so that the compiler knows how many numbers it may load at once."""
    i_h, row, at, p_x, p_e, m_x, m_e, channel, wave = _place(
        p_x, p_e, s_x, s_xh, s_e, s_eh, s_ec, N, D, BD, C, R, BE, TILE
    )
    p_dwide += (row // T * s_gb + row % T * s_gt + i_h.to(tl.int64) * s_gh) * UNIT
    b_dx = tl.load(p_dwide + channel[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_de = tl.load(p_dwide + D + wave[None, :], mask=m_e, other=0.0).to(tl.float32)
    b_e = tl.load(p_e, mask=m_e, other=0.0).to(tl.float32)
    b_square = tl.sum(b_e * b_e, 1)
    b_square = tl.where(b_square == 0, float("nan"), b_square)  # for rows beyond N; NaN for a norm of zero, too
    b_scale = norm / tl.sqrt(b_square)
    if SCALED:
        i_part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + i_h
        b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
        tl.store(p_dmix + i_part, tl.sum(tl.sum(b_x * b_dx, 1), 0))
        b_along = tl.sum(tl.where(m_e, b_e * b_de * b_scale[:, None], 0.0), 0)
        for c in tl.static_range(C):
            tl.store(p_dgain + i_part * C + c, tl.sum(tl.where(wave // R == c, b_along, 0.0), 0))
        b_dx *= tl.load(p_mix + i_h).to(p_dx.dtype.element_ty).to(tl.float32)
        b_de *= tl.load(p_gain + i_h * C + wave // R, mask=wave < C * R, other=0.0)[None, :]
    b_de = (b_de - b_e * (tl.sum(b_e * b_de, 1) / b_square)[:, None]) * b_scale[:, None]
    tl.store(p_dx + at * D + channel[None, :], b_dx.to(p_dx.dtype.element_ty), mask=m_x)
    tl.store(p_de + at * (C * R) + wave[None, :], b_de.to(p_de.dtype.element_ty), mask=m_e)


class Widened(torch.autograd.Function):
    """(B, T, H, D + C r) of x (B, T, H, D) and e (B, T, H, C, r); mix (H,) and gain (H, C) are float32, None for 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, e: Tensor, mix: Tensor | None, gain: Tensor | None, norm: float) -> Tensor:
        x, e = _in_rows(x), _in_rows(e)
        (batch, length, heads, width), (cursors, waves) = x.shape, e.shape[3:]
        wide = x.new_empty(batch, length, heads, width + cursors * waves)
        _launch(_forward, x, e, mix, gain, (wide,), norm)
        ctx.save_for_backward(x, e, mix, gain)
        ctx.norm = norm
        return wide

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, e, mix, gain = ctx.saved_tensors
        dx, de = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (x, e))
        parts = ceil_div(x.shape[0] * x.shape[1], _tile(e)["TILE"])
        sums = [x.new_empty(parts, *y.shape, dtype=torch.float32) for y in (mix, gain) if y is not None]
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()  # attention's may be head by head
        unit = gcd(16, *grad.stride()[:3])
        strides = (stride // unit for stride in grad.stride()[:3])
        rest = grad, dx, de, *(sums or (dx, dx)), *strides, x.shape[1]
        _launch(_backward, x, e, mix, gain, rest, ctx.norm, UNIT=unit)
        dmix, dgain = (y.sum(0) for y in sums) if sums else (None, None)
        return dx, de, dmix, dgain, None


def _in_rows(x: Tensor) -> Tensor:
    """x (B, T, …), copied unless tokens have one stride across the batch and the last dimension is contiguous."""
    return x if x.stride(0) == x.shape[1] * x.stride(1) and x.stride(-1) == 1 else x.contiguous()


def _tile(e: Tensor) -> dict[str, int]:
    width = power_of_two(e.shape[3] * e.shape[4])
    return {"BE": width, "TILE": max(1, NUMBERS // width)}


def _launch(
    kernel: Kernel, x: Tensor, e: Tensor, mix: Tensor | None, gain: Tensor | None, rest: tuple[Tensor | int, ...],
    norm: float, **constants: int,
) -> None:  # fmt: skip
    """A program for each head of each tile of tokens; `rest`: the kernel's arguments after the scales."""
    options, (batch, length, heads, width), (cursors, waves) = _tile(e), x.shape, e.shape[3:]
    tokens = batch * length
    with torch.cuda.device_of(x):
        kernel[(ceil_div(tokens, options["TILE"]), heads)](
            x, e, x if mix is None else mix.contiguous(), x if gain is None else gain.contiguous(), *rest,
            x.stride(1), x.stride(2), e.stride(1), e.stride(2), e.stride(3), tokens, norm,
            D=width, BD=power_of_two(width), C=cursors, R=waves, SCALED=gain is not None, num_warps=4, **options,
            **constants,
        )  # fmt: skip


@Kernel
@triton.jit
def _gathered(
    p_q, p_k, p_e, p_table, p_place, p_order, p_mix, p_alpha, p_wide_q, p_wide_k, gain, norm, s_place, T, F, P,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """One head of one token: query heads come first."""
    i_n, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(p_place + i_n // T * s_place + i_n % T)
    place = tl.minimum(tl.maximum(place, 0), P - 1)
    channel, wave = tl.arange(0, BD), tl.arange(0, BE)
    cursor, m_wave = wave // R, wave < C * R
    order = tl.load(p_order + i_h * C + cursor, mask=m_wave, other=0)
    p_filtered = p_e + (i_n * F + order) * R + wave % R
    b_e = tl.load(p_filtered, mask=m_wave & (order >= 0), other=0.0).to(tl.float32)
    b_e += tl.load(p_table + place * R + wave % R, mask=m_wave & (order < 0), other=0.0).to(tl.float32)
    b_e *= norm / tl.sqrt(tl.sum(b_e * b_e, 0))
    dtype = p_wide_q.dtype.element_ty
    if i_h < HQ:
        at = i_n * HQ + i_h
        mix = sigmoid(tl.load(p_mix + i_h).to(tl.float32))
        b_alpha = tl.load(p_alpha + i_h * C + cursor, mask=m_wave, other=0.0).to(tl.float32)
        b_e *= (1 - mix) * tl.abs(b_alpha) * gain
        b_x = tl.load(p_q + at * D + channel, mask=channel < D, other=0.0).to(tl.float32)
        b_x *= mix.to(dtype).to(tl.float32)
        p_wide = p_wide_q + at * (D + C * R)
    else:
        at = i_n * H + i_h - HQ
        b_x = tl.load(p_k + at * D + channel, mask=channel < D, other=0.0).to(tl.float32)
        p_wide = p_wide_k + at * (D + C * R)
    tl.store(p_wide + channel, b_x.to(dtype), mask=channel < D)
    tl.store(p_wide + D + wave, b_e.to(dtype), mask=m_wave)


def gathered(
    q: Tensor, k: Tensor, e: Tensor, table: Tensor, places: Tensor, order: Tensor, mix: Tensor, alpha: Tensor,
    gain: float, norm: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries (B, T, Hq, D + C r) and keys (B, T, H, D + C r): μ q beside (1 − μ) |α| · gain times superpositions.

    Args:
        e: (B, T, F, r) superpositions of all filters; those of a head are scaled to one norm.
        table: (P, r), superpositions by place of the cursors that step forward with every token.
        order: (Hq + H, C) int32, which filter a cursor is, query heads first; −1 for those in the table.
        mix: (Hq,) logits of μ; alpha: (Hq, C).
    """
    (batch, length, query_heads, width), heads = q.shape, k.shape[2]
    cursors, waves = alpha.shape[1], table.shape[1]
    wide = width + cursors * waves
    wide_q, wide_k = (q.new_empty(batch, length, n, wide) for n in (query_heads, heads))
    with torch.cuda.device_of(q):
        _gathered[(batch * length, query_heads + heads)](
            q.contiguous(), k.contiguous(), e.contiguous(), table, places, order, mix, alpha.contiguous(),
            wide_q, wide_k, gain, norm, stride_of(places), length, e.shape[2], len(table),
            HQ=query_heads, H=heads, D=width, BD=power_of_two(width), C=cursors, R=waves,
            BE=power_of_two(cursors * waves), num_warps=4,
        )  # fmt: skip
    return wide_q, wide_k

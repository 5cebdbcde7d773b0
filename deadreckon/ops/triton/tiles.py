"""Building blocks of kernels: loads and stores of tiles, and products of tiles as precise as they need to be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Tiling(NamedTuple):
    """How a kernel is cut into programs, and how Triton compiles it."""

    tile: int  # tokens of each program
    step: int  # tokens of each step of its loop
    warps: int
    stages: int  # of the loop's software pipeline
    registers: int | None = None  # at most, for each thread

    @property
    def options(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


def ceil_div(number: int, size: int) -> int:
    """⌈number / size⌉. Triton's own takes ten microseconds of Python, at each of a hundred launches."""
    return -(-number // size)


def power_of_two(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def padded(width: int) -> int:
    """The power of two that a tile's channels take. Narrower tiles than 64 were seen to be miscompiled on Hopper."""
    return max(64, power_of_two(width))


def warps_for(width: int) -> int:
    """Warps of programs that multiply or add up whole (D, D) matrices: as many as keep them in registers."""
    return 4 if padded(width) == 64 else 8


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def shared_memory(x: Tensor) -> int:
    """KiB that a program may have: 227 on an H100 or B200, 163 on an A100, 99 on most others."""
    major, minor = _capability(x.get_device()) if x.is_cuda else (8, 0)
    return 227 if major in (9, 10) else 163 if (major, minor) in ((8, 0), (8, 7)) else 99


def roomy(x: Tensor) -> bool:
    """Whether programs have as much shared memory as on an H100."""
    return shared_memory(x) >= 227


def cramped(x: Tensor) -> bool:
    """Whether programs have less shared memory than on an A100, as on an RTX 3090, 4090 or 5090."""
    return shared_memory(x) < 163


def strides(*tensors: Tensor) -> Iterator[tuple[int, ...]]:
    """Of each tensor the strides of all dimensions but the last, which is 1: kernels take them as one argument."""
    return (x.stride()[:-1] for x in tensors)


@triton.jit
def load_rows(p_x, row, s_r, channel, m_row, W: tl.constexpr, BW: tl.constexpr):
    """(rows, channels) of x."""
    mask = m_row[:, None]
    if W != BW:
        mask = mask & (channel < W)[None, :]
    return tl.load(p_x + row.to(tl.int64)[:, None] * s_r + channel[None, :], mask=mask, other=0.0)


@triton.jit
def load_columns(p_x, row, s_r, channel, m_row, W: tl.constexpr, BW: tl.constexpr):
    """(channels, rows) of x."""
    mask = m_row[None, :]
    if W != BW:
        mask = mask & (channel < W)[:, None]
    return tl.load(p_x + row.to(tl.int64)[None, :] * s_r + channel[:, None], mask=mask, other=0.0)


@triton.jit
def store_rows(p_x, row, s_r, channel, m_row, value, W: tl.constexpr):
    """Some rows of x."""
    mask = m_row[:, None] & (channel < W)[None, :]
    tl.store(p_x + row.to(tl.int64)[:, None] * s_r + channel[None, :], value.to(p_x.dtype.element_ty), mask=mask)


@triton.jit
def load_tile(p_x, row, s_r, W: tl.constexpr, BW: tl.constexpr):
    """64 rows of x."""
    channel = tl.arange(0, BW)
    offsets = row[:, None] * s_r + channel[None, :]
    if W != BW:
        return tl.load(p_x + offsets, mask=(channel < W)[None, :] & (row >= 0)[:, None], other=0.0)
    return tl.load(p_x + offsets)


@triton.jit
def store_tile(p_x, row, s_r, value, W: tl.constexpr, BW: tl.constexpr):
    channel = tl.arange(0, BW)
    offsets = row[:, None] * s_r + channel[None, :]
    if W != BW:
        tl.store(p_x + offsets, value.to(p_x.dtype.element_ty), mask=(channel < W)[None, :] & (row >= 0)[:, None])
    else:
        tl.store(p_x + offsets, value.to(p_x.dtype.element_ty))


@triton.jit
def matrix(p_x, W: tl.constexpr, BW: tl.constexpr):
    """Loads a (D, D) product."""
    channel = tl.arange(0, BW)
    offsets = channel[:, None] * W + channel[None, :]
    if W != BW:
        return tl.load(p_x + offsets, mask=(channel < W)[:, None] & (channel < W)[None, :], other=0.0)
    return tl.load(p_x + offsets)


@triton.jit
def store_matrix(p_x, value, W: tl.constexpr, BW: tl.constexpr):
    channel = tl.arange(0, BW)
    offsets = channel[:, None] * W + channel[None, :]
    tl.store(p_x + offsets, value.to(p_x.dtype.element_ty), mask=(channel < W)[:, None] & (channel < W)[None, :])


@triton.jit
def store_columns(p_x, value, column, W: tl.constexpr, BW: tl.constexpr):
    """Some columns of a (D, D) product."""
    channel = tl.arange(0, BW)
    offsets = channel[:, None] * W + column[None, :]
    tl.store(p_x + offsets, value.to(p_x.dtype.element_ty), mask=(channel < W)[:, None] & (column < W)[None, :])


@triton.jit
def poison_of(b_x):
    """Zero for each row of x, NaN for those that are not finite."""
    return tl.sum(b_x.to(tl.float32) * 0, 1)


@triton.jit
def zeroed(b_x, b_poison):
    """x with zeros for the rows that are poisoned: in a product, a weight of zero does not stop a NaN."""
    return tl.where((b_poison == 0)[:, None], b_x, 0.0).to(b_x.dtype)


@triton.jit
def mul_single(a, b):
    """a @ b in float32 precision: each factor as three bfloat16, which together have all its digits.

    (Triton's own way, in tf32, takes more shared memory than there is. The interpreter has no bfloat16 products.)
    """
    if INTERPRETED:
        return tl.dot(a, b, input_precision="ieee")
    high_a, high_b = a.to(tl.bfloat16), b.to(tl.bfloat16)
    rest_a, rest_b = a - high_a.to(tl.float32), b - high_b.to(tl.float32)
    middle_a, middle_b = rest_a.to(tl.bfloat16), rest_b.to(tl.bfloat16)
    low_a = (rest_a - middle_a.to(tl.float32)).to(tl.bfloat16)
    low_b = (rest_b - middle_b.to(tl.float32)).to(tl.bfloat16)
    small = tl.dot(middle_a, middle_b)
    small = tl.dot(low_a, high_b, small)
    small = tl.dot(high_a, low_b, small)
    small = tl.dot(middle_a, high_b, small)
    small = tl.dot(high_a, middle_b, small)
    return tl.dot(high_a, high_b, small)


@triton.jit
def mul(a, b, DTYPE: tl.constexpr):
    """a @ b in the precision of the inputs."""
    if tl.float32 == DTYPE:
        return mul_single(a.to(DTYPE), b.to(DTYPE))
    return tl.dot(a.to(DTYPE), b.to(DTYPE))


@triton.jit
def mul_exact(a, b, DTYPE: tl.constexpr):
    """a @ b nearly in float32 precision: with a 16-bit DTYPE, float32 factors are split into a high and a low part.

    What the low parts lose is 2⁻¹⁶ or less.
    """
    if tl.float32 == DTYPE:
        return mul_single(a.to(DTYPE), b.to(DTYPE))
    high_a, high_b = a.to(DTYPE), b.to(DTYPE)
    if a.dtype == tl.float32 and b.dtype == tl.float32:
        small = tl.dot((a - high_a.to(tl.float32)).to(DTYPE), high_b)
        small = tl.dot(high_a, (b - high_b.to(tl.float32)).to(DTYPE), small)
        return tl.dot(high_a, high_b, small)
    if a.dtype == tl.float32:
        return tl.dot(high_a, high_b, tl.dot((a - high_a.to(tl.float32)).to(DTYPE), high_b))
    if b.dtype == tl.float32:
        return tl.dot(high_a, high_b, tl.dot(high_a, (b - high_b.to(tl.float32)).to(DTYPE)))
    return tl.dot(high_a, high_b)


@triton.jit
def through(b_x, b_p, TRANSPOSED: tl.constexpr, DTYPE: tl.constexpr):
    """x P or x Pᵀ, for 16-bit x with P as a high and a low part."""
    if tl.float32 == DTYPE:
        if TRANSPOSED:
            b_p = tl.trans(b_p)
        return mul_single(b_x, b_p)
    if b_p.dtype == DTYPE:
        if TRANSPOSED:
            b_p = tl.trans(b_p)
        return tl.dot(b_x, b_p)
    b_high = b_p.to(DTYPE)
    b_low = (b_p - b_high.to(tl.float32)).to(DTYPE)
    if TRANSPOSED:
        return tl.dot(b_x, tl.trans(b_high), tl.dot(b_x, tl.trans(b_low)))
    return tl.dot(b_x, b_high, tl.dot(b_x, b_low))


@triton.jit
def place_of(GROUP, TILES):
    """This program's query of a group, tile and head. Heads go first: those of a token lie side by side in memory."""
    pid = tl.program_id(0)
    taken = tl.num_programs(0) // (GROUP * TILES)
    return pid % GROUP, pid // (GROUP * taken), (pid // GROUP % taken).to(tl.int64)

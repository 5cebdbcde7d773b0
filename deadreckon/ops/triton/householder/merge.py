"""Merging partial attention outputs by their log-sum-exp, all levels in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.gated.launch import Documents
from deadreckon.ops.triton.householder.frames import Place
from deadreckon.ops.triton.householder.leaf import in_fours
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import ceil_div, padded, place_of


@triton.jit
def _add_run(b_out, b_lse, p_x, p_lse, i_row, m_run, channel, E: tl.constexpr):
    """Merges the partial outputs of one run into the rows (m_run) that it has."""
    b_run_lse = tl.load(p_lse + i_row, mask=m_run, other=float("-inf"))
    mask = (channel < E)[None, :] & m_run[:, None]
    b_x = tl.load(p_x + i_row[:, None] * E + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.maximum(b_lse, b_run_lse)
    keep, add = tl.exp(b_lse - high), tl.exp(b_run_lse - high)
    total = keep + add
    return (b_out * keep[:, None] + b_x * add[:, None]) / total[:, None], high + tl.log(total)


@Kernel
@triton.jit(do_not_specialize=["first", "T", "TILES", "HEADS"])
def _merge(
    p_out, p_lse, runs, places, p_start, p_to, p_lse_to, s_out, s_lse, first, T, TILES, HEADS, GROUP,
    E: tl.constexpr, BE: tl.constexpr, RUNS: tl.constexpr, LAST: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """out (N, T, G, E) of the leaves and of each run's right blocks -> (B, T, Hq, E) if LAST, else in place."""
    i_g, i_tile, i_n = place_of(GROUP, TILES)
    channel = tl.arange(0, BE)
    row = tl.arange(0, 64)
    token = i_tile.to(tl.int64) * 64 + row
    at = token[:, None] * (GROUP * E) + i_g * E + channel[None, :]
    inside = (channel < E)[None, :] & (row >= 0)[:, None]
    p_out += i_n * s_out
    p_lse += i_n * s_lse + token * GROUP + i_g
    b_lse = tl.load(p_lse)
    if PACKED:
        b_start = tl.load(p_start + token)
    b_out = tl.load(p_out + at, mask=inside, other=0.0).to(tl.float32)
    for r in tl.static_range(RUNS):
        p_x, p_lse_x = runs[r]
        start, count, left, right = places[r]
        start, count, left, right = start // 16, count // 16, left // 16, right // 16
        place = i_tile * 64 - start
        i_pair, place = place // (left + right), place % (left + right)
        m_run = (i_tile * 64 >= start) & (i_pair < count) & (place >= left) & (row >= 0)
        i_row = ((i_n * count + i_pair) * right + (place - left) + row) * GROUP + i_g
        if PACKED:  # rows that see the run's keys: all others were never written
            m_run = m_run & (b_start < start + i_pair * (left + right) + left)
            if tl.max(m_run.to(tl.int32), 0) > 0:  # few runs have any
                b_out, b_lse = _add_run(b_out, b_lse, p_x, p_lse_x, i_row, m_run, channel, E)
        else:  # a mask rather than a branch: the loads of all runs are under way at once
            b_out, b_lse = _add_run(b_out, b_lse, p_x, p_lse_x, i_row, m_run, channel, E)
    tl.store(p_lse_to + i_n * s_lse + token * GROUP + i_g, b_lse)
    if LAST:
        i_b, i_h = (i_n + first) // HEADS, (i_n + first) % HEADS
        p_to += (i_b * T * HEADS + i_h) * GROUP * E + i_g * E
        offsets = token[:, None] * (HEADS * GROUP * E) + channel[None, :]
        tl.store(p_to + offsets, b_out.to(p_to.dtype.element_ty), mask=inside & (token < T)[:, None])
    else:
        tl.store(p_out + at, b_out.to(p_out.dtype.element_ty), mask=inside)


Part = tuple[tuple[Tensor, Tensor], Place]
"""Of a run: out (n, count, right · G, E) and lse (n, count, right · G), and where it is."""
TOGETHER = 16  # parts merged in one pass


def merge(out: Tensor, lse: Tensor, parts: list[Part], to: Tensor, lse_to: Tensor, first: int,
    documents: Documents | None = None,
) -> None:  # fmt: skip
    """Blocks' out (n, T, G, E) and lse (n, T, G) with the parts of all levels -> to (B, T, Hq, E) and lse_to (n, T, G).

    out and lse may be overwritten. The heads are key heads `first` … of B·H; T is padded to whole leaves, except in
    `to`.
    """
    count, tokens, group, width = out.shape[0], lse_to.shape[1], out.shape[2], out.shape[3]
    passes = max(1, ceil_div(len(parts), TOGETHER))
    # A pass never writes what it reads: its threads are not synchronised.
    buffers = (lse, lse_to) if passes % 2 else (lse_to, lse)
    if passes % 2 == 0:
        lse_to.copy_(lse)
    for number in range(passes):
        runs, places = in_fours(parts[number * TOGETHER : (number + 1) * TOGETHER])
        _merge[(count * tokens // 64 * group,)](
            out, buffers[number % 2], runs, places, to if documents is None else documents.start, to,
            buffers[(number + 1) % 2], out.stride(0), lse_to.stride(0), first,
            to.shape[1], tokens // 64, to.shape[2] // group, group, E=width, BE=padded(width), RUNS=len(runs),
            LAST=number + 1 == passes, PACKED=documents is not None, num_warps=2 if padded(width) == 64 else 8,
        )  # fmt: skip

"""From one level of the route tree to the next and back: queries and keys cross the products of the blocks between.

Pairs of blocks lie one after the other. With P the product of a block's steps, on the way up

    queries of the right block ← P_left q      keys of the left block ← P_rightᵀ k      P ← P_left P_right

in place; on the way down the gradients go back through all three. Rows are tokens times the queries of a group; P and
its gradient are float32, multiplied as a high and a low part where rows have 16 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.gated.launch import Documents
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import (
    DTYPES,
    ceil_div,
    matrix,
    mul,
    mul_exact,
    padded,
    store_matrix,
    through,
    warps_for,
)

ROWS = 64  # of a tile
CHUNK = 16  # tiles that one program adds up
FEW, SHORT = 264, 4  # with fewer programs than two on each of an H200's multiprocessors, one crosses with fewer tiles


class Side(NamedTuple):
    """The rows of a run that cross a product: those of its right blocks (queries) or of its left blocks (keys)."""

    start: int  # row where the first of them begins
    blocks: int
    rows: int  # of a block
    step: int  # rows from one block to the next


@triton.jit
def _related(p_bound, row, origin, rows, step, GROUP, QUERIES: tl.constexpr):
    """Which rows' documents reach into the other block of the pair, and which beyond it; p_bound: how far they reach.

    Queries of a right block attend to the left one and cross it to earlier tokens: p_bound is where their document
    begins. Keys of a left block are attended to from the right one and cross it to later tokens: p_bound is where it
    ends.
    """
    row = tl.minimum(row, rows - 1)
    if QUERIES:
        b_bound = tl.load(p_bound + (origin + row) // GROUP)
        return b_bound < origin // GROUP, b_bound < (origin + rows - step) // GROUP
    else:
        b_bound = tl.load(p_bound + origin + row)
        return b_bound > origin + rows, b_bound > origin + step


@triton.jit
def _kept(p_bound, row, origin, rows, GROUP, QUERIES: tl.constexpr):
    """Whether the backward pass of dense attention loads this tile: it loads up to 128 tokens at a time."""
    if QUERIES:
        first = tl.min(row, 0) // GROUP // 128 * 128
        return tl.load(p_bound + origin // GROUP + tl.minimum(first, rows // GROUP - 1)) < origin // GROUP
    else:
        last = tl.max(row, 0) // 128 * 128 + 127
        return tl.load(p_bound + origin + tl.minimum(last, rows - 1)) > origin + rows


@Kernel
@triton.jit(do_not_specialize=["start", "count", "rows", "step", "first", "every", "CHUNKS"])
def _cross(
    p_x, p_kept, p_to, p_products, p_bound, s_x, s_to, start, count, rows, step, s_products, first, every,
    CHUNKS, GROUP,
    TRANSPOSED: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    DTYPE: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    i_chunk, i_block = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    i_n, i_pair = (i_block // count).to(tl.int64), i_block % count
    channel = tl.arange(0, BD)
    p_x += i_n * s_x + (start + i_pair.to(tl.int64) * step) * D
    p_kept += i_block.to(tl.int64) * rows * D
    p_to += i_n * s_to + (start + i_pair.to(tl.int64) * step) * D
    p_product = p_products + i_n * s_products + (first + every * i_pair).to(tl.int64) * D * D
    b_p = matrix(p_product, D, BD)
    for tile in range(TILES):
        row = (i_chunk * TILES + tile) * BM + tl.arange(0, BM)
        mask = (row < rows)[:, None] & (channel < D)[None, :]
        offsets = row.to(tl.int64)[:, None] * D + channel[None, :]
        if PACKED:
            onward = tl.max(
                _related(p_bound, row, start + i_pair * step, rows, step, GROUP, TRANSPOSED)[1].to(tl.int32), 0
            )
            if KEEP:
                if _kept(p_bound, row, start + i_pair * step, rows, GROUP, TRANSPOSED):
                    tl.store(p_kept + offsets, tl.load(p_x + offsets, mask=mask, other=0.0), mask=mask)
            if onward > 0:
                b_x = tl.load(p_x + offsets, mask=mask, other=0.0)
                tl.store(p_to + offsets, through(b_x, b_p, TRANSPOSED, DTYPE).to(DTYPE), mask=mask)
        else:
            b_x = tl.load(p_x + offsets, mask=mask, other=0.0)
            if KEEP:
                tl.store(p_kept + offsets, b_x, mask=mask)
            tl.store(p_to + offsets, through(b_x, b_p, TRANSPOSED, DTYPE).to(DTYPE), mask=mask)


@Kernel
@triton.jit(do_not_specialize=["start", "count", "rows", "step", "first", "CHUNKS"])
def _cross_back(
    p_grad, p_kept, p_fresh, p_outer, p_products, p_bound, s_x, start, count, rows, step, s_products, first,
    CHUNKS, GROUP,
    TRANSPOSED: tl.constexpr, PACKED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    DTYPE: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Gradients of rows before they crossed, the block's own (fresh) added; and this chunk's part of P's gradient.

    Packed: of rows that see or are seen from the other block. Others have no gradients from this level up; theirs is
    not written.
    """
    i_chunk, i_block = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    i_n, i_pair = (i_block // count).to(tl.int64), i_block % count
    channel = tl.arange(0, BD)
    p_grad += i_n * s_x + (start + i_pair.to(tl.int64) * step) * D
    p_kept += i_block.to(tl.int64) * rows * D
    p_fresh += i_block.to(tl.int64) * rows * D
    p_product = p_products + i_n * s_products + (first + 2 * i_pair).to(tl.int64) * D * D
    b_p = matrix(p_product, D, BD)
    b_outer = tl.zeros([BD, BD], tl.float32)
    for tile in range(TILES):
        row = (i_chunk * TILES + tile) * BM + tl.arange(0, BM)
        mask = (row < rows)[:, None] & (channel < D)[None, :]
        offsets = row.to(tl.int64)[:, None] * D + channel[None, :]
        looking, onward = 1, 1
        if PACKED:
            looks, beyond = _related(p_bound, row, start + i_pair * step, rows, step, GROUP, TRANSPOSED)
            mask = mask & looks[:, None]  # those of one document, which reaches beyond with all of them or with none
            looking, onward = tl.max(looks.to(tl.int32), 0), tl.max(beyond.to(tl.int32), 0)
        b_new = tl.load(p_fresh + offsets, mask=mask, other=0.0).to(tl.float32)
        if onward > 0:
            b_grad = tl.load(p_grad + offsets, mask=mask, other=0.0)
            b_kept = tl.load(p_kept + offsets, mask=mask, other=0.0)
            if TRANSPOSED:  # rows crossed by x Pᵀ
                b_outer += mul(tl.trans(b_grad), b_kept, DTYPE)
            else:
                b_outer += mul(tl.trans(b_kept), b_grad, DTYPE)
            b_new += through(b_grad, b_p, not TRANSPOSED, DTYPE)
        if looking > 0:
            tl.store(p_grad + offsets, b_new.to(DTYPE), mask=mask)
    store_matrix(p_outer + tl.program_id(0).to(tl.int64) * D * D, b_outer, D, BD)


@Kernel
@triton.jit(do_not_specialize=["count"])
def _multiply(p_products, p_above, s_products, s_above, count, D: tl.constexpr, BD: tl.constexpr, DTYPE: tl.constexpr):
    """P_left P_right of each pair."""
    i_n, i_pair = (tl.program_id(0) // count).to(tl.int64), tl.program_id(0) % count
    p_left = p_products + i_n * s_products + 2 * i_pair.to(tl.int64) * D * D
    b_product = mul_exact(matrix(p_left, D, BD), matrix(p_left + D * D, D, BD), DTYPE)
    store_matrix(p_above + i_n * s_above + i_pair.to(tl.int64) * D * D, b_product, D, BD)


@Kernel
@triton.jit(do_not_specialize=["count", "first", "first_above", "LEFT_PARTS", "RIGHT_PARTS"])
def _multiply_back(
    p_products, p_above, p_left_parts, p_right_parts, p_grad, s_products, s_above, s_grad, count, first, first_above,
    LEFT_PARTS, RIGHT_PARTS, ABOVE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Gradients of P_left and P_right: what the chunks of crossing rows have gathered, and that of their product."""
    i_n, i_pair = (tl.program_id(0) // count).to(tl.int64), tl.program_id(0) % count
    p_grad += i_n * s_grad + (first + 2 * i_pair).to(tl.int64) * D * D
    p_products += i_n * s_products + (first + 2 * i_pair).to(tl.int64) * D * D
    p_above += i_n * s_above + (first_above + i_pair).to(tl.int64) * D * D
    for side in tl.static_range(2):
        b_grad = tl.zeros([BD, BD], tl.float32)
        if side == 0:
            p_parts, parts = p_left_parts, LEFT_PARTS
        else:
            p_parts, parts = p_right_parts, RIGHT_PARTS
        p_parts += tl.program_id(0).to(tl.int64) * parts * D * D
        for part in range(parts):
            b_grad += matrix(p_parts + part * D * D, D, BD)
        if ABOVE:
            b_above = matrix(p_above, D, BD)
            b_other = matrix(p_products + (1 - side) * D * D, D, BD)
            if side == 0:
                b_grad += mul_exact(b_above, tl.trans(b_other), DTYPE)
            else:
                b_grad += mul_exact(tl.trans(b_other), b_above, DTYPE)
        store_matrix(p_grad + side * D * D, b_grad, D, BD)


@Kernel
@triton.jit(do_not_specialize=["rows", "boundary"])
def _place(
    p_x, p_fresh, p_bound, s_x, boundary, rows, TILES, GROUP,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    i_tile, i_n = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    row = i_tile * BM + tl.arange(0, BM)
    channel = tl.arange(0, BD)
    mask = (row < rows)[:, None] & (channel < D)[None, :]
    if BEFORE:
        m_fresh, at, fresh_rows = row < boundary, row, boundary
    else:
        m_fresh, at, fresh_rows = row >= boundary, row - boundary, rows - boundary
    if PACKED:
        b_bound = tl.load(p_bound + tl.minimum(row, rows - 1) // GROUP)
        m_fresh = m_fresh & ((b_bound > boundary) if BEFORE else (b_bound < boundary // GROUP))
        mask = mask & m_fresh[:, None]
    at = i_n * fresh_rows * D + at.to(tl.int64)[:, None] * D + channel[None, :]
    b_x = tl.load(p_fresh + at, mask=mask & m_fresh[:, None], other=0.0)
    tl.store(p_x + i_n * s_x + row.to(tl.int64)[:, None] * D + channel[None, :], b_x, mask=mask)


def place(
    x: Tensor, fresh: Tensor, boundary: int, before: bool, documents: Documents | None = None, group: int = 1
) -> None:
    """Fills the rows of x (n, rows, D) before or from the boundary on with fresh ones, the others with zeros.

    With documents, only rows whose document crosses the boundary: see `_cross_back`.
    """
    count, rows, width = x.shape
    tiles = ceil_div(rows, 128)
    _place[(count * tiles,)](
        x, fresh, _bound(x, documents, not before), x.stride(0), boundary, rows, tiles, group,
        D=width, BD=padded(width), BM=128, BEFORE=before, PACKED=documents is not None,
    )  # fmt: skip


def _sizes(x: Tensor) -> dict[str, Any]:
    width = x.shape[-1]
    return {"D": width, "BD": padded(width), "DTYPE": DTYPES[x.dtype]}


def _chunks(side: Side, most: int = CHUNK) -> tuple[int, dict[str, int]]:
    tiles = min(most, ceil_div(side.rows, ROWS))
    return ceil_div(side.rows, ROWS * tiles), {"BM": ROWS, "TILES": tiles}


def _bound(other: Tensor, documents: Documents | None, queries: bool) -> Tensor:
    """Where documents begin, for queries that go back; where they end, for keys that go on."""
    return other if documents is None else documents.start if queries else documents.end


def cross(
    x: Tensor, products: Tensor, first: int, every: int, side: Side, transposed: bool,
    to: Tensor | None = None, keep: bool = False, documents: Documents | None = None, group: int = 1,
) -> Tensor | None:  # fmt: skip
    """Rows of x (n, rows, D) cross the product of a block: x P, or x Pᵀ if transposed; in place, or into those of `to`.

    The blocks' products are those from `first` on, one in `every`. Tiles whose documents do not reach beyond the block
    stay as they are. Returns the rows as they were before, (n, count, rows, D), if `keep`.
    """
    chunks, tiles = _chunks(side)
    if x.shape[0] * side.blocks * chunks < FEW:
        chunks, tiles = _chunks(side, SHORT)
    kept = x.new_empty(x.shape[0], side.blocks, side.rows, x.shape[-1]) if keep else None
    to = x if to is None else to
    _cross[(x.shape[0] * side.blocks * chunks,)](
        x, x if kept is None else kept, to, products, _bound(products, documents, transposed), x.stride(0),
        to.stride(0), *side, products.stride(0), first, every, chunks, group,
        TRANSPOSED=transposed, KEEP=keep, PACKED=documents is not None, **_sizes(x), **tiles, num_warps=4,
        num_stages=3 if padded(x.shape[-1]) == 64 else 2,  # three take more than the 99 KiB that smaller GPUs have
    )  # fmt: skip
    return kept


def cross_back(
    grad: Tensor, kept: Tensor, fresh: Tensor, products: Tensor, first: int, side: Side, transposed: bool,
    documents: Documents | None = None, group: int = 1,
) -> Tensor:  # fmt: skip
    """Takes grad (n, rows, D) back before the crossing and adds fresh (n, count, rows, D).

    Returns the products' gradients in parts, (n, count, parts, D, D) float32.
    """
    chunks, tiles = _chunks(side)
    width = grad.shape[-1]
    outer = products.new_empty(grad.shape[0], side.blocks, chunks, width, width)
    _cross_back[(grad.shape[0] * side.blocks * chunks,)](
        grad, kept, fresh, outer, products, _bound(products, documents, transposed), grad.stride(0), *side,
        products.stride(0), first, chunks, group,
        TRANSPOSED=transposed, PACKED=documents is not None, **_sizes(grad), **tiles, num_warps=4, num_stages=2,
    )  # fmt: skip
    return outer


def multiply(products: Tensor, dtype: torch.dtype) -> Tensor:
    """Products of pairs of blocks, (n, blocks, D, D) -> (n, ⌈blocks / 2⌉, D, D); a last lone one stays as it is."""
    count, blocks, width, _ = products.shape
    pairs = blocks // 2
    above = products.new_empty(count, blocks - pairs, width, width)
    _multiply[(count * pairs,)](
        products, above, products.stride(0), above.stride(0), pairs,
        D=width, BD=padded(width), DTYPE=DTYPES[dtype], num_warps=warps_for(width),
    )  # fmt: skip
    if blocks % 2:
        above[:, -1] = products[:, -1]
    return above


def multiply_back(
    products: Tensor, above: Tensor | None, parts: list[tuple[Tensor, Tensor]], dtype: torch.dtype
) -> Tensor:
    """Gradients of products, (n, blocks, D, D), from those above and from the parts that `cross_back` gives by run."""
    grad = torch.empty_like(products)
    width, first = products.shape[-1], 0
    for left, right in parts:
        pairs = left.shape[1]
        _multiply_back[(products.shape[0] * pairs,)](
            products, products if above is None else above, left, right, grad,
            products.stride(0), 0 if above is None else above.stride(0), grad.stride(0), pairs, first, first // 2,
            left.shape[2], right.shape[2], ABOVE=above is not None,
            D=width, BD=padded(width), DTYPE=DTYPES[dtype], num_warps=warps_for(width),
        )  # fmt: skip
        first += 2 * pairs
    if first < products.shape[1]:
        if above is None:
            grad[:, -1].zero_()
        else:
            grad[:, -1] = above[:, -1]
    return grad

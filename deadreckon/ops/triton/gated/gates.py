"""Log gates: running sums for the kernels, which keys they leave in reach, and the gradient.

c_i − c_j is added to the logit of query i and key j, c the running sum of log gates. As one number c would lose the
digits of near pairs to far ones. So it is kept as its value at the end of each 64 tokens (`edge`, float64) and what is
left from each token to there (`left`, float32, and what rounding took from it, `rest`).

    key j ──── left_j ────▸│ edge ──────── edges ────────▸ edge │──── since its start ────▸ query i

Keys of an earlier tile than their query's: three sums on the way from j to i, none of which goes beyond i, so that
nothing cancels. A tile needs one scalar and one vector of them. In the query's own tile it is a difference of two sums
that may both be large, if a closed gate precedes or follows both: of pairs (left, rest), rounded once. So a logit is
off by 2⁻²⁴ times the log gates between its key and its query, whatever others there are.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.gated.launch import EDGE, Reach, Sums
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import ceil_div, load_rows, padded, power_of_two, strides

MARGINS = {torch.float32: 20.0, torch.bfloat16: 10.0, torch.float16: 10.0}  # see :func:`reach_of`
PRUNED = 2048  # tokens from which on it pays to ask what gates leave in reach


@triton.jit
def _gates(p_gate, token, s_t, mask, floor):
    """Log gates in base 2, clamped to the floor, 0 where not finite; and the poison of these, 0 or NaN."""
    b_gate = tl.load(p_gate + token * s_t, mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.where(b_gate < floor, floor, b_gate)
    b_poison = b_gate * 0
    return tl.where(b_poison == 0, b_gate, 0.0).to(tl.float64) * 1.4426950408889634, b_poison


@Kernel
@triton.jit(do_not_specialize=["s_b", "s_t", "s_h", "T", "BLOCKS", "GATES"])
def _block_sums(p_gate, p_left, p_rest, p_total, p_most, s_b, s_t, s_h, T, BLOCKS, GATES, floor):
    i_block, i_c = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    row = tl.arange(0, 64)
    token = i_block.to(tl.int64) * 64 + row
    p_gate += (i_c // GATES) * s_b + (i_c % GATES) * s_h
    b_gate, b_poison = _gates(p_gate, token, s_t, token < T, floor)
    b_next, _ = _gates(p_gate, token + 1, s_t, (row < 63) & (token + 1 < T), floor)
    # What is poisoned is the token's own key, which all later queries of its document see, and no others.
    b_sum = tl.cumsum(b_next, 0, reverse=True)
    b_left = b_sum.to(tl.float32)
    tl.store(p_left + i_c * BLOCKS * 64 + token, b_left + b_poison)
    tl.store(p_rest + i_c * BLOCKS * 64 + token, (b_sum - b_left.to(tl.float64)).to(tl.float32))
    tl.store(p_total + i_c * BLOCKS + i_block, tl.sum(b_gate, 0))
    tl.store(p_most + i_c * BLOCKS + i_block, tl.max(tl.where(b_poison == 0, b_gate.to(tl.float32), float("inf")), 0))


def gate_sums(log_gate: Tensor, heads: int) -> tuple[Sums, Tensor]:
    """log_gate (B, T, H or Hq) -> running sums for B·H key heads and 1 or G gates of each.

    And the greatest log gate of each block, (B·H, 1 | G, blocks), infinite where one is not finite.

    Gates are clamped to −1e4: the exponential is zero too, and sums stay finite.
    """
    batch, length, gates = log_gate.shape
    blocks = ceil_div(length, EDGE)
    left = log_gate.new_empty(batch * gates, blocks * EDGE, dtype=torch.float32)
    rest = torch.empty_like(left)
    total = log_gate.new_empty(batch * gates, blocks, dtype=torch.float64)
    most = log_gate.new_empty(batch * gates, blocks, dtype=torch.float32)
    _block_sums[(batch * gates * blocks,)](
        log_gate, left, rest, total, most, *log_gate.stride(), length, blocks, gates, -1e4
    )
    shape = (batch * heads, gates // heads, -1)
    return Sums(left.view(shape), rest.view(shape), total.cumsum(1).view(shape)), most.view(shape)


@Kernel
@triton.jit(do_not_specialize=["T", "TILES", "HEADS"])
def _longest(p_x, p_out, s_x, T, TILES, HEADS, W: tl.constexpr, BW: tl.constexpr):
    s_b, s_t, s_h = s_x
    pid = tl.program_id(0)
    i_h, i_tile, i_b = (pid % HEADS).to(tl.int64), pid // HEADS % TILES, (pid // (HEADS * TILES)).to(tl.int64)
    row = i_tile * 64 + tl.arange(0, 64)
    b_x = load_rows(p_x + i_b * s_b + i_h * s_h, row, s_t, tl.arange(0, BW), row < T, W, BW).to(tl.float32)
    b_square = tl.sum(b_x * b_x, 1)
    b_square = tl.where(b_square == b_square, b_square, float("inf"))  # a maximum would ignore NaN
    tl.store(p_out + (i_b * HEADS + i_h) * TILES + i_tile, tl.max(b_square, 0))


def longest(x: Tensor) -> Tensor:
    """The largest squared norm of x (B, T, heads, D) in each 64 tokens: (B, heads, blocks).

    Infinite where one is NaN.
    """
    batch, length, heads, width = x.shape
    tiles = ceil_div(length, 64)
    squares = x.new_empty(batch, heads, tiles, dtype=torch.float32)
    _longest[(batch * heads * tiles,)](
        x, squares, *strides(x), length, tiles, heads, W=width, BW=padded(width), num_warps=4
    )
    return squares


@Kernel
@triton.jit(do_not_specialize=["T", "TILES", "HEADS"])
def _growth(p_w, p_beta, p_out, s_w, s_beta, T, TILES, HEADS, W: tl.constexpr, BW: tl.constexpr):
    pid = tl.program_id(0)
    i_h, i_tile, i_b = (pid % HEADS).to(tl.int64), pid // HEADS % TILES, (pid // (HEADS * TILES)).to(tl.int64)
    row = i_tile * 64 + tl.arange(0, 64)
    b_w = load_rows(p_w + i_b * s_w[0] + i_h * s_w[2], row, s_w[1], tl.arange(0, BW), row < T, W, BW).to(tl.float32)
    p_beta += i_b * s_beta[0] + i_h * s_beta[2]
    b_beta = tl.load(p_beta + row.to(tl.int64) * s_beta[1], mask=row < T, other=0.0).to(tl.float32)
    # The factor along w; orthogonal to w vectors stay as they are.
    b_norm = tl.abs(1 - b_beta * tl.sum(b_w * b_w, 1))
    b_log = tl.where(b_norm > 1, tl.log(b_norm), b_norm * 0)  # what is no number stays none
    tl.store(p_out + (i_b * HEADS + i_h) * TILES + i_tile, tl.sum(b_log, 0))


def growth_of(w: Tensor, beta: Tensor) -> Tensor:
    """The log of the largest factor by which 64 steps I − β w wᵀ may lengthen a vector: (B·H, blocks).

    0 where β is in 0..2 and ‖w‖ is 1.
    """
    batch, length, heads, width = w.shape
    tiles = ceil_div(length, 64)
    logs = w.new_empty(batch * heads, tiles, dtype=torch.float32)
    _growth[(batch * heads * tiles,)](
        w, beta, logs, *strides(w), beta.stride(), length, tiles, heads, W=width, BW=padded(width), num_warps=4
    )
    return logs


@triton.jit
def _greatest(p_x, count, BB: tl.constexpr):
    """The maximum of `count` numbers."""
    block = tl.arange(0, BB)
    b_most = tl.full([BB], float("-inf"), tl.float32)
    for start in range(0, count, BB):
        b_most = tl.maximum(b_most, tl.load(p_x + start + block, mask=start + block < count, other=float("-inf")))
    return tl.max(b_most, 0)


@Kernel
@triton.jit(do_not_specialize=["BLOCKS", "HEADS", "GROUP", "GATES", "STEPS"])
def _reach(
    p_edge, p_most, p_q, p_k, p_growth, p_first, p_last, scale, beside, BLOCKS, HEADS, GROUP, GATES, STEPS,
    GROWS: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """For BB blocks of a gate, by bisection: edges fall from block to block."""
    chunks = tl.cdiv(BLOCKS, BB)
    i_chunk, i_c = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    i_b, i_gate = i_c // GATES, i_c % GATES
    shared = HEADS * GROUP // GATES  # query heads of a gate
    i_n = i_b * HEADS + i_gate * shared // GROUP
    p_edge += i_c * BLOCKS
    bound = scale * tl.sqrt(_greatest(p_q + (i_b * HEADS * GROUP + i_gate * shared) * BLOCKS, shared * BLOCKS, BB))
    bound *= tl.sqrt(_greatest(p_k + i_n * BLOCKS, BLOCKS, BB))
    if GROWS:
        b_growth = tl.zeros([BB], tl.float32)
        for start in range(0, BLOCKS, BB):
            place = start + tl.arange(0, BB)
            b_growth += tl.load(p_growth + i_n * BLOCKS + place, mask=place < BLOCKS, other=0.0)
        growth = tl.sum(b_growth, 0)
        bound *= tl.where(growth < 60, tl.exp(growth), float("inf"))  # beyond that, as with NaN, all is in reach
    bound = (bound + beside) * 1.4426950408889634
    # With positive log gates or NaN there is no bound.
    bounds = (bound == bound) & (_greatest(p_most + i_c * BLOCKS, BLOCKS, BB) <= 0)
    bound = tl.where(bounds, bound, float("inf")).to(tl.float64)
    block = i_chunk * BB + tl.arange(0, BB)
    inside = block < BLOCKS
    b_edge = tl.load(p_edge + block, mask=inside, other=0.0)
    b_before = tl.load(p_edge + block - 1, mask=inside & (block > 0), other=0.0)
    b_first, b_first_end = tl.zeros([BB], tl.int32), tl.zeros([BB], tl.int32) + BLOCKS
    b_last, b_last_end = tl.zeros([BB], tl.int32), tl.zeros([BB], tl.int32) + BLOCKS
    for _ in range(STEPS):
        middle = (b_first + b_first_end) // 2
        below = tl.load(p_edge + middle, mask=middle < BLOCKS, other=float("-inf")) <= b_before + bound
        open_still = b_first < b_first_end
        b_first_end = tl.where(open_still & below, middle, b_first_end)
        b_first = tl.where(open_still & (below == 0), middle + 1, b_first)
        middle = (b_last + b_last_end) // 2
        before = tl.load(p_edge + middle - 1, mask=(middle > 0) & (middle <= BLOCKS), other=0.0)
        beyond = before + bound < b_edge
        open_still = b_last < b_last_end
        b_last_end = tl.where(open_still & beyond, middle, b_last_end)
        b_last = tl.where(open_still & (beyond == 0), middle + 1, b_last)
    tl.store(p_first + i_c * BLOCKS + block, b_first * 64, mask=inside)
    tl.store(p_last + i_c * BLOCKS + block, b_last * 64, mask=inside)


def reach_of(q: Tensor, k: Tensor, edge: Tensor, most: Tensor, scale: float, growth: Tensor | None = None) -> Reach:
    """Which keys gates leave in reach, exactly to the output's precision; `edge` and `most` are from `gate_sums`.

    No logit exceeds b = scale · max‖q‖ · max‖k‖ · growth in size, and a query always sees itself. So keys whose gates
    add up to less than −(2 b + log T + m) have together less than e⁻ᵐ of its weight: m is 10 in 16 bits, 20 in float32.
    """
    count, gates, blocks = edge.shape
    heads, length = k.shape[2], k.shape[1]
    squares = longest(k)
    reach = Reach(k.new_empty(2, count, gates, blocks, dtype=torch.int32))
    size = min(128, power_of_two(blocks))
    _reach[(count * gates * ceil_div(blocks, size),)](
        edge, most, longest(q), squares, squares if growth is None else growth, *reach.both,
        2 * abs(scale), MARGINS[q.dtype] + math.log(length), blocks, heads, q.shape[2] // heads, heads * gates,
        blocks.bit_length(), GROWS=growth is not None, BB=size,
    )  # fmt: skip
    return reach


def pruned(k: Tensor, log_gate: Tensor | None) -> bool:
    """Whether keys out of the gates' reach are skipped: in long sequences, and always if the length is symbolic."""
    return log_gate is not None and (isinstance(k.shape[1], torch.SymInt) or k.shape[1] >= PRUNED)


def room_for_reach(k: Tensor, log_gate: Tensor | None, prune: bool) -> Tensor:
    """An uninitialised `Reach` as operators return it: one dimension, its size never 1, 0 where nothing is pruned."""
    blocks = k.shape[0] * log_gate.shape[2] * -(-k.shape[1] // EDGE) if prune and log_gate is not None else 0
    return k.new_empty(2 * blocks, dtype=torch.int32)


def reach_in(room: Tensor, k: Tensor, log_gate: Tensor | None) -> Reach | None:
    """The `Reach` that an operator returned, as a view; None where nothing is pruned."""
    if log_gate is None or not room.numel():
        return None
    batch, _, heads, _ = k.shape
    return Reach(room.view(2, batch * heads, log_gate.shape[2] // heads, -1))


@Kernel
@triton.jit(do_not_specialize=["T", "PADDED", "HEADS", "GROUP", "GATES"])
def _gate_gradient(p_query, p_key, p_out, T, PADDED, HEADS, GROUP, GATES, BT: tl.constexpr):
    i_c = tl.program_id(0).to(tl.int64)
    i_b, i_gate = i_c // GATES, i_c % GATES
    shared = HEADS * GROUP // GATES  # query heads of a gate
    at = (i_b * HEADS + i_gate * shared // GROUP) * PADDED * GROUP + i_gate * shared % GROUP
    p_out += i_b * T * GATES + i_gate
    later = tl.zeros([1], tl.float64)
    chunks = tl.cdiv(PADDED, BT)
    for i in range(chunks):
        token = (chunks - 1 - i) * BT + tl.arange(0, BT)
        b_ends = tl.zeros([BT], tl.float64)
        for g in range(shared):
            place = at + token.to(tl.int64) * GROUP + g
            b_query = tl.load(p_query + place, mask=token < PADDED, other=0.0).to(tl.float64)
            b_ends += b_query - tl.load(p_key + place, mask=token < PADDED, other=0.0).to(tl.float64)
        b_sum = tl.cumsum(b_ends, 0, reverse=True) + later
        tl.store(p_out + token.to(tl.int64) * GATES, b_sum.to(p_out.dtype.element_ty), mask=token < T)
        later += tl.sum(b_ends, 0)


def gate_gradient(by_query: Tensor, by_key: Tensor, log_gate: Tensor, heads: int) -> Tensor:
    """A gate at s is on the routes that end at s or later, less those that also begin there: from (B·H, T, G)."""
    _, padded_length, group = by_query.shape
    batch, length, gates = log_gate.shape
    gradient = torch.empty(log_gate.shape, dtype=log_gate.dtype, device=log_gate.device)
    _gate_gradient[(batch * gates,)](
        by_query, by_key, gradient, length, padded_length, heads, group, gates,
        BT=min(1024, power_of_two(padded_length)),
    )  # fmt: skip
    return gradient

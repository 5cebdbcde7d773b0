"""Log gates: running sums for the kernels, which keys they leave in reach, and the gradient.

c_i − c_j is added to the logit of query i and key j, c the running sum of log gates. As one number c would lose the
digits of near pairs to far ones. So it is kept as its value at the end of each 64 tokens (`edge`, float64) and what is
left from each token to there (`left`, float32, and what rounding took from it, `rest`).

    key j ──── left_j ────▸│ edge ──────── edges ────────▸ edge │──── since its start ────▸ query i

Keys of an earlier tile than their query's: three sums on the way from j to i, none of which goes beyond i, so that
nothing cancels. A tile needs one scalar and one vector of them. In the query's own tile it is a difference of two sums
that may be long, where a gate that forgets all is before or behind both: of pairs (left, rest), rounded once. So a
logit is off by 2⁻²⁴ times the log gates between its key and its query, whatever others there are.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.gated.launch import EDGE, Reach, Sums
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import LOG2E, ceil_div, load_rows, padded, strides

PRUNED = 2048  # tokens from which on it pays to ask what gates leave in reach


@triton.jit
def _gates(p_gate, token, s_t, mask, floor):
    """Log gates in base 2, not below the floor, 0 for those that are no numbers; and what these poison, 0 or NaN."""
    b_gate = tl.load(p_gate + token * s_t, mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.where(b_gate < floor, floor, b_gate)
    b_poison = b_gate * 0
    return tl.where(b_poison == 0, b_gate, 0.0).to(tl.float64) * 1.4426950408889634, b_poison


@Kernel
@triton.jit(do_not_specialize=["s_b", "s_t", "s_h", "T", "BLOCKS", "GATES"])
def _block_sums(p_gate, p_left, p_rest, p_total, s_b, s_t, s_h, T, BLOCKS, GATES, floor):
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


def gate_sums(log_gate: Tensor, heads: int) -> Sums:
    """log_gate (B, T, H or Hq) -> running sums for B·H key heads and 1 or G gates of each.

    A gate below −1e4 is taken as −1e4: its exponential is zero too, and sums of it are still numbers.
    """
    batch, length, gates = log_gate.shape
    blocks = ceil_div(length, EDGE)
    left = log_gate.new_empty(batch * gates, blocks * EDGE, dtype=torch.float32)
    rest = torch.empty_like(left)
    total = log_gate.new_empty(batch * gates, blocks, dtype=torch.float64)
    _block_sums[(batch * gates * blocks,)](log_gate, left, rest, total, *log_gate.stride(), length, blocks, gates, -1e4)
    shape = (batch * heads, gates // heads, -1)
    return Sums(left.view(shape), rest.view(shape), total.cumsum(1).view(shape))


@Kernel
@triton.jit(do_not_specialize=["T", "TILES", "HEADS"])
def _longest(p_x, p_out, s_x, T, TILES, HEADS, W: tl.constexpr, BW: tl.constexpr):
    s_b, s_t, s_h = s_x
    pid = tl.program_id(0)
    i_h, i_tile, i_b = pid % HEADS, pid // HEADS % TILES, (pid // (HEADS * TILES)).to(tl.int64)
    row = i_tile * 64 + tl.arange(0, 64)
    b_x = load_rows(p_x + i_b * s_b + i_h * s_h, row, s_t, tl.arange(0, BW), row < T, W, BW).to(tl.float32)
    tl.store(p_out + (i_b * HEADS + i_h) * TILES + i_tile, tl.max(tl.sum(b_x * b_x, 1), 0))


def longest(x: Tensor) -> Tensor:
    """The greatest length of x (B, T, heads, D) in each sequence and head: (B, heads), infinite rather than too large.

    What is not a number counts as nothing.
    """
    batch, length, heads, width = x.shape
    tiles = ceil_div(length, 64)
    squares = x.new_empty(batch, heads, tiles, dtype=torch.float32)
    _longest[(batch * heads * tiles,)](
        x, squares, *strides(x), length, tiles, heads, W=width, BW=padded(width), num_warps=4
    )
    return squares.amax(2).sqrt()


@Kernel
@triton.jit(do_not_specialize=["T", "TILES", "HEADS"])
def _growth(p_w, p_beta, p_out, s_w, s_beta, T, TILES, HEADS, W: tl.constexpr, BW: tl.constexpr):
    pid = tl.program_id(0)
    i_h, i_tile, i_b = pid % HEADS, pid // HEADS % TILES, (pid // (HEADS * TILES)).to(tl.int64)
    row = i_tile * 64 + tl.arange(0, 64)
    b_w = load_rows(p_w + i_b * s_w[0] + i_h * s_w[2], row, s_w[1], tl.arange(0, BW), row < T, W, BW).to(tl.float32)
    p_beta += i_b * s_beta[0] + i_h * s_beta[2]
    b_beta = tl.load(p_beta + row.to(tl.int64) * s_beta[1], mask=row < T, other=0.0).to(tl.float32)
    # Of what lies along w; all else stays as it is.
    b_norm = tl.abs(1 - b_beta * tl.sum(b_w * b_w, 1))
    b_log = tl.where(b_norm > 1, tl.log(b_norm), b_norm * 0)  # what is no number stays none
    tl.store(p_out + (i_b * HEADS + i_h) * TILES + i_tile, tl.sum(b_log, 0))


def growth_of(w: Tensor, beta: Tensor) -> Tensor:
    """How many times as long steps I − β w wᵀ may make a vector: (B·H, 1), 1 where β is in 0..2 and ‖w‖ is 1."""
    batch, length, heads, width = w.shape
    tiles = ceil_div(length, 64)
    logs = w.new_empty(batch * heads, tiles, dtype=torch.float32)
    _growth[(batch * heads * tiles,)](
        w, beta, logs, *strides(w), beta.stride(), length, tiles, heads, W=width, BW=padded(width), num_warps=4
    )
    return logs.sum(1, keepdim=True).clamp(max=60).exp()  # more than 60 prunes no less


def reach_of(q: Tensor, k: Tensor, log_gate: Tensor, edge: Tensor, scale: float, growth: Tensor | float = 1.0) -> Reach:
    """Which keys gates leave in reach, exactly to the output's precision; edge is that of their sums.

    No logit exceeds b = scale · max‖q‖ · max‖k‖ · growth in size, and a query always sees itself. So keys whose gates
    add up to less than −(2 b + log T + m) have together less than e⁻ᵐ of its weight: m is 10 for halves, 20 for single
    precision.
    """
    return reach_within(scale * longest(q), longest(k), log_gate, edge, q.dtype, growth)


def reach_within(
    longest_q: Tensor,
    longest_k: Tensor,
    log_gate: Tensor,
    edge: Tensor,
    dtype: torch.dtype,
    growth: Tensor | float = 1.0,
) -> Reach:
    """The same from the greatest lengths of scaled queries (B, Hq) and of keys (B, H), on any device."""
    longest_q, longest_k = longest_q.view(longest_k.numel(), -1), longest_k.view(-1, 1)
    if edge.shape[1] == 1:
        longest_q = longest_q.amax(1, keepdim=True)
    margin = 20.0 if dtype == torch.float32 else 10.0
    bound = 2 * longest_q * longest_k * growth + math.log(log_gate.shape[1]) + margin  # (B·H, 1 | G)
    # Sums of gates that grow bound nothing, nor does what is no number.
    bound = torch.where((log_gate.amax() <= 0) & ~bound.isnan(), bound, torch.inf) * LOG2E
    before = torch.nn.functional.pad(edge[..., :-1], (1, 0))  # before the first query of a block
    first = torch.searchsorted((-edge).contiguous(), -(before + bound.unsqueeze(-1).to(before.dtype)), out_int32=True)
    block = torch.arange(first.shape[2], device=first.device, dtype=torch.int32).expand_as(first).contiguous()
    last = torch.searchsorted(first, block, right=True, out_int32=True)
    return Reach(torch.stack([first, last]) * EDGE)


def pruned(k: Tensor, log_gate: Tensor | None) -> bool:
    """Whether gates are asked what they leave in reach: always while a tracer's length stands for any."""
    return log_gate is not None and (isinstance(k.shape[1], torch.SymInt) or k.shape[1] >= PRUNED)


def room_for_reach(k: Tensor, log_gate: Tensor | None, prune: bool) -> Tensor:
    """As operators return it, in one dimension, which is never 1; empty where nothing is pruned."""
    blocks = k.shape[0] * log_gate.shape[2] * -(-k.shape[1] // EDGE) if prune and log_gate is not None else 0
    return k.new_empty(2 * blocks, dtype=torch.int32)


def reach_in(room: Tensor, k: Tensor, log_gate: Tensor | None) -> Reach | None:
    """What an operator returned, as a view; None where nothing is pruned."""
    if log_gate is None or not room.numel():
        return None
    batch, _, heads, _ = k.shape
    return Reach(room.view(2, batch * heads, log_gate.shape[2] // heads, -1))


def gate_gradient(by_query: Tensor, by_key: Tensor, log_gate: Tensor, heads: int) -> Tensor:
    """A gate at s is on the routes that end at s or later, less those that also begin there: from (B·H, T, G)."""
    ends = by_query - by_key
    if ends.shape[2] * heads != log_gate.shape[2]:
        ends = ends.sum(2, keepdim=True)
    ends = ends.mT.contiguous()  # (B·H, G, T): a scan along the last dimension is many times as fast
    ends = ends.flip(2).cumsum(2, dtype=torch.float64).flip(2)  # long sums, of which little is left
    ends = ends.view(log_gate.shape[0], -1, ends.shape[2]).mT
    return ends[:, : log_gate.shape[1]].to(log_gate.dtype).contiguous()

"""Histogram filters as Triton kernels: each cursor's histogram stays in registers for all tokens of a call.

A step is, with h̃ = (1 − reset) h + reset · total · δ₀,

    moved = stay · h̃ + up · h̃[i − 1] + down · h̃[i + 1], bounded at both ends       h' ∝ (moved + ε)^γ

One warp handles the histograms of R cursors; beyond 640 positions, several warps one histogram. L lanes share it, V
positions side by side in each: they are loaded and stored at once, and a lane asks others only about both ends of V.

             lane 0        1      …      L − 1
    register 0    0        V      …   (L − 1) V        K = V ⌈P / (L V)⌉ registers: a tuple of (R, L) tensors;
             ⋮                                          V = 4, 2 or 1, of which P is a multiple
         V − 1  V − 1   2 V − 1   …    L V − 1
             V   L V   (L + 1) V  …
             ⋮

The kernels are bound by the number of their instructions. So 1 − reset is multiplied into the moves, and in the
backward pass, with g the gradient of `moved`, all three sums for the moves are over products of h with g and its
neighbours, and the gradient of reset follows from them. The backward pass needs the histograms: those that were the
output, or that a forward call has just recomputed. After a step the total is 1, whatever h was: only the first step of
a call has to compute it, and its gradient.

Superpositions are not computed inside the filter's kernel. A table of 512 × 340 16-bit numbers is larger than shared
memory, so every program would load it again at every token, and enough rows for tensor cores (64 of 512 positions) take
all registers of a multiprocessor. Chunk by chunk, the filter runs at full occupancy and the product at cuBLAS's speed;
the price is that a chunk's histograms go through global memory once, in the table's precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from deadreckon.filters.operators import filter_operator, superposition_operator
from deadreckon.ops.triton.cursors import slot_of
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.pointwise import ratio, sigmoid
from deadreckon.ops.triton.tiles import INTERPRETED, ceil_div, power_of_two

WIDEST = 4096  # positions
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REGISTERS = 20  # positions of a histogram that one thread holds, at most
NARROWEST = 8  # lanes that share a histogram, at least


@triton.jit
def _log2(x):
    """log2 of normal numbers in one instruction: error 2⁻²²; the exact one takes a dozen instructions."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


@triton.jit
def _there(m_row, lane, m: tl.constexpr, P: tl.constexpr, L: tl.constexpr, V: tl.constexpr):
    """Which numbers of register m are positions of a cursor."""
    if (m // V + 1) * V * L <= P:
        return m_row & (lane >= 0)
    else:
        return m_row & (m // V * V * L + V * lane < P)


@triton.jit
def _group(p_row, m_row, lane, g: tl.constexpr, P: tl.constexpr, L: tl.constexpr, V: tl.constexpr):
    """Pointers (R, L, V) to V positions of each lane, and which of them are of a cursor."""
    at = (g * L * V + lane * V)[:, :, None] + tl.arange(0, V)[None, None, :]
    return p_row[:, :, None] + at, m_row[:, :, None] & (at < P)


@triton.jit
def _apart(b_x, V: tl.constexpr):
    """V tensors (R, L) of one (R, L, V)."""
    if V == 1:
        return (tl.reshape(b_x, [b_x.shape[0], b_x.shape[1]]),)
    elif V == 2:
        return tl.split(b_x)
    else:
        even, odd = tl.split(tl.reshape(b_x, [b_x.shape[0], b_x.shape[1], 2, 2]))
        b_0, b_2 = tl.split(even)
        b_1, b_3 = tl.split(odd)
        return b_0, b_1, b_2, b_3


@triton.jit
def _load(p_row, m_row, lane, P: tl.constexpr, L: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Rows of P numbers."""
    found = ()
    for g in tl.static_range(K // V):
        p_x, mask = _group(p_row, m_row, lane, g, P, L, V)
        found += _apart(tl.load(p_x, mask=mask, other=0.0).to(tl.float32), V)
    return found


@triton.jit
def _first(p_row, s_p, m_row, lane, P: tl.constexpr, L: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """The first state, of any stride."""
    found = ()
    for m in tl.static_range(K):
        position = (m // V * V * L + V * lane + m % V) * s_p
        found += (tl.load(p_row + position, mask=_there(m_row, lane, m, P, L, V), other=0.0).to(tl.float32),)
    return found


@triton.jit
def _store(p_row, value, m_row, lane, P: tl.constexpr, L: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    dtype = p_row.dtype.element_ty
    for g in tl.static_range(K // V):
        p_x, mask = _group(p_row, m_row, lane, g, P, L, V)
        if V == 4:
            even = tl.join(value[4 * g].to(dtype), value[4 * g + 2].to(dtype))
            odd = tl.join(value[4 * g + 1].to(dtype), value[4 * g + 3].to(dtype))
            b_x = tl.reshape(tl.join(even, odd), p_x.shape)
        elif V == 2:
            b_x = tl.join(value[2 * g].to(dtype), value[2 * g + 1].to(dtype))
        else:
            b_x = value[g].to(dtype)[:, :, None]
        tl.store(p_x, b_x, mask=mask)


@triton.jit
def _turned(b_x, lane, by: tl.constexpr, L: tl.constexpr):
    """Each lane's number is that of another, `by` lanes on, in a circle."""
    return tl.gather(b_x, (lane + by) & (L - 1), 1)


@triton.jit
def _neighbours(value, lane, P: tl.constexpr, L: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """value[i − 1] and value[i + 1]; at both ends value[i]."""
    before = ()
    after = ()
    for g in tl.static_range(K // V):
        before += (_turned(value[g * V + V - 1], lane, -1, L),)
        after += (_turned(value[g * V], lane, 1, L),)
    left = ()
    right = ()
    for m in tl.static_range(K):
        if m % V > 0:
            left += (value[m - 1],)
        else:
            left += (tl.where(lane == 0, value[0] if m == 0 else before[m // V - 1], before[m // V]),)
        if m % V < V - 1:
            right += (value[m + 1],)
        elif m == K - 1:
            right += (tl.where(lane == (P - 1) // V % L, value[m], after[m // V]),)
        else:
            right += (tl.where(lane == L - 1, after[m // V + 1], after[m // V]),)
    return left, right


@triton.jit
def _gates(p_reset, p_move, i_at, m_row):
    """reset, up, down and stay."""
    p_move += i_at * 3
    reset, up = tl.load(p_reset + i_at, mask=m_row, other=0.0), tl.load(p_move, mask=m_row, other=0.0)
    down, stay = tl.load(p_move + 1, mask=m_row, other=0.0), tl.load(p_move + 2, mask=m_row, other=0.0)
    return reset.to(tl.float32), up.to(tl.float32), down.to(tl.float32), stay.to(tl.float32)


@triton.jit
def _moved(h, total, reset, up, down, stay, lane, P: tl.constexpr, L: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Where the mass of h moves: what would leave at an end stays there."""
    left, right = _neighbours(h, lane, P, L, K, V)
    kept, fresh = 1 - reset, reset * total
    keep_up, keep_down, keep_stay = kept * up, kept * down, kept * stay
    new = ()
    for m in tl.static_range(K):
        from_left, from_right = keep_up, keep_down
        if m == 0:
            from_left = tl.where(lane == 0, keep_down, keep_up)
        if m == K - 1:
            from_right = tl.where(lane == (P - 1) // V % L, keep_up, keep_down)
        b_new = keep_stay * h[m] + from_left * left[m] + from_right * right[m]
        if m == 0:  # what starts again at 0, and moves
            b_new += tl.where(lane == 0, fresh * (stay + down), 0.0)
        if m == min(1, V - 1):
            b_new += tl.where(lane == 1 - m, fresh * up, 0.0)
        new += (b_new,)
    return new


@triton.jit
def _total(h, K: tl.constexpr):
    b_sum = h[0]
    for m in tl.static_range(1, K):
        b_sum += h[m]
    return tl.sum(b_sum, 1, keep_dims=True)


@triton.jit
def _sharpened(new, gamma, eps, lane, P: tl.constexpr, L: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """(new + ε)^γ, normalised."""
    logs = ()
    for m in tl.static_range(K):
        b_log = gamma * _log2(new[m] + eps)
        if (m // V + 1) * V * L > P:
            b_log = tl.where(_there(lane >= 0, lane, m, P, L, V), b_log, float("-inf"))
        logs += (b_log,)
    b_most = logs[0]
    for m in tl.static_range(1, K):
        b_most = tl.maximum(b_most, logs[m])
    most = tl.max(b_most, 1, keep_dims=True)
    powers = ()
    for m in tl.static_range(K):
        powers += (tl.exp2(logs[m] - most),)
    share = 1.0 / _total(powers, K)
    h = ()
    for m in tl.static_range(K):
        h += (powers[m] * share,)
    return h


@triton.jit
def _rows(N, C, R: tl.constexpr, L: tl.constexpr):
    """The cursors of a program: their numbers, which of them exist, sequence, cursor, and the lanes."""
    i_n = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    return i_n, i_n < N, i_n // C, i_n % C, tl.arange(0, L)[None, :] + tl.zeros([R, L], tl.int32)


@Kernel
@triton.jit(do_not_specialize=["FIRST", "STEPS", "T", "C", "N"])
def _filter_forward(
    p_reset, p_move, p_gamma, p_copy, p_state, p_out, p_final, eps, FIRST, STEPS, T, C, N, s_b, s_c, s_p,
    P: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    i_n, m_row, i_b, i_c, lane = _rows(N, C, R, L)
    gamma = tl.load(p_gamma + i_c).to(tl.float32)
    h = _first(p_state + i_b * s_b + i_c * s_c, s_p, m_row, lane, P, L, K, V)
    total = _total(h, K)
    for t in range(STEPS):
        i_at = (i_b * T + FIRST + t) * C + i_c
        reset, up, down, stay = _gates(p_reset, p_move, i_at, m_row)
        new = _moved(h, total, reset, up, down, stay, lane, P, L, K, V)
        if p_copy is not None:
            new = _jumped(new, total, p_copy + i_at * (P + 1), m_row, lane, P, L, K, V)
        h = _sharpened(new, gamma, eps, lane, P, L, K, V)
        if p_out is not None:
            _store(p_out + ((i_b * STEPS + t) * C + i_c) * P, h, m_row, lane, P, L, K, V)
        total = tl.full([R, 1], 1.0, tl.float32)
    if p_final is not None:
        _store(p_final + i_n * P, h, m_row, lane, P, L, K, V)


@triton.jit
def _jumped(new, total, p_row, m_row, lane, P: tl.constexpr, L: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """new after the copy branch, whose row has P probabilities of jumps and that of none."""
    jumps, none = _load(p_row, m_row, lane, P, L, K, V), tl.load(p_row + P, mask=m_row, other=0.0).to(tl.float32)
    after = ()
    for m in tl.static_range(K):
        after += (new[m] * none + total * jumps[m],)
    return after


@Kernel
@triton.jit
def _filter_step(
    p_action, p_sharpness, p_copy, p_kept, p_place, p_h, eps, s_place, s_row, C, N, WALKING,
    P: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, R: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One decoding step, from the logits of its gates; histograms are read from and written to slots by position."""
    i_n, m_row, i_b, i_c, lane = _rows(N, C, R, L)
    place = tl.load(p_place + i_b * s_place, mask=m_row, other=0)
    p_action += i_b * s_row + i_c * 4
    reset = sigmoid(tl.load(p_action, mask=m_row, other=0.0))
    to_up, to_down = tl.load(p_action + 1, mask=m_row, other=0.0), tl.load(p_action + 2, mask=m_row, other=0.0)
    to_stay = tl.load(p_action + 3, mask=m_row, other=0.0)
    likeliest = tl.maximum(tl.maximum(to_up, to_down), to_stay)
    up, down, stay = tl.exp(to_up - likeliest), tl.exp(to_down - likeliest), tl.exp(to_stay - likeliest)
    every = up + down + stay
    # Padding keeps a cursor at its start.
    reset, stay = tl.where(place < 0, 1.0, reset), tl.where(place < 0, 1.0, stay / every)
    up, down = tl.where(place < 0, 0.0, up / every), tl.where(place < 0, 0.0, down / every)
    gamma = 1 + tl.exp(tl.load(p_sharpness + i_c).to(tl.float32))
    p_kept += (i_b * KEPT * C + i_c) * P
    h = _load(p_kept + slot_of(tl.maximum(place - 1, -1), KEPT) * C * P, m_row, lane, P, L, K, V)
    total = _total(h, K)
    new = _moved(h, total, reset, up, down, stay, lane, P, L, K, V)
    if p_copy is not None:
        jumps = m_row & (i_c >= WALKING)
        p_row = p_copy + (i_b * (C - WALKING) + i_c - WALKING) * (P + 1)
        after = _jumped(new, total, p_row, jumps, lane, P, L, K, V)
        chosen = ()
        for m in tl.static_range(K):
            chosen += (tl.where(jumps, after[m], new[m]),)
        new = chosen
    h = _sharpened(new, gamma, eps, lane, P, L, K, V)
    tl.debug_barrier()  # padding may write to the slot that has just been read
    _store(p_kept + slot_of(place, KEPT) * C * P, h, m_row, lane, P, L, K, V)
    _store(p_h + i_n * P, h, m_row, lane, P, L, K, V)


@Kernel
@triton.jit(do_not_specialize=["FIRST", "STEPS", "T", "C", "N"])
def _filter_backward(
    p_reset, p_move, p_gamma, p_copy, p_state, p_out, p_grad, p_carry, p_grad_reset, p_grad_move, p_grad_gamma,
    p_grad_copy, eps, FIRST, STEPS, T, C, N, s_b, s_c, s_p,
    P: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    i_n, m_row, i_b, i_c, lane = _rows(N, C, R, L)
    gamma = tl.load(p_gamma + i_c).to(tl.float32)
    p_state += i_b * s_b + i_c * s_c
    carry = _load(p_carry + i_n * P, m_row, lane, P, L, K, V)
    after = _load(p_out + ((i_b * STEPS + STEPS - 1) * C + i_c) * P, m_row, lane, P, L, K, V)
    b_gamma = tl.zeros([R, L], tl.float32)
    for back in range(STEPS):
        t = STEPS - 1 - back
        i_at, i_row = (i_b * T + FIRST + t) * C + i_c, (i_b * STEPS + t) * C + i_c
        reset, up, down, stay = _gates(p_reset, p_move, i_at, m_row)
        total = tl.full([R, 1], 1.0, tl.float32)
        h = after
        if t > 0:
            h = _load(p_out + (i_row - C) * P, m_row, lane, P, L, K, V)
        else:
            h = _first(p_state, s_p, m_row, lane, P, L, K, V)
            total = _total(h, K)
        grad = _load(p_grad + i_row * P, m_row, lane, P, L, K, V)
        b_along = (carry[0] + grad[0]) * after[0]
        for m in tl.static_range(1, K):
            b_along += (carry[m] + grad[m]) * after[m]
        along = tl.sum(b_along, 1, keep_dims=True)

        new = _moved(h, total, reset, up, down, stay, lane, P, L, K, V)
        jumps = new
        none = tl.full([R, 1], 1.0, tl.float32)
        if p_copy is not None:
            p_row = p_copy + i_at * (P + 1)
            jumps, none = (
                _load(p_row, m_row, lane, P, L, K, V),
                tl.load(p_row + P, mask=m_row, other=0.0).to(tl.float32),
            )
        g = ()
        of_jumps = ()
        b_none, b_jumped = tl.zeros([R, L], tl.float32), tl.zeros([R, L], tl.float32)
        for m in tl.static_range(K):
            b_all = new[m] + eps
            if p_copy is not None:
                b_all = new[m] * none + total * jumps[m] + eps
            b_g = after[m] * (carry[m] + grad[m] - along)  # of γ log(new + ε)
            b_gamma += b_g * _log2(b_all)
            b_g = ratio(gamma * b_g, b_all)
            if p_copy is not None:
                of_jumps += (total * b_g,)
                b_none += b_g * new[m]
                b_jumped += b_g * jumps[m]
                b_g = none * b_g
            g += (b_g,)
        jumped = tl.zeros([R, 1], tl.float32)
        if p_copy is not None:
            p_row = p_grad_copy + i_at * (P + 1)
            _store(p_row, of_jumps, m_row, lane, P, L, K, V)
            tl.store(p_row + P, tl.sum(b_none, 1, keep_dims=True).to(p_row.dtype.element_ty), mask=m_row)
            jumped = tl.sum(b_jumped, 1, keep_dims=True)
        # Of h̃: to = stay · g + up · g[i + 1] + down · g[i − 1], whose sums with h are those of the moves.
        left, right = _neighbours(g, lane, P, L, K, V)
        kept = 1 - reset
        b_up, b_down, b_stay = h[0] * right[0], h[0] * left[0], h[0] * g[0]
        to = ()
        for m in tl.static_range(K):
            if m > 0:
                b_up += h[m] * right[m]
                b_down += h[m] * left[m]
                b_stay += h[m] * g[m]
            to += (stay * g[m] + up * right[m] + down * left[m],)
        of_up, of_down = tl.sum(b_up, 1, keep_dims=True), tl.sum(b_down, 1, keep_dims=True)
        of_stay = tl.sum(b_stay, 1, keep_dims=True)
        # What starts again at 0 is moved, too. Every lane learns of the gradients there.
        nowhere = lane & 0
        at_0, at_1, to_0 = tl.gather(g[0], nowhere, 1), tl.gather(right[0], nowhere, 1), tl.gather(to[0], nowhere, 1)
        _store_gates(
            p_grad_reset + i_at, p_grad_move + i_at * 3, total * to_0 - (stay * of_stay + up * of_up + down * of_down),
            kept * of_up + reset * total * at_1, kept * of_down + reset * total * at_0,
            kept * of_stay + reset * total * at_0, m_row, lane,
        )  # fmt: skip
        further = tl.zeros([R, L], tl.float32)
        if t == 0:  # the gradient by way of total
            further = jumped + reset * to_0
        rest = ()
        for m in tl.static_range(K):
            rest += (kept * to[m] + further,)
        carry, after = rest, h
    _store(p_carry + i_n * P, carry, m_row, lane, P, L, K, V)
    p_grad_gamma += i_n
    of_gamma = tl.load(p_grad_gamma, mask=m_row, other=0.0) + 0.6931471805599453 * tl.sum(b_gamma, 1, keep_dims=True)
    tl.store(p_grad_gamma, of_gamma, mask=m_row)


@triton.jit
def _store_gates(p_reset, p_move, reset, up, down, stay, m_row, lane):
    """Gradients of the gates, which every lane knows."""
    one = m_row & (lane == 0)
    tl.store(p_reset + lane * 0, reset.to(p_reset.dtype.element_ty), mask=one)
    tl.store(p_move + lane * 0, up.to(p_move.dtype.element_ty), mask=one)
    tl.store(p_move + lane * 0 + 1, down.to(p_move.dtype.element_ty), mask=one)
    tl.store(p_move + lane * 0 + 2, stay.to(p_move.dtype.element_ty), mask=one)


def _tile(positions: int) -> dict[str, int]:
    """Registers of a histogram in each lane, positions side by side, lanes, histograms of a program, and warps.

    Up to 640 positions a histogram is in one warp, without synchronisation. More warps communicate through shared
    memory.
    """
    lanes = max(NARROWEST, power_of_two(ceil_div(positions, REGISTERS)))
    sizes = {v: v * ceil_div(positions, lanes * v) for v in (4, 2, 1) if positions % v == 0}
    # Both ends of what is side by side take two thirds of the instructions of a register.
    together = min(sizes, key=lambda v: 3 * sizes[v] + 2 * sizes[v] // v)
    return {
        "K": sizes[together], "V": together, "L": lanes, "R": max(1, 32 // lanes), "num_warps": max(1, lanes // 32),
    }  # fmt: skip


def advance(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, state: Tensor, eps: float,
    first: int, steps: int, out: Tensor | None, final: Tensor | None,
) -> None:  # fmt: skip
    """Filters tokens first, ..., first + steps − 1 from state (B, C, P), in any layout.

    reset (B, T, C), move (B, T, C, 3), gamma (C,) and copy (B, T, C, P + 1) are contiguous. Writes out
    (B, steps, C, P) and final (B, C, P), float32, unless they are None.
    """
    (batch, length, cursors), positions = reset.shape, state.shape[2]
    tile, rows = _tile(positions), batch * cursors
    _filter_forward[(ceil_div(rows, tile["R"]),)](
        reset, move, gamma, copy, state, out, final, eps, first, steps, length, cursors, rows, *state.stride(),
        P=positions, **tile,
    )  # fmt: skip


def retreat(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, state: Tensor, eps: float,
    first: int, steps: int, out: Tensor, grad: Tensor, carry: Tensor,
    grad_reset: Tensor, grad_move: Tensor, grad_gamma: Tensor, grad_copy: Tensor | None,
) -> None:  # fmt: skip
    """The backward pass over the same tokens: out as `advance` wrote it, grad its gradient, both contiguous.

    carry (B, C, P), float32, is the gradient of the histogram after these tokens, and is overwritten by that of state.
    Writes the tokens' grad_reset, grad_move and grad_copy, laid out as the inputs; adds to grad_gamma (B, C), float32.
    """
    (batch, length, cursors), positions = reset.shape, state.shape[2]
    tile, rows = _tile(positions), batch * cursors
    _filter_backward[(ceil_div(rows, tile["R"]),)](
        reset, move, gamma, copy, state, out, grad, carry, grad_reset, grad_move, grad_gamma, grad_copy,
        eps, first, steps, length, cursors, rows, *state.stride(), P=positions, **tile,
    )  # fmt: skip


def step(
    actions: Tensor,
    sharpness: Tensor,
    copy: Tensor | None,
    kept: Tensor,
    places: Tensor,
    dtype: torch.dtype,
    eps: float,
) -> Tensor:
    """One decoding step: histograms (B, C, P), in a dtype, which are also written to the ring buffer `kept`.

    Args:
        actions: (B, 1, C, 4) float32 logits of reset, up, down and stay, the last two dimensions contiguous.
        sharpness: (C,), γ = 1 + exp of it.
        copy: (B, 1, jumping, P + 1) of the last cursors, contiguous.
        kept: (B, slots, C, P) float32, contiguous: the histogram after a token is at its position modulo slots.
        places: (B or 1, 1) int64, the token's position; below 0 it is padding.
    """
    batch, slots, cursors, positions = kept.shape
    tile, rows = _tile(positions), batch * cursors
    h = kept.new_empty(batch, cursors, positions, dtype=dtype)
    with torch.cuda.device_of(kept):
        _filter_step[(ceil_div(rows, tile["R"]),)](
            actions, sharpness, copy, kept, places, h, eps, places.stride(0) if len(places) > 1 else 0,
            actions.stride(0), cursors, rows, cursors if copy is None else cursors - copy.shape[2],
            P=positions, KEPT=slots, **tile,
        )  # fmt: skip
    return h


filter_fused = filter_operator("deadreckon::histogram_filter", advance, retreat)
superpose_fused = superposition_operator("deadreckon::superpose", advance, retreat)


def reason_against(reset: Tensor, positions: int) -> str | None:
    """What the kernels need and these inputs lack, or None."""
    if reset.dtype not in DTYPES:
        return f"dtype float32, bfloat16 or float16, got {reset.dtype}"
    if positions > WIDEST:
        return f"at most {WIDEST} positions, got {positions}"
    return None
